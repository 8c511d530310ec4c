"""Streaming loader: the same batches whatever the number of workers, and boxes that fit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from alignmixup.data import StreamLoader, scan_folder
from alignmixup.data.decode import centre_square
from alignmixup.data.stream import _choose_box

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(11):
        for split in ("train", "val"):
            path = tmp_path / split / "ab"[i % 2] / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            coarse = rng.integers(0, 256, (6, 9, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((30 + i, 24), Image.Resampling.BICUBIC).save(path)
    return scan_folder(tmp_path, "train")


def batches_of(loader, epoch=0, start_step=0):
    return [(x.clone(), y.clone()) for x, y in loader.epoch(epoch, start_step)]


def assert_same(first, second):
    assert len(first) == len(second)
    for (x, y), (x2, y2) in zip(first, second, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)


def test_workers_change_nothing(files):
    alone = StreamLoader(files, 4, 16, seed=5)
    helped = StreamLoader(files, 4, 16, seed=5, num_workers=2)
    for epoch in (0, 3):
        assert_same(batches_of(alone, epoch), batches_of(helped, epoch))
    assert_same(batches_of(alone, 3)[1:], batches_of(helped, 3, start_step=1))


def test_an_epoch_left_early_does_not_leak_into_the_next(files):
    loader = StreamLoader(files, 2, 16, seed=5, num_workers=1)
    next(loader.epoch(0))
    assert_same(batches_of(loader, 1), batches_of(StreamLoader(files, 2, 16, seed=5), 1))


def test_epochs_are_repeatable_and_differ(files):
    loader = StreamLoader(files, 11, 16, seed=5)
    ((x, y),), ((x2, y2),) = batches_of(loader, 0), batches_of(loader, 1)
    assert_same([(x, y)], batches_of(loader, 0))
    assert sorted(y.tolist()) == sorted(y2.tolist()) == sorted(files.labels.tolist())
    assert not torch.equal(x, x2)
    assert not torch.equal(x, batches_of(StreamLoader(files, 11, 16, seed=6))[0][0])


def test_where_only_the_whole_image_fits_it_is_given_mirrored_half_the_time(files):
    square = Image.open(files.paths[0]).convert("RGB").resize((20, 20))
    square.save(files.paths[0])
    one = type(files)("x", "train", files.paths[:1], files.labels[:1], files.class_names)
    whole = torch.from_numpy(np.array(square)).permute(2, 0, 1) / 255
    plain = StreamLoader(one, 1, 20, seed=0, area=(1.0, 1.0), flip=False)
    assert all(torch.equal(next(plain.epoch(e))[0][0], whole) for e in range(5))
    flipping = StreamLoader(one, 1, 20, seed=0, area=(1.0, 1.0))
    images = [next(flipping.epoch(e))[0][0] for e in range(40)]
    num_mirrored = sum(torch.equal(image.flip(2), whole) for image in images)
    assert num_mirrored + sum(torch.equal(image, whole) for image in images) == 40
    assert 8 <= num_mirrored <= 32


def test_evaluation_is_in_order_and_takes_the_centre(files):
    loader = StreamLoader(files, 4, 16, seed=5, is_train=False)
    x, y = (torch.cat(parts) for parts in zip(*batches_of(loader, 7), strict=True))
    assert torch.equal(y, files.labels)
    for i, path in enumerate(files.paths):
        expected = centre_square(Image.open(path).convert("RGB"), 16, 0.875)
        assert torch.equal(x[i], torch.from_numpy(np.array(expected)).permute(2, 0, 1) / 255)


@given(
    width=st.integers(1, 900),
    height=st.integers(1, 900),
    shares=st.lists(st.tuples(*[st.floats(0, 0.999)] * 4), min_size=1, max_size=10),
)
def test_every_box_lies_inside_and_has_an_allowed_shape(width, height, shares):
    left, top, right, bottom = _choose_box(width, height, (0.08, 1.0), shares)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    w, h = right - left, bottom - top
    # One pixel of rounding on either side.
    assert (w + 1) / max(h - 1, 0.5) >= 3 / 4
    assert (w - 1) / (h + 1) <= 4 / 3


def test_boxes_have_the_areas_asked_for():
    rng = torch.Generator().manual_seed(0)
    areas = []
    for _ in range(500):
        shares = torch.rand(10, 4, generator=rng).tolist()
        left, top, right, bottom = _choose_box(400, 300, (0.2, 0.6), shares)
        areas.append((right - left) * (bottom - top) / 120_000)
    assert min(areas) > 0.19
    assert max(areas) < 0.61
    assert math.isclose(sum(areas) / 500, 0.4, abs_tol=0.03)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_corrupt_file_is_named_in_one_line(files, num_workers):
    broken = files.paths[6]
    with open(broken, "wb") as file:
        file.write(b"no image")
    with pytest.raises(ValueError, match=r"cannot be read as an image") as caught:
        batches_of(StreamLoader(files, 4, 16, seed=5, num_workers=num_workers))
    assert str(caught.value).startswith(broken)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"image_size": 0}, "image_size must be at least 1, got 0"),
        ({"num_workers": -1}, "num_workers must be at least 0, got -1"),
        ({"area": (0.5, 0.1)}, "area must hold"),
        ({"centre": 1.5}, "centre must lie in"),
        ({"batch_size": 12, "drop_last": True}, "11 images make no full batch of 12"),
    ],
)
def test_bad_settings_are_refused(files, options, match):
    with pytest.raises(ValueError, match=match):
        StreamLoader(files, **{"batch_size": 4, "image_size": 16, "seed": 0} | options)


def test_an_empty_set_is_refused(files):
    empty = type(files)("x", "train", (), torch.empty(0, dtype=torch.int64), ("a",))
    with pytest.raises(ValueError, match="no image"):
        StreamLoader(empty, 4, 16, seed=0)
