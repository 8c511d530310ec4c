"""Detection: average precision by hand and against pycocotools; two steps of real fine-tuning."""

import contextlib
import io
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from alignmixup.datasets.voc import scan_voc
from alignmixup.evaluation.detection.average_precision import (
    Detected,
    Truth,
    VocPrecision,
    coco_average_precision,
    voc_average_precision,
)
from alignmixup.evaluation.detection.crops import augment
from alignmixup.evaluation.detection.detectors import faster_rcnn, ssd300, torchvision_state
from alignmixup.evaluation.detection.fine_tuning import COCO_FASTER_RCNN, FineTuner, FineTuning
from alignmixup.evaluation.detection.results import detect, detection
from alignmixup.models import NetSpec, build
from torchvision_ops import nms, patch_torchvision_ops, roi_align


def fine_tune(detector, examples, settings, *, on_epoch=None):
    """Train the detector in place and return the mean loss of each epoch."""
    tuner = FineTuner(detector, examples, settings)
    while not tuner.is_done:
        for _ in tuner.run_epoch():
            pass
        if on_epoch is not None:
            on_epoch(tuner.epoch - 1, tuner.losses[-1])
    return tuple(tuner.losses)


def truth(boxes, labels=None, ignored=None):
    boxes = np.array(boxes, float).reshape(-1, 4)
    n = len(boxes)
    return Truth(
        boxes=boxes,
        labels=np.array(labels if labels is not None else [0] * n, dtype=np.int64),
        is_ignored=np.array(ignored if ignored is not None else [False] * n, dtype=bool),
        areas=(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]),
        size=(200, 100),
    )


def found(boxes, scores, labels=None):
    boxes = np.array(boxes, float).reshape(-1, 4)
    labels = labels if labels is not None else [0] * len(boxes)
    return Detected(boxes, np.array(labels, np.int64), np.array(scores, float))


A, B, C = (0, 0, 10, 10), (20, 0, 30, 10), (40, 0, 50, 10)
FAR = (80, 80, 90, 90)


# Average precision by hand.


def test_voc_by_hand():
    # In order of score: hit, miss, hit, miss; one of three true boxes is never found.
    truths = [truth([A, B]), truth([C])]
    said = [found([A, FAR], [0.9, 0.8]), found([FAR, C], [0.6, 0.7])]
    # precision 1, 1/2, 2/3, 1/2 at recall 1/3, 1/3, 2/3, 2/3
    precision = voc_average_precision(truths, said, 1)
    assert precision.area == pytest.approx(((1 + 2 / 3) / 3,))
    # p(r) is 1 up to r = 0.3, 2/3 up to 0.6, then 0
    assert precision.eleven_point == pytest.approx(((4 * 1 + 3 * 2 / 3) / 11,))


def test_recall_that_falls_on_a_point():
    # Three hits of ten: recall 0.3, which as a float is less than 3 * 0.1.
    truths = [truth([A]) for _ in range(10)]
    said = [found([A], [0.5]) for _ in range(3)] + [found([], [])] * 7
    assert voc_average_precision(truths, said, 1).eleven_point == pytest.approx((4 / 11,))


def test_second_detection_of_a_box_is_a_miss():
    said = [found([A, A, B], [0.9, 0.8, 0.7])]
    precision = voc_average_precision([truth([A, B])], said, 1)
    assert precision.area == pytest.approx(((1 + 2 / 3) / 2,))


def test_claim_is_on_the_box_of_most_overlap_even_if_taken():
    near, other = (0, 0, 10, 10), (0, 2, 10, 12)  # IoU of the two 2/3
    said = [found([near, (0, 0.5, 10, 10.5)], [0.9, 0.8])]
    # The second overlaps `near` by 0.90 and `other` by 0.74: VOC calls it a miss.
    precision = voc_average_precision([truth([near, other])], said, 1)
    assert precision.area == pytest.approx((0.5,))


def test_difficult_boxes_count_neither_way():
    truths = [truth([A, B], ignored=[False, True])]
    plain = voc_average_precision(truths, [found([A], [0.5])], 1)
    assert plain.area == (1.0,)
    hits_difficult = voc_average_precision(truths, [found([B, B, A], [0.9, 0.8, 0.5])], 1)
    assert hits_difficult.area == (1.0,)
    misses = voc_average_precision(truths, [found([FAR, A], [0.9, 0.5])], 1)
    assert misses.area == (0.5,)


