"""What holds for every mixer: each test runs on the whole table of ``cases.py``."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, Mixer, soft_cross_entropy, softmax_bce
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE
from alignmixup.mixers.attentivemix import AttentiveMix
from alignmixup.mixers.comixup import CoMixup
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.cutout import Cutout
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.manifold_mixup import ManifoldMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.mixers.puzzlemix import PuzzleMix
from alignmixup.mixers.snapmix import SnapMix
from alignmixup.ops.align import align_mix
from alignmixup.registry import MIXERS
from cases import (
    IMAGE_SIZE,
    NUM_CLASSES,
    ROWS,
    Row,
    TinyNet,
    draw_case,
    every_case,
    every_row,
    every_unguided_case,
    images,
    labels,
    params,
    with_lam,
)

# ---- laws ----------------------------------------------------------------------------------------


@every_case
def test_a_whole_share_gives_the_image_back(row: Row, case: str) -> None:
    """lam = 1: the plain forward's logits, bit for bit. A kept partner comes back at lam = 0."""
    net, x = TinyNet().double(), images(6, dtype=torch.float64)
    draw = draw_case(row.mixer, case, 6)
    plain, one_hot = net(x), torch.eye(NUM_CLASSES)[labels(6)]
    recovered = row.recovers.get(case, "anchor")
    if recovered == "anchor":
        mixed = row.apply(net, x, labels(6), with_lam(draw, 1.0))
        if row.is_beside:  # batch norm sees the batch twice, and rounds its mean differently
            torch.testing.assert_close(mixed.logits, plain, atol=1e-12, rtol=1e-12)
        else:
            assert torch.equal(mixed.logits, plain)
        if row.smoothing:
            torch.testing.assert_close(row.sharp(mixed.targets), one_hot)
        else:
            assert torch.equal(mixed.targets, one_hot)
    elif recovered == "partner":
        mixed = row.apply(net, x, labels(6), with_lam(draw, 0.0))
        # The rows of a matrix product may round differently where they lie elsewhere.
        torch.testing.assert_close(mixed.logits, plain[draw.perm], atol=1e-13, rtol=1e-13)
        assert torch.equal(mixed.targets, one_hot[draw.perm])
    else:
        mixed = row.apply(net, x, labels(6), with_lam(draw, 1.0))
        assert (mixed.logits - plain).norm() > 1e-3 * plain.norm()
        assert row.is_guided or row.num_rows or torch.equal(mixed.targets, one_hot)


@every_row
def test_settings_are_loaded_as_weights_are(row: Row, tmp_path: Path) -> None:
    """Lightning saves them with ``save_hyperparameters``, and torch.load is strict by default."""
    torch.save({"mixer": row.mixer}, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)["mixer"]
    assert loaded == row.mixer
    assert loaded.cases == row.mixer.cases


CELL = """
from dataclasses import dataclass
import alignmixup as am

@dataclass(frozen=True, slots=True)
class Own(am.NoMix):
    pass
"""


