"""OneOf per pair and per sample: its laws, and timm's Mixup with its chance replaced by ours."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.label_smoothing import LabelSmoothing
from alignmixup.mixers.oneof import OneOf
from alignmixup.mixers.per_sample import ChoiceDraw, _choose
from alignmixup.mixers.resizemix import ResizeMix
from cases import NUM_CLASSES, PixelRecorder, TinyNet, images, labels
from torchvision_schemas import define_torchvision_schemas

MIXERS = (InputMixup(alpha=0.8), CutMix(alpha=1.0, prob=1.0))
both_modes = pytest.mark.parametrize("mode", ["pair", "elem"])


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- timm ----------------------------------------------------------------------------------------


@pytest.fixture
def timm_mixup(monkeypatch: pytest.MonkeyPatch):
    """timm's Mixup of this draw: the numbers it asks numpy for are ours."""
    define_torchvision_schemas()
    data = pytest.importorskip("timm.data")

    def mixup(mode: str, draw: ChoiceDraw, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        count = len(x) if mode == "elem" else len(x) // 2
        is_cut = draw.method[:count].numpy() == 1
        # CutMix below switch_prob = 0.5; then mixed at all, below prob = 1.
        coins = iter([np.where(is_cut, 0.0, 0.9), np.zeros(count)])
        boxed = is_cut & (draw.lam[:count].numpy() != 1)
        fractions = iter(draw.center[:count][torch.from_numpy(boxed)].flatten().tolist())
        monkeypatch.setattr(np.random, "rand", lambda n: next(coins))
        monkeypatch.setattr(np.random, "beta", lambda a, b, size: draw.lam[:count].numpy())
        monkeypatch.setattr(
            np.random, "randint", lambda low, high, size=None: int(next(fractions) * high)
        )
        mixer = data.Mixup(0.8, 1.0, mode=mode, label_smoothing=0.1, num_classes=NUM_CLASSES)
        return mixer(x.clone(), y)

    return mixup


@both_modes
def test_it_is_timms_mixup(mode: str, timm_mixup) -> None:
    mixer = OneOf(MIXERS, smoothing=0.1, pairing="reverse", mode=mode)
    x, y = torch.rand(8, 3, 32, 32, generator=rng()), labels(8)
    for seed in range(12):
        draw = mixer.draw(8, rng(seed))
        # Sides of an even number of pixels: for an odd one timm's box is a pixel larger. The first
        # and last are zero at times: lam = 1 leaves a sample as it is.
        side = 2 * (16 * (1 - draw.lam).sqrt()).floor() / 32
        if seed % 2:
            side[::7] = 0
        draw = dataclasses.replace(draw, lam=1 - side * side)
        net = PixelRecorder()
        mixed = mixer.apply(net, x, y, draw)
        theirs, their_targets = timm_mixup(mode, draw, x, y)
        torch.testing.assert_close(net.seen, theirs, atol=1e-6, rtol=1e-6)
        is_cut = draw.method == 1
        assert torch.equal(net.seen[is_cut], theirs[is_cut])
        torch.testing.assert_close(mixed.targets, their_targets, atol=1e-6, rtol=1e-6)


# ---- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "single"), [((1.0, 0.0), MIXERS[0]), ((0.0, 1.0), MIXERS[1])])
def test_one_method_alone_is_that_method(weights: tuple[float, ...], single) -> None:
    """Per sample, bit for bit, chance included."""
    single = dataclasses.replace(single, lam_per_sample=True)
    ours, theirs = rng(3), rng(3)
    for _ in range(4):
        one = OneOf(MIXERS, weights=weights, mode="elem")(TinyNet(), images(6), labels(6), ours)
        other = single(TinyNet(), images(6), labels(6), theirs)
        assert torch.equal(one.logits, other.logits)
        assert torch.equal(one.targets, other.targets)
    assert torch.equal(ours.get_state(), theirs.get_state())


@both_modes
def test_each_sample_is_that_of_its_own_method(mode: str) -> None:
    mixer = OneOf(MIXERS, mode=mode)
    draw = mixer.draw(9, rng(1))
    assert set(draw.method.tolist()) == {0, 1}
    net, x, y = PixelRecorder(), images(9), labels(9)
    mixed = mixer.apply(net, x, y, draw)
    for number, single in enumerate(MIXERS):
        alone = PixelRecorder()
        targets = single.apply(
            alone, x, y, dataclasses.replace(draw, case=next(iter(single.cases)))
        )
        own = draw.method == number
        assert torch.equal(net.seen[own], alone.seen[own])
        assert torch.equal(mixed.targets[own], targets.targets[own])


@pytest.mark.parametrize("pairing", ["random", "reverse"])
@pytest.mark.parametrize("batch_size", [1, 2, 7, 8])
def test_pairs_are_mutual_and_have_one_draw(pairing: str, batch_size: int) -> None:
    mixer = OneOf(MIXERS, mode="pair", pairing=pairing)
    draw = mixer.draw(batch_size, rng(2))
    perm = draw.perm
    assert torch.equal(perm[perm], torch.arange(batch_size))
    assert int((perm == torch.arange(batch_size)).sum()) == batch_size % 2
    for name in ("lam", "center", "method"):
        tensor = draw.tensors()[name]
        assert torch.equal(tensor, tensor[perm]), name
    if pairing == "reverse":
        assert torch.equal(perm, torch.arange(batch_size).flip(0))
    # Both images of a pair together hold both originals: what one shows, the other does not.
    net, x = PixelRecorder(), images(batch_size)
    mixer.apply(net, x, labels(batch_size), draw)
    torch.testing.assert_close(net.seen + net.seen[perm], x + x[perm])


@both_modes
def test_shares_of_methods_are_their_probabilities(mode: str) -> None:
    """Of clean samples too, those of prob and of CutMix's own; chi-square at one in 10,000."""
    mixers = (InputMixup(), CutMix(prob=0.5), CutMix(alpha=0.3, prob=1.0))
    mixer = OneOf(mixers, weights=(1.0, 2.0, 1.0), prob=0.8, mode=mode)
    draw, count = mixer.draw(8000, rng()), 8000 if mode == "elem" else 4000
    is_clean = draw.lam == 1
    found = [int((~is_clean & (draw.method == n)).sum()) for n in range(3)] + [int(is_clean.sum())]
    scale = count / 8000
    expected = [0.2 * count, 0.2 * count, 0.2 * count, 0.4 * count]
    assert scipy.stats.chisquare([n * scale for n in found], expected).pvalue > 1e-4
    for number, alpha in ((0, 1.0), (2, 0.3)):
        own = draw.lam[~is_clean & (draw.method == number)].double()
        own = own.unique() if mode == "pair" else own
        assert scipy.stats.kstest(own.numpy(), scipy.stats.beta(alpha, alpha).cdf).pvalue > 1e-4


@both_modes
def test_labels_have_the_share_of_the_pixels(mode: str) -> None:
    """Image i is of color i alone, so the mean color of a sample is its target."""
    x = torch.eye(3)[:, :, None, None].expand(3, 3, 16, 16).contiguous()

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(2).mean(2)

    for seed in range(8):
        mixer = OneOf(MIXERS, mode=mode)
        mixed = mixer(Mean(), x, torch.arange(3), rng(seed))
        torch.testing.assert_close(mixed.logits, mixed.targets, atol=1e-6, rtol=1e-6)


@both_modes
def test_after_until_and_without_weight_nothing_is_mixed(mode: str) -> None:
    mixer = OneOf(MIXERS, mode=mode, until=0.5)
    assert mixer.cases == {mode: 0.5, "clean": 0.5}
    assert mixer.draw(4, rng(), 0.49).case == mode
    assert mixer.draw(4, rng(), 0.5).case == "clean"
    never = OneOf(MIXERS, mode=mode, prob=0.0)
    assert never.cases == {"clean": 1.0}
    net = PixelRecorder()
    never(net, images(4), labels(4), rng())
    assert torch.equal(net.seen, images(4))


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "sample"}, "mode must be 'batch' or 'pair' or 'elem', got 'sample'"),
        ({"mixers": (AlignMixup(),), "mode": "elem"}, "one lam per sample .* got AlignMixup: use"),
        ({"mixers": (ResizeMix(),), "mode": "pair"}, r"CutMix\), got ResizeMix: use mode='batch'"),
        ({"mixers": (LabelSmoothing(CutMix()),), "mode": "elem"}, "got LabelSmoothing"),
        (
            {"mixers": (InputMixup(loss="bce"), CutMix()), "mode": "elem"},
            r"one loss for all samples, got \['bce', 'ce'\]",
        ),
    ],
)
def test_bad_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OneOf(**settings)


def test_a_draw_of_another_mode_is_named() -> None:
    modes = {mode: OneOf(MIXERS, mode=mode) for mode in ("batch", "pair", "elem")}
    for own, mixer in modes.items():
        for other, drawing in modes.items():
            if other != own:
                with pytest.raises(ValueError, match="but this mixer has"):
                    mixer.apply(TinyNet(), images(4), labels(4), drawing.draw(4, rng()))


@pytest.mark.parametrize("shares", [(0.3,), (1.0,), (0.2, 0.5), (0.25, 0.75), (0.0, 0.4)])
def test_methods_are_chosen_by_their_shares_and_the_rest_is_not_mixed(shares) -> None:
    number, is_mixed = _choose(shares, 20000, torch.Generator().manual_seed(0))
    for method, share in enumerate(shares):
        found = float(((number == method) & is_mixed).float().mean())
        assert found == pytest.approx(share, abs=4 * (share * (1 - share) / 20000) ** 0.5)
    assert float(is_mixed.float().mean()) == pytest.approx(sum(shares), abs=0.015)
