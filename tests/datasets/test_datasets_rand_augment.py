"""RandAugment against timm's operations, random erasing, repeated augmentation, and their laws."""

import random

import numpy as np
import pytest
import scipy.stats
import torch
from PIL import Image

from alignmixup.datasets import StreamLoader, scan_folder
from alignmixup.datasets.loading.order import EpochOrder
from alignmixup.datasets.loading.rand_augment import (
    ERASED_AREA,
    NAMES,
    NUM_OPERATIONS,
    Operation,
    change,
    draw_operations,
    erase,
)
from alignmixup.recipes.schema import DataSpec
from torchvision_schemas import define_torchvision_schemas

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

MEAN, STD = (0.4, 0.5, 0.6), (0.1, 0.2, 0.2)
FILL = (102, 128, 153)
# timm's names, where they are not ours: variants that get stronger with the magnitude.
THEIRS = {"TranslateX": "TranslateXRel", "TranslateY": "TranslateYRel"} | {
    name: f"{name}Increasing"
    for name in ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")
}


def picture(seed=0, size=(21, 17)):
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def files(tmp_path):
    for i in range(10):
        path = tmp_path / "train" / "ab"[i % 2] / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(i, (30 + i, 24)).save(path)
    return scan_folder(tmp_path, "train")


def batches_of(loader, epoch=0, start_step=0):
    return [(x.clone(), y.clone()) for x, y in loader.epoch(epoch, start_step)]


def assert_same(first, second):
    for (x, y), (x2, y2) in zip(first, second, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)


# ---- RandAugment ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timm_augment():
    define_torchvision_schemas()
    pytest.importorskip("timm")
    from timm.data import auto_augment

    return auto_augment


# At 10 timm's Posterize keeps no bit, which Pillow refuses.
COMPARED = [
    (name, magnitude)
    for name in NAMES
    for magnitude in (0.0, 4.3, 9.0, 10.0)
    if (name, magnitude) != ("Posterize", 10.0)
]


@pytest.mark.parametrize(("name", "magnitude"), COMPARED)
def test_operations_are_timms(name, magnitude, timm_augment, monkeypatch):
    """Equal pixels, in both directions."""
    hparams = {"img_mean": FILL, "interpolation": Image.Resampling.BICUBIC}
    theirs = timm_augment.AugmentOp(THEIRS.get(name, name), 1.0, magnitude, hparams)
    for direction in (1, -1):
        # Its coin of the direction: above one half negates.
        monkeypatch.setattr(random, "random", lambda coin=0.5 - 0.4 * direction: coin)
        ours = change(picture(), Operation(name, magnitude / 10, direction), FILL)
        assert np.array_equal(np.array(ours), np.array(theirs(picture())))


def test_posterizing_keeps_a_bit():
    """At magnitude 10, which one draw in fifty of magnitude 9 is clipped to."""
    levels = np.unique(np.array(change(picture(), Operation("Posterize", 1.0, 1), FILL)))
    assert levels.tolist() == [0, 128]


def test_the_operations_are_those_of_timms_policy(timm_augment):
    policy = timm_augment.rand_augment_transform("rand-m9-mstd0.5-inc1", {})
    assert sorted(op.name for op in policy.ops) == sorted(THEIRS.get(n, n) for n in NAMES)
    assert policy.num_layers == NUM_OPERATIONS
    assert {(op.prob, op.magnitude, op.magnitude_std) for op in policy.ops} == {(0.5, 9, 0.5)}


def test_draws_follow_their_distributions():
    rng = torch.Generator().manual_seed(0)
    drawn = [draw_operations(7.0, rng) for _ in range(3000)]
    operations = [operation for each in drawn for operation in each]
    # Each of two is left out half the time.
    counts = [sum(len(each) == n for each in drawn) for n in (0, 1, 2)]
    assert scipy.stats.chisquare(counts, [750, 1500, 750]).pvalue > 1e-4
    by_name = [sum(o.name == name for o in operations) for name in NAMES]
    assert scipy.stats.chisquare(by_name).pvalue > 1e-4
    levels = [10 * o.strength for o in operations]
    assert scipy.stats.kstest(levels, scipy.stats.norm(7.0, 0.5).cdf).pvalue > 1e-4
    ups = sum(o.direction == 1 for o in operations)
    assert scipy.stats.binomtest(ups, len(operations)).pvalue > 1e-4
    assert max(o.strength for _ in range(50) for o in draw_operations(10.0, rng)) == 1


# ---- erasing -------------------------------------------------------------------------------------


def test_a_rectangle_becomes_noise_of_the_data():
    rng, image = torch.Generator().manual_seed(0), torch.full((64, 48, 3), 7, dtype=torch.uint8)
    areas, values = [], []
    for _ in range(200):
        changed = (erased := erase(image, MEAN, STD, rng)) != image
        box = changed.any(2)
        rows, columns = box.any(1).nonzero().flatten(), box.any(0).nonzero().flatten()
        top, left, h, w = int(rows[0]), int(columns[0]), len(rows), len(columns)
        assert int(rows[-1]) == top + h - 1
        assert int(columns[-1]) == left + w - 1
        inside = erased[top : top + h, left : left + w]
        areas.append(h * w / (64 * 48))
        values.append(inside.float().flatten(0, 1) / 255)
    low, high = ERASED_AREA
    assert low * 0.8 < min(areas)
    assert max(areas) < high * 1.1
    assert sum(areas) / 200 == pytest.approx((low + high) / 2, abs=0.03)
    noise = torch.cat(values)
    torch.testing.assert_close(noise.mean(0), torch.tensor(MEAN), atol=0.02, rtol=0)
    # Clipped to bytes: slightly narrower than the data.
    torch.testing.assert_close(noise.std(0), torch.tensor(STD), atol=0.01, rtol=0)
    assert (image == 7).all()  # the image itself is left alone


