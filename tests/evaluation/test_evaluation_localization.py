"""Localization: contours against OpenCV and scipy, metrics against a loop and hand-drawn maps."""

import json

import cv2
import numpy as np
import pytest
import scipy.ndimage
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from alignmixup.contracts import Skipped
from alignmixup.datasets.shapes import shapes
from alignmixup.evaluation.contours import level_boxes, mask_box
from alignmixup.evaluation.heat import heat_maps
from alignmixup.evaluation.iou import box_iou
from alignmixup.evaluation.tasks.localization import LocalizationSettings, localization, localize
from alignmixup.models import NetSpec, build
from alignmixup.models.wsol import ACoL

EXACT = LocalizationSettings(convention="exact")


class Painted(nn.Module):
    """The map of class k is channel k of the image."""

    def __init__(self):
        super().__init__()
        self.map = nn.Identity()
        self.classify = nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            self.classify.weight.copy_(torch.eye(3))

    def forward(self, x):
        return self.classify(self.map(x).mean(dim=(2, 3)))


def painted(*planes, label=0):
    """Images whose map of ``label`` is as drawn, and its mean the largest."""
    x = torch.zeros(len(planes), 3, *planes[0].shape)
    x[:, label] = torch.stack(planes)
    return [(x, torch.full((len(planes),), label))]


def drawn(size=12, *regions):
    plane = torch.zeros(size, size)
    for x0, y0, x1, y1, value in regions:
        plane[y0:y1, x0:x1] = value
    return plane


def score(planes, boxes, options=EXACT, **kw):
    found = localization(Painted(), painted(*planes), boxes, settings=options, **kw)
    return {r.metric: r for r in found}


def box(*corners):
    return torch.tensor([corners], dtype=torch.float32)


# The contours, level by level.


def opencv_contours(heat, threshold):
    _, binary = cv2.threshold(heat, threshold, 255, cv2.THRESH_BINARY)
    return cv2.findContours(binary, cv2.RETR_TREE, cv2.CHAIN_APPROX_SIMPLE)[0]


def opencv_box(contour):
    x, y, w, h = cv2.boundingRect(contour)
    return (x, y, x + w, y + h)


def check_against_opencv(heat, thresholds):
    found = level_boxes(heat)
    largest = {int(found.levels[i]): tuple(found.boxes[i].tolist()) for i in found.largest()}
    for threshold in thresholds:
        here = found.levels == threshold + 1
        ours = [
            (*b, a)
            for b, a in zip(found.boxes[here].tolist(), found.areas[here].tolist(), strict=True)
        ]
        contours = opencv_contours(heat, threshold)
        theirs = [(*opencv_box(c), round(2 * cv2.contourArea(c))) for c in contours]
        assert sorted(ours) == sorted(theirs)
        best = opencv_box(max(contours, key=cv2.contourArea)) if contours else None
        assert largest.get(threshold + 1) == best


