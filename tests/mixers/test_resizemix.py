"""ResizeMix against ``interpolate`` and slices on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

from alignmixup.mixers.boxes import BoxDraw
from alignmixup.mixers.resizemix import ResizeMix
from cases import Recorder

# Sides k / 64 of the box and centers k / 64: exact in float32, also after 1 - tau^2 and back.
sixty_fourths = st.integers(0, 63).map(lambda k: k / 64)
sizes = st.tuples(st.integers(4, 20), st.integers(4, 20))


def mix(mixer: ResizeMix, x: Tensor, tau: float, center: Tensor) -> tuple[Tensor, Tensor]:
    net, b = Recorder(), len(x)
    draw = BoxDraw("cut", torch.arange(b).roll(1), torch.tensor(1 - tau * tau), center)
    return mixer.apply(net, x, torch.arange(b), draw).targets, net.seen


@given(tau=st.integers(20, 63).map(lambda k: k / 64), size=sizes, seed=st.integers(0, 99))
def test_it_is_interpolate_and_slices(tau: float, size: tuple[int, int], seed: int) -> None:
    """The authors' order: shrink by the factor, then push the box inside."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.rand(3, 3, *size, generator=rng)
    center = torch.randint(64, (3, 2), generator=rng) / 64
    targets, seen = mix(ResizeMix(), x, tau, center)
    small = F.interpolate(x, scale_factor=tau, mode="nearest")
    h, w = small.shape[2:]
    assert (h, w) == tuple(math.floor(side * tau) for side in size)
    expected = x.clone()
    for i in range(3):
        tops = []
        for fraction, length, side in zip(center[i].tolist(), (h, w), size, strict=True):
            begin = min(max(int(fraction * side) - length // 2, 0), side)
            tops.append(min(begin + length, side) - length)
        top, left = tops
        assert top >= 0
        assert left >= 0
        expected[i, :, top : top + h, left : left + w] = small[i - 1]
    assert torch.equal(seen, expected)
    share = h * w / (size[0] * size[1])
    own = torch.eye(3)
    torch.testing.assert_close(targets, (1 - share) * own + share * own.roll(1, 0))


@given(
    tau=st.integers(20, 63).map(lambda k: k / 64),
    row=sixty_fourths,
    column=sixty_fourths,
    size=sizes,
)
def test_the_clipped_box_holds_the_whole_partner(
    tau: float, row: float, column: float, size: tuple[int, int]
) -> None:
    """OpenMixup's reading: one box, clipped, into which the whole partner is resized."""
    x = torch.rand(3, 3, *size, generator=torch.Generator().manual_seed(0))
    targets, seen = mix(ResizeMix.openmixup(), x, tau, torch.tensor([row, column]))
    spans = []
    for fraction, side in zip((row, column), size, strict=True):
        middle, half = int(fraction * side), int(side * tau) // 2
        spans.append((max(middle - half, 0), min(middle + half, side)))
    (top, bottom), (left, right) = spans
    expected, area = x.clone(), (bottom - top) * (right - left)
    if area:
        shrunk = F.interpolate(x, (bottom - top, right - left), mode="nearest")
        expected[:, :, top:bottom, left:right] = shrunk.roll(1, 0)
    assert torch.equal(seen, expected)
    assert targets[0, 0] == pytest.approx(1 - area / (size[0] * size[1]))


def test_rows_are_taken_by_the_factor_given() -> None:
    """floor(i / tau) and floor(i H / h) differ by up to two rows at 32 pixels."""
    ramp = torch.arange(32.0).view(1, 1, 32, 1).expand(2, 3, 32, 32).contiguous()
    x, largest = torch.cat([torch.full_like(ramp[:1], -1), ramp[:1]]), 0.0
    for k in range(13, 52):
        tau, h = k / 64, 32 * k // 64
        _, seen = mix(ResizeMix(), x, tau, torch.zeros(2, 2))
        shown = seen[0, 0, :h, 0]
        assert torch.equal(shown, (torch.arange(h) / tau).floor())
        largest = max(largest, float((shown - (torch.arange(h) * 32 / h).floor()).abs().max()))
    assert largest == 2


def test_a_constant_partner_gives_a_constant_box() -> None:
    x = torch.stack([torch.zeros(3, 15, 11), torch.full((3, 15, 11), 0.7)])
    for seed in range(20):
        mixer, net = ResizeMix(), Recorder()
        draw = mixer.draw(2, torch.Generator().manual_seed(seed))
        draw = draw.with_tensors({**draw.tensors(), "perm": torch.tensor([1, 0])})
        mixer.apply(net, x, torch.arange(2), draw)
        tau = (1 - float(draw.lam)) ** 0.5
        area = math.floor(tau * 15 + 1e-4) * math.floor(tau * 11 + 1e-4)
        for sample, (own, other) in zip(net.seen, ((0.0, 0.7), (0.7, 0.0)), strict=True):
            is_other = sample == torch.tensor(other)
            assert (is_other | (sample == torch.tensor(own))).all()
            assert int(is_other[0].sum()) == area


def test_sides_are_uniform_in_the_scope_and_boxes_per_sample() -> None:
    rng = torch.Generator().manual_seed(0)
    taus = torch.stack([(1 - ResizeMix().draw(2, rng).lam).sqrt() for _ in range(600)])
    assert 0.1 - 1e-5 <= taus.min() < 0.12
    assert 0.78 < taus.max() <= 0.8 + 1e-5
    counts = torch.histc(taus, 5, 0.1, 0.8)
    assert ((counts - 120).square() / 120).sum() < 23.5  # chi-square, one in ten thousand
    assert ResizeMix().draw(5, rng).center.shape == (5, 2)
    assert ResizeMix.openmixup().draw(5, rng).center.shape == (2,)


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scope": (0.8, 0.1)}, r"scope must be two rising shares in \[0, 1\], got \(0.8, 0.1\)"),
        ({"scope": (0.1, 1.5)}, "scope must be"),
        ({"place": "outside"}, "place must be 'inside' or 'clipped', got 'outside'"),
    ],
)
def test_bad_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResizeMix(**settings)
