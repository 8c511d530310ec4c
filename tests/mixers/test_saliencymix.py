"""SaliencyMix: where its boxes are, that labels are the pixels shown, and that it learns."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw
from alignmixup.mixers.boxes import BoxDraw
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.saliencymix import SaliencyMix
from alignmixup.ops.saliency import fine_grained_saliency, saliency_peak
from cases import TinyNet, images, labels
from learning import check_it_teaches

SIZE = 16


class Seen(nn.Module):
    """A network that keeps what it was shown."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.image = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.image = x
        return x.new_zeros(len(x), self.num_classes)


def cut(perm: list[int], lam: float) -> Draw:
    return Draw("cut", torch.tensor(perm), torch.tensor(lam))


# ---- laws ----------------------------------------------------------------------------------------


def test_per_sample_boxes_bring_the_peak_of_each_partner() -> None:
    net, x, perm = Seen(5), images(5), [1, 2, 3, 4, 0]
    SaliencyMix(saliency="per_sample").apply(net, x, torch.arange(5), cut(perm, 0.9))
    peaks = saliency_peak(fine_grained_saliency(x)).tolist()
    assert len(set(map(tuple, peaks))) == 5
    for i, partner in enumerate(perm):
        box = box_around(*peaks[partner])
        assert torch.equal(net.image[i, :, box], x[partner, :, box])
        assert torch.equal(net.image[i, :, ~box], x[i, :, ~box])


def test_one_box_for_the_batch_is_that_of_the_first_partner() -> None:
    net, x, perm = Seen(5), images(5), [2, 0, 3, 1, 4]
    mixed = SaliencyMix(saliency="first").apply(net, x, torch.arange(5), cut(perm, 0.9))
    box = box_around(*saliency_peak(fine_grained_saliency(x))[2].tolist())
    assert torch.equal(net.image, torch.where(box, x[perm], x))
    share = float(box.float().mean())
    torch.testing.assert_close(mixed.targets[0], torch.tensor([1 - share, 0, share, 0, 0]))


def box_around(row: int, column: int) -> Tensor:
    """The box at lam = 0.9: floor(16 sqrt(0.1)) = 5 pixels, of which two lie on either side."""
    box = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    box[max(row - 2, 0) : row + 2, max(column - 2, 0) : column + 2] = True
    return box


@pytest.mark.parametrize("saliency", ["first", "per_sample"])
@pytest.mark.parametrize("lam", [0.0, 0.15, 0.5, 0.83, 1.0])
def test_labels_are_the_share_of_the_pixels_shown(saliency: str, lam: float) -> None:
    """Class k is one shade with one spot of nearly that shade, so every pixel tells its class."""
    shade = torch.arange(6).view(6, 1, 1, 1) / 8
    x = shade.repeat(1, 3, SIZE, SIZE)
    for k, (row, column) in enumerate([(0, 0), (15, 15), (7, 8), (2, 13), (9, 1), (5, 5)]):
        x[k, :, row, column] += 0.02
    net = Seen(6)
    mixed = SaliencyMix(saliency=saliency).apply(
        net, x, torch.arange(6), cut([3, 0, 5, 1, 2, 4], lam)
    )
    whose = (net.image[:, 0] * 8).round().long()
    for i in range(6):
        shown = torch.bincount(whose[i].flatten(), minlength=6) / SIZE**2
        torch.testing.assert_close(mixed.targets[i], shown)
    assert (mixed.targets.sum(1) - 1).abs().max() < 1e-6


def test_a_whole_share_is_the_anchor_bit_for_bit() -> None:
    net, x = Seen(5), images(6)
    for saliency in ("first", "per_sample"):
        mixed = SaliencyMix(saliency=saliency).apply(
            net, x, labels(6), cut([1, 2, 3, 4, 5, 0], 1.0)
        )
        assert torch.equal(net.image, x)
        assert torch.equal(mixed.targets, torch.eye(5)[labels(6)])


# ---- agreements ----------------------------------------------------------------------------------


