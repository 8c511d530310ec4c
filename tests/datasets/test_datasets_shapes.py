"""The built-in shapes: the same everywhere, boxes tight, class independent of everything else."""

import hashlib
import math

import numpy as np
import pytest
import torch

from alignmixup.datasets.shapes import (
    MEAN,
    MIN_CONTRAST,
    SHAPE_NAMES,
    STD,
    TEXTURE_NAMES,
    draw_shapes,
    shapes,
)
from alignmixup.datasets.silhouettes import COS, SIN


@pytest.fixture(scope="module")
def drawing():
    return draw_shapes("train", 2000)


def digest(*tensors):
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.contiguous().numpy().tobytes())
    return state.hexdigest()[:16]


def test_the_bits_are_pinned():
    drawing = draw_shapes("train", 40)
    assert digest(drawing.image_set.images) == "c3ed004eac2b575b"
    assert digest(drawing.truth.masks) == "01d6ffb0db06086a"
    assert digest(shapes("test", 20, image_size=48, seed=3).images) == "baa81fba96f342bb"


def test_the_direction_tables_do_not_depend_on_the_maths_library():
    # Every entry is far from the point where its rounding would turn: 1e-3 against 1e-10.
    for table, function in [(COS, math.cos), (SIN, math.sin)]:
        exact = [function(2 * math.pi * k / 1024) * 2**20 for k in range(1024)]
        assert max(abs(v / 2**20 - t) for v, t in zip(exact, table.tolist(), strict=True)) < 5e-7
        assert min(abs(v % 1 - 0.5) for v in exact) > 1e-3


def test_a_smaller_set_is_the_beginning_of_a_larger_one():
    small, large = draw_shapes("train", 25), draw_shapes("train", 60)
    assert torch.equal(small.image_set.images, large.image_set.images[:25])
    assert torch.equal(small.truth.masks, large.truth.masks[:25])


def test_splits_and_seeds_differ():
    drawings = [shapes("train", 20), shapes("test", 20), shapes("train", 20, seed=1)]
    for i, a in enumerate(drawings):
        for b in drawings[i + 1 :]:
            assert not (a.images == b.images).flatten(1).all(1).any()


def test_classes_are_balanced():
    counts = shapes("test", 1003).labels.bincount()
    assert len(counts) == 10
    assert int(counts.max() - counts.min()) <= 1
    assert shapes("test").images.shape == (1000, 3, 32, 32)


@pytest.mark.parametrize("image_size", [16, 32, 50])
def test_boxes_are_tight_and_masks_inside_the_circle(image_size):
    drawing = draw_shapes("train", 100, image_size)
    masks, truth = drawing.truth.masks, drawing.truth
    for i in range(100):
        ys, xs = masks[i].nonzero(as_tuple=True)
        box = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
        assert drawing.image_set.boxes[i].tolist() == [[int(v) for v in box]]
        centers = torch.stack([xs, ys], 1) + 0.5
        reach = (centers - truth.center[i]).norm(dim=1).max()
        assert reach <= truth.size[i] + 1  # half-covered pixels may reach over the rim
        assert reach >= 0.7 * truth.size[i] - 1


def independent_mask(name, u, v):
    """Some of the outlines, written anew from their definition, by angle and radius."""
    radius = np.hypot(u, v)
    if name == "disc":
        return radius <= 0.9
    if name == "ring":
        return (radius >= 0.55) & (radius <= 0.95)
    if name == "square":
        return (abs(u) <= 0.7) & (abs(v) <= 0.7)
    if name == "bar":
        return (abs(u) <= 0.95) & (abs(v) <= 0.26)
    corners = {"triangle": 3, "star": 5}[name]
    angle = np.arctan2(u, -v) % (2 * math.pi / corners)  # from the upper tip
    angle = np.minimum(angle, 2 * math.pi / corners - angle)
    if name == "triangle":
        return radius * np.cos(math.pi / 3 - angle) <= 0.5
    return radius * np.cos(2 * math.pi / 5 - angle) <= math.cos(2 * math.pi / 5)


