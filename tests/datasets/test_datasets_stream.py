"""Streaming loader: the same batches whatever the number of workers, and boxes that fit."""

import math
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from alignmixup.datasets import StreamLoader, scan_folder
from alignmixup.datasets.folder import FileSet
from alignmixup.datasets.loading import stream
from alignmixup.datasets.loading.augment import change_colors, derive_seed, draw_colors
from alignmixup.datasets.loading.decode import (
    available_cores,
    center_square,
    open_image,
    reduce_scale,
)
from alignmixup.datasets.loading.view import View, choose_box
from torchvision_schemas import define_torchvision_schemas

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


def test_a_loader_left_early_ends_its_workers_at_once(files, monkeypatch):
    """They would finish the second batch, of 7.5 s, and torch would wait for 5 s of them."""

    def slow(path):
        if "/b/" in path:
            time.sleep(1.5)
        return open_image(path)

    monkeypatch.setattr(stream, "open_image", slow)
    loader = StreamLoader(files, 6, 16, seed=5, num_workers=1, is_train=False)
    before = set(multiprocessing.active_children())
    batches = loader.epoch(0)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    began = time.monotonic()
    del loader, batches
    assert time.monotonic() - began < 4
    assert not worker.is_alive()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_leaves_the_workers_to_the_loader(files, number, monkeypatch):
    """A terminal and Slurm send it to the workers too; training needs batches until it saves."""
    expected = batches_of(StreamLoader(files, 2, 16, seed=5))

    def slow(path):
        time.sleep(0.02)
        return open_image(path)

    start = stream._start_worker

    def late(is_closed, worker):
        time.sleep(0.2 * worker)  # the second one has yet to start when the signal comes
        start(is_closed, worker)

    monkeypatch.setattr(stream, "open_image", slow)
    monkeypatch.setattr(stream, "_start_worker", late)
    before = set(multiprocessing.active_children())
    loader = StreamLoader(files, 2, 16, seed=5, num_workers=2)
    batches = loader.epoch(0)
    found = [next(batches)]
    for worker in set(multiprocessing.active_children()) - before:
        os.kill(worker.pid, number)
    assert_same([*found, *batches], expected)


def test_an_epoch_left_early_does_not_leak_into_the_next(files):
    loader = StreamLoader(files, 2, 16, seed=5, num_workers=1)
    next(loader.epoch(0))
    assert_same(batches_of(loader, 1), batches_of(StreamLoader(files, 2, 16, seed=5), 1))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_draws_nothing_from_torchs_own_generator(files, num_workers):
    """A run with dropout resumes exactly only if starting an epoch anew takes no number."""
    loader = StreamLoader(files, 4, 16, seed=3, num_workers=num_workers)
    before = torch.get_rng_state()
    for start_step in (0, 2):
        batches_of(loader, 1, start_step)
        assert torch.equal(torch.get_rng_state(), before)


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


def test_evaluation_is_in_order_and_takes_the_center(files):
    loader = StreamLoader(files, 4, 16, seed=5, is_train=False)
    x, y = (torch.cat(parts) for parts in zip(*batches_of(loader, 7), strict=True))
    assert torch.equal(y, files.labels)
    for i, path in enumerate(files.paths):
        expected = center_square(Image.open(path).convert("RGB"), 16, 0.875)
        assert torch.equal(x[i], torch.from_numpy(np.array(expected)).permute(2, 0, 1) / 255)


@pytest.fixture(scope="module")
def transforms():
    define_torchvision_schemas()
    from torchvision import transforms

    return transforms


def opened(path):
    return Image.open(path).convert("RGB")


def to_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def test_evaluation_is_torchvisions_resize_and_center_crop(files, transforms):
    """Twice the size, so that no side and no border falls between two pixels."""
    theirs = transforms.Compose([transforms.Resize(48), transforms.CenterCrop(36)])
    loader = StreamLoader(files, 11, 36, seed=5, is_train=False, resize=48)
    ((x, _),) = batches_of(loader)
    for image, path in zip(x, files.paths, strict=True):
        assert torch.equal(image, to_tensor(theirs(opened(path))))


def test_evaluation_squashed_is_torchvisions_resize(files, transforms):
    loader = StreamLoader(files, 11, 16, seed=5, is_train=False, resize=16, squash=True)
    ((x, _),) = batches_of(loader)
    for image, path in zip(x, files.paths, strict=True):
        assert torch.equal(image, to_tensor(transforms.Resize((16, 16))(opened(path))))


