"""RecursiveMix: history by hand, the region against torchvision's RoIAlign, nearest resizing."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

import alignmixup as am
from alignmixup.contracts import Draw, soft_cross_entropy
from alignmixup.mixers.recursivemix import (
    HISTORY_LIMIT,
    History,
    RecursiveMix,
    box_bounds,
    inside,
    region_mean,
    shrunk,
)
from cases import NUM_CLASSES, TinyNet, images, labels, with_lam
from torchvision_schemas import define_torchvision_schemas


def attached(
    mixer: RecursiveMix | None = None, batch_size: int = 4
) -> tuple[RecursiveMix, TinyNet]:
    net = TinyNet()
    torch.manual_seed(0)
    return (mixer or RecursiveMix()).attach(net, images(batch_size)), net


def draw(mixer: RecursiveMix, seed: int, lam: float = 0.6, progress: float = 0.0) -> Draw:
    drawn = mixer.draw(4, torch.Generator().manual_seed(seed), progress)
    return with_lam(drawn, lam).with_tensors({"center": torch.tensor([0.4, 0.6])})


def test_a_network_of_other_classes_is_named() -> None:
    mixer, other = RecursiveMix().attach(TinyNet(), images(4)), TinyNet()
    other.fc = torch.nn.Linear(other.fc.in_features, NUM_CLASSES + 2)
    message = rf"of {NUM_CLASSES} classes, but this one has {NUM_CLASSES + 2}: call mixer\.attach"
    with pytest.raises(ValueError, match=message):
        mixer(other, images(4), labels(4))


def test_the_first_step_does_not_mix() -> None:
    mixer, net = attached()
    mixed = mixer.apply(net, images(4), labels(4), draw(mixer, 0))
    assert torch.equal(mixed.logits, TinyNet()(images(4)))
    assert torch.equal(mixed.targets, torch.eye(NUM_CLASSES)[labels(4)])
    assert mixed.extra["region"] == 0
    mixed.loss().backward()
    assert torch.equal(mixer.module.roi_head.weight.grad, torch.zeros(NUM_CLASSES, 8))


def test_three_steps_by_hand() -> None:
    """Images, targets and logits of each step enter the next; labels decay by the areas."""
    mixer, net = attached()
    before = one_hot = None
    for step in range(3):
        x, y = images(4, seed=step), (labels(4) + step) % NUM_CLASSES
        drawn = draw(mixer, step)
        mixed = mixer.apply(net, x, y, drawn)
        rows, columns = (
            [int(v) for v in each] for each in box_bounds(drawn.center, drawn.lam, (16, 16))
        )
        one_hot = torch.eye(NUM_CLASSES)[y]
        if before is None:
            pasted, targets = x, one_hot
        else:
            pasted = x.clone()
            size = rows[1] - rows[0], columns[1] - columns[0]
            small = F.interpolate(before[0], size, mode="nearest")
            pasted[:, :, rows[0] : rows[1], columns[0] : columns[1]] = small
            area = size[0] * size[1] / 256
            targets = (1 - area) * one_hot + area * before[1]
            region = region_mean(
                *mapped(TinyNet(), pasted), *box_bounds(drawn.center, drawn.lam, (16, 16)), (16, 16)
            )
            head = mixer.module.roi_head(region)
            expected = 0.5 * area * soft_cross_entropy(head, before[2].softmax(1))
            torch.testing.assert_close(mixed.extra["region"], expected)
        torch.testing.assert_close(mixed.targets, targets)
        torch.testing.assert_close(mixed.targets.sum(1), torch.ones(4))
        torch.testing.assert_close(mixed.logits, TinyNet()(pasted))
        before = pasted, targets, mixed.logits.detach()
        assert torch.equal(mixer.module.images, pasted)


def mapped(net: TinyNet, x: torch.Tensor) -> tuple[torch.Tensor]:
    return (net.layer4(net.layer2(net.layer1(x))),)


def test_an_empty_box_is_the_image_and_has_no_region() -> None:
    mixer, net = attached()
    mixer.apply(net, images(4), labels(4), draw(mixer, 0))
    mixed = mixer.apply(net, images(4, seed=1), labels(4), draw(mixer, 1, lam=1.0))
    assert torch.equal(mixed.targets, torch.eye(NUM_CLASSES)[labels(4)])
    assert mixed.extra["region"] == 0


def test_no_gradient_reaches_the_history() -> None:
    mixer, net = attached()
    first = mixer.apply(net, images(4).requires_grad_(), labels(4), draw(mixer, 0))
    second = mixer.apply(net, images(4, seed=1), labels(4), draw(mixer, 1))
    assert not mixer.module.images.requires_grad
    second.loss().backward()
    with pytest.raises(RuntimeError, match="second time"):
        second.loss().backward()
    first.loss().backward()  # a graph of its own


def test_a_batch_of_another_size_drops_the_history() -> None:
    mixer, net = attached()
    mixer.apply(net, images(4), labels(4), draw(mixer, 0))
    drawn = mixer.draw(3, torch.Generator().manual_seed(0))
    small = mixer.apply(net, images(3), labels(3), drawn)
    assert torch.equal(small.targets, torch.eye(NUM_CLASSES)[labels(3)])
    assert small.extra["region"] == 0
    again = mixer.apply(net, images(4), labels(4), draw(mixer, 1))
    assert torch.equal(again.targets, torch.eye(NUM_CLASSES)[labels(4)])


@pytest.mark.parametrize("is_released", [False, True])
def test_the_authors_code_restarts_at_each_epoch(is_released: bool) -> None:
    """Ours keeps the history from one epoch to the next."""
    mixer, net = attached(RecursiveMix.released(epochs=3) if is_released else None)
    mixes = []
    for step in range(6):  # two steps an epoch
        drawn = draw(mixer, step, progress=(step // 2 + step % 2 / 2) / 3)
        mixed = mixer.apply(net, images(4), labels(4), drawn)
        mixes.append(bool(mixed.extra["region"] > 0))
    assert mixes == ([False, True] * 3 if is_released else [False, *[True] * 5])


def test_renumbering_the_batches_renumbers_the_result() -> None:
    s = torch.tensor([2, 0, 3, 1])
    results = []
    for order in (torch.arange(4), s):
        mixer, net = attached()
        for step in range(3):
            x, y = images(4, seed=step)[order], labels(4)[order]
            mixed = mixer.apply(net, x, y, draw(mixer, step))
        results.append(mixed)
    one, other = results
    torch.testing.assert_close(other.logits, one.logits[s], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other.targets, one.targets[s])
    torch.testing.assert_close(other.extra["region"], one.extra["region"])


@pytest.mark.unchecked_shapes  # hundreds of draws of the same shapes
def test_areas_are_uniform() -> None:
    rng, mixer = torch.Generator().manual_seed(0), RecursiveMix(alpha=0.5)
    areas = torch.stack([1 - mixer.draw(2, rng).lam for _ in range(2000)])
    assert areas.max() <= 0.5
    quantiles = areas.quantile(torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(quantiles, torch.tensor([0.125, 0.25, 0.375]), atol=0.03, rtol=0)
    with pytest.raises(ValueError, match="alpha is an area and must be at most 1, got 2"):
        RecursiveMix(alpha=2.0)


@pytest.mark.parametrize("size", [(16, 16), (12, 20)])
def test_the_whole_image_is_resized_into_the_box(size: tuple[int, int]) -> None:
    x = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    for height in range(1, size[0] + 1):
        low = torch.tensor(float((size[0] - height) // 2))
        rows = (low, low + height)
        columns = (torch.tensor(2.0), torch.tensor(9.0))
        placed = shrunk(x, rows, columns)[:, :, inside(rows, size[0])][
            ..., inside(columns, size[1])
        ]
        assert torch.equal(placed, F.interpolate(x, (height, 7), mode="nearest"))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("cells", "pixels"), [((4, 4), (16, 16)), ((3, 7), (24, 56))])
def test_the_region_is_roi_align(cells, pixels, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    features = torch.randn(3, 5, *cells, generator=rng)
    # Below 1: a box without pixels has no weight in the loss, and no mean.
    center, lam = torch.rand(2, generator=rng), 0.3 + 0.65 * torch.rand((), generator=rng)
    rows, columns = box_bounds(center, lam, pixels)
    ours = region_mean(features, rows, columns, pixels)
    # torchvision's own function in Python: the compiled one needs the torch it was built for.
    define_torchvision_schemas()
    oracle = importlib.import_module("torchvision.ops.roi_align")._roi_align.__wrapped__
    box = torch.stack([columns[0], rows[0], columns[1], rows[1]]).expand(3, 4)
    rois = torch.cat([torch.arange(3.0).unsqueeze(1), box], dim=1)
    expected = oracle(features, rois, cells[0] / pixels[0], 1, 1, -1, True).flatten(1)
    torch.testing.assert_close(ours, expected, atol=5e-6, rtol=1e-5)


def test_a_large_history_is_not_saved_and_another_size_is_not_loaded() -> None:
    x = torch.empty(1, 1, 1, 1).expand(HISTORY_LIMIT // 4 + 1, 1, 1, 1)
    logits = torch.zeros(1, 2)
    assert set(History(x, 3, logits).state_dict()) == {"roi_head.weight", "roi_head.bias"}
    saved, own = History(images(4), 3, logits), History(images(2), 3, logits)
    saved.restart.fill_(0)
    own.load_state_dict(saved.state_dict())
    assert own.restart == -1
    assert torch.equal(own.roi_head.weight, saved.roi_head.weight)


def test_maps_are_needed() -> None:
    with pytest.raises(ValueError, match=r"layer 'fc' returns \[4, 5\]; RecursiveMix needs maps"):
        am.RecursiveMix("fc").attach(TinyNet(), images(4))


@pytest.mark.unchecked_shapes
def test_a_compiled_module_hands_out_the_same_region() -> None:
    """In the second step, the first one with a history."""
    torch.compiler.reset()
    gradients = []
    for is_compiled in (False, True):
        mixer, net = attached()
        run = torch.compile(net, backend="aot_eager") if is_compiled else net
        for step in range(2):
            net.zero_grad()
            mixer.apply(run, images(4, seed=step), labels(4), draw(mixer, step)).loss().backward()
        own = mixer.module.roi_head.weight
        gradients.append([own.grad, *[p.grad for p in net.parameters()]])
    for plain, compiled in zip(*gradients, strict=True):
        assert plain.abs().max() > 0
        torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-4)
