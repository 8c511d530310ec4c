"""SnapMix: its laws, interpolation of a slice as oracle, and the defects of the released code."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from alignmixup.contracts import soft_cross_entropy
from alignmixup.mixers.boxes import paste, share_mask
from alignmixup.mixers.multimix import DenseMultiMix
from alignmixup.mixers.recursivemix import box_bounds
from alignmixup.mixers.snapmix import SnapDraw, SnapMix, class_maps, snap, snap_targets
from cases import NUM_CLASSES, TinyNet, draw_case, images, labels

MIXER = SnapMix(classifier="fc")


class Recorder(TinyNet):
    """A network that keeps what it is shown."""

    def __init__(self) -> None:
        super().__init__("pool")

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return super().forward(x)


def draw_of(lam: float, lam2: float, center: object = (0.5, 0.5), center2: object = None):
    centers = torch.tensor([center, center if center2 is None else center2])
    shares = torch.tensor(lam), torch.tensor(lam2)
    return SnapDraw("cut", torch.arange(6).roll(1), shares[0], center=centers, lam2=shares[1])


def maps_by_hand(x: Tensor, y: Tensor) -> Tensor:
    """The maps of a new network, sample by sample."""
    net, found = TinyNet("pool").eval(), []
    with torch.no_grad():
        features = net.layer4(net.layer2(net.layer1(x)))
        for feature, label in zip(features, y.tolist(), strict=True):
            cam = (feature.relu() * net.fc.weight[label].view(-1, 1, 1)).sum(0) + net.fc.bias[label]
            cam = F.interpolate(cam[None, None], x.shape[2:], mode="bilinear")[0, 0]
            cam = cam - cam.min()
            found.append(cam / cam.sum())
    return torch.stack(found)


# ---- laws ----------------------------------------------------------------------------------------


def test_maps_are_distributions() -> None:
    maps = class_maps(
        torch.randn(5, 8, 4, 4), torch.randn(NUM_CLASSES, 8), torch.eye(NUM_CLASSES), (16, 9)
    )
    assert maps.shape == (5, 16, 9)
    assert (maps >= 0).all()
    torch.testing.assert_close(maps.sum((1, 2)), torch.ones(5))


def test_a_step_against_a_loop() -> None:
    """Images by interpolation of a slice, labels by sums over slices of the map."""
    x, y, rng = images(6), labels(6), torch.Generator().manual_seed(1)
    maps, one_hot, num_mixed = maps_by_hand(x, y), torch.eye(NUM_CLASSES)[y], 0
    for _ in range(12):
        draw, net = MIXER.draw(6, rng), Recorder()
        mixed = MIXER.apply(net, x, y, draw)
        images_, targets = x.clone(), one_hot.clone()
        slices = []
        for center, lam in ((draw.center[0], draw.lam), (draw.center[1], draw.lam2)):
            bounds = box_bounds(center, lam, (16, 16))
            slices.append(tuple(slice(int(low), int(high)) for low, high in bounds))
        (rows, columns), source = slices
        size = rows.stop - rows.start, columns.stop - columns.start
        if min(*size, source[0].stop - source[0].start, source[1].stop - source[1].start) > 0:
            num_mixed += 1
            for i, j in enumerate(draw.perm.tolist()):
                crop = x[j, :, source[0], source[1]]
                images_[i, :, rows, columns] = F.interpolate(
                    crop[None], size, mode="bilinear", align_corners=True
                )[0]
                rho_a = 1 - maps[i, rows, columns].sum()
                targets[i] = rho_a * one_hot[i] + maps[j, source[0], source[1]].sum() * one_hot[j]
        torch.testing.assert_close(net.seen, images_, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mixed.targets, targets, atol=1e-5, rtol=1e-5)
    assert num_mixed > 6


def test_two_whole_boxes_give_the_partner() -> None:
    net, x, y, draw = Recorder(), images(6), labels(6), draw_of(0.0, 0.0)
    mixed = MIXER.apply(net, x, y, draw)
    assert torch.equal(net.seen, x[draw.perm])
    torch.testing.assert_close(mixed.targets, torch.eye(NUM_CLASSES)[y][draw.perm])


@pytest.mark.parametrize("center", [(0.5, 0.5), (0.1, 0.9)])
def test_equal_boxes_are_cutmix(center: tuple[float, float]) -> None:
    net, x, draw = Recorder(), images(6), draw_of(0.6, 0.6, center)
    MIXER.apply(net, x, labels(6), draw)
    box = share_mask(torch.tensor(center), torch.tensor(0.6), (16, 16))
    assert torch.equal(net.seen, paste(x, x[draw.perm], box))


@pytest.mark.parametrize(("lam", "lam2"), [(1.0, 0.5), (0.5, 1.0), (1.0, 1.0)])
def test_an_empty_box_leaves_the_anchor(lam: float, lam2: float) -> None:
    net, x, y = Recorder(), images(6), labels(6)
    mixed = MIXER.apply(net, x, y, draw_of(lam, lam2))
    assert torch.equal(net.seen, x)
    assert torch.equal(mixed.targets, torch.eye(NUM_CLASSES)[y])


def test_a_map_without_contrast_gives_the_areas() -> None:
    """A zero CAM, which is 0 / 0 by the formula."""
    weight, one_hot = torch.zeros(NUM_CLASSES, 8), torch.eye(NUM_CLASSES)[labels(6)]
    maps = class_maps(torch.randn(6, 8, 4, 4), weight, one_hot, (16, 16))
    own = box_bounds(torch.tensor([0.5, 0.5]), torch.tensor(0.5), (16, 16))
    other = box_bounds(torch.tensor([0.0, 0.5]), torch.tensor(0.2), (16, 16))
    _, (rho_a, rho_b) = snap(images(6), maps, torch.arange(6).roll(1), own, other)
    areas = [(r[1] - r[0]) * (c[1] - c[0]) / 256 for r, c in (own, other)]
    torch.testing.assert_close(rho_a, (1 - areas[0]).expand(6))
    torch.testing.assert_close(rho_b, areas[1].expand(6))


def test_shares_need_not_sum_to_one() -> None:
    """A box of the background that is covered by the object: both labels count."""
    maps = torch.zeros(2, 8, 8)
    maps[:, :4, :4] = 1 / 16  # the object is in the upper left quarter
    lower, upper = ((torch.tensor(n), torch.tensor(n + 4)) for n in (4, 0))
    _, (rho_a, rho_b) = snap(
        torch.rand(2, 3, 8, 8), maps, torch.tensor([1, 0]), (lower, lower), (upper, upper)
    )
    assert rho_a.tolist() == rho_b.tolist() == [1.0, 1.0]
    _, (rho_a, rho_b) = snap(
        torch.rand(2, 3, 8, 8), maps, torch.tensor([1, 0]), (upper, upper), (lower, lower)
    )
    assert rho_a.tolist() == rho_b.tolist() == [0.0, 0.0]


def test_the_loss_is_the_weighted_sum_of_two() -> None:
    draw, x, y = draw_case(MIXER, "cut", 6), images(6), labels(6)
    mixed = MIXER.apply(TinyNet("pool"), x, y, draw)
    one, two = (F.cross_entropy(mixed.logits, z, reduction="none") for z in (y, y[draw.perm]))
    rows = torch.arange(6)
    rho_a, rho_b = mixed.targets[rows, y], mixed.targets[rows, y[draw.perm]]
    is_other = y != y[draw.perm]
    each = torch.where(is_other, rho_a * one + rho_b * two, rho_a * one)
    torch.testing.assert_close(mixed.loss(), each.mean())
    assert mixed.criterion is soft_cross_entropy


# ---- defects of the released code ----------------------------------------------------------------


def test_images_of_one_class_count_once() -> None:
    one_hot, perm = torch.eye(3)[[0, 0, 2]], torch.tensor([1, 2, 0])
    shares = torch.tensor([0.5, 0.6, 0.7]), torch.tensor([0.2, 0.3, 0.1])
    once = snap_targets(one_hot, perm, *shares, is_twice=False)
    torch.testing.assert_close(once[0], torch.tensor([0.7, 0, 0]))
    twice = snap_targets(one_hot, perm, *shares, is_twice=True)
    torch.testing.assert_close(twice[0], torch.tensor([1.4, 0, 0]))
    assert torch.equal(once[1:], twice[1:])
    assert (MIXER.same_class, SnapMix.released().same_class) == ("once", "twice")


def test_running_statistics_move_once() -> None:
    draw = draw_of(0.5, 0.5)
    for mixer, times in ((MIXER, 1), (SnapMix.released(classifier="fc"), 2)):
        net = TinyNet("pool")
        mixer.apply(net, images(6), labels(6), draw)
        assert int(net.layer1[1].num_batches_tracked) == times
        assert all(module.training for module in net.modules())


def test_settings_are_the_authors() -> None:
    assert (MIXER.alpha, MIXER.cases) == (5.0, {"cut": 1.0})
    scratch = SnapMix.scratch()
    assert (scratch.alpha, scratch.cases) == (1.0, {"cut": 0.5, "clean": 0.5})
    draw = MIXER.draw(4, torch.Generator().manual_seed(0))
    assert draw.center.shape == (2, 2)
    assert draw.lam != draw.lam2


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "bce"}, "need not sum to 1: loss must be 'ce', got 'bce'"),
        ({"same_class": "thrice"}, "same_class must be 'once' or 'twice', got 'thrice'"),
        ({"cam_mode": "frozen"}, "cam_mode must be 'eval' or 'train', got 'frozen'"),
        ({"classifier": 1}, "a layer is the name of a sub-module"),
        ({"prob": -1.0}, "prob must lie in"),
    ],
)
def test_bad_settings_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SnapMix(**change)


def test_a_head_without_maps_is_named() -> None:
    draw = draw_case(MIXER, "cut", 6)
    with pytest.raises(ValueError, match="reads 128 features: choose the layer"):
        MIXER.apply(TinyNet(), images(6), labels(6), draw)
    wrong = dataclasses.replace(MIXER, classifier="layer1")
    with pytest.raises(ValueError, match="classifier 'layer1' is a Sequential"):
        wrong.apply(TinyNet("pool"), images(6), labels(6), draw)
    named = r"set classifier= .* perhaps classifier='fc': there is no layer 'head\.linear'"
    for mixer in (SnapMix(), DenseMultiMix()):
        draw = draw_case(mixer, next(iter(mixer.cases)), 6)
        with pytest.raises(ValueError, match=named):
            mixer.apply(TinyNet("pool"), images(6), labels(6), draw)


def test_logits_that_are_a_dict_are_named() -> None:
    draw = draw_case(MIXER, "cut", 6)
    with pytest.raises(ValueError, match=r"logits \[b, k\], got dict"):
        MIXER.apply(Wrapped(), images(6), labels(6), draw)


class Wrapped(TinyNet):
    def __init__(self) -> None:
        super().__init__("pool")

    def forward(self, x: Tensor) -> object:
        return {"logits": super().forward(x)}
