"""Image files: other formats, absurd sizes, files that vanish or are damaged in mid-epoch."""

import fcntl
import os
import re
import signal
import struct
import time
import zlib
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import pytest
import torch
from mutations import damaged
from PIL import EpsImagePlugin, Image

import alignmixup as am
from alignmixup.datasets import StreamLoader
from alignmixup.datasets.folder import check_image_folder, scan_folder
from alignmixup.datasets.loading import decode
from alignmixup.datasets.loading.box_lists import boxes_in_view
from alignmixup.datasets.loading.decode import FORMATS, read_rgb
from alignmixup.experiments.plugins import open_recipe
from alignmixup.recipes.schema import on_data
from alignmixup.training.checkpoint import CHECKPOINT, load_checkpoint
from forked import Forked
from picture_folder import make_pictures

PACKAGE = Path(am.__file__).parent
SMALL = {
    "net.width": 4,
    "train.epochs": 2,
    "train.batch_size": 8,
    "train.device": "cpu",
    "train.warmup_epochs": 0.0,
    "data.stream": True,
    "data.image_size": 32,
}
NAME = "cifar10-r18-input-fast"


def as_bytes(format, size=(20, 12)):
    file = BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(file, format)
    return file.getvalue()


@pytest.mark.parametrize("format", FORMATS)
def test_every_allowed_format_is_read_whatever_the_name(tmp_path, format):
    path = tmp_path / "image.png"
    path.write_bytes(as_bytes(format))
    assert read_rgb(path).size == (20, 12)


@pytest.mark.parametrize("format", ["EPS", "PDF", "TGA", "ICO", "PCX", "SGI", "DDS", "JPEG2000"])
def test_other_formats_are_refused_and_none_starts_a_program(tmp_path, monkeypatch, format):
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **options: pytest.fail("ran"))
    monkeypatch.setattr("subprocess.Popen", lambda *args, **options: pytest.fail("ran"))
    path = tmp_path / "image.png"
    path.write_bytes(as_bytes(format))
    with pytest.raises(ValueError, match=r"image\.png cannot be read as an image \(it is none of"):
        read_rgb(path)
    with pytest.raises(ValueError, match="none of JPEG, PNG"):
        boxes_in_view([torch.ones(1, 4)], [str(path)], 8)