@given(
    st.integers(1, 13),
    st.integers(1, 13),
    st.sampled_from([2, 3, 6, 256]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=150, deadline=None)
def test_contours_of_noise_are_those_of_opencv(height, width, num_values, seed):
    rng = np.random.default_rng(seed)
    values = rng.choice(256, num_values, replace=False).astype(np.uint8)
    heat = rng.choice(values, (height, width))
    check_against_opencv(heat, sorted({*values.tolist(), 0} - {255}))


@pytest.mark.parametrize("seed", range(4))
def test_contours_of_a_smooth_map_are_those_of_opencv(seed):
    rng = torch.Generator().manual_seed(seed)
    (heat,), (order,) = heat_maps(torch.randn(1, 7, 7, generator=rng), (56, 40))
    check_against_opencv(heat, range(255))
    plain, refined = level_boxes(heat), level_boxes(heat, order)
    for found in (plain, refined):
        assert len(found.levels) == len(plain.levels)
    key = lambda e: sorted(zip(e.levels.tolist(), e.boxes.tolist(), e.areas.tolist(), strict=True))  # noqa: E731
    assert key(plain) == key(refined)


def test_components_and_holes_are_those_of_scipy():
    rng = np.random.default_rng(0)
    heat = rng.integers(0, 5, (20, 30)).astype(np.uint8)
    found = level_boxes(heat)
    for level in range(1, 5):
        here = found.levels == level
        above, _ = scipy.ndimage.label(heat >= level, np.ones((3, 3)))
        boxes = [(x.start, y.start, x.stop, y.stop) for y, x in scipy.ndimage.find_objects(above)]
        ours = found.boxes[here & ~found.is_hole]
        assert sorted(map(tuple, ours.tolist())) == sorted(boxes)
        below, _ = scipy.ndimage.label(heat < level)
        rest = [(x.start, y.start, x.stop, y.stop) for y, x in scipy.ndimage.find_objects(below)]
        holes = [b for b in rest if min(b[:2]) > 0 and b[2] < 30 and b[3] < 20]
        inner = found.boxes[here & found.is_hole] + np.array([1, 1, -1, -1])
        assert sorted(map(tuple, inner.tolist())) == sorted(holes)


def test_nested_rings_enclose_everything_inside():
    heat = np.zeros((11, 11), np.uint8)
    for inset, value in enumerate([200, 0, 200, 0, 200]):
        heat[inset : 11 - inset, inset : 11 - inset] = value
    found = level_boxes(heat)
    entries = zip(found.boxes.tolist(), found.areas.tolist(), found.is_hole, strict=True)
    here = [
        (is_hole, tuple(corners), area)
        for level, (corners, area, is_hole) in zip(found.levels, entries, strict=True)
        if level == 200
    ]
    # Twice the area of squares of side 10, 6 and 2 between the centers of their outer pixels; the
    # contours of the holes run through the same pixels, but cut the corners.
    assert sorted(here) == [
        (False, (0, 0, 11, 11), 200),
        (False, (2, 2, 9, 9), 72),
        (False, (4, 4, 7, 7), 8),
        (True, (0, 0, 11, 11), 196),
        (True, (2, 2, 9, 9), 68),
    ]


def test_iou_by_hand():
    a = np.array([[0, 0, 4, 4], [2, 2, 6, 6], [0, 0, 0, 0]])
    b = np.array([[0, 0, 4, 4], [4, 4, 8, 8], [1, 1, 3, 2.0]])
    expected = [[1, 0, 2 / 16], [4 / 28, 4 / 28, 0], [0, 0, 0]]
    np.testing.assert_allclose(box_iou(a, b), expected)
    np.testing.assert_allclose(box_iou(a, b), box_iou(b, a).T)


# The map.


def test_resizing_is_that_of_opencv():
    small = torch.randn(3, 7, 7, generator=torch.Generator().manual_seed(0))
    heat, order = heat_maps(small, (40, 56))
    for plane, byte, unit in zip(small.numpy(), heat, order, strict=True):
        large = cv2.resize(plane, (56, 40), interpolation=cv2.INTER_CUBIC)
        expected = (large - large.min()) / np.ptp(large)
        np.testing.assert_allclose(unit, expected, atol=1e-5)
        assert (byte == (255 * unit).astype(np.uint8)).all()
        assert byte.max() == 255
        assert byte.min() == 0


@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 1e-8, 1e6])
def test_constant_map_is_all_zero(value):
    maps = torch.full((2, 7, 7), value)
    maps[1, 3, 3] += 1e-7 * value
    heat, _ = heat_maps(maps, (29, 31))
    assert not heat.any()


# The metrics on maps drawn by hand.


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_a_map_that_is_not_finite_is_named(value):
    """Nor may the difference of two of its values be infinite."""
    maps = torch.zeros(2, 3, 3)
    maps[1, 0], maps[1, 1, 1] = value, -value
    with pytest.raises(ValueError, match="map is not finite"):
        heat_maps(maps, (5, 5))