def test_it_is_cutmix_with_the_box_at_the_peak() -> None:
    x, y = images(6), labels(6)
    draw = cut([4, 3, 5, 0, 1, 2], 0.55)
    peak = saliency_peak(fine_grained_saliency(x[draw.perm]))
    for saliency, center in (("first", peak[0]), ("per_sample", peak)):
        ours = SaliencyMix(saliency=saliency).apply(TinyNet(), x, y, draw)
        at = BoxDraw("cut", draw.perm, draw.lam, center=(center + 0.5) / SIZE)
        other = CutMix().apply(TinyNet(), x, y, at)
        assert torch.equal(ours.logits, other.logits)
        assert torch.equal(ours.targets, other.targets)


def test_normalized_images_get_the_boxes_of_their_pixels() -> None:
    mean, std = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
    x, draw = (images(6) * 255).round() / 255, cut([4, 3, 5, 0, 1, 2], 0.4)
    normalized = (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    plain, scaled = Seen(5), Seen(5)
    SaliencyMix(saliency="per_sample").apply(plain, x, labels(6), draw)
    SaliencyMix(saliency="per_sample", mean=mean, std=std).apply(
        scaled, normalized, labels(6), draw
    )
    restored = scaled.image * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
    torch.testing.assert_close(restored, plain.image)


def test_boxes_are_applied_with_their_probability() -> None:
    assert SaliencyMix().cases == {"cut": 0.5, "clean": 0.5}
    assert SaliencyMix(prob=1.0).cases == {"cut": 1.0}
    x = images(6)
    draw = dataclasses.replace(cut([1, 0, 3, 2, 5, 4], 0.3), case="clean")
    net = Seen(5)
    mixed = SaliencyMix().apply(net, x, labels(6), draw)
    assert torch.equal(net.image, x)
    assert torch.equal(mixed.targets, torch.eye(5)[labels(6)])


@pytest.mark.gpu
@pytest.mark.parametrize("saliency", ["first", "per_sample"])
def test_a_captured_step_mixes_as_a_plain_one(saliency: str) -> None:
    mixer, net = SaliencyMix(prob=1.0, saliency=saliency), TinyNet().to("cuda")
    x, y = images(6).to("cuda"), labels(6).to("cuda")
    rng = torch.Generator().manual_seed(0)
    static = mixer.draw(6, rng).to("cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        mixer.apply(net, x, y, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = mixer.apply(net, x, y, static)
    for _ in range(3):
        draw = mixer.draw(6, rng)
        for name, buffer in static.tensors().items():
            buffer.copy_(getattr(draw, name))
        graph.replay()
        plain = mixer.apply(net, x, y, draw)
        torch.testing.assert_close(captured.targets, plain.targets)
        torch.testing.assert_close(captured.logits, plain.logits)


# ---- learning ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_learns_shapes() -> None:
    check_it_teaches(SaliencyMix(alpha=0.5, prob=1.0), epochs=10)


# ---- bad settings and images ---------------------------------------------------------------------


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SaliencyMix(prob=-0.1), r"prob must lie in \[0, 1\], got -0.1"),
        (lambda: SaliencyMix(alpha=0.0), "alpha must be positive and finite, got 0.0"),
        (
            lambda: SaliencyMix(saliency="all"),
            "saliency must be 'first' or 'per_sample', got 'all'",
        ),
        (lambda: SaliencyMix(mean=(0.5, 0.5, 0.5)), "both mean and std or neither"),
        (lambda: SaliencyMix(mean=(0.5,), std=(0.0,)), "std positive, got"),
        (lambda: SaliencyMix(mean=0.5, std=0.5), "one value per channel, .* got 0.5 and 0.5"),
        (lambda: SaliencyMix(loss="mse"), "loss must be .*, got 'mse'"),
    ],
)
def test_bad_settings_are_named(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_images_that_are_no_pixels_are_named() -> None:
    with pytest.raises(ValueError, match=r"pixels in \[0, 1\], got values from -.* mean and std"):
        SaliencyMix(saliency="per_sample").apply(
            TinyNet(), images(6) * 4 - 2, labels(6), cut([1, 2, 3, 4, 5, 0], 0.5)
        )
    one_band = SaliencyMix(saliency="per_sample", mean=(0.5,), std=(0.2,))
    with pytest.raises(ValueError, match="mean and std have 1 values for 3 channels"):
        one_band.apply(TinyNet(), images(6), labels(6), cut([1, 2, 3, 4, 5, 0], 0.5))