@pytest.mark.parametrize("name", ["disc", "square", "triangle", "star", "ring", "bar"])
def test_silhouettes_agree_with_their_outlines_placed_by_the_truth(drawing, name):
    truth = drawing.truth
    at = (np.arange(32 * 8) + 0.5) / 8  # eight by eight points in a pixel
    for i in range(SHAPE_NAMES.index(name), 60, 10):
        (cx, cy), size = truth.center[i].tolist(), truth.size[i].item()
        turn = truth.rotation[i].item()
        cos, sin = math.cos(turn), math.sin(turn)
        dx, dy = (at - cx) / size, (at[:, None] - cy) / size
        inside = independent_mask(name, cos * dx + sin * dy, cos * dy - sin * dx)
        count = inside.reshape(32, 8, 32, 8).sum((1, 3))
        wrong = int(((count >= 32) != truth.masks[i].numpy()).sum())
        assert wrong <= 8  # pixels that are all but half covered may fall either way


def test_the_object_shows_its_color_and_the_background_its_own(drawing):
    images, truth = drawing.image_set.images.float(), drawing.truth
    flat = (truth.texture == 0) & (truth.background_texture == 0)
    assert flat.sum() > 30
    for i in flat.nonzero().flatten().tolist():
        # Two pixels from the outline, where nothing is partly covered but the finest tips.
        mask = truth.masks[i].float()[None, None]
        inner = -torch.nn.functional.max_pool2d(-mask, 5, 1, 2)[0, 0]
        outer = torch.nn.functional.max_pool2d(mask, 7, 1, 3)[0, 0]
        for where, color in [(inner == 1, truth.color), (outer == 0, truth.background_color)]:
            if where.any():
                error = (images[i][:, where] - color[i].float()[:, None]).abs()
                assert error.max() <= 8


def test_object_and_background_always_differ(drawing):
    apart = (drawing.truth.color.int() - drawing.truth.background_color.int()).abs()
    assert int(apart.amax(1).min()) >= MIN_CONTRAST


def test_the_class_tells_nothing_about_the_rest(drawing):
    truth, labels = drawing.truth, drawing.image_set.labels
    factors = {
        "color": truth.color.double(),
        "background": truth.background_color.double(),
        "size": truth.size[:, None],
        "center": truth.center,
        "turn": torch.stack([truth.rotation.cos(), truth.rotation.sin()], 1),
        "texture": torch.nn.functional.one_hot(truth.texture).double(),
        "background texture": torch.nn.functional.one_hot(truth.background_texture).double(),
    }
    for name, values in factors.items():
        values = (values - values.mean(0)) / values.std(0)
        means = torch.stack([values[labels == k].mean(0) for k in range(10)])
        # 200 images a class: means of independent values have deviation 1 / sqrt(200) = 0.07.
        assert means.abs().max() < 4.5 * 200**-0.5, name


def test_factors_take_all_their_values(drawing):
    truth = drawing.truth
    assert truth.texture.bincount().min() > 300
    assert len(truth.texture.unique()) == len(TEXTURE_NAMES)
    for values, low, high in [
        (truth.size, 0.26 * 32, 0.44 * 32),
        (truth.rotation, 0, 2 * math.pi),
        (truth.color.double().flatten(), 0, 256),
    ]:
        assert values.min() >= low
        assert values.max() < high
        counts = torch.histc(values, 8, low, high)
        assert counts.min() > 0.7 * counts.mean()


def test_mean_and_deviation_are_those_of_the_images(drawing):
    pixels = drawing.image_set.images.double() / 255
    for given, found in [(MEAN, pixels.mean((0, 2, 3))), (STD, pixels.std((0, 2, 3)))]:
        assert (torch.tensor(given) - found).abs().max() < 0.015


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"split": "val"}, "every data set is 'test'"),
        ({"num_images": 0}, "num_images must be at least 1, got 0"),
        ({"image_size": 8}, "image_size must be at least 16"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_bad_arguments_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        shapes(**{"split": "train"} | options)