@pytest.mark.parametrize("convention", ["reference", "exact"])
@pytest.mark.parametrize("label", [0, 2])
def test_map_that_is_the_box_scores_full_marks(convention, label):
    plane = drawn(12, (3, 4, 9, 11, 1.0))
    options = LocalizationSettings(convention=convention)
    found = localization(
        Painted(), painted(plane, label=label), [box(3, 4, 9, 11)], settings=options
    )
    assert {r.metric: r.value for r in found} == {
        "top1_loc": 100.0,
        "gt_known_loc": 100.0,
        "maxboxacc": 100.0,
        "maxboxacc_v2": 100.0,
    }
    assert all(r.task == "localization" for r in found)
    assert all(json.loads(r.to_json())["settings"]["num_images"] == 1 for r in found)


def test_largest_component_alone_counts_for_v1_and_any_for_v2():
    plane = drawn(16, (1, 1, 9, 9, 1.0), (11, 11, 15, 15, 1.0))
    small, large = box(11, 11, 15, 15), box(1, 1, 9, 9)
    found = score([plane, plane], [small, large])
    assert found["gt_known_loc"].value == found["maxboxacc"].value == 50
    assert found["maxboxacc_v2"].value == 100


def test_one_of_several_true_boxes_is_enough():
    plane = drawn(16, (1, 1, 9, 9, 1.0))
    both = torch.cat([box(11, 11, 15, 15), box(1, 1, 9, 9)])
    assert score([plane], [both])["maxboxacc"].value == 100


def test_hole_has_a_contour_of_its_own_in_v2():
    plane = drawn(16, (1, 1, 15, 15, 1.0), (5, 5, 9, 9, 0.0))
    found = score([plane], [box(4, 4, 10, 10)])  # the pixels around the hole
    assert found["maxboxacc_v2"].value == 100
    assert found["maxboxacc"].value == 0


def test_constant_map_finds_nothing():
    plane = torch.full((12, 12), 0.5)
    exact = score([plane], [box(0, 0, 12, 12)])
    assert [exact[m].value for m in ("gt_known_loc", "maxboxacc", "maxboxacc_v2")] == [0, 0, 0]
    # The authors' code then has the box (0, 0, 0, 0), which counts as one pixel there. A true box
    # of that pixel is counted as two by two: an IoU of a quarter.
    options = LocalizationSettings(v2_iou_thresholds=(0.25, 0.26))
    found = score([plane], [box(0, 0, 1, 1)], options)
    assert found["maxboxacc_v2"].settings["boxacc"] == {"0.25": 100.0, "0.26": 0.0}


def test_box_at_the_border():
    plane = drawn(12, (6, 6, 12, 12, 1.0))
    truth = box(6, 6, 12, 12)
    (exact,) = localize(Painted(), *painted(plane)[0], [truth], settings=EXACT)
    assert exact.box == (6, 6, 12, 12)
    assert exact.iou == 1
    # As the authors count: predicted 6..11, since 12 is outside; true 6..12.
    (reference,) = localize(Painted(), *painted(plane)[0], [truth])
    assert reference.iou == pytest.approx(36 / 49)


def test_conventions_by_hand():
    plane = drawn(20, (4, 4, 10, 8, 1.0))
    truth = box(5.9, 4.2, 11.7, 8.9)
    (exact,) = localize(Painted(), *painted(plane)[0], [truth], settings=EXACT)
    inner = (10 - 5.9) * (8 - 4.2)
    assert exact.iou == pytest.approx(inner / (6 * 4 + 5.8 * 4.7 - inner), rel=1e-6)
    # Inclusive corners: (4, 4, 10, 8) and, rounded down, (5, 4, 11, 8).
    (reference,) = localize(Painted(), *painted(plane)[0], [truth])
    assert reference.iou == pytest.approx((6 * 5) / (7 * 5 + 7 * 5 - 6 * 5))


def test_threshold_is_chosen_once_for_the_set():
    # Each image has its box at a threshold of its own: one at any below 0.4, one above 0.6.
    low = drawn(16, (2, 2, 14, 14, 0.4), (2, 2, 4, 4, 1.0))
    high = drawn(16, (0, 0, 16, 16, 0.6), (6, 6, 10, 10, 1.0), (15, 15, 16, 16, 0.0))
    boxes = [box(2, 2, 14, 14), box(6, 6, 10, 10)]
    found = score([low, high], boxes)
    assert found["maxboxacc"].value == 50
    assert found["maxboxacc_v2"].value == 50
    assert score([low], boxes[:1])["maxboxacc"].settings["tau"] == 0
    # Above int(tau * 255) = 153 = int(0.6 * 255) stands the square alone.
    assert score([high], boxes[1:])["maxboxacc"].settings["tau"] == 0.6