def test_overlap_of_exactly_one_half_is_enough():
    half = (0, 0, 10, 5)
    assert voc_average_precision([truth([A])], [found([half], [1.0])], 1).area == (1.0,)
    less = (0, 0, 10, 4.99)
    assert voc_average_precision([truth([A])], [found([less], [1.0])], 1).area == (0.0,)


def test_classes_are_apart_and_one_without_boxes_has_no_precision():
    truths = [truth([A, B], labels=[0, 2])]
    said = [found([A, B], [0.9, 0.8], labels=[0, 1])]
    precision = voc_average_precision(truths, said, 4)
    assert precision.area == (1.0, None, 0.0, None)
    assert VocPrecision.mean(precision.area) == 0.5
    with pytest.raises(ValueError, match="no class"):
        VocPrecision.mean((None, None))


def test_bad_records():
    with pytest.raises(ValueError, match="got 0 for 1"):
        voc_average_precision([truth([A])], [], 1)
    with pytest.raises(ValueError, match=r"0\.\.0, got 1 to 1"):
        voc_average_precision([truth([A], labels=[1])], [found([], [])], 1)
    with pytest.raises(ValueError, match=r"0\.\.0, got -1"):
        coco_average_precision([truth([A])], [found([A], [1.0], labels=[-1])], 1)


def random_scene(seed, num_images=12, num_classes=3):
    """Boxes far apart, so that the two ways of matching agree; some found, some invented."""
    rng = np.random.default_rng(seed)
    truths, said = [], []
    for _ in range(num_images):
        corners = np.array([[x, y] for x in range(0, 160, 40) for y in (0, 40)], float)
        corners += rng.uniform(0, 8, corners.shape)
        boxes = np.concatenate([corners, corners + rng.uniform(15, 28, corners.shape)], axis=1)
        labels = rng.integers(0, num_classes, len(boxes))
        truths.append(truth(boxes[:6], labels[:6]))
        moved = boxes + rng.normal(0, 1.5, boxes.shape)
        keep = rng.random(len(boxes)) < 0.8
        twice = rng.random(len(boxes)) < 0.2
        shown = np.concatenate([moved[keep], moved[twice] + 0.5])
        classes = np.concatenate([labels[keep], labels[twice]])
        said.append(found(shown, rng.random(len(shown)), classes))
    return truths, said


def coco_curve(truths, said, num_classes):
    """The precision at 101 recalls and IoU 0.5 of each class, from pycocotools itself."""
    from pycocotools.cocoeval import COCOeval

    kept = []

    class Keeping(COCOeval):
        def __init__(self, *args):
            super().__init__(*args)
            kept.append(self)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr("pycocotools.cocoeval.COCOeval", Keeping)
        values = coco_average_precision(truths, said, num_classes)
    return kept[0].eval["precision"][0, :, :, 0, 2], values


@pytest.mark.parametrize("seed", range(3))
def test_voc_curve_is_that_of_pycocotools(seed):
    truths, said = random_scene(seed)
    curve, values = coco_curve(truths, said, 3)
    ours = voc_average_precision(truths, said, 3)
    assert 0.3 < min(ours.area) < max(ours.area) < 0.99
    # p(0), p(0.1), ... are every tenth of its 101 points; the area is their mean in the limit.
    assert ours.eleven_point == pytest.approx(curve[::10].mean(axis=0), abs=1e-9)
    assert ours.area == pytest.approx(curve.mean(axis=0), abs=0.012)
    assert values["map50"] == pytest.approx(curve.mean())


def test_coco_by_hand():
    # IoU 0.8 is a hit at 0.50 to 0.80, seven of the ten thresholds.
    values = coco_average_precision([truth([A])], [found([(0, 0, 10, 8)], [1.0])], 1)
    assert values["map50"] == pytest.approx(1.0)
    assert values["map75"] == pytest.approx(1.0)
    assert values["map"] == pytest.approx(0.7)


def test_coco_crowds_are_ignored_and_nothing_found_is_zero(capsys):
    truths = [truth([A, (60, 0, 100, 40)], ignored=[False, True])]
    inside = found([(60, 0, 70, 10), A], [0.9, 0.5])  # wholly inside the crowd
    assert coco_average_precision(truths, [inside], 1)["map"] == pytest.approx(1.0)
    assert coco_average_precision(truths, [found([], [])], 1)["map"] == 0
    for nothing in (truth([]), truth([A], ignored=[True])):
        for said in (found([], []), found([A], [0.9])):
            with pytest.raises(ValueError, match="no class has a true box that counts"):
                coco_average_precision([nothing], [said], 1)
    assert capsys.readouterr().out == ""