def test_of_mixers_of_one_name_the_last_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell of a notebook may run again, and ``slots=True`` makes two classes."""
    notebook = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    for _ in range(5):
        exec(CELL, vars(notebook))
        torch.save(notebook.Own(), tmp_path / "mixer.pt")
        assert type(torch.load(tmp_path / "mixer.pt", weights_only=True)) is notebook.Own


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@every_case
def test_the_default_dtype_does_not_matter(row: Row, case: str, default: torch.dtype) -> None:
    """Lightning sets it to that of the weights; draws, targets and loss are those of float32."""
    net, x = TinyNet().eval(), images(4)

    def step(mixer: Mixer) -> list[Tensor | None]:
        draw = draw_case(mixer, case, 4)
        mixed = mixer.apply(net, x, labels(4), draw)
        return [*draw.tensors().values(), mixed.logits, mixed.targets, mixed.loss().detach()]

    plain, other = step(row.attached(net, x)), row.attached(net, x)
    try:
        torch.set_default_dtype(default)
        same = step(other)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(same, plain, atol=0, rtol=0)


@pytest.mark.parametrize("row", params(row for row in ROWS if hasattr(row.mixer, "loss")))
def test_multi_label_targets_keep_their_mass(row: Row) -> None:
    """Two labels a sample: their shares are two after mixing, and the loss is that of sigmoids."""
    net, x = TinyNet(), images(6)
    mixer = dataclasses.replace(row.mixer, loss="sigmoid_bce").attach(net, x)
    y = torch.eye(NUM_CLASSES)[labels(6)] + torch.eye(NUM_CLASSES)[labels(6) - 1]
    mixed = mixer(net, x, y, torch.Generator().manual_seed(0))
    torch.testing.assert_close(mixed.targets.sum(1), torch.full((6,), 2.0))
    bce = F.binary_cross_entropy_with_logits(mixed.logits, mixed.targets)
    torch.testing.assert_close(mixed.loss(), bce + sum(mixed.extra.values()))
    mixed.loss().backward()


@every_unguided_case
def test_a_share_in_between_mixes(row: Row, case: str) -> None:
    """The counterpart of the law above: no case is a plain forward that nobody notices."""
    net, x = TinyNet().double(), images(6, dtype=torch.float64)
    draw = with_lam(draw_case(row.mixer, case, 6), 0.4)
    mixed = row.apply(net, x, labels(6), draw)
    kind = case.rpartition("/")[2]
    assert torch.equal(mixed.logits, net(x)) == (kind == "clean" or row.mixes == "history")
    if kind not in ("clean", "cut", "elem", "pair") and row.mixes == "pairs":
        share = 1.0 if row.is_beside else 0.4
        expected = torch.eye(NUM_CLASSES)[labels(6)]
        expected = share * expected + (1 - share) * expected[draw.perm]
        torch.testing.assert_close(row.sharp(mixed.targets), expected)


@pytest.mark.parametrize("batch_size", [1, 3])
@every_case
def test_small_batches_and_targets_that_sum_to_one(row: Row, case: str, batch_size: int) -> None:
    draw = draw_case(row.mixer, case, batch_size)
    mixed = row.apply(TinyNet(), images(batch_size), labels(batch_size), draw)
    num_rows = row.num_rows.get(case, batch_size)
    assert mixed.logits.shape == mixed.targets.shape == (num_rows, NUM_CLASSES)
    torch.testing.assert_close(mixed.targets.sum(1), torch.ones(num_rows))
    assert (mixed.targets >= 0).all()
    assert mixed.loss().isfinite()


@pytest.mark.unchecked_shapes
@every_unguided_case
def test_a_lam_per_sample_is_that_of_each_sample_or_named(row: Row, case: str) -> None:
    """In a batch as large as the side of the images, where the shapes alone would fit."""
    b, net = IMAGE_SIZE, TinyNet().eval()
    draw, is_first = draw_case(row.mixer, case, b), torch.arange(b) % 2 == 0

    def mixed(lam: Tensor) -> Mixed:
        changed = dataclasses.replace(draw, lam=lam)
        return row.apply(net, images(b), labels(b), changed)

    each = torch.where(is_first, 0.3, 0.8)
    if getattr(row.mixer, "has_one_lam", False):
        with pytest.raises(ValueError, match=rf"has one lam per batch, got \[{b}\]"):
            mixed(each)
        return
    ours = mixed(each)
    one, two = (mixed(torch.tensor(lam)) for lam in (0.3, 0.8))
    if len(ours.logits) == b:  # else a row is not of one sample
        mask = is_first.unsqueeze(1)
        expected = torch.where(mask, one.logits, two.logits)
        torch.testing.assert_close(ours.logits, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.targets, torch.where(mask, one.targets, two.targets))


@every_case
def test_one_hot_labels_are_integer_labels(row: Row, case: str) -> None:
    draw = draw_case(row.mixer, case, 6)
    one_hot = torch.eye(NUM_CLASSES)[labels(6)]
    by_integer = row.apply(TinyNet(), images(6), labels(6), draw)
    by_share = row.apply(TinyNet(), images(6), one_hot, draw)
    assert torch.equal(by_integer.targets, by_share.targets)
    assert torch.equal(by_integer.loss(), by_share.loss())


@every_unguided_case
def test_soft_labels_mix_in_the_shares_of_hard_ones(row: Row, case: str) -> None:
    """Sample i has label i, so that the targets of the hard labels are the matrix of all shares."""
    draw, x = draw_case(row.mixer, case, NUM_CLASSES), images(NUM_CLASSES)
    rng = torch.Generator().manual_seed(1)
    soft = torch.randn(NUM_CLASSES, NUM_CLASSES, generator=rng).softmax(1)
    shares = row.apply(TinyNet(), x, torch.arange(NUM_CLASSES), draw).targets
    mixed = row.apply(TinyNet(), x, soft, draw).targets
    torch.testing.assert_close(row.sharp(mixed), row.sharp(shares) @ soft)


@every_case
def test_every_parameter_gets_a_finite_gradient(row: Row, case: str) -> None:
    net = TinyNet()
    draw = draw_case(row.mixer, case, 6)
    row.apply(net, images(6), labels(6), draw).loss().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    # Otherwise DistributedDataParallel looks for those without a gradient in every step.
    assert row.mixer.trains_all == (not isinstance(row.mixer, AlignMixupAE))


@every_row
def test_a_mixer_names_the_layers_that_it_taps(row: Row) -> None:
    """OneOf taps them in every case, because torch.compile ignores hooks that come later."""
    tapped: set[str] = set()

    class Watched(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            if self is net:  # not a teacher, which is a copy
                tapped.update(name for name, part in self.named_modules() if part._forward_hooks)
            return super().forward(x)

    net = Watched()
    for case in row.mixer.cases:
        row.apply(net, images(6), labels(6), draw_case(row.mixer, case, 6))
    assert tapped == set(row.mixer.tapped(net))


@every_case
def test_the_same_draw_gives_the_same_result(row: Row, case: str) -> None:
    draw, x, y = draw_case(row.mixer, case, 6), images(6), labels(6)
    kept = {name: tensor.clone() for name, tensor in draw.tensors().items()}
    first = row.apply(TinyNet(), x, y, draw)
    second = row.apply(TinyNet(), x, y, draw)
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.targets, second.targets)
    # ... and leaves its inputs alone.
    assert torch.equal(x, images(6))
    assert torch.equal(y, labels(6))
    assert all(torch.equal(kept[name], tensor) for name, tensor in draw.tensors().items())


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_a_misspelt_setting_is_an_error(name: str) -> None:
    """No method swallows a keyword that it does not know, as OpenMixup and AdAutoMix's code do."""
    held = {"mixer": NoMix()} if "mixer" in MIXERS[name].__dataclass_fields__ else {}
    with pytest.raises(TypeError, match="unexpected keyword argument 'alhpa'"):
        MIXERS[name](**held, alhpa=8.0)


