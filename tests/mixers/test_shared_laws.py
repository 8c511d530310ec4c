"""Laws of the methods that mix within the batch, on every row of ``cases.py`` they hold for."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alignmixup.contracts import Draw, Mixer, fusing
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.multimix import DenseMultiMix
from alignmixup.mixers.samix import SAMix
from alignmixup.mixers.snapmix import SnapMix
from alignmixup.mixers.tokenmix import TokenMix
from alignmixup.mixers.transmix import TransMix
from cases import (
    NUM_CLASSES,
    ROWS,
    VARIANTS,
    Recorder,
    Row,
    TinyNet,
    case_params,
    draw_case,
    images,
    labels,
)
from tiny_transformer import TinyTransformer

# One box for the batch, at the peak of the first partner.
BY_THE_FIRST_SAMPLE = ("saliencymix",)
# The weights of a sample are made from its place in the batch.
BY_A_SEED = ("multimix",)
# The style network reads its weights from a file, on a real device.
STYLED = ("stylemix", "stylecutmix")

# Methods with state have further permutations in their draws, and tests of their own.
STATELESS = [r for r in ROWS if r.attached(TinyNet(), images(2)).module is None]
unguided = [row for row in STATELESS if not row.is_guided]


def rows(*left_out: str) -> pytest.MarkDecorator:
    chosen = (row for row in unguided if row.name not in left_out)
    return pytest.mark.parametrize(("row", "case"), case_params(chosen))


def renumbered(draw: Draw, order: Tensor) -> Draw:
    """The same draw for the batch x[order]: what belongs to a sample moves with it."""
    tensors = {
        name: t[order] if t.ndim and len(t) == len(order) else t
        for name, t in draw.tensors().items()
    }
    tensors["perm"] = order.argsort()[draw.perm[order]]
    return draw.with_tensors(tensors)


@rows(*BY_THE_FIRST_SAMPLE, *BY_A_SEED)
def test_the_order_of_the_batch_does_not_matter(row: Row, case: str) -> None:
    x, y = images(7, dtype=torch.float64), labels(7)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(4))
    draw = draw_case(row.mixer, case, 7)
    # A network each: a pass moves the running statistics, by which some methods look at images.
    one = row.apply(TinyNet().double(), x, y, draw)
    other = row.apply(TinyNet().double(), x[order], y[order], renumbered(draw, order))
    torch.testing.assert_close(other.logits, one.logits[order], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other.targets, one.targets[order])
    torch.testing.assert_close(other.loss(), one.loss(), atol=1e-5, rtol=1e-5)


class OnDevice(TorchDispatchMode):
    """Fails where a tensor on the host is made, read or copied: a GPU would wait for it.

    Single numbers are arguments of a kernel.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        host = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and not t.is_meta]
        host += [t for t in tree_leaves(made) if isinstance(t, Tensor) and not t.is_meta and t.ndim]
        copies = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        assert not any(t.ndim or copies for t in host), f"{func} with a tensor on the host"
        return made


def pooled() -> TinyNet:
    return TinyNet("pool")


# The style network reads its weights from a file, in the first step.
IN_PLACE = [
    (row.name, row.mixer, TinyNet, row.name in VARIANTS) for row in ROWS if row.name not in STYLED
]
# Methods for networks that end in pooling, and for transformers.
IN_PLACE += [
    ("snapmix", SnapMix(classifier="fc"), pooled, False),
    ("snapmix-released", SnapMix.released(classifier="fc"), pooled, True),
    ("densemultimix", DenseMultiMix(num_mixes=5, classifier="fc"), pooled, False),
    ("samix-eta", SAMix("layer2", global_eta=0.5), pooled, True),
    ("transmix", TransMix.released(), TinyTransformer, False),
    ("tokenmix-attention", TokenMix(grid=8), TinyTransformer, False),
    ("tokenmix-random", TokenMix(grid=8, mask="random"), TinyTransformer, True),
]


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("mixer", "make_net", "case"),
    [
        pytest.param(mixer, make, case, id=f"{name}-{case}", marks=[pytest.mark.slow] * is_variant)
        for name, mixer, make, is_variant in IN_PLACE
        for case in mixer.cases
    ],
)
def test_a_step_needs_no_value_on_the_host(mixer: Mixer, make_net: type, case: str) -> None:
    """Without values (on torch's meta device) all runs: a CUDA graph can hold the step."""
    net, x, y = make_net(), images(6), labels(6)
    mixer = mixer.attach(net, x)
    for module in (net, mixer.module):
        if module is not None:
            module.to("meta")
    x, y, draw = x.to("meta"), y.to("meta"), draw_case(mixer, case, 6).to("meta")
    with OnDevice():
        mixed = mixer.apply(net, x, y, draw)
        mixed.loss().backward()
    assert mixed.logits.is_meta
    assert mixed.targets.shape == (len(mixed.logits), NUM_CLASSES)


def test_a_value_on_the_host_is_found() -> None:
    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :NUM_CLASSES] * torch.ones(NUM_CLASSES).to(x.device)

    x, y = images(6).to("meta"), labels(6).to("meta")
    draw = draw_case(InputMixup(), "input", 6).to("meta")
    with OnDevice(), pytest.raises(AssertionError, match="with a tensor on the host"):
        InputMixup().apply(Waits(), x, y, draw)
    with pytest.raises(RuntimeError, match="meta tensors"), OnDevice():
        float(x.sum())


by_area = [
    pytest.param(row, id=row.name)
    for row in ROWS
    if "cut" in row.mixer.cases
    and getattr(row.mixer, "correct_lam", True)
    and row.name not in ("cutout", "stylecutmix")
]


@pytest.mark.parametrize("size", [(16, 16), (9, 14)])
@pytest.mark.parametrize("row", by_area)
def test_labels_have_the_share_of_the_pixels(row: Row, size: tuple[int, int]) -> None:
    """Image i is of color i alone, so the mean color of a sample is its target."""
    x = torch.eye(3)[:, :, None, None].expand(3, 3, *size).contiguous()
    for seed in range(8):
        draw = draw_case(row.mixer, "cut", 3, seed)
        draw = dataclasses.replace(draw, perm=torch.tensor([1, 2, 0]))
        mixed = row.apply(Recorder(), x, torch.arange(3), draw)
        torch.testing.assert_close(mixed.logits, row.sharp(mixed.targets), atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.unchecked_shapes
@pytest.mark.filterwarnings("ignore")  # the compiler's own, on old processors
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "name",
    [
        *("resizemix", "smoothmix", "fmix", "fmix-released", "fmix-soft", "gridmix"),
        *("gridmix-cells", "tokenmix"),
    ],
)
def test_fused_masks_are_the_plain_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a compiled step the masks are computed by generated code."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    (row,) = [row for row in ROWS if row.name == name]
    draw, x = draw_case(row.mixer, "cut", 6), images(6)
    plain, fused = Recorder(), Recorder()
    one = row.apply(plain, x, labels(6) % 3, draw)
    with fusing():
        other = row.apply(fused, x, labels(6) % 3, draw)
    torch.testing.assert_close(fused.seen, plain.seen)
    torch.testing.assert_close(other.targets, one.targets)
