"""The methods that cut, against slow loops over pixels."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from alignmixup.contracts import Mixed
from alignmixup.mixers.boxes import BoxDraw
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.cutout import Cutout
from cases import Recorder
from learning import check_it_teaches

# Shares k / 64 and centers k / 64: exact in float32, so both sides round the same way.
sixty_fourths = st.integers(0, 63).map(lambda k: k / 64)


def cutmix_box(lam: float, center: tuple[float, float], size: tuple[int, int]) -> list[list[bool]]:
    """The reference algorithm in integers: which pixels the box covers."""
    height, width = size
    h, w = (int(side * math.sqrt(1 - lam)) for side in size)
    row, column = int(center[0] * height), int(center[1] * width)
    top, bottom = max(row - h // 2, 0), min(row + h // 2, height)
    left, right = max(column - w // 2, 0), min(column + w // 2, width)
    return [[top <= i < bottom and left <= j < right for j in range(width)] for i in range(height)]


def cut(mixer: CutMix, x: Tensor, lam: float, center: tuple[float, float]) -> tuple[Mixed, Tensor]:
    net, b = Recorder(), len(x)
    draw = BoxDraw("cut", torch.arange(b).roll(1), torch.tensor(lam), torch.tensor(center))
    return mixer.apply(net, x, torch.arange(b), draw), net.seen


@given(
    lam=sixty_fourths,
    row=sixty_fourths,
    column=sixty_fourths,
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
def test_cutmix_is_the_reference_loop(
    lam: float, row: float, column: float, size: tuple[int, int]
) -> None:
    x = torch.rand(3, 3, *size, generator=torch.Generator().manual_seed(0))
    mixed, seen = cut(CutMix(), x, lam, (row, column))
    box = cutmix_box(lam, (row, column), size)
    expected = x.clone()
    for i in range(3):
        for y in range(size[0]):
            for z in range(size[1]):
                if box[y][z]:
                    expected[i, :, y, z] = x[i - 1, :, y, z]
    assert torch.equal(seen, expected)
    shown = 1 - sum(map(sum, box)) / (size[0] * size[1])
    own = torch.eye(3)
    torch.testing.assert_close(mixed.targets, shown * own + (1 - shown) * own.roll(1, 0))


@given(lam=st.floats(0, 1, width=32), row=sixty_fourths, column=sixty_fourths)
def test_the_pasted_share_of_pixels_is_the_partners_share_of_the_label(
    lam: float, row: float, column: float
) -> None:
    """Image i is of color i alone, so the mean color tells the share of pixels."""
    x = torch.eye(3)[:, :, None, None].expand(3, 3, 8, 12).contiguous()
    mixed, seen = cut(CutMix(), x, lam, (row, column))
    torch.testing.assert_close(seen.mean((2, 3)), mixed.targets)


def test_the_label_before_clipping_is_an_option() -> None:
    x = torch.rand(3, 3, 8, 8)
    corner = (0.0, 0.0)  # three quarters of the box lie outside
    kept, seen = cut(CutMix(correct_lam=False), x, 0.75, corner)
    exact, same = cut(CutMix(), x, 0.75, corner)
    assert torch.equal(seen, same)
    assert kept.targets[0, 0] == 0.75
    assert exact.targets[0, 0] == 1 - 4 / 64


def test_a_clean_case_shows_and_labels_the_anchor() -> None:
    x = torch.rand(3, 3, 8, 8)
    mixer, net = CutMix(), Recorder()
    draw = mixer.draw(3, torch.Generator().manual_seed(0))
    mixed = mixer.apply(net, x, torch.arange(3), dataclasses.replace(draw, case="clean"))
    assert torch.equal(net.seen, x)
    assert torch.equal(mixed.targets, torch.eye(3))


@given(
    length=st.integers(2, 20),
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    seed=st.integers(0, 1000),
)
def test_cutout_is_a_loop(length: int, size: tuple[int, int], seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    x, fill = torch.rand(3, 3, *size, generator=rng), (0.1, 0.2, 0.3)
    mixer, net = Cutout(length=length, fill=fill), Recorder()
    draw = mixer.draw(3, rng)
    mixed = mixer.apply(net, x, torch.tensor([2, 0, 1]), draw)
    expected, half = x.clone(), length // 2
    for i in range(3):
        row, column = (int(f * s) for f, s in zip(draw.center[i].tolist(), size, strict=True))
        for y in range(max(row - half, 0), min(row + half, size[0])):
            for z in range(max(column - half, 0), min(column + half, size[1])):
                expected[i, :, y, z] = torch.tensor(fill)
    assert torch.equal(net.seen, expected)
    assert (net.seen != x).any((1, 2, 3)).all()  # the shortest length there is hides something
    assert torch.equal(mixed.targets, torch.eye(3)[[2, 0, 1]])


def test_cutout_cuts_each_sample_elsewhere() -> None:
    mixer, net = Cutout(length=4), Recorder()
    draw = mixer.draw(16, torch.Generator().manual_seed(0))
    mixer.apply(net, torch.ones(16, 3, 32, 32), torch.zeros(16, dtype=torch.int64), draw)
    holes = {tuple(hole.flatten().tolist()) for hole in net.seen[:, 0] != 1}
    assert len(holes) > 10


@pytest.mark.unchecked_shapes  # hundreds of draws of the same shapes
def test_centers_cover_the_image_evenly() -> None:
    mixer, rng = CutMix(), torch.Generator().manual_seed(0)
    centers = torch.stack([mixer.draw(1, rng).center for _ in range(2000)])
    counts = torch.histc(centers[:, 0] * 4, 4, 0, 4), torch.histc(centers[:, 1] * 4, 4, 0, 4)
    for count in counts:
        assert ((count - 500).square() / 500).sum() < 21  # chi-square, one in ten thousand


@pytest.mark.slow
def test_cutout_learns_shapes() -> None:
    check_it_teaches(Cutout(length=4), epochs=6)


@pytest.mark.unchecked_shapes
def test_bad_input_is_named() -> None:
    rng = torch.Generator().manual_seed(0)
    with pytest.raises(
        ValueError, match=r"\(0.5, 0.5, 0.5\) has 3 values, but the images have 1 channels"
    ):
        Cutout().apply(
            Recorder(), torch.rand(2, 1, 8, 8), torch.zeros(2).long(), Cutout().draw(2, rng)
        )
    for mixer in (Cutout(), CutMix(prob=1.0)):
        with pytest.raises(ValueError, match=r"images must be \[b, c, h, w\], got \[2, 8\]"):
            mixer.apply(Recorder(), torch.rand(2, 8), torch.zeros(2).long(), mixer.draw(2, rng))