def test_erasing_has_its_probability(files):
    plain = StreamLoader(files, 10, 16, seed=1)
    erasing = StreamLoader(files, 10, 16, seed=1, erasing=0.25)
    changed = 0
    for epoch in range(40):
        ((x, _),), ((x2, _),) = batches_of(plain, epoch), batches_of(erasing, epoch)
        changed += int((x != x2).flatten(1).any(1).sum())
    assert scipy.stats.binomtest(changed, 400, 0.25).pvalue > 1e-4


# ---- the loader ----------------------------------------------------------------------------------

FULL = {"rand_augment": 9.0, "erasing": 0.5, "repeats": 3}


def test_what_is_zero_changes_nothing(files):
    plain = StreamLoader(files, 4, 16, seed=5, jitter=0.2)
    zero = StreamLoader(files, 4, 16, seed=5, jitter=0.2, rand_augment=0.0, erasing=0.0, repeats=1)
    assert_same(batches_of(plain, 2), batches_of(zero, 2))


@pytest.mark.parametrize("setting", ["rand_augment", "erasing"])
def test_augmentation_leaves_the_crops_and_the_order_alone(files, setting):
    """Each has a source of randomness of its own: some images stay as they are, at any setting."""
    plain = StreamLoader(files, 10, 16, seed=5)
    augmented = StreamLoader(files, 10, 16, seed=5, **{setting: FULL[setting]})
    same = 0
    for epoch in range(4):
        ((x, y),), ((x2, y2),) = batches_of(plain, epoch), batches_of(augmented, epoch)
        assert torch.equal(y, y2)
        same += int((x == x2).flatten(1).all(1).sum())
    assert 0 < same < 40


def test_workers_and_resuming_change_nothing(files):
    alone = StreamLoader(files, 2, 16, seed=5, **FULL)
    helped = StreamLoader(files, 2, 16, seed=5, num_workers=2, **FULL)
    whole = batches_of(alone, 3)
    assert_same(whole, batches_of(helped, 3))
    assert_same(whole[2:], batches_of(StreamLoader(files, 2, 16, seed=5, **FULL), 3, start_step=2))
    assert not torch.equal(whole[0][0], batches_of(alone, 4)[0][0])


def test_evaluation_is_not_augmented(files):
    plain = StreamLoader(files, 5, 16, seed=5, is_train=False)
    assert_same(
        batches_of(plain), batches_of(StreamLoader(files, 5, 16, 5, is_train=False, **FULL))
    )


@pytest.mark.parametrize("shards", [None, torch.arange(20) // 4])
@pytest.mark.parametrize("repeats", [2, 3])
def test_repeats_come_in_a_row_as_different_copies(shards, repeats):
    order = EpochOrder(20, 6, 3, 0, True, slice(None), shards)
    single = [key.index for batch in order for key in batch]
    order = EpochOrder(20, 6, 3, 0, True, slice(None), shards, repeats)
    keys = [key for batch in order for key in batch]
    assert len(keys) == len(single) == 18  # an epoch has as many steps
    assert [key.index for key in keys] == [single[k // repeats] for k in range(18)]
    assert [key.copy for key in keys] == [k % repeats for k in range(18)]
    order.start_step = 2
    assert next(iter(order)) == keys[12:18]
    halves = [EpochOrder(20, 6, 3, 0, True, slice(k, None, 2), shards, repeats) for k in (0, 1)]
    assert [next(iter(half)) for half in halves] == [keys[0:6:2], keys[1:6:2]]


def test_copies_are_augmented_differently(files):
    ((x, y),) = batches_of(StreamLoader(files, 9, 16, seed=5, repeats=3, drop_last=True))
    for k in range(0, 9, 3):
        assert len(set(y[k : k + 3].tolist())) == 1
        assert not torch.equal(x[k], x[k + 1])
    ((single, _),) = batches_of(StreamLoader(files, 9, 16, seed=5, drop_last=True))
    # The first copy of an image is the image without repeats.
    assert torch.equal(x[0], single[0])
    assert torch.equal(x[3], single[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rand_augment": 11.0}, r"rand_augment must be a magnitude from 0 \(none\) to 10, got 11"),
        ({"rand_augment": -1.0}, "rand_augment must be a magnitude"),
        ({"erasing": 1.5}, r"erasing is a probability and must lie in \[0, 1\], got 1.5"),
        ({"repeats": 0}, "repeats must be an integer >= 1, got 0"),
    ],
)
def test_bad_settings_are_named(files, settings, message):
    with pytest.raises(ValueError, match=message):
        DataSpec("imagenet", stream=True, **settings)
    with pytest.raises(ValueError, match=message):
        StreamLoader(files, 4, 16, seed=5, **settings)