def test_threshold_of_top1_is_015():
    # 0.15 * 255 = 38.25: a byte of 38 is not above it, a byte of 39 is.
    for byte, expected in ((38, 0), (39, 100)):
        plane = drawn(16, (2, 2, 14, 14, (byte + 0.5) / 255), (2, 2, 4, 4, 1.0))
        assert score([plane], [box(2, 2, 14, 14)])["gt_known_loc"].value == expected


def test_top1_needs_the_right_class():
    x, _ = painted(*[drawn(12, (3, 4, 9, 11, 1.0))] * 3)[0]
    x[:, 1] = x[:, 0] * 0.5
    batches = [(x, torch.tensor([0, 1, 0]))]  # the second image is taken for class 0
    found = localization(Painted(), batches, [box(3, 4, 9, 11)] * 3)
    values = {r.metric: r.value for r in found}
    assert values["gt_known_loc"] == pytest.approx(100)
    assert values["top1_loc"] == pytest.approx(200 / 3)


# The box of the whole mask, against one drawn around the pixels one by one.


def brute_mask_box(heat, threshold):
    inside = [
        (x, y) for y, row in enumerate(heat) for x, value in enumerate(row) if value > threshold
    ]
    if not inside:
        return None
    xs, ys = [x for x, _ in inside], [y for _, y in inside]
    return (min(xs), min(ys), max(xs) + 1, max(ys) + 1)


@given(
    st.integers(1, 11), st.integers(1, 11), st.sampled_from([1, 2, 9]), st.integers(0, 2**32 - 1)
)
@settings(max_examples=60, deadline=None)
def test_the_box_of_a_mask_is_around_all_its_pixels(height, width, num_values, seed):
    rng = np.random.default_rng(seed)
    heat = rng.choice(rng.choice(256, num_values).astype(np.uint8), (height, width))
    for threshold in {0, 38, int(heat.max())}:
        found = mask_box(heat, threshold + 1)
        assert found == brute_mask_box(heat.tolist(), threshold)


def pixels_of(x0, y0, x1, y1):
    return {(x, y) for x in range(x0, x1) for y in range(y0, y1)}


@pytest.mark.parametrize("tau", [0.0, 0.15, 0.6])
def test_the_fixed_threshold_takes_the_box_it_is_asked_for(tau):
    """Many smooth maps with whole-pixel boxes: shares counted pixel by pixel."""
    rng = torch.Generator().manual_seed(3)
    n, size = 12, 20
    corners = torch.randint(0, 8, (n, 2), generator=rng)
    boxes = [torch.cat([c, c + torch.tensor([10, 9])])[None] for c in corners]
    planes = torch.rand(n, size, size, generator=rng) ** 6
    for plane, truth in zip(planes, boxes, strict=True):
        x0, y0, x1, y1 = truth[0].tolist()
        plane[y0:y1, x0:x1] += 0.5
    planes = planes / 1.5
    batches = [
        (torch.stack([planes, *[torch.zeros_like(planes)] * 2], dim=1), torch.zeros(n).long())
    ]
    shares = {}
    for kind in ("contour", "mask"):
        options = LocalizationSettings(cam_threshold=tau, convention="exact", box=kind)
        found = localize(Painted(), *batches[0], [b.float() for b in boxes], settings=options)
        for place, truth in zip(found, boxes, strict=True):
            want = brute_mask_box(place.heat.tolist(), int(255 * tau))
            if kind == "mask":
                assert place.box == want
            mine, theirs = pixels_of(*place.box), pixels_of(*truth[0].tolist())
            assert place.iou == pytest.approx(len(mine & theirs) / len(mine | theirs))
        scored = localization(Painted(), batches, [b.float() for b in boxes], settings=options)
        values = {r.metric: r for r in scored}
        shares[kind] = values
        is_found = [place.iou >= 0.5 for place in found]
        assert values["gt_known_loc"].value == pytest.approx(100 * sum(is_found) / n)
        assert values["top1_loc"].settings["box"] == kind
    # The benchmark's own measures have contours of their own.
    for metric in ("maxboxacc", "maxboxacc_v2"):
        assert shares["contour"][metric] == shares["mask"][metric]


