"""Laws that hold for every mixer, for those that need a network other than that of ``cases.py``.

SnapMix needs a pooled head; TransMix and TokenMix a class token.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, Mixer, fusing
from alignmixup.mixers.attentivemix import AttentiveMix
from alignmixup.mixers.snapmix import SnapMix
from alignmixup.mixers.tokenmix import TokenMix
from alignmixup.mixers.transmix import TransMix
from cases import NUM_CLASSES, TinyNet, draw_case, images, labels, with_lam
from tiny_transformer import TinyTransformer


@dataclass(frozen=True)
class Case:
    """A mixer, a case of it and the network it needs."""

    mixer: Mixer
    case: str
    make: Callable[[], nn.Module]

    def draw(self, batch_size: int = 6) -> Draw:
        return draw_case(self.mixer, self.case, batch_size)

    def apply(self, draw: Draw, x: Tensor | None = None, y: Tensor | None = None) -> Mixed:
        x = images(len(draw.perm)) if x is None else x
        net = self.make().to(x.dtype)
        return self.mixer.apply(net, x, labels(len(x)) if y is None else y, draw)


def pooled() -> nn.Module:
    return TinyNet("pool")


MIXERS: dict[str, tuple[Mixer, Callable[[], nn.Module]]] = {
    "snapmix": (SnapMix(classifier="fc", prob=0.5), pooled),
    "transmix": (TransMix(prob=0.5), TinyTransformer),
    "transmix-switch": (TransMix.released(), TinyTransformer),
    "tokenmix": (TokenMix(grid=4, loss="ce"), TinyTransformer),
    "tokenmix-random": (TokenMix(grid=8, mask="random"), TinyTransformer),
    "attentivemix": (AttentiveMix(min_cells=0), pooled),
    "snapmix-released": (SnapMix.released(classifier="fc"), pooled),
}
every_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(mixer, case, make), id=f"{name}-{case}")
        for name, (mixer, make) in MIXERS.items()
        for case in mixer.cases
    ],
)


@every_case
def test_a_whole_share_gives_the_image_back(case: Case) -> None:
    x = images(6, dtype=torch.float64)
    draw = dataclasses.replace(case.draw(), perm=torch.arange(6).roll(2))  # of other classes
    mixed = case.apply(with_lam(draw, 1.0), x)
    # In training mode the pass for the maps moves running statistics, which no logits depend on.
    assert torch.equal(mixed.logits, case.make().double()(x))
    torch.testing.assert_close(sharp(case, mixed), torch.eye(NUM_CLASSES)[labels(6)])


def sharp(case: Case, mixed: Mixed) -> Tensor:
    """Targets without the label smoothing of the mixer."""
    smoothing = getattr(case.mixer, "smoothing", 0.0)
    return (mixed.targets - smoothing / NUM_CLASSES) / (1 - smoothing)


@every_case
def test_the_same_draw_gives_the_same_result(case: Case) -> None:
    draw = case.draw()
    one, other = case.apply(draw), case.apply(draw)
    assert torch.equal(one.logits, other.logits)
    assert torch.equal(one.targets, other.targets)
    assert one.loss().isfinite()


@every_case
def test_the_order_of_the_batch_does_not_matter(case: Case) -> None:
    x, y, draw = images(7, dtype=torch.float64), labels(7), case.draw(7)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(4))
    perm = order.argsort()[draw.perm[order]]
    one = case.apply(draw, x, y)
    other = case.apply(dataclasses.replace(draw, perm=perm), x[order], y[order])
    torch.testing.assert_close(other.logits, one.logits[order], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other.targets, one.targets[order], atol=1e-5, rtol=1e-5)


@pytest.mark.unchecked_shapes
@every_case
def test_a_step_reads_no_value(case: Case) -> None:
    """Without values (on torch's meta device) all runs: nothing would wait for a GPU."""
    x, y = images(6).to("meta"), labels(6).to("meta")
    mixed = case.mixer.apply(case.make().to("meta"), x, y, case.draw())
    mixed.loss().backward()
    assert mixed.logits.is_meta
    assert mixed.targets.shape == (6, NUM_CLASSES)


@every_case
def test_every_parameter_gets_a_finite_gradient(case: Case) -> None:
    net = case.make()
    case.mixer.apply(net, images(6), labels(6), case.draw()).loss().backward()
    for name, parameter in net.named_parameters():
        assert not parameter.numel() or parameter.grad.isfinite().all(), name


@every_case
def test_one_hot_labels_are_integer_labels(case: Case) -> None:
    draw = case.draw()
    by_share = case.apply(draw, y=torch.eye(NUM_CLASSES)[labels(6)])
    assert torch.equal(case.apply(draw).targets, by_share.targets)


@every_case
def test_a_single_image_and_half_precision(case: Case) -> None:
    assert case.apply(case.draw(1)).loss().isfinite()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = case.apply(case.draw())
    assert (mixed.logits.dtype, mixed.targets.dtype) == (torch.bfloat16, torch.float32)
    # Attention of half precision is off by about a percent.
    torch.testing.assert_close(mixed.targets, case.apply(case.draw()).targets, atol=0.05, rtol=0.05)


# The settings of the others change numbers, not what is traced.
TRACED = ("snapmix", "transmix-switch", "tokenmix")


@pytest.mark.slow
@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in TRACED else [pytest.mark.slow]) for n in MIXERS]
)
def test_a_compiled_module_gives_the_same_loss(name: str) -> None:
    torch.compiler.reset()
    mixer, make = MIXERS[name]
    plain, twin = make(), make()
    compiled = torch.compile(twin, backend="aot_eager")
    for case in mixer.cases:
        draw = draw_case(mixer, case, 6)
        losses = [mixer.apply(net, images(6), labels(6), draw).loss() for net in (plain, compiled)]
        torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-5)
        for loss in losses:
            loss.backward()
    for one, other in zip(plain.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.unchecked_shapes
@pytest.mark.filterwarnings("ignore")  # the compiler's own, on old processors
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", MIXERS)
def test_fused_masks_and_labels_are_the_plain_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a compiled step they are computed by generated code."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    mixer, make = MIXERS[name]
    for case in mixer.cases:
        draw = draw_case(mixer, case, 6)
        one = mixer.apply(make(), images(6), labels(6), draw)
        with fusing():
            other = mixer.apply(make(), images(6), labels(6), draw)
        torch.testing.assert_close(other.logits, one.logits, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(other.targets, one.targets, atol=1e-5, rtol=1e-4)