@pytest.mark.parametrize("squash", [False, True])
def test_training_windows_are_windows_of_the_resized_image(files, transforms, squash):
    """Each is one of all that there are, every place of a long enough run, mirrored or not."""
    one = type(files)("x", "train", files.paths[:1], files.labels[:1], files.class_names)
    size = (28, 28) if squash else 28  # 30 x 24 becomes 28 x 28, or 35 x 28
    whole = to_tensor(transforms.Resize(size)(opened(files.paths[0])))
    windows = whole.unfold(1, 26, 1).unfold(2, 26, 1).movedim((1, 2), (0, 1))
    assert windows.shape[:2] == ((3, 3) if squash else (3, 10))
    seen = set()
    loader = StreamLoader(one, 1, 26, seed=0, resize=28, squash=squash)
    num_places = windows.shape[0] * windows.shape[1] * 2
    for epoch in range(10 * num_places):
        x = next(loader.epoch(epoch))[0][0]
        for mirrored in (False, True):
            image = x.flip(2) if mirrored else x
            distance = (windows - image).abs().flatten(2).amax(2)
            # Pillow keeps the borders of a box in float32: two levels at most.
            if distance.min() < 2.01 / 255:
                top, left = divmod(int(distance.argmin()), windows.shape[1])
                seen.add((top, left, mirrored))
                break
        else:
            raise AssertionError(f"epoch {epoch} shows no window of the resized image")
    # Each place is missed with probability exp(-10).
    assert len(seen) == num_places


@given(
    width=st.integers(1, 900),
    height=st.integers(1, 900),
    image_size=st.integers(1, 64),
    more=st.integers(0, 20),
    squash=st.booleans(),
    shares=st.none() | st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
)
def test_every_window_lies_inside_and_has_the_scale_asked_for(
    width, height, image_size, more, squash, shares
):
    view = View(image_size, (0.08, 1.0), image_size + more, squash)
    left, top, right, bottom = view.window(width, height, shares)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    for shown, side in ((right - left, width), (bottom - top, height)):
        resized = side if squash else min(width, height)
        assert shown == pytest.approx(resized * image_size / (image_size + more))
    if shares is None:
        assert left + right == pytest.approx(width)
        assert top + bottom == pytest.approx(height)


def test_random_parts_have_the_law_of_torchvisions(transforms):
    """Area and aspect ratio of 3,000 boxes each, by the Kolmogorov-Smirnov distance."""
    from scipy.stats import ks_2samp

    rng = torch.Generator().manual_seed(0)
    image = torch.zeros(3, 300, 400)
    ours, theirs = [], []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(3000):
            shares = torch.rand(10, 4, generator=rng, dtype=torch.float64).tolist()
            left, top, right, bottom = choose_box(400, 300, (0.08, 1.0), shares)
            ours.append((top, left, bottom - top, right - left))
            get = transforms.RandomResizedCrop.get_params
            theirs.append(get(image, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)))
    ours, theirs = np.array(ours, float), np.array(theirs, float)
    for measure in (
        lambda b: b[:, 2] * b[:, 3],
        lambda b: b[:, 3] / b[:, 2],
        lambda b: b[:, 0],
        lambda b: b[:, 1],
    ):
        assert ks_2samp(measure(ours), measure(theirs)).pvalue > 1e-3


def test_colors_change_the_part_and_nothing_else(files):
    plain = StreamLoader(files, 11, 16, seed=5)
    colored = StreamLoader(files, 11, 16, seed=5, jitter=0.4, lighting=0.1)
    ((x, y),), ((x2, y2),) = batches_of(plain, 2), batches_of(colored, 2)
    assert torch.equal(y, y2)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(derive_seed("epoch", 5, 2)))
    for image, changed, index in zip(x, x2, order.tolist(), strict=True):
        rng = torch.Generator().manual_seed(derive_seed("image", 5, 2, index))
        torch.rand(10, 4, generator=rng, dtype=torch.float64)
        torch.randint(0, 2, (), generator=rng)
        colors = draw_colors(0.4, 0.1, rng)
        levels = (image * 255).round().to(torch.uint8).permute(1, 2, 0)
        expected = change_colors(levels, colors).permute(2, 0, 1) / 255
        assert torch.equal(changed, expected)
    assert (x - x2).abs().mean() > 0.02
    still = StreamLoader(files, 11, 16, seed=5, is_train=False, jitter=0.4, lighting=0.1)
    assert_same(batches_of(still), batches_of(StreamLoader(files, 11, 16, seed=5, is_train=False)))