# The operators that the tests bring along.


def test_nms_by_hand():
    boxes = torch.tensor([[0, 0, 10, 10], [0, 1, 10, 11], [20, 0, 30, 10], [0, 5, 10, 15.0]])
    scores = torch.tensor([0.5, 0.9, 0.1, 0.8])
    # 1 first; 3 overlaps it by 6/14; 0 overlaps 1 by 9/11 and 3 by 5/15
    assert nms(boxes, scores, 0.9).tolist() == [1, 3, 0, 2]
    assert nms(boxes, scores, 0.5).tolist() == [1, 3, 2]
    assert nms(boxes, scores, 0.4).tolist() == [1, 2]
    assert nms(boxes[:0], scores[:0], 0.5).tolist() == []


def test_roi_align_of_a_plane_is_its_value_at_the_center_of_each_bin():
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(16.0), indexing="ij")
    plane = (2 * x + 3 * y + 1)[None, None]
    rois = torch.tensor([[0, 4.0, 6.0, 20.0, 18.0]])  # half as large on the map
    out = roi_align(plane, rois, 0.5, 3, 4, 2, False)
    xs, ys = 2 + 2 * (torch.arange(4) + 0.5), 3 + 2 * (torch.arange(3) + 0.5)
    torch.testing.assert_close(out[0, 0], 2 * xs[None] + 3 * ys[:, None] + 1)


# Detectors.


@pytest.fixture
def operators(monkeypatch):
    patch_torchvision_ops(monkeypatch)


@pytest.fixture(scope="module")
def trained():
    return build(NetSpec("resnet50"), 7, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), image_size=64, seed=1)


XML = "<annotation><size><width>64</width><height>48</height></size>{}</annotation>"
OBJECT = (
    "<object><name>{}</name><difficult>{}</difficult><bndbox><xmin>{}</xmin><ymin>{}</ymin>"
    "<xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
)


@pytest.fixture
def voc(tmp_path):
    """Four images of a bright square, a dog, or of a dark one, a cat; the last difficult only."""
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (tmp_path / "VOC2007" / name).mkdir(parents=True)
    for i, (name, shade) in enumerate([("dog", 255), ("cat", 0), ("dog", 255), ("dog", 255)]):
        x, y = 8 + 4 * i, 6
        pixels = np.full((48, 64, 3), 128, np.uint8)
        pixels[y : y + 32, x : x + 32] = shade
        Image.fromarray(pixels).save(tmp_path / f"VOC2007/JPEGImages/{i}.jpg")
        objects = OBJECT.format(name, int(i == 3), x + 1, y + 1, x + 32, y + 32)
        (tmp_path / f"VOC2007/Annotations/{i}.xml").write_text(XML.format(objects))
    (tmp_path / "VOC2007/ImageSets/Main/trainval.txt").write_text("0\n1\n2\n3\n")
    return scan_voc(tmp_path, class_names=("cat", "dog"))


@pytest.mark.slow
@pytest.mark.usefixtures("operators")
def test_backbone_has_the_trained_weights(trained, torchvision_resnet):
    detector = faster_rcnn(trained, 2, min_size=64, max_size=64)
    body = detector.backbone.body.eval()
    ours = trained.eval()
    x = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        maps = body(ours.normalize(x))
        expected = ours.layer4(ours.layer3(ours.layer2(ours.layer1(ours.stem(ours.normalize(x))))))
    torch.testing.assert_close(maps["3"], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        torch.tensor(detector.transform.image_mean), trained.normalize.mean.flatten()
    )
    theirs = torchvision_resnet.state_dict()
    assert torchvision_state(theirs).keys() == torchvision_state(trained.state_dict()).keys()
    assert faster_rcnn(theirs, 2).transform.image_mean == [0.485, 0.456, 0.406]
    spec = NetSpec("resnet50", autoencoder="vector")
    encoder = build(spec, 7, (0.5,) * 3, (0.2,) * 3, image_size=64).state_dict()
    assert torchvision_state(encoder).keys() == torchvision_state(theirs).keys()


@pytest.fixture
def torchvision_resnet():
    import torchvision

    return torchvision.models.resnet50()


def small_faster_rcnn(trained):
    """A Faster R-CNN that looks at few proposals: full numbers take a minute without kernels."""
    detector = faster_rcnn(trained, 2, min_size=48, max_size=64, trainable_layers=1)
    few = {"training": 40, "testing": 20}
    detector.rpn._pre_nms_top_n = detector.rpn._post_nms_top_n = few
    detector.roi_heads.fg_bg_sampler.batch_size_per_image = 16
    return detector