# ---- chance --------------------------------------------------------------------------------------


@every_row
def test_draws_follow_the_generator(row: Row) -> None:
    """Equal states give equal draws; a state saved midway and restored goes on the same way."""
    rng, twin = (torch.Generator().manual_seed(3) for _ in range(2))
    for _ in range(5):
        assert_same_draw(row.mixer.draw(6, rng), row.mixer.draw(6, twin))
    state = rng.get_state()
    ahead = [row.mixer.draw(6, rng) for _ in range(5)]
    rng.set_state(state)
    for draw in ahead:
        assert_same_draw(draw, row.mixer.draw(6, rng))


def assert_same_draw(one: Draw, other: Draw) -> None:
    assert type(one) is type(other)
    assert one.case == other.case
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name


@every_row
def test_a_draw_touches_no_global_chance(row: Row) -> None:
    before = torch.get_rng_state()
    row.mixer.draw(6, torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.unchecked_shapes  # hundreds of draws of the same shapes
@every_row
def test_cases_occur_with_their_probability(row: Row) -> None:
    """Chi-square at one in ten thousand, from a fixed seed."""
    rng, num_draws = torch.Generator().manual_seed(0), 900 if len(row.mixer.cases) > 1 else 20
    counts = dict.fromkeys(row.mixer.cases, 0)
    for _ in range(num_draws):
        counts[row.mixer.draw(2, rng).case] += 1
    expected = {case: num_draws * share for case, share in row.mixer.cases.items()}
    assert math.isclose(sum(expected.values()), num_draws)
    distance = sum((counts[case] - number) ** 2 / number for case, number in expected.items())
    assert distance <= scipy.stats.chi2.ppf(1 - 1e-4, max(1, len(counts) - 1))


@every_row
def test_draws_are_permutations_and_shares(row: Row) -> None:
    held = getattr(row.mixer, "mixer", row.mixer)
    is_each = getattr(held, "lam_per_sample", getattr(held, "mode", "") in ("elem", "pair"))
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        draw = row.mixer.draw(7, rng)
        assert torch.equal(draw.perm.sort().values, torch.arange(7))
        assert draw.lam.shape == ((7,) if is_each else ())
        assert ((draw.lam >= 0) & (draw.lam <= 1)).all()


@pytest.mark.parametrize("alpha", [0.2, 1.0, 2.0])
def test_shares_are_beta_distributed(alpha: float) -> None:
    rng = torch.Generator().manual_seed(0)
    shares = InputMixup(alpha=alpha, lam_per_sample=True).draw(4000, rng).lam
    test = scipy.stats.kstest(shares.double().numpy(), scipy.stats.beta(alpha, alpha).cdf)
    assert test.pvalue > 1e-3


@pytest.mark.parametrize("alpha", [1e-6, 1e-3])
def test_shares_of_a_tiny_alpha_are_0_or_1(alpha: float) -> None:
    """Beta(alpha, alpha) has about 2 alpha of its mass between 0.1 and 0.9."""
    rng = torch.Generator().manual_seed(0)
    lam = InputMixup(alpha=alpha, lam_per_sample=True).draw(4000, rng).lam
    assert ((lam > 0.1) & (lam < 0.9)).float().mean() < 0.01
    assert lam.mean() == pytest.approx(0.5, abs=0.05)


def test_paper_thirds_and_released_halves() -> None:
    thirds = {"input": 1 / 3, "feat": 1 / 3, "feat'": 1 / 3}
    assert AlignMixup().cases == pytest.approx(thirds)
    assert AlignMixup.released().cases == {"input": 0.5, "feat": 0.25, "feat'": 0.25}
    assert AlignMixup(weights={"feat": 2.0, "input": 0.0}).cases == {"feat": 1.0}
    assert AlignMixup() == AlignMixup("layer4", alpha=2.0, eps=0.1, num_iters=100)


@every_row
def test_calling_a_mixer_draws_and_applies(row: Row) -> None:
    x, y = images(6), labels(6)
    mixed = row.attached(TinyNet(), x)(TinyNet(), x, y, torch.Generator().manual_seed(5))
    draw = row.mixer.draw(6, torch.Generator().manual_seed(5))
    assert torch.equal(mixed.loss(), row.apply(TinyNet(), x, y, draw).loss())
    net = TinyNet()
    torch.manual_seed(5)  # without a generator chance is torch's own
    assert torch.equal(mixed.loss(), row.attached(net, x)(net, x, y).loss())


# ---- agreements ----------------------------------------------------------------------------------


# One row mixes images and one features; the others run with the slow tests.
TRACED = ("saliencymix", "align")
every_traced_row = pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (row.name not in TRACED))
        for row in ROWS
    ],
)