def test_a_mask_in_two_parts_has_one_box_and_its_largest_contour_another():
    plane = drawn(16, (1, 1, 9, 9, 1.0), (11, 11, 15, 15, 1.0))
    for kind, expected in (("contour", (1, 1, 9, 9)), ("mask", (1, 1, 15, 15))):
        options = LocalizationSettings(convention="exact", box=kind)
        (place,) = localize(Painted(), *painted(plane)[0], [box(1, 1, 9, 9)], settings=options)
        assert place.box == expected
    constant = torch.full((12, 12), 0.5)
    options = LocalizationSettings(box="mask")
    (place,) = localize(Painted(), *painted(constant)[0], [box(1, 1, 9, 9)], settings=options)
    assert place.box is None
    with pytest.raises(ValueError, match="box must be 'contour' or 'mask', got 'all'"):
        LocalizationSettings(box="all")


def by_loop(maps, boxes, size, deltas):
    """MaxBoxAcc and MaxBoxAccV2 as described: every threshold by itself, contours by OpenCV."""
    v1, v2 = np.zeros(1000), np.zeros((len(deltas), 1000))
    for plane, truth in zip(maps, boxes, strict=True):
        large = cv2.resize(plane, (size, size), interpolation=cv2.INTER_CUBIC)
        heat = ((large - large.min()) / np.ptp(large) * 255).astype(np.uint8)
        for t, tau in enumerate(np.arange(0, 1, 0.001)):
            contours = opencv_contours(heat, int(tau * heat.max()))
            largest = max(contours, key=cv2.contourArea)
            v1[t] += max(inclusive_iou(largest, b, size) for b in truth) >= 0.5
            best = max(inclusive_iou(c, b, size) for c in contours for b in truth)
            v2[:, t] += best >= np.array(deltas)
    return v1, v2


def inclusive_iou(contour, truth, size):
    x, y, w, h = cv2.boundingRect(contour)
    p = (x, y, min(x + w, size - 1), min(y + h, size - 1))
    q = tuple(int(v) for v in truth)
    across = max(0, min(p[2], q[2]) - max(p[0], q[0]) + 1)
    down = max(0, min(p[3], q[3]) - max(p[1], q[1]) + 1)
    areas = [(b[2] - b[0] + 1) * (b[3] - b[1] + 1) for b in (p, q)]
    return across * down / (sum(areas) - across * down)


class Coarse(nn.Module):
    """Gives prepared 6 x 6 maps in order, as a network with strides would."""

    def __init__(self, maps):
        super().__init__()
        self.maps, self.seen = maps, 0
        self.feature = nn.Identity()
        self.classify = nn.Linear(1, 1)

    def forward(self, x):
        first, self.seen = self.seen, self.seen + len(x)
        return self.classify(self.feature(self.maps[first : self.seen]).mean(dim=(2, 3)))