def loss_of(detector, examples):
    """The loss on the images as they are; what torchvision samples is the same at every call."""
    used = [e for e in (examples[i] for i in range(len(examples))) if not e.is_ignored.all()]
    images = [e.image.float() / 255 for e in used]
    targets = [{"boxes": e.boxes, "labels": e.labels + 1} for e in used]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        return float(sum(detector.train()(images, targets).values()))


@pytest.mark.usefixtures("operators")
@pytest.mark.slow
def test_faster_rcnn_trains_and_is_scored(trained, voc):
    settings = FineTuning(num_epochs=2, batch_size=3, lr=0.005, num_warmup_steps=1)
    detector = small_faster_rcnn(trained)
    before = {k: v.clone() for k, v in detector.state_dict().items()}
    first = loss_of(detector, voc)
    state = torch.random.get_rng_state()
    told = []
    losses = fine_tune(detector, voc, settings, on_epoch=lambda *what: told.append(what))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert told == list(enumerate(losses))
    assert loss_of(detector, voc) < first
    # The same seed gives the same first epoch, also where the second never comes.
    again = fine_tune(small_faster_rcnn(trained), voc, replace(settings, num_epochs=1))
    assert again == losses[:1]
    changed = {k for k, v in detector.state_dict().items() if not torch.equal(v, before[k])}
    assert "backbone.body.layer4.2.conv3.weight" in changed
    assert "backbone.body.layer1.0.conv1.weight" not in changed
    said, truths = detect(detector, voc, batch_size=3)
    assert len(said) == len(truths) == 4
    assert [t.is_ignored.tolist() for t in truths] == [[False]] * 3 + [[True]]
    assert all(s.labels.min(initial=0) >= 0 and s.labels.max(initial=0) <= 1 for s in said)
    results = detection(detector, voc, style="coco", batch_size=4)
    assert {r.metric for r in results} == {"map", "map50", "map75"}
    assert all(0 <= r.value <= 100 for r in results)


@pytest.mark.slow
@pytest.mark.usefixtures("operators")
def test_ssd_trains_and_is_scored(trained, voc):
    two = replace(voc, rows=voc.rows[:2])
    detector = ssd300(trained, 2, trainable_layers=1)
    before = loss_of(detector, two)
    sides = []
    detector.backbone.register_forward_hook(
        lambda _, given, maps: sides.append([m.shape[2] for m in maps.values()])
    )
    settings = FineTuning(2, batch_size=2, lr=1e-3, num_warmup_steps=1, augmentation="ssd")
    fine_tune(detector, two, settings)
    assert sides == [[38, 19, 10, 5, 3, 1]] * 2
    assert loss_of(detector, two) < before
    results = {r.metric: r for r in detection(detector, two, style="voc")}
    assert set(results) == {"map", "map_area"}
    assert set(results["map"].settings["by_class"]) == {"cat", "dog"}
    assert results["map"].to_json()


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("make", "millions", "frozen", "trained_layer"),
    [
        pytest.param(
            partial(faster_rcnn, min_size=96, max_size=128),
            41.4,
            "backbone.body.layer1.0.conv1.weight",
            "backbone.body.layer2.0.conv1.weight",
            marks=pytest.mark.slow,
        ),
        (ssd300, 31.6, "backbone.stem.0.weight", "backbone.layer1.0.conv1.weight"),
    ],
)
def test_the_real_detectors_take_a_step(trained, voc, make, millions, frozen, trained_layer):
    """ResNet-50 at its real width, 20 classes, every setting but the image's size as it comes."""
    detector = make(trained, 20)
    count = sum(p.numel() for p in detector.parameters()) / 1e6
    assert count == pytest.approx(millions, abs=0.05)
    before = {k: v.clone() for k, v in detector.state_dict().items()}
    one = replace(voc, rows=voc.rows[:1])
    (loss,) = fine_tune(detector, one, FineTuning(1, 1, lr=1e-3, num_warmup_steps=1))
    # Untrained: about the loss of a guess among 21 classes.
    assert 0.5 < loss < 100
    after = detector.state_dict()
    assert torch.equal(after[frozen], before[frozen])
    assert not torch.equal(after[trained_layer], before[trained_layer])
    assert all(v.isfinite().all() for v in after.values())