@pytest.mark.unchecked_shapes
@every_traced_row
def test_a_compiled_module_gives_the_same_loss(row: Row) -> None:
    torch.compiler.reset()
    plain, twin = TinyNet(), TinyNet()
    compiled = torch.compile(twin, backend="aot_eager")
    for case in row.mixer.cases:
        draw = draw_case(row.mixer, case, 6)
        losses = [loss_of(row, net, draw) for net in (plain, compiled)]
        torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-5)
        for loss in losses:
            loss.backward()
    for one, other in zip(plain.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.unchecked_shapes
@pytest.mark.filterwarnings("ignore")  # the compiler's own, on old processors
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
def test_inductor_gives_the_same_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The default cache gives code made for another ATEN_CPU_CAPABILITY, which does not compile.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    mixer, plain = AlignMixup(), TinyNet()
    compiled = torch.compile(TinyNet())
    for case in mixer.cases:
        draw = draw_case(mixer, case, 6)
        losses = [loss_of(mixer, net, draw) for net in (plain, compiled)]
        torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-5)
        for loss in losses:
            loss.backward()


def loss_of(mixer: Mixer | Row, net: nn.Module, draw: Draw) -> Tensor:
    return mixer.apply(net, images(6), labels(6), draw).loss()


@every_unguided_case
def test_autocast_is_near_float32(row: Row, case: str) -> None:
    draw, net = draw_case(row.mixer, case, 6), TinyNet()
    wide = row.apply(TinyNet(), images(6), labels(6), draw)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = row.apply(net, images(6), labels(6), draw)
    narrow.loss().backward()
    assert narrow.logits.dtype == torch.bfloat16
    assert narrow.loss().dtype == narrow.targets.dtype == torch.float32
    assert torch.equal(narrow.targets, wide.targets)  # labels are mixed exactly
    # bf16 has 8 bits: each of four layers is off by up to 0.4 %, and a plan follows its features.
    difference = (narrow.logits.float() - wide.logits).norm() / wide.logits.norm()
    assert difference < 0.05
    assert all(p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.gpu
@every_unguided_case
def test_cuda_is_near_cpu(row: Row, case: str) -> None:
    """A draw of a CPU generator serves images on any device."""
    draw, x, y = draw_case(row.mixer, case, 6), images(6), labels(6)
    here = row.apply(TinyNet(), x, y, draw)
    there = row.apply(TinyNet().to("cuda"), x.to("cuda"), y.to("cuda"), draw)
    torch.testing.assert_close(there.targets.cpu(), here.targets)
    torch.testing.assert_close(there.logits.cpu(), here.logits, atol=2e-2, rtol=2e-2)  # tf32 convs


def test_soft_cross_entropy_is_torchs_own() -> None:
    rng = torch.Generator().manual_seed(0)
    z, t = torch.randn(7, 4, generator=rng) * 5, torch.rand(7, 4, generator=rng).softmax(1)
    torch.testing.assert_close(soft_cross_entropy(z, t), F.cross_entropy(z, t))
    y = torch.arange(7) % 4
    hard = NoMix().apply(Constant(z), torch.rand(7, 3, 2, 2), y, NoMix().draw(7, rng))
    torch.testing.assert_close(hard.loss(), F.cross_entropy(z, y))


def test_mixed_loss_is_the_mix_of_the_two_losses() -> None:
    """lam CE(z, y) + (1 - lam) CE(z, y'), sample by sample."""
    rng = torch.Generator().manual_seed(0)
    z, y = torch.randn(6, 4, generator=rng), torch.arange(6) % 4
    draw = InputMixup(lam_per_sample=True).draw(6, rng)
    mixed = InputMixup().apply(Constant(z), torch.rand(6, 3, 2, 2), y, draw)
    one, two = (F.cross_entropy(z, label, reduction="none") for label in (y, y[draw.perm]))
    torch.testing.assert_close(mixed.loss(), (draw.lam * one + (1 - draw.lam) * two).mean())


def test_bce_against_a_loop() -> None:
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(3, 4, generator=rng, dtype=torch.float64) * 3
    t = torch.rand(3, 4, generator=rng, dtype=torch.float64).softmax(1)
    total = 0.0
    for i in range(3):
        exps = [math.exp(float(v)) for v in z[i]]
        for k in range(4):
            p = exps[k] / sum(exps)
            total -= float(t[i, k]) * math.log(p) + (1 - float(t[i, k])) * math.log(1 - p)
    assert float(softmax_bce(z, t)) == pytest.approx(total / 12, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bce_of_a_confident_wrong_prediction_is_finite(dtype: torch.dtype) -> None:
    z = torch.tensor([[200.0, 0.0, -200.0]], dtype=dtype, requires_grad=True)
    loss = softmax_bce(z, torch.tensor([[0.0, 1.0, 0.0]]))
    loss.backward()
    assert loss.isfinite()
    assert loss > 60  # -log p of the right class is 200, of three terms in the mean
    assert z.grad.isfinite().all()


def test_bce_row_uses_bce() -> None:
    draw = InputMixup().draw(6, torch.Generator().manual_seed(0))
    mixed = InputMixup(loss="bce").apply(TinyNet(), images(6), labels(6), draw)
    torch.testing.assert_close(mixed.loss(), softmax_bce(mixed.logits, mixed.targets))
    assert mixed.loss() < 0.6 * soft_cross_entropy(mixed.logits, mixed.targets)


def features_after(mixer: Mixer, draw: Draw) -> tuple[Tensor, Tensor]:
    """What the head of a TinyNet sees with this mixer, and what it sees without."""
    net, seen = TinyNet(), []
    net.fc.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    mixer.apply(net, images(6), labels(6), draw)
    net(images(6))
    return seen[0].view(6, 8, 4, 4), seen[1].view(6, 8, 4, 4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eps": 2.0},
        {"num_iters": 1},
        {"num_iters": 0},
        {"tol": 0.5},
        {"last": "rows"},
        {"last": "columns"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("case", "keep"), [("feat", "anchor"), ("feat'", "partner")])
def test_alignmixup_hands_its_settings_on(case: str, keep: str, settings: dict) -> None:
    draw = draw_case(AlignMixup(lam_per_sample=True), case, 6)
    mixed, plain = features_after(AlignMixup(**settings), draw)
    expected = align_mix(plain, draw.perm, draw.lam, keep=keep, **settings)
    torch.testing.assert_close(mixed, expected)
    # Settings that make no difference here would prove nothing.
    default = align_mix(plain, draw.perm, draw.lam, keep=keep)
    is_default = settings.get("last") == ("columns" if keep == "anchor" else "rows")
    assert torch.equal(expected, default) == (not settings or is_default)


def test_alignmixup_hands_its_backend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = []

    def recorded(features: Tensor, *args: Any, backend: str, **kwargs: Any) -> Tensor:
        backends.append(backend)
        return features

    monkeypatch.setattr("alignmixup.mixers.alignmixup.align_mix", recorded)
    features_after(AlignMixup(backend="absorbed"), draw_case(AlignMixup(), "feat", 6))
    assert backends == ["absorbed"]


def test_the_released_preset_is_the_authors() -> None:
    released = AlignMixup.released("layer2")
    assert (released.layer, released.last, released.alpha) == ("layer2", "columns", 2.0)
    assert not released.lam_per_sample


def test_resolution_mixes_block_means() -> None:
    """At resolution 2, what follows sees each quarter's mean, mixed, in all of its pixels."""
    draw = draw_case(AlignMixup(), "feat", 6)
    mixed, plain = features_after(AlignMixup(resolution=2, aligned=False), draw)
    blocks = plain.view(6, 8, 2, 2, 2, 2).mean((3, 5))
    blocks = draw.lam * blocks + (1 - draw.lam) * blocks[draw.perm]
    expected = blocks.repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(mixed, expected)


def test_a_layer_may_be_called_clean() -> None:
    net = TinyNet()
    net.add_module("clean", net.layer4)
    del net.layer4
    net.forward = lambda x: net.fc(net.clean(net.layer2(net.layer1(x))).flatten(1))
    mixer = ManifoldMixup(("clean",))
    mixed = mixer.apply(net, images(6), labels(6), draw_case(mixer, "clean", 6))
    assert not torch.allclose(mixed.logits, net(images(6)))
    assert (mixed.targets.amax(1) < 1).any()


class Constant(nn.Module):
    """A network that gives these logits whatever it sees."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: Tensor) -> Tensor:
        return self.logits


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.unchecked_shapes
@every_case
def test_bad_batches_are_named(row: Row, case: str) -> None:
    net, x, y = TinyNet(), images(6), labels(6)
    draw = draw_case(row.mixer, case, 6)

    def apply(x: Tensor, y: Tensor, draw: Draw = draw) -> Mixed:
        return row.apply(net, x, y, draw)

    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.4, got 5; check"):
        apply(x, y + 1)
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.4, got -1; check"):
        apply(x, y - 1)
    with pytest.raises(ValueError, match=r"soft labels must have shape \[b, 5\].*got \[6, 4\]"):
        apply(x, torch.rand(6, 4))
    with pytest.raises(ValueError, match=r"integer labels must have shape \[b\], got \[6, 5\]"):
        apply(x, torch.eye(5, dtype=torch.int64)[y])
    with pytest.raises(ValueError, match="6 images but 5 labels"):
        apply(x, y[:5])
    with pytest.raises(ValueError, match=r"images must be floats, got torch.uint8; divide"):
        apply((x * 255).to(torch.uint8), y)
    with pytest.raises(ValueError, match=r"images must be a tensor .*, got ndarray"):
        apply(x.numpy(), y)
    for bad in ("nan", "inf"):
        with pytest.raises(ValueError, match=f"images must be finite, got values .* to {bad}"):
            apply(x.index_fill(0, torch.tensor([5]), float(bad)), y)
    with pytest.raises(ValueError, match=r"labels must be a tensor .*, got list"):
        apply(x, y.tolist())
    with pytest.raises(ValueError, match=r"labels must be a tensor .*, got a scalar"):
        apply(x, y[0])
    with pytest.raises(ValueError, match=r"images are on cpu but labels on meta: move the labels"):
        apply(x, y.to("meta"))
    with pytest.raises(ValueError, match=r"images must not be empty, got shape \[0, 3, 16, 16\]"):
        apply(x[:0], y[:0])
    with pytest.raises(ValueError, match="draw is for a batch of 6, got 3 images"):
        apply(x[:3], y[:3])
    with pytest.raises(ValueError, match=r"lam must have shape \[\] or \[6\], got \[4\]"):
        apply(x, y, dataclasses.replace(draw, lam=torch.ones(4)))


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lam": 0.5}, r"lam of a draw must be a tensor, got 0\.5: use torch\.tensor"),
        ({"perm": [1, 0]}, r"perm of a draw must be a tensor, got \[1, 0\]"),
        ({"lam": torch.tensor(1.5)}, r"lam must lie in \[0, 1\], got values from 1\.5 to 1\.5"),
        ({"lam": torch.tensor([0.5, torch.nan])}, r"lam must lie in \[0, 1\], got values from nan"),
        ({"perm": torch.tensor([1, 2])}, "perm must have values 0 to 1, got 1 to 2"),
        ({"perm": torch.tensor([-1, 0])}, "perm must have values 0 to 1, got -1 to 0"),
        ({"perm": torch.tensor([1.0, 0.0])}, r"perm must be int64 or int32, got torch\.float32"),
        ({"perm": torch.tensor([1, 0]).byte()}, r"perm must be int64 or int32, got torch\.uint8"),
    ],
)
def test_draws_made_by_hand_are_checked(change: dict[str, Any], message: str) -> None:
    draw = Draw("input", **{"perm": torch.tensor([1, 0]), "lam": torch.tensor(0.5), **change})
    for mixer in (InputMixup(), AlignMixup()):
        with pytest.raises(ValueError, match=message):
            mixer.apply(TinyNet(), images(2), labels(2), draw)


@pytest.mark.unchecked_shapes
@every_row
def test_a_network_that_gives_no_logits_is_named(row: Row) -> None:
    class Maps(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, :, None]

    for case in row.mixer.cases:
        with pytest.raises(ValueError, match=r"must return logits \[b, k\], got \[6, 5, 1\]"):
            row.apply(Maps(), images(6), labels(6), draw_case(row.mixer, case, 6))


class Answer(TinyNet):
    """A network that wraps its logits up, or gives them for other images than it was given."""

    def __init__(self, wrap: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> object:
        return self.wrap(super().forward(x))


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("wrap", "found"),
    [
        (lambda z: {"logits": z}, "dict"),
        (lambda z: (z, z), "tuple"),
        (lambda z: z.repeat(2, 1), r"\[12, 5\]"),
    ],
)
@every_row
def test_logits_that_are_not_those_of_the_batch_are_named(row: Row, wrap, found: str) -> None:
    for case in row.mixer.cases:
        with pytest.raises(ValueError, match=rf"logits \[b, k\], got {found} for a batch of 6"):
            row.apply(Answer(wrap), images(6), labels(6), draw_case(row.mixer, case, 6))


@every_row
def test_the_gradient_reaches_images_that_ask_for_it(row: Row) -> None:
    for case in row.mixer.cases:
        x = images(6).requires_grad_()
        row.apply(TinyNet(), x, labels(6), draw_case(row.mixer, case, 6)).loss().backward()
        assert x.grad is not None, case
        assert (x.grad.flatten(1).abs().amax(1) > 0).all(), case


@pytest.mark.parametrize("clean_lam", [0.0, 1.0])
@pytest.mark.parametrize("kind", [PuzzleMix, CoMixup])
def test_the_gradient_of_images_is_that_of_the_loss_where_blocks_are_chosen(
    kind: type[PuzzleMix] | type[CoMixup], clean_lam: float
) -> None:
    mixer = kind(grids=(4,), clean_lam=clean_lam)
    draw = mixer.draw(6, torch.Generator().manual_seed(0))
    x = images(6).double().requires_grad_()
    step = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype) * 1e-6

    def loss(at: Tensor) -> Tensor:
        return mixer.apply(TinyNet().double(), at, labels(6), draw).loss()

    loss(x).backward()
    change = loss(x.detach() + step) - loss(x.detach() - step)
    torch.testing.assert_close(2 * (x.grad * step).sum(), change.detach(), rtol=1e-3, atol=0)


@every_row
def test_inference_mode_works_or_is_named(row: Row) -> None:
    """Saliency is a gradient, and there is none."""
    draw = row.mixer.draw(6, torch.Generator().manual_seed(0))
    with torch.inference_mode():
        if not row.is_guided:
            assert row.apply(TinyNet(), images(6), labels(6), draw).loss().isfinite()
            return
        with pytest.raises(ValueError, match=r"saliency needs a gradient.*inference_mode"):
            row.apply(TinyNet(), images(6), labels(6), draw)


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: InputMixup(alpha=0.0), "alpha must be positive and finite, got 0.0"),
        (lambda: InputMixup(alpha="2"), "alpha must be positive and finite, got '2'"),
        (lambda: InputMixup(alpha=None), "alpha must be positive and finite, got None"),
        (lambda: CutMix(prob="1"), r"prob must lie in \[0, 1\], got '1'"),
        (lambda: InputMixup(alpha=float("nan")), "alpha must be positive and finite, got nan"),
        (lambda: InputMixup(alpha=float("inf")), "alpha must be positive and finite, got inf"),
        (lambda: InputMixup(loss="mse"), "loss must be 'ce' or .*, got 'mse'"),
        (lambda: NoMix(loss=""), "loss must be .*, got ''"),
        (lambda: ManifoldMixup(()), r"layers must be one or more different names, got \(\)"),
        (lambda: ManifoldMixup(("layer1", "layer1")), "different names"),
        (lambda: ManifoldMixup("layer1"), r"layers must be a tuple of names, .* got 'layer1'"),
        (lambda: ManifoldMixup(None), "layers must be a tuple of names, .* got None"),
        (lambda: ManifoldMixup((3,)), "a layer is the name of a sub-module, .* got 3"),
        (lambda: ManifoldMixup(([],)), r"a layer is the name of a sub-module, .* got \[\]"),
        (lambda: AlignMixup(layer=3), "a layer is the name of a sub-module, .* got 3"),
        (lambda: AlignMixup(layer=None), "a layer is the name of a sub-module, .* got None"),
        (lambda: AlignMixup(layer=[]), r"a layer is the name of a sub-module, .* got \[\]"),
        (lambda: AlignMixupAE(layer=3), "a layer is the name of a sub-module, .* got 3"),
        (lambda: AlignMixupAE(embed=None), "a layer is the name of a sub-module, .* got None"),
        (lambda: AlignMixup(prefix_tokens=-1), "prefix_tokens must be an integer >= 0, got -1"),
        (lambda: AlignMixup(prefix_tokens=1.5), "prefix_tokens must be an integer >= 0, got 1.5"),
        (lambda: AlignMixup(resolution=2.0), "resolution must be an integer >= 1, got 2.0"),
        (lambda: PuzzleMix(neigh_size=4.0), "neigh_size must be an integer >= 1, got 4.0"),
        (lambda: PuzzleMix(t_size="4"), "t_size must be an integer >= 1, or -1 .*, got '4'"),
        (lambda: CutMix(prob=1.5), r"prob must lie in \[0, 1\], got 1.5"),
        (lambda: CutMix(alpha=-1.0), "alpha must be positive and finite, got -1.0"),
        (lambda: Cutout(length=1), "length must be an integer >= 2, got 1"),
        (lambda: Cutout(length=16.0), "length must be an integer >= 2, got 16.0"),
        (lambda: Cutout(fill=0.5), r"fill must be a tuple of one number per channel, .* got 0.5"),
        (lambda: Cutout(fill=(0.5, float("nan"), 0.5)), r"got \(0.5, nan, 0.5\)"),
        (lambda: AlignMixup(eps=0.0), "eps must be a positive number, got 0.0"),
        (lambda: AlignMixup(num_iters=-1), "num_iters must be an integer >= 0 .* got -1"),
        (lambda: AlignMixup(tol=0.0), "tol must be positive, .* got 0.0"),
        (
            lambda: AlignMixup(last="diagonal"),
            "last must be 'rows' or 'columns' or None, got 'diagonal'",
        ),
        (lambda: AlignMixup(resolution=0), "resolution must be an integer >= 1, got 0"),
        (lambda: AlignMixup(weights={"embedding": 1.0}), r"unknown cases \['embedding'\]"),
        (lambda: AlignMixup(weights={"feat": 0.0}), "not all zero"),
        (lambda: AlignMixup(weights={"feat": float("inf")}), "finite"),
        (lambda: AlignMixup(weights={"feat": -1.0, "input": 2.0}), "must be >= 0"),
    ],
)
def test_bad_settings_are_named(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@every_row
def test_a_case_of_another_mixer_is_named(row: Row) -> None:
    """Labels mixed and images not would train on wrong labels, and nobody would notice."""
    draw = row.mixer.draw(6, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"case is 'layer9', but this mixer has .* its own draw"):
        row.apply(TinyNet(), images(6), labels(6), dataclasses.replace(draw, case="layer9"))


def test_a_draw_without_a_box_is_named() -> None:
    bare = Draw("cut", torch.arange(6), torch.tensor(0.5))
    for mixer in (CutMix(), Cutout()):
        with pytest.raises(
            ValueError, match="needs a BoxDraw, got a Draw: use the mixer's own draw"
        ):
            mixer.apply(TinyNet(), images(6), labels(6), bare)


@pytest.mark.parametrize("case", ["input", "feat", "feat'"])
@pytest.mark.parametrize("resolution", [3, 99])
def test_a_resolution_that_does_not_divide_the_map_is_named(resolution: int, case: str) -> None:
    """In the first step, whatever its case."""
    mixer = AlignMixup(resolution=resolution)
    with pytest.raises(ValueError, match=rf"resolution {resolution} must .* \[6, 8, 4, 4\]"):
        mixer.apply(TinyNet(), images(6), labels(6), draw_case(mixer, case, 6))


class Twice(nn.Module):
    """A network with a layer that returns two rows per image."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.fc = nn.Identity(), nn.Linear(3 * IMAGE_SIZE**2, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.twice(x.flatten(1).repeat(2, 1)))[: len(x)]


@pytest.mark.parametrize(
    ("mixer", "case"),
    [
        (ManifoldMixup(("twice",)), "twice"),
        (AlignMixupAE(embed="twice", layers=("x", "e"), clean=False), "embed"),
        (AlignMixupAE(embed="twice", layers=("x", "e"), clean=False), "input"),
    ],
)
def test_a_layer_with_other_rows_than_the_batch_is_named(mixer: Mixer, case: str) -> None:
    with pytest.raises(ValueError, match=r"'twice' returns \[12, 768\] for a batch of 6"):
        mixer.apply(Twice(), images(6), labels(6), draw_case(mixer, case, 6))


@pytest.mark.parametrize("size", [(16, 24), (24, 16)])
def test_a_resolution_must_divide_both_sides(size: tuple[int, int]) -> None:
    x = torch.rand(6, 3, *size)  # maps of 4 by 6, or of 6 by 4
    net, draw = TinyNet("pool"), draw_case(AlignMixup(), "feat", 6)
    assert AlignMixup(resolution=2).apply(net, x, labels(6), draw).loss().isfinite()
    with pytest.raises(ValueError, match="resolution 4 must divide the sides"):
        AlignMixup(resolution=4).apply(net, x, labels(6), draw)


@pytest.mark.parametrize("case", ["input", "feat"])
def test_a_layer_without_positions_is_named_in_any_case(case: str) -> None:
    mixer = AlignMixup("fc")
    with pytest.raises(ValueError, match=r"layer 'fc' returns \[6, 5\]; AlignMixup needs maps"):
        mixer.apply(TinyNet(), images(6), labels(6), draw_case(mixer, case, 6))


@pytest.mark.unchecked_shapes
def test_a_1d_convolution_is_not_taken_for_tokens() -> None:
    """[b, c, n] would be aligned over its channels, and nobody would notice."""
    net = nn.Sequential()
    conv = nn.Conv1d(2, 4, 3, padding=1)
    net.add_module("line", nn.Sequential(conv, nn.BatchNorm1d(4), nn.ReLU()))
    net.add_module("tokens", nn.Sequential(Transposed(), nn.LayerNorm(4)))
    net.add_module("head", nn.Sequential(nn.Flatten(), nn.Linear(4 * 9, NUM_CLASSES)))
    x = torch.rand(6, 2, 9)
    for layer in ("line", "line.0"):
        with pytest.raises(ValueError, match=rf"'{layer}' ends in a 1-D conv.* use ManifoldMixup"):
            AlignMixup(layer)(net, x, labels(6))
    assert AlignMixup("tokens")(net, x, labels(6)).loss().isfinite()
    assert ManifoldMixup(("line",))(net, x, labels(6)).loss().isfinite()


class Transposed(nn.Module):
    """Channels first to channels last."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@every_row
def test_float64_images_are_named_unless_the_network_takes_them(row: Row) -> None:
    rng = torch.Generator().manual_seed(0)
    x = images(6, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"images are torch.float64 .* weights are torch.float32"):
        row.attached(TinyNet(), x)(TinyNet(), x, labels(6), rng)
    if "style" not in row.name:  # a style network is float32
        net = TinyNet().double()
        assert row.attached(net, x)(net, x, labels(6), rng).loss().isfinite()


@pytest.mark.parametrize(
    ("x", "net"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.half)],
)
def test_images_of_another_float_type_are_named(x: torch.dtype, net: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"images are {x} but the network's weights are {net}"):
        InputMixup()(TinyNet().to(net), images(6).to(x), labels(6))


def test_autocast_takes_images_of_another_float_type() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = InputMixup()(TinyNet(), images(6).half(), labels(6)).loss()
        with pytest.raises(ValueError, match=r"images are torch.float64 .* torch.float32"):
            InputMixup()(TinyNet(), images(6, dtype=torch.float64), labels(6))
    assert loss.isfinite()


def test_an_error_of_the_network_itself_stays_its_own() -> None:
    class Broken(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        InputMixup()(Broken(), images(6), labels(6))


@pytest.mark.unchecked_shapes
def test_a_function_in_place_of_a_network() -> None:
    """Methods on images take it; those that look into the network name it."""
    net, x, y = TinyNet(), images(6), labels(6)
    assert InputMixup()(lambda images: net(images), x, y).loss().isfinite()
    with pytest.raises(RuntimeError, match="type"):  # torch's own, without our hint
        InputMixup()(lambda images: net(images), x.double(), y)
    with pytest.raises(ValueError, match=r"got TinyNet: mixer\(model, x, y\)"):
        InputMixup()(x, net, y)
    for mixer in (PuzzleMix(), CoMixup(), AttentiveMix(min_cells=0), SnapMix(classifier="fc")):
        for case in mixer.cases:
            if case != "clean":
                with pytest.raises(ValueError, match=r"nn\.Module.* function"):
                    mixer.apply(lambda images: net(images), x, y, draw_case(mixer, case, 6))


@every_row
def test_equal_mixers_have_equal_hashes(row: Row) -> None:
    same = dataclasses.replace(row.mixer)
    assert same == row.mixer
    assert hash(same) == hash(row.mixer)


def test_a_setting_of_a_subclass_does_not_change_its_cases() -> None:
    @dataclasses.dataclass(frozen=True)
    class Fewer(InputMixup):
        prob: float = 0.5

    assert Fewer().cases == {"input": 1.0}
    assert list(Fewer().known_cases) == ["input"]
