"""FMix against numpy's Fourier transform of the same noise, and its laws."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from alignmixup.mixers.fmix import (
    FMix,
    FourierDraw,
    isotropic_spectrum,
    largest,
    low_frequency_image,
    released_spectrum,
    soft_largest,
)
from cases import Recorder

SIZES = [(32, 32), (16, 16), (7, 9), (5, 12), (12, 5), (1, 1), (2, 3)]


def noise_of(seed: int) -> Tensor:
    return torch.randn(32, 17, 2, generator=torch.Generator().manual_seed(seed))


def image_of(noise: Tensor, size: tuple[int, int], decay: float = 3.0) -> np.ndarray:
    """The paper's formula, frequency by frequency."""
    height, width = size
    spectrum = np.zeros((height, width // 2 + 1), dtype=complex)
    for row in range(height):
        ky = row if row < (height + 1) // 2 else row - height
        for kx in range(width // 2 + 1):
            f = max(np.hypot(ky / height, kx / width), 1 / max(size))
            a, b = noise[ky + 16, kx].tolist()
            spectrum[row, kx] = complex(a, b) / f**decay
    return np.fft.irfft2(spectrum, size)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_image_is_numpys(size: tuple[int, int]) -> None:
    noise = noise_of(0)
    ours = low_frequency_image(isotropic_spectrum(noise, 3.0, size), size[1])
    theirs = torch.from_numpy(image_of(noise, size) / max(size) ** 3).float()
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize("decay", [8.0, 40.0, 500.0])
def test_a_mask_of_any_decay_is_that_of_float64(decay: float) -> None:
    """Powers of the lowest frequency that float32 cannot hold are no loss of the mask."""
    size, lam, coin = (32, 24), torch.tensor(0.4), torch.tensor(0.0)
    for make in (isotropic_spectrum, released_spectrum):
        images = (
            low_frequency_image(make(noise_of(3).to(dtype), decay, size), size[1])
            for dtype in (torch.float32, torch.float64)
        )
        ours, theirs = (largest(image, lam, coin) for image in images)
        assert float((ours != theirs).float().mean()) < 0.01
        assert 0 < float(ours[: size[0] // 4].float().mean()) < 1  # not the first pixels


@pytest.mark.parametrize("size", [(32, 32), (16, 16), (12, 8)], ids=str)
def test_the_released_image_is_a_transform_of_the_wrong_axis(size: tuple[int, int]) -> None:
    """Scale noise [ky, kx, re/im] by frequency, then take rows 0 and 1 for real and imaginary."""
    height, width = size
    noise = noise_of(1)
    field = noise[16:, : width // 2 + 1].double().numpy().copy()  # ky = 0, 1, ...
    for ky in range(len(field)):
        for kx in range(field.shape[1]):
            field[ky, kx] /= max(np.hypot(ky / height, kx / width) * max(size), 1) ** 3
    theirs = torch.from_numpy(np.fft.irfftn(field[0] + 1j * field[1], size, (0, 1))).float()
    ours = low_frequency_image(released_spectrum(noise, 3.0, size), width)
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_shows_the_anchor_where_numpys_image_is_largest(seed: int) -> None:
    """By default in the paper's spectrum; that of the released code gives another mask."""
    noise, x = noise_of(seed), torch.stack([torch.ones(3, 32, 32), torch.zeros(3, 32, 32)])
    draw = FourierDraw("cut", torch.tensor([1, 0]), torch.tensor(0.5), noise, torch.tensor(0.0))
    seen = {}
    for mixer in (FMix(), FMix.released()):
        net = Recorder()
        mixer.apply(net, x, torch.arange(2), draw)
        seen[mixer.spectrum] = net.seen[0, 0] == 1
    image = image_of(noise, (32, 32))
    theirs = torch.from_numpy(image > np.median(image))
    assert (seen["isotropic"] != theirs).float().mean() < 0.005  # near ties round differently
    assert (seen["released"] != theirs).float().mean() > 0.05


def energy_beyond_one_cycle(make, axis: int, size: tuple[int, int] = (32, 32)) -> float:
    """Share of the energy in more than one cycle along ``axis`` of the images of 40 noises."""
    total = beyond = 0.0
    for seed in range(40):
        image = low_frequency_image(make(noise_of(seed), 3.0, size), size[1]).double()
        power = torch.fft.fft(image - image.mean(), dim=axis).abs().square()
        power = power.movedim(axis, 0)
        total += float(power.sum())
        beyond += float(power[2:-1].sum())
    return beyond / total


def test_energy_is_the_same_along_both_axes_but_not_in_the_released_code() -> None:
    along_rows, along_columns = (energy_beyond_one_cycle(isotropic_spectrum, a) for a in (1, 0))
    assert 0.005 < along_rows < 0.2
    assert 1 / 3 < along_rows / along_columns < 3
    # The defect: along a row of pixels there are 0 and 1 cycles, and nothing else.
    assert energy_beyond_one_cycle(released_spectrum, 1) < 1e-10
    assert energy_beyond_one_cycle(released_spectrum, 0) > 1e-3


def test_the_mask_has_the_largest_values() -> None:
    rng = torch.Generator().manual_seed(0)
    for lam, coin, num in ((0.37, 0.2, 23), (0.37, 0.7, 24), (0.5, 0.9, 32), (1.0, 0.9, 64)):
        image = torch.randn(8, 8, generator=rng)
        mask = largest(image, torch.tensor(lam), torch.tensor(coin))
        assert int(mask.sum()) == num
        if num < 64:
            assert image[mask].min() > image[~mask].max()


@given(low=st.floats(0, 1, width=32), high=st.floats(0, 1, width=32), seed=st.integers(0, 99))
def test_masks_of_one_noise_are_nested(low: float, high: float, seed: int) -> None:
    low, high = sorted((low, high))
    image = low_frequency_image(isotropic_spectrum(noise_of(seed), 3.0, (16, 16)), 16)
    small, large = (largest(image, torch.tensor(v), torch.tensor(0.0)) for v in (low, high))
    assert not (small & ~large).any()


def test_ties_leave_the_number_exact() -> None:
    mask = largest(torch.zeros(6, 6), torch.tensor(0.25), torch.tensor(0.0))
    assert int(mask.sum()) == 9
    assert mask.flatten()[:9].all()
    image = torch.randint(4, (6, 6), generator=torch.Generator().manual_seed(0)).float()
    rank = image.flatten().argsort(descending=True, stable=True).argsort().view(6, 6)
    assert torch.equal(largest(image, torch.tensor(0.5), torch.tensor(0.0)), rank < 18)


@pytest.mark.parametrize(("mixer", "label"), [(FMix(), 96 / 256), (FMix.released(), 0.377)])
def test_the_label_is_the_mask_or_in_the_preset_what_was_drawn(mixer: FMix, label: float) -> None:
    draw = FourierDraw(
        "cut", torch.tensor([1, 0]), torch.tensor(0.377), noise_of(3), torch.tensor(0.2)
    )
    x = torch.eye(2, 3)[:, :, None, None].expand(2, 3, 16, 16).contiguous()
    mixed = mixer.apply(Recorder(), x, torch.arange(2), draw)
    assert mixed.targets[0, 0] == pytest.approx(label, abs=1e-7)
    assert mixed.logits[0, 0] == 96 / 256


def test_autocast_does_not_touch_the_mask() -> None:
    x, draw = torch.rand(4, 3, 24, 24), FMix().draw(4, torch.Generator().manual_seed(0))
    wide, narrow = Recorder(), Recorder()
    FMix().apply(wide, x, torch.arange(3).repeat(2)[:4], draw)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        FMix().apply(narrow, x, torch.arange(3).repeat(2)[:4], draw)
    assert torch.equal(wide.seen, narrow.seen)


def test_higher_frequencies_than_drawn_hardly_matter() -> None:
    """At 64 pixels: noise up to 32 cycles moves well under 1 % of the pixels of a mask."""
    moved = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        full = rng.standard_normal((64, 33, 2))
        ky, kx = np.fft.fftfreq(64)[:, None], np.fft.rfftfreq(64)
        scale = np.maximum(np.hypot(ky, kx), 1 / 64) ** -3.0
        theirs = np.fft.irfft2((full[..., 0] + 1j * full[..., 1]) * scale, (64, 64))
        low = np.concatenate([full[-16:, :17], full[:16, :17]])
        noise = torch.from_numpy(low).float()
        ours = low_frequency_image(isotropic_spectrum(noise, 3.0, (64, 64)), 64)
        half = torch.tensor(0.5)
        one, other = (largest(g, half, half) for g in (ours, torch.from_numpy(theirs).float()))
        moved.append(float((one != other).float().mean()))
    assert max(moved) < 0.005


# ---- soft masks and the reformulated objective ---------------------------------------------------

thirty_seconds = st.integers(0, 32).map(lambda k: k / 32)


@given(lam=thirty_seconds, soft=st.sampled_from([0.0, 0.02, 0.1, 0.5]), seed=st.integers(0, 20))
def test_a_soft_mask_is_a_ramp_over_the_ranks(lam: float, soft: float, seed: int) -> None:
    """Sort the pixels; lay down ones, numpy's linspace from 1 to 0, and zeros."""
    image = torch.randn(8, 12, generator=torch.Generator().manual_seed(seed))
    mask = soft_largest(image, torch.tensor(lam), torch.tensor(0.0), soft)
    num, size = int(lam * 96), int(96 * min(soft, lam, 1 - lam))
    ramp = [1.0] * (num - size) + np.linspace(1, 0, 2 * size).tolist() + [0.0] * (96 - num - size)
    expected = torch.zeros(96)
    expected[image.flatten().argsort(descending=True)] = torch.tensor(ramp)
    torch.testing.assert_close(mask.flatten(), expected)
    assert float(mask.mean()) == pytest.approx(num / 96, abs=1e-6)  # the ramp moves no mass


@given(lam=st.floats(0, 1, width=32), coin=st.sampled_from([0.0, 0.9]))
def test_without_softness_the_mask_is_sharp(lam: float, coin: float) -> None:
    image = low_frequency_image(isotropic_spectrum(noise_of(2), 3.0, (9, 7)), 7)
    share, heads = torch.tensor(lam), torch.tensor(coin)
    sharp = largest(image, share, heads)
    assert torch.equal(soft_largest(image, share, heads, 0.0), sharp.float())
    soft = soft_largest(image, share, heads, 0.3)
    assert float(soft.mean()) == pytest.approx(float(sharp.float().mean()), abs=1e-6)
    assert ((soft >= 0) & (soft <= 1)).all()


def test_soft_masks_blend_images_in_the_share_of_the_labels() -> None:
    x = torch.eye(2, 3)[:, :, None, None].expand(2, 3, 16, 16).contiguous()
    draw = FourierDraw(
        "cut", torch.tensor([1, 0]), torch.tensor(0.6), noise_of(4), torch.tensor(0.2)
    )
    net = Recorder()
    mixed = FMix(max_soft=0.25).apply(net, x, torch.arange(2), draw)
    torch.testing.assert_close(mixed.logits, mixed.targets, atol=1e-6, rtol=1e-6)
    assert ((net.seen > 0.01) & (net.seen < 0.99)).any()


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_reformulated_objective_has_one_label_and_a_larger_share(alpha: float) -> None:
    mixer, rng = FMix(alpha=alpha, reformulate=True), torch.Generator().manual_seed(0)
    lams = torch.stack([mixer.draw(2, rng).lam for _ in range(600)])
    cdf = scipy.stats.beta(alpha + 1, alpha).cdf
    assert scipy.stats.kstest(lams.double().numpy(), cdf).pvalue > 1e-3
    draw, net, twin = mixer.draw(2, rng), Recorder(), Recorder()
    x, y = torch.rand(2, 3, 16, 16), torch.arange(2)
    mixed = mixer.apply(net, x, y, draw)
    assert torch.equal(mixed.targets, torch.eye(2, 3))
    FMix(alpha=alpha).apply(twin, x, y, draw)
    assert torch.equal(net.seen, twin.seen)  # the images are those of the other objective


def test_both_objectives_are_equal_in_expectation() -> None:
    """Integrals over lam of l(lam) t: the weight of each label, by both densities."""
    lam = torch.linspace(0.0005, 0.9995, 1000, dtype=torch.float64)
    symmetric = torch.from_numpy(scipy.stats.beta(1.5, 1.5).pdf(lam))
    ahead = torch.from_numpy(scipy.stats.beta(2.5, 1.5).pdf(lam))
    # A pair is drawn in both orders: what the anchor's label gets at lam, the partner's at 1 - lam.
    torch.testing.assert_close(2 * lam * symmetric, ahead)


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0.0}, "alpha must be positive and finite, got 0.0"),
        ({"decay": -1.0}, "decay must be >= 0 and finite, got -1.0"),
        ({"spectrum": "pink"}, "spectrum must be .*, got 'pink'"),
        ({"max_soft": 0.6}, r"max_soft must lie in \[0, 0.5\], got 0.6"),
    ],
)
def test_bad_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FMix(**settings)