# Over three seeds the loss of the SSD fell by 4 % each time, that of the Faster R-CNN by more.
@pytest.mark.slow
@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("make", "lr"), [(small_faster_rcnn, 0.005), (lambda net: ssd300(net, 2), 1e-3)]
)
def test_detectors_learn(trained, voc, make, lr):
    few = replace(voc, rows=voc.rows[:2])
    settings = FineTuning(9, batch_size=2, lr=lr, num_warmup_steps=1)
    losses = fine_tune(make(trained), few, settings)
    assert sum(losses[-3:]) < 0.985 * sum(losses[:3])


class Perfect(nn.Module):
    """Says what is true, in the way of torchvision's detectors."""

    def __init__(self, examples):
        super().__init__()
        self.examples = iter([examples[i] for i in range(len(examples))])

    def forward(self, images):
        batch = [next(self.examples) for _ in images]
        return [
            {"boxes": e.boxes, "labels": e.labels + 1, "scores": torch.ones(len(e.labels))}
            for e in batch
        ]


@pytest.mark.parametrize("style", ["voc", "coco"])
def test_detector_that_says_the_truth_scores_full_marks(voc, style):
    results = detection(Perfect(voc), voc, style=style, batch_size=3)
    assert [r.value for r in results] == pytest.approx([100] * len(results))
    assert all(r.task == "detection" for r in results)


def test_bad_input(voc, trained):
    with pytest.raises(ValueError, match="style"):
        detection(Perfect(voc), voc, style="imagenet")
    with pytest.raises(ValueError, match="no examples"):
        detect(Perfect(voc), replace(voc, rows=()))
    with pytest.raises(ValueError, match="no example has an object"):
        fine_tune(nn.Linear(1, 1), replace(voc, rows=voc.rows[3:]), COCO_FASTER_RCNN)
    with pytest.raises(ValueError, match="lr"):
        FineTuning(1, 1, lr=0.0)
    with pytest.raises(ValueError, match="batch_size"):
        FineTuning(1, 0, lr=0.1)
    with pytest.raises(ValueError, match="not the weights of a ResNet-50"):
        torchvision_state(nn.Linear(2, 2).state_dict())


def test_learning_rate_warms_up_and_falls():
    settings = FineTuning(10, 4, lr=1.0, milestones=(6, 8), num_warmup_steps=4)
    assert [settings.rate(0, step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [settings.rate(epoch, 99) for epoch in (5, 6, 8)] == pytest.approx([1.0, 0.1, 0.01])


# What may happen to a training image.


@pytest.mark.parametrize("kind", ["flip", "ssd"])
def test_boxes_follow_their_pixels(kind):
    image = torch.full((3, 40, 60), 0.5)
    image[:, 10:26, 20:44] = 1.0
    boxes, labels = torch.tensor([[20, 10, 44, 26.0]]), torch.tensor([3])
    shapes = set()
    for seed in range(60):
        rng = torch.Generator().manual_seed(seed)
        out, moved, kept = augment(image, boxes, labels, kind, rng)
        shapes.add(tuple(out.shape))
        assert kept.tolist() == [3]
        x0, y0, x1, y1 = (int(v) for v in moved[0])
        assert 0 <= x0 < x1 <= out.shape[2]
        assert 0 <= y0 < y1 <= out.shape[1]
        level = out[0, y0, x0]
        assert (out[:, y0:y1, x0:x1] == out[:, y0 : y0 + 1, x0 : x0 + 1]).all()
        for around in (out[0, y0:y1, max(0, x0 - 1)], out[0, y0:y1, min(out.shape[2] - 1, x1)]):
            assert (around < level).all() or x0 == 0 or x1 == out.shape[2]
    assert len(shapes) == (1 if kind == "flip" else len(shapes))
    assert len(shapes) > 20 or kind == "flip"


def test_augmentation_is_a_function_of_its_generator():
    image = torch.rand(3, 30, 30, generator=torch.Generator().manual_seed(0))
    boxes, labels = torch.tensor([[3, 4, 20, 25.0], [10, 2, 28, 9]]), torch.tensor([0, 1])
    for seed in range(10):
        runs = [
            augment(image, boxes, labels, "ssd", torch.Generator().manual_seed(seed))
            for _ in range(2)
        ]
        for a, b in zip(*runs, strict=True):
            assert torch.equal(a, b)
    with pytest.raises(ValueError, match="unknown augmentation"):
        augment(image, boxes, labels, "mosaic", torch.Generator())