def test_workers_change_no_colors_and_no_windows(files):
    options = {"resize": 20, "squash": True, "jitter": 0.4, "lighting": 0.1}
    alone = StreamLoader(files, 4, 16, seed=5, **options)
    helped = StreamLoader(files, 4, 16, seed=5, num_workers=2, **options)
    assert_same(batches_of(alone, 1), batches_of(helped, 1))
    by_machine = StreamLoader(files, 4, 16, seed=5, num_workers=None, **options)
    assert by_machine._loader.num_workers == 0  # few files: processes would cost more
    assert_same(batches_of(alone, 1), batches_of(by_machine, 1))


@given(
    width=st.integers(1, 900),
    height=st.integers(1, 900),
    shares=st.lists(st.tuples(*[st.floats(0, 0.999)] * 4), min_size=1, max_size=10),
)
def test_every_box_lies_inside_and_has_an_allowed_shape(width, height, shares):
    left, top, right, bottom = choose_box(width, height, (0.08, 1.0), shares)
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
        left, top, right, bottom = choose_box(400, 300, (0.2, 0.6), shares)
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
        ({"resize": 15}, r"resize must be at least image_size \(16\).* got 15"),
        ({"jitter": 1.5}, r"jitter must lie in \[0, 1\], got 1.5"),
        ({"lighting": -0.1}, "lighting must not be negative, got -0.1"),
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


@pytest.mark.parametrize("is_gray", [False, True])
def test_a_reduced_jpeg_shows_the_same_part(tmp_path, is_gray):
    """Faster, as the decoder leaves out what the part is too small to show."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (5, 7) if is_gray else (5, 7, 3), dtype=np.uint8)
    for split in ("train", "val"):
        path = tmp_path / split / "a" / "0.jpg"
        path.parent.mkdir(parents=True)
        image = Image.fromarray(coarse).resize((351, 263), Image.Resampling.BICUBIC)
        image.save(path, quality=95)
    files = scan_folder(tmp_path, "train")

    def parts(reduced, side):
        loader = StreamLoader(files, 1, side, seed=0, area=(0.3, 1.0), reduced=reduced)
        return torch.cat([x for epoch in range(8) for x, _ in loader.epoch(epoch)])

    # Parts of 0.3 of the surface and more have 32 pixels even at a quarter of the size.
    whole, reduced = parts(False, 32), parts(True, 32)
    assert not torch.equal(whole, reduced)
    assert (whole - reduced).abs().mean() < 0.01
    assert torch.equal(parts(False, 256), parts(True, 256))  # there is nothing to leave out


@pytest.mark.parametrize("side", [256, 257, 261, 263])
def test_a_reduced_jpeg_is_not_stretched(tmp_path, side):
    """At 1/8, 257 pixels become 33, of which the last one stands for a single pixel."""
    waves = 127 + 100 * np.sin(20 * np.arange(side) / side)
    pixels = np.broadcast_to(waves[:, None, None], (side, side, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "0.jpg", quality=98)
    file = FileSet("one", "test", (str(tmp_path / "0.jpg"),), torch.tensor([0]), ("a", "b"))
    whole, reduced = (
        next(StreamLoader(file, 1, 32, 0, is_train=False, resize=32, reduced=reduced).epoch(0))[0]
        for reduced in (False, True)
    )
    assert not torch.equal(whole, reduced)
    assert (whole - reduced).abs().mean() < 0.01  # 0.1 for 257 pixels that are stretched


def test_the_scale_is_the_smallest_that_keeps_the_pixels(tmp_path):
    Image.new("RGB", (800, 600)).save(tmp_path / "0.jpg")
    for box, side, size in [
        ((0, 0, 800, 600), 75, (100, 75)),
        ((0, 0, 800, 600), 76, (200, 150)),
        ((10, 10, 310, 310), 150, (400, 300)),
        ((10, 10, 310, 310), 151, (800, 600)),
        ((0, 0, 20, 20), 40, (800, 600)),
    ]:
        with open_image(tmp_path / "0.jpg") as image:
            reduce_scale(image, box, side)
            assert image.size == size


def test_processes_of_torchrun_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(24)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert available_cores() == 24
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert available_cores() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert available_cores() == 1