def test_files_are_opened_in_one_place():
    """Pillow's ``Image.open`` tries all its formats unless it is given a list."""
    calls = [
        (path.name, line.strip())
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\bImage\.open\(|\bimread\(|decode_image\(|read_image\(", line)
    ]
    assert calls == [
        ("decode.py", "with _NO_WARNINGS, Image.open(source, formats=FORMATS) as image:")
    ]


def png_of(width, height):
    """The header of a PNG of this size, and no pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    )


@pytest.mark.parametrize("size", [(2**14, 2**14), (2**27 + 1, 1), (2**31 - 1, 2**31 - 1)])
def test_absurd_sizes_are_refused_before_a_pixel_is_decoded(tmp_path, size):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_of(*size) + struct.pack(">I", 0) + b"IDAT")
    with pytest.raises(ValueError, match=r"bomb\.png cannot be read as an image \(.*pixels"):
        read_rgb(path)


def test_the_limit_is_ours_where_pillows_is_switched_off(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    monkeypatch.setattr(decode, "MAX_PIXELS", 200)
    path = tmp_path / "large.png"
    path.write_bytes(as_bytes("PNG"))
    with pytest.raises(ValueError, match="20 x 12 pixels are too many"):
        read_rgb(path)


@pytest.mark.parametrize("format", FORMATS)
def test_every_mutation_is_an_image_or_named(tmp_path, format):
    """Most formats have no checksum, so some mutations are images of other pixels."""
    path = tmp_path / "image"
    for _, changed in damaged(as_bytes(format), seed=2):
        path.write_bytes(changed)
        with suppress(ValueError):
            assert read_rgb(path).mode == "RGB"


def spoil(files, index, how):
    path = Path(files.paths[index])
    if how == "vanished":
        path.unlink()
    else:
        os.truncate(path, 40)  # never empty in between, where a worker may be reading it
    return str(path)


def epoch_of(files, **options):
    loader = StreamLoader(files, 4, 16, seed=5, **options)
    return [(x.clone(), y.clone()) for x, y in loader.epoch(0)]


@pytest.fixture
def files(tmp_path):
    make_pictures(tmp_path / "data")
    return scan_folder(tmp_path / "data", "train")


@pytest.mark.parametrize("how", ["vanished", "corrupt"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_in_mid_epoch_a_file_is_named_and_fatal_by_default(files, how, num_workers):
    batches = StreamLoader(files, 4, 16, seed=5, num_workers=num_workers).epoch(0)
    next(batches)
    paths = {spoil(files, index, how) for index in range(len(files))}
    with pytest.raises(ValueError, match=r"is missing|cannot be read") as caught:
        list(batches)
    assert any(str(caught.value).startswith(path) for path in paths)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["vanished", "corrupt"])
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_skipped_file_changes_nothing_else(files, how, num_workers):
    whole = epoch_of(files, num_workers=0)
    path = spoil(files, 6, how)
    with pytest.warns(UserWarning, match=f"{re.escape(path)}.*; skipped") as warned:
        skipped = epoch_of(files, on_error="skip", num_workers=num_workers)
    assert len(warned) == 1
    assert [x.shape for x, _ in skipped] == [x.shape for x, _ in whole]
    same = [
        torch.equal(a, b)
        for (x, _), (z, _) in zip(whole, skipped, strict=True)
        for a, b in zip(x, z, strict=True)
    ]
    assert same.count(False) == 1


def test_a_file_is_named_once_and_skipped_in_every_epoch(files):
    path = spoil(files, 15, "vanished")  # the last one: the first one takes its place
    loader = StreamLoader(files, 4, 16, seed=5, on_error="skip")
    with pytest.warns(UserWarning, match=f"{re.escape(path)}.*; skipped") as warned:
        labels = [torch.cat([y for _, y in loader.epoch(epoch)]).sum() for epoch in range(3)]
    assert len(warned) == 1
    assert labels == [7] * 3  # of the class of the last one there is one less


def test_a_folder_that_has_vanished_is_fatal_even_where_files_are_skipped(files):
    for index in range(len(files)):
        spoil(files, index, "vanished")
    with pytest.raises(ValueError, match=r"0\.png is missing; .*is missing"):
        epoch_of(files, on_error="skip")


def test_evaluation_skips_nothing(files):
    with pytest.raises(ValueError, match="to evaluate, use 'raise'"):
        StreamLoader(files, 4, 16, seed=5, is_train=False, on_error="skip")
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'skip', got 'pass'"):
        am.DataSpec("cifar10", on_error="pass")


def test_a_run_that_a_damaged_image_has_ended_resumes_with_skip(tmp_path):
    name = make_pictures(tmp_path / "data")
    broken = tmp_path / "data" / "train" / "dark" / "3.png"
    out = tmp_path / "run"

    chosen = on_data(open_recipe(NAME), name)
    broken.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"3\.png cannot be read as an image"):
        am.train(chosen, out, changes=SMALL, quiet=True)
    changes = {**SMALL, "data.on_error": "skip"}
    with pytest.warns(UserWarning, match=r"3\.png.*skipped"):
        run = am.train(chosen, out, changes=changes, quiet=True)
    assert run.summary.is_complete
    assert load_checkpoint(out / CHECKPOINT).facts["epoch"] == 2


def test_a_check_of_the_data_names_each_damaged_image(tmp_path):
    make_pictures(tmp_path)
    for name in ("1.png", "2.png"):
        (tmp_path / "train" / "dark" / name).write_bytes(as_bytes("EPS"))
    problems = check_image_folder(tmp_path)
    assert [Path(problem.split(" ")[0]).name for problem in problems] == ["1.png", "2.png"]


# torch raises in whatever the main thread does when the worker dies, so it is a process of its own.
DEAD_WORKER = """
import os, signal, sys
from alignmixup.datasets import StreamLoader
from alignmixup.datasets.folder import scan_folder

loader = StreamLoader(scan_folder(sys.argv[1], "train"), 2, 16, seed=5, num_workers=1)
try:
    for _ in loader.epoch(0):
        os.kill(loader._loader._iterator._workers[0].pid, signal.SIGKILL)
    list(loader.epoch(1))
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_dead_worker_ends_the_epoch_with_one_sentence(tmp_path):
    make_pictures(tmp_path / "data")
    (line,) = Forked(DEAD_WORKER, [str(tmp_path / "data")], os.environ).finish()
    assert "a process that decodes images has died" in line or "is killed by signal" in line


def die(paths):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_worker_that_decodes_into_memory_ends_the_load(files):
    with pytest.raises(RuntimeError, match="a process that decodes images has died"):
        list(decode._map_blocks(die, files.paths, 2))


DECODING = """
import fcntl
import multiprocessing
import sys
import time
from alignmixup.datasets.folder import scan_folder
from alignmixup.datasets.loading import decode, stream


def slow(path):
    print("decoding", flush=True)
    time.sleep(60)


multiprocessing.set_start_method("fork", force=True)  # as in a program that is not forked
decode.BLOCK, decode.open_image, stream.open_image = 1, slow, slow
files, lock = scan_folder(sys.argv[1], "train"), open(sys.argv[2], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
if sys.argv[3] == "memory":
    decode.decode_files(files.paths, 16, num_workers=2)
next(stream.StreamLoader(files, 2, 16, seed=0, num_workers=2).epoch(0))
"""


@pytest.mark.parametrize("how", ["memory", "streamed"])
def test_decoding_processes_end_with_the_one_that_is_killed(tmp_path, how):
    """They hold the lock of its run, too: the same command would be refused."""
    make_pictures(tmp_path / "pictures")
    lock = tmp_path / "lock"
    process = Forked(DECODING, [str(tmp_path / "pictures"), str(lock), how], os.environ)
    process.wait_for("decoding")
    process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < deadline, "a decoding process is still there"
                time.sleep(0.1)
    process.fail()