def test_set_of_smooth_maps_as_the_protocol_written_as_a_loop():
    n, size = 8, 36
    rng = torch.Generator().manual_seed(5)
    maps = torch.rand(n, 1, 6, 6, generator=rng)
    maps[:, :, 2:4, 1:4] += 0.7
    corners = torch.rand(n, 2, 2, generator=rng) * 10 + torch.tensor([3.0, 6.0])
    boxes = [torch.cat([c, c + torch.tensor([17.3, 14.9])], dim=1) for c in corners]
    boxes[0] = torch.tensor([[33.0, 33.0, 35.0, 35.0]])  # far from what any map shows
    model = Coarse(maps)
    with torch.no_grad():
        model.classify.weight.fill_(1.0)
    x = torch.zeros(n, 3, size, size)
    batches = list(zip(x.split(3), torch.zeros(n, dtype=torch.int64).split(3), strict=True))
    # The search for the layers takes a forward of its own, which would use up maps.
    found = localization(model, batches, boxes, layer="feature", classifier="classify")
    metrics = {r.metric: r for r in found}
    v1, v2 = by_loop(maps[:, 0].numpy(), boxes, size, (0.3, 0.5, 0.7))
    assert 0 < v1.max() < n
    assert metrics["maxboxacc"].value == pytest.approx(100 * v1.max() / n)
    assert metrics["maxboxacc"].settings["tau"] == pytest.approx(v1.argmax() / 1000)
    assert metrics["gt_known_loc"].value == pytest.approx(100 * v1[150] / n)
    assert metrics["maxboxacc_v2"].value == pytest.approx(100 * v2.max(axis=1).mean() / n)
    taus = list(metrics["maxboxacc_v2"].settings["tau"].values())
    assert taus == pytest.approx((v2.argmax(axis=1) / 1000).tolist())


# Whole networks, records for figures, and bad input.


def test_our_network_on_the_built_in_shapes():
    data = shapes("test", num_images=20, image_size=32)
    net = build(NetSpec("preact_resnet18", width=4), 10, data.mean, data.std, 32)
    x, y = data.images.float() / 255, data.labels
    batches = list(zip(x.split(7), y.split(7), strict=True))
    found = localization(net, batches, data.boxes)
    by_metric = {r.metric: r for r in found}
    assert by_metric["top1_loc"].settings["layer"] == "layer4"
    assert by_metric["top1_loc"].value <= by_metric["gt_known_loc"].value
    assert by_metric["gt_known_loc"].value <= by_metric["maxboxacc"].value
    assert by_metric["maxboxacc"].value <= by_metric["maxboxacc_v2"].settings["boxacc"]["0.5"]
    assert [r.value for r in localization(net, batches, data.boxes)] == [r.value for r in found]
    records = localize(net, x, y, data.boxes)
    is_correct = [r.predicted == r.label and r.iou >= 0.5 for r in records]
    assert sum(is_correct) * 5 == by_metric["top1_loc"].value
    assert records[3].heat.shape == (32, 32)
    assert records[3].true_boxes == (tuple(data.boxes[3][0].tolist()),)


def test_network_with_maps_of_its_own():
    data = shapes("test", num_images=4, image_size=64)
    net = ACoL(10, data.mean, data.std, width=4)
    x = data.images.float() / 255
    found = localization(net, [(x, data.labels)], data.boxes)
    assert [r.settings["layer"] for r in found] == [None] * 4
    records = localize(net, x, data.labels, data.boxes)
    logits, maps = net.eval().class_maps(x, None)
    assert [r.predicted for r in records] == logits.argmax(dim=1).tolist()
    heat, _ = heat_maps(maps, (64, 64))
    assert all((r.heat == h).all() for r, h in zip(records, heat, strict=True))


def test_a_named_layer_takes_the_place_of_maps_of_its_own():
    class Both(Painted):
        def class_maps(self, x, classes):
            return self(x), drawn(12).expand(len(x), 12, 12)

    batches, truth = painted(drawn(12, (3, 4, 9, 11, 1.0))), [box(3, 4, 9, 11)]
    for chosen, value in (
        ({}, 0.0),
        ({"layer": "map"}, 100.0),
        ({"classifier": "classify"}, 100.0),
    ):
        found = {r.metric: r for r in localization(Both(), batches, truth, **chosen)}
        assert found["gt_known_loc"].value == value
        assert found["gt_known_loc"].settings["layer"] == ("map" if chosen else None)


@pytest.mark.parametrize("layer", ["body", ""])
def test_a_layer_that_has_no_map_beside_maps_of_its_own_is_an_error_with_the_remedy(layer):
    data = shapes("test", num_images=2, image_size=64)
    net = ACoL(10, data.mean, data.std, width=4)
    batches = [(data.images.float() / 255, data.labels)]
    with pytest.raises(ValueError, match=r"maps of its own .* layer and classifier are left out"):
        localization(net, batches, data.boxes, layer=layer)


