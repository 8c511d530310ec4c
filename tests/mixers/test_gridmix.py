"""GridMix: holes against slices, cells against a loop, and their laws."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn

from alignmixup.contracts import soft_cross_entropy
from alignmixup.mixers.gridmix import CellsDraw, GridMix, HolesDraw, cell_means, cells, holes
from cases import Recorder, TinyNet, images, labels

sixty_fourths = st.integers(0, 63).map(lambda k: k / 64)
numbers = st.tuples(*[sixty_fourths] * 5)


def crop_of(numbers: tuple[float, ...], size: tuple[int, int]) -> tuple[int, ...]:
    """The crop and its squares in integers: left, top, width, height, pitch."""
    height, width = size
    area, aspect = int(height * width * (0.5 + numbers[0] / 2)), 0.5 + 1.5 * numbers[1]
    across = int(math.sqrt(area / aspect))
    down = int(across * aspect)
    left, top = int((width - across) * numbers[2]), int((height - down) * numbers[3])
    return left, top, across, down, math.ceil(across / (2 + int(5 * numbers[4])))


def fits(numbers: tuple[float, ...], size: tuple[int, int]) -> bool:
    _, _, across, down, _ = crop_of(numbers, size)
    return across <= size[1] and down <= size[0]


@given(numbers=numbers, lam=sixty_fourths, size=st.sampled_from([(32, 32), (64, 64), (20, 31)]))
def test_holes_are_slices_of_the_crop(
    numbers: tuple[float, ...], lam: float, size: tuple[int, int]
) -> None:
    """The author's loops: a mask of the crop, hole by hole, laid into the image.

    Where the crop is larger than the image, what lies outside is cut off. In the author's code a
    negative offset is read from the end of the image: holes vanish, or show at the opposite side.
    """
    left, top, across, down, pitch = crop_of(numbers, size)
    hole = min(max(int(pitch * math.sqrt(1 - lam)), 1), pitch - 1)
    mask = torch.zeros(down, across, dtype=torch.bool)
    for y in range(0, down, pitch):
        for x in range(0, across, pitch):
            mask[y : y + hole, x : x + hole] = True
    margin = 64
    canvas = torch.zeros(size[0] + 2 * margin, size[1] + 2 * margin, dtype=torch.bool)
    canvas[margin + top : margin + top + down, margin + left : margin + left + across] = mask
    expected = canvas[margin : margin + size[0], margin : margin + size[1]]
    assert torch.equal(holes(torch.tensor(numbers), torch.tensor(lam), size), expected)


def test_a_crop_larger_than_the_image_keeps_its_holes() -> None:
    """They are nearly half of all crops; negative offsets must not be read from the end."""
    rng, count, kept = torch.Generator().manual_seed(0), 0, 0
    for _ in range(400):
        draw = GridMix().draw(2, rng)
        if not fits(tuple(draw.crop.tolist()), (32, 32)):
            count += 1
            kept += bool(holes(draw.crop, draw.lam, (32, 32)).any())
    assert 120 < count < 240
    assert kept == count


def test_holes_are_of_equal_size_away_from_the_border() -> None:
    mask = holes(torch.tensor([0.9, 1 / 3, 0.5, 0.5, 0.4]), torch.tensor(0.5), (64, 64))
    runs = "".join("1" if v else "0" for v in mask.any(0).tolist()).split("0")
    lengths = [len(run) for run in runs if run]
    assert len(lengths) >= 3
    assert len(set(lengths[:-1])) == 1


def test_holes_are_small_but_there_unless_lam_is_one() -> None:
    crop = torch.tensor([0.5, 0.3, 0.2, 0.7, 0.5])
    assert holes(crop, torch.tensor(1 - 1e-6), (32, 32)).sum() >= 4
    assert not holes(crop, torch.tensor(1.0), (32, 32)).any()
    tiny = holes(crop, torch.tensor(0.5), (2, 2))  # squares of one pixel have no hole
    assert tiny.shape == (2, 2)


@given(lam=sixty_fourths, seed=st.integers(0, 99), n=st.integers(1, 5))
def test_cells_are_a_loop(lam: float, seed: int, n: int) -> None:
    size = (20, 13)
    order = torch.randperm(n * n, generator=torch.Generator().manual_seed(seed))
    mask = cells(order, torch.tensor(lam), n, size)
    own = set(order[: round(lam * n * n)].tolist())
    for i in range(size[0]):
        for j in range(size[1]):
            assert bool(mask[i, j]) == (i * n // size[0] * n + j * n // size[1] not in own)


@pytest.mark.parametrize("num_own", range(17))
def test_the_label_is_the_number_of_cells(num_own: int) -> None:
    x = torch.eye(2, 3)[:, :, None, None].expand(2, 3, 16, 16).contiguous()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    draw = CellsDraw("cut", torch.tensor([1, 0]), torch.tensor(num_own / 16), order)
    mixed = GridMix("cells").apply(Recorder(), x, torch.arange(2), draw)
    assert mixed.targets[0].tolist() == [num_own / 16, 1 - num_own / 16, 0]


def test_shares_are_uniform_or_beta() -> None:
    rng = torch.Generator().manual_seed(0)
    for mixer, low, high in ((GridMix(), 0.1, 0.9), (GridMix("cells"), 0.0, 1.0)):
        lams = torch.stack([mixer.draw(2, rng).lam for _ in range(300)])
        assert low <= lams.min() < low + 0.05
        assert high - 0.05 < lams.max() <= high
    assert GridMix.openmixup().alpha == 0.2


# ---- local loss ----------------------------------------------------------------------------------


def attached(mixer: GridMix, net: nn.Module) -> GridMix:
    torch.manual_seed(0)
    return mixer.attach(net, images(6))


@pytest.mark.parametrize("num_own", [0, 3, 9])
def test_a_cell_is_asked_for_the_image_it_is_from(num_own: int) -> None:
    """A head that reads colors off has no loss: cells are neither transposed nor exchanged."""
    x = torch.eye(3)[:, :, None, None].expand(3, 3, 12, 12).contiguous()
    order = torch.tensor([1, 2, 5, 0, 8, 4, 3, 7, 6])
    draw = CellsDraw("cut", torch.tensor([1, 2, 0]), torch.tensor(num_own / 9), order)
    mixer = GridMix("cells", num_cells=3, local_weight=2.0).attach(Recorder(), x)
    with torch.no_grad():
        mixer.module.head.weight.copy_(100 * torch.eye(3))
        mixer.module.head.bias.zero_()
    mixed = mixer.apply(Recorder(), x, torch.arange(3), draw)
    assert mixed.extra["local"] < 1e-6
    wrong = mixer.apply(Recorder(), x, torch.tensor([1, 2, 0]), draw)
    assert wrong.extra["local"] > 50


def test_the_local_loss_is_a_loop_over_cells() -> None:
    net, x, y = TinyNet(), images(6), labels(6)
    mixer = attached(GridMix("cells", num_cells=2, local_weight=0.7), net)
    draw = mixer.draw(6, torch.Generator().manual_seed(1))
    draw = CellsDraw(draw.case, draw.perm, torch.tensor(0.5), draw.order)
    kept: list[Tensor] = []
    handle = net.layer4.register_forward_hook(lambda *call: kept.append(call[2]))
    mixed = mixer.apply(net, x, y, draw)
    handle.remove()
    own, losses = set(draw.order[:2].tolist()), []
    for i in range(6):
        for cell in range(4):
            row, column = divmod(cell, 2)
            part = kept[0][i, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            label = y[i] if cell in own else y[draw.perm[i]]
            losses.append(F.cross_entropy(mixer.module.head(part.mean((1, 2))), label))
    torch.testing.assert_close(mixed.extra["local"], 0.7 * torch.stack(losses).mean())
    plain = GridMix("cells", num_cells=2).apply(TinyNet(), x, y, draw)
    assert torch.equal(mixed.logits, plain.logits)
    assert torch.equal(mixed.targets, plain.targets)
    expected = soft_cross_entropy(plain.logits, plain.targets) + mixed.extra["local"]
    torch.testing.assert_close(mixed.loss(), expected)


def test_the_local_loss_reaches_the_layer_and_its_own_head() -> None:
    net = TinyNet()
    mixer = attached(GridMix("cells", local_weight=1.0), net)
    mixed = mixer(net, images(6), labels(6), torch.Generator().manual_seed(0))
    mixed.extra["local"].backward()
    assert net.fc.weight.grad is None
    assert net.layer1[0].weight.grad.abs().max() > 0
    assert all(p.grad.abs().max() > 0 for p in mixer.module.parameters())
    assert mixer.trains_all
    assert list(mixer.tapped(net)) == ["layer4"]


def test_without_a_local_loss_nothing_is_attached() -> None:
    mixer = GridMix("cells")
    assert mixer.attach(TinyNet(), images(2)) is mixer
    assert not mixer.needs_network
    assert not mixer.tapped(TinyNet())
    assert GridMix("cells", local_weight=0.5).needs_network


@pytest.mark.parametrize("size", [(8, 4), (7, 7), (2, 3), (1, 1), (5, 9)])
def test_cells_of_a_map_are_means_by_area(size: tuple[int, int]) -> None:
    """Each position, divided into n x n parts, and the mean of the parts of each cell."""
    features = torch.rand(2, 3, *size, dtype=torch.float64)
    means = cell_means(features, 4)
    fine = features.repeat_interleave(4, 2).repeat_interleave(4, 3)
    expected = F.avg_pool2d(fine, size).flatten(2).transpose(1, 2)
    torch.testing.assert_close(means, expected)


@pytest.mark.unchecked_shapes
def test_bad_input_is_named() -> None:
    for settings, message in (
        ({"grid": "stripes"}, "grid must be 'holes' or 'cells', got 'stripes'"),
        ({"num_cells": 0}, "num_cells must be an integer >= 1, got 0"),
        ({"alpha": 0.0}, "alpha must be positive and finite, got 0.0"),
        ({"local_weight": 1.0}, "local_weight=1.0 is for grid='cells', got grid='holes'"),
        ({"grid": "cells", "local_weight": -1.0}, "local_weight must be >= 0 and finite"),
        ({"layer": 4}, "a layer is the name of a sub-module"),
    ):
        with pytest.raises(ValueError, match=message):
            GridMix(**settings)
    draw = HolesDraw("cut", torch.tensor([1, 0]), torch.tensor(0.5), torch.rand(5))
    x, y = torch.rand(2, 3, 8, 8), torch.arange(2)
    with pytest.raises(ValueError, match="needs a CellsDraw, got a HolesDraw"):
        GridMix("cells").apply(Recorder(), x, y, draw)
    other = GridMix("cells", num_cells=3).draw(2, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="the draw is for 9 cells, but this mixer has 16"):
        GridMix("cells").apply(Recorder(), x, y, other)
    local = GridMix("cells", local_weight=1.0)
    with pytest.raises(ValueError, match="GridMix has parameters or state: call mixer = mixer"):
        local(TinyNet(), images(2), labels(2))
    with pytest.raises(ValueError, match=r"layer 'fc' returns \[2, 5\]; the local loss"):
        GridMix("cells", local_weight=1.0, layer="fc").attach(TinyNet(), images(2))