@pytest.mark.parametrize(
    "bad", [(-1, 0, 5, 5), (0, 0, 13, 5), (0, 0, 5, 12.5), (5, 5, 5, 8), (6, 0, 2, 5)]
)
def test_box_outside_the_image_is_an_error(bad):
    good = drawn(12, (3, 4, 9, 11, 1.0))
    with pytest.raises(ValueError, match=r"image 1: the box .* does not lie inside .* 12 x 12"):
        score([good, good], [box(3, 4, 9, 11), box(*bad)])


def test_boxes_must_fit_the_images():
    good = drawn(12, (3, 4, 9, 11, 1.0))
    with pytest.raises(ValueError, match="for 1 images, but there are more"):
        score([good, good], [box(3, 4, 9, 11)])
    with pytest.raises(ValueError, match="1 images, but boxes for 2"):
        score([good], [box(3, 4, 9, 11)] * 2)
    with pytest.raises(ValueError, match="no image has a box"):
        score([good], [torch.zeros(0, 4)])
    with pytest.raises(ValueError, match=r"got \[4\]"):
        score([good], [torch.zeros(4)])


def test_labels_out_of_range_and_models_without_a_head_are_errors():
    (x, _), truth = painted(drawn(12, (3, 4, 9, 11, 1.0)))[0], [box(3, 4, 9, 11)]
    for task in (
        lambda y: localization(Painted(), [(x, y)], truth),
        lambda y: localize(Painted(), x, y, truth),
    ):
        with pytest.raises(ValueError, match=r"0\.\.2"):
            task(torch.tensor([3]))
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 144, 3))
    with pytest.raises(Skipped, match=r"no class activation maps: .*no pooling head"):
        localization(flat, [(x, torch.tensor([0]))], truth)
    with pytest.raises(ValueError, match="nonesuch") as error:
        localization(flat, [(x, torch.tensor([0]))], truth, layer="nonesuch")
    assert not isinstance(error.value, Skipped)  # a name that was given is a mistake
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        localization(Painted(), [(x * 255, torch.tensor([0]))], truth)


@pytest.mark.parametrize(
    "options",
    [
        {"cam_threshold": 1.0},
        {"iou_threshold": 0.0},
        {"v2_iou_thresholds": ()},
        {"v2_iou_thresholds": (0.3, 1.2)},
        {"threshold_step": 0.0},
        {"convention": "coco"},
    ],
)
def test_bad_settings(options):
    with pytest.raises(ValueError, match=next(iter(options)).split("_")[-1].rstrip("s")):
        LocalizationSettings(**options)


def test_the_box_of_nothing_counts_only_where_there_is_no_contour():
    # Rounded down, the true box is the pixel that the benchmark takes for the box of nothing.
    corner, elsewhere = box(0, 0, 0.9, 0.9), drawn(12, (6, 6, 10, 10, 1.0))
    found = score([elsewhere], [corner], LocalizationSettings())
    assert found["maxboxacc_v2"].value == 0
    assert found["maxboxacc"].value == 0
    assert score([drawn(12)], [corner], LocalizationSettings())["maxboxacc_v2"].value == 100


def test_boxes_that_are_no_tensors_are_explained():
    with pytest.raises(ValueError, match=r"must be a tensor \[k, 4\], got \[\[0, 0, 3, 3\]\]"):
        score([drawn(12, (6, 6, 10, 10, 1.0))], [[[0, 0, 3, 3]]])


def test_images_without_boxes_have_no_place():
    x, y = painted(drawn(12, (2, 2, 8, 8, 1.0)), drawn(12, (1, 1, 5, 5, 1.0)))[0]
    none, whole = torch.zeros(0, 4), box(1, 1, 5, 5)
    assert localize(Painted(), x, y, [none] * 2) == []
    (found,) = localize(Painted(), x, y, [none, whole])
    assert found.true_boxes == (tuple(whole[0].tolist()),)
    (result, *_) = localization(Painted(), [(x, y)], [none, whole])
    assert result.settings["num_images"] == 1
