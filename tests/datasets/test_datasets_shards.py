"""Shards: what is written is read again, by us and by others, in an order by (seed, epoch)."""

import io
import json
import re
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from alignmixup import datasets
from alignmixup.cli.program import main
from alignmixup.datasets import StreamLoader, scan_folder, scan_shards, write_shards
from alignmixup.datasets.loading.augment import derive_seed
from alignmixup.datasets.loading.decode import read_rgb
from alignmixup.datasets.loading.members import Member, shard_of
from alignmixup.datasets.loading.order import WINDOW, EpochOrder, shard_numbers
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.schema import on_data

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

NUM_TRAIN = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for split, count in (("train", NUM_TRAIN), ("val", 6)):
        for i in range(count):
            path = root / split / "ab"[i % 2] / f"{i:02}.{'jpeg' if i % 3 else 'png'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            coarse = rng.integers(0, 256, (6, 9, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((30 + i, 24), Image.Resampling.BICUBIC).save(path)
    return root


@pytest.fixture
def out(folder, tmp_path):
    return write_shards(datasets.find(f"folder:{folder}@16"), tmp_path / "s", images_per_shard=5)


def epoch_of(files, epoch=0, start_step=0, **options):
    loader = StreamLoader(files, 8, 16, seed=5, **options)
    return [(x.clone(), y.clone()) for x, y in loader.epoch(epoch, start_step)]


def assert_same(first, second):
    for (x, y), (x2, y2) in zip(first, second, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)


@pytest.mark.parametrize("split", ["train", "test"])
def test_shards_hold_the_bytes_and_labels_of_the_files(folder, out, split):
    files, members = scan_folder(folder, split), scan_shards(str(out), split)
    assert members.class_names == files.class_names
    wanted = {
        (Path(p).read_bytes(), int(y)) for p, y in zip(files.paths, files.labels, strict=True)
    }
    read = [
        (Member.of(path).read(), int(y))
        for path, y in zip(members.paths, members.labels, strict=True)
    ]
    assert set(read) == wanted
    assert len(read) == len(files)
    # Each window of shards needs images of all classes, so they are mixed when they are written.
    if split == "train":
        assert len({int(y) for y in members.labels[:5]}) == 2
    else:
        assert members.labels.tolist() == files.labels.tolist()
        first, second = (
            datasets.load(f"shards:{out}", split),
            datasets.load(f"folder:{folder}@16", split),
        )
        assert torch.equal(first.images, second.images)


def test_shards_of_others_need_no_index(out):
    before = scan_shards(str(out), "train")
    for path in out.glob("*.json"):
        path.unlink()
    after = scan_shards(str(out / "{split}-*.tar"), "train")
    assert after.class_names == ("0", "1")  # nothing names them
    assert torch.equal(after.labels, before.labels)
    assert [Member.of(p)[:4] for p in after.paths] == [Member.of(p)[:4] for p in before.paths]
    assert_same(epoch_of(before), epoch_of(after))


@pytest.mark.filterwarnings("ignore")  # it leaves files open
def test_the_webdataset_package_reads_what_we_write(folder, out):
    webdataset = pytest.importorskip("webdataset")
    urls = sorted(str(path) for path in out.glob("val-*.tar"))
    samples = list(webdataset.WebDataset(urls, shardshuffle=False))
    files = scan_folder(folder, "test")
    assert [int(sample["cls"]) for sample in samples] == files.labels.tolist()
    images = [sample.get("jpg") or sample["png"] for sample in samples]
    assert images == [Path(path).read_bytes() for path in files.paths]


def test_a_plain_tar_reader_finds_pairs_with_one_key(out):
    names = []
    for path in sorted(out.glob("train-*.tar")):
        with tarfile.open(path) as tar:
            names += tar.getnames()
    keys = [name.partition(".")[0] for name in names]
    assert keys[::2] == keys[1::2]
    assert {name.partition(".")[2] for name in names} == {"jpg", "png", "cls"}


def test_the_same_images_make_the_same_shards(folder, out, tmp_path):
    again = write_shards(
        datasets.find(f"folder:{folder}@16"), tmp_path / "again", images_per_shard=5
    )
    for path in out.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()


def test_batches_depend_on_seed_and_epoch_alone(out):
    """Not on workers, nor on the step where an epoch starts; ranks have their parts of a batch."""
    files = scan_shards(str(out), "train")
    whole = epoch_of(files, 3)
    assert_same(whole, epoch_of(files, 3, num_workers=2))
    assert_same(whole[2:], epoch_of(files, 3, start_step=2))
    parts = [epoch_of(files, 3, share=slice(rank, None, 2)) for rank in range(2)]
    for (x, _), (even, _), (odd, _) in zip(whole, *parts, strict=True):
        assert torch.equal(x[::2], even)
        assert torch.equal(x[1::2], odd)
    assert not torch.equal(whole[0][0], epoch_of(files, 4)[0][0])


def test_an_order_entered_late_is_its_tail_and_knows_its_length():
    """In windows of shards, images stand in the order that the epoch has without shards."""
    shards = torch.arange(2000) % (2 * WINDOW)
    whole = list(EpochOrder(2000, 64, 32, 0, True, slice(None), shards))
    for start in (0, 7, 32):
        late = EpochOrder(2000, 64, 32, 0, True, slice(None), shards, start_step=start)
        assert list(late) == whole[start:]
        assert len(late) == len(whole) - start
    drawn = torch.tensor([key.index for batch in whole for key in batch])
    rng = torch.Generator().manual_seed(derive_seed("epoch", 0, 0))
    plain = torch.randperm(2000, generator=rng)
    first = set(shards[drawn[:1000]].tolist())
    assert len(first) == WINDOW
    expected = [
        [i for i in plain.tolist() if (int(shards[i]) in first) is own] for own in (True, False)
    ]
    assert drawn.tolist() == expected[0] + expected[1]


def test_an_epoch_has_each_image_once_and_reads_few_shards_at_a_time():
    shards = torch.arange(50).repeat_interleave(7)[:-3]  # the last one is smaller
    seen = []
    for epoch in range(3):
        order = EpochOrder(len(shards), 10, 35, 0, True, slice(None), shards, epoch=epoch)
        rows = torch.tensor([key.index for batch in order for key in batch])
        assert rows.sort().values.tolist() == list(range(len(shards)))
        begins = [shards[rows[i : i + 10]] for i in range(0, len(rows), 10)]
        # Two windows meet in a batch at most.
        assert all(len(set(begin.tolist())) <= 2 * WINDOW for begin in begins)
        first = set(shards[rows[: (WINDOW - 1) * 7]].tolist())
        assert len(first) <= WINDOW
        seen.append(frozenset(first))
    assert len(set(seen)) == 3  # other shards come first in each epoch


def test_files_have_no_shards():
    assert shard_numbers(("/a/b.png", "/a/c.png")) is None
    member = Member("/a/b.tar", "c.png", 512, 9, "0badcafe")
    assert Member.of(member.path) == member
    assert (shard_of(member.path), str(member)) == ("/a/b.tar", "/a/b.tar: c.png")
    beside, other = member._replace(name="d.png"), member._replace(shard="/z.tar")
    paths = [each.path for each in (member, other, beside)]
    assert shard_numbers(paths).tolist() == [0, 1, 0]
    assert shard_numbers(()) is None


def damage(out, how):
    shard = out / "train-000003.tar"
    data = bytearray(shard.read_bytes())
    if how == "missing":
        shard.unlink()
        return f"{shard} is missing"
    if how == "cut":
        shard.write_bytes(data[:700])
        return f"{shard} is cut short at 700 bytes: write it again"
    row = json.loads(shard.with_suffix(".json").read_text())["members"][2]
    data[row[1] + row[2] // 2] ^= 16  # one bit, which most decoders do not notice
    shard.write_bytes(data)
    return f"{shard}: {row[0]} is damaged (its checksum differs): write the shard again"


@pytest.mark.parametrize("how", ["missing", "cut", "flipped"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_shard_is_named_and_fatal_or_skipped(out, how, num_workers):
    files = scan_shards(str(out), "train")
    whole = epoch_of(files)
    problem = damage(out, how)
    with pytest.raises(ValueError, match=re.escape(problem)):
        epoch_of(files, num_workers=num_workers)
    with pytest.warns(UserWarning, match=re.escape(f"{problem}; skipped")) as warned:
        skipped = epoch_of(files, on_error="skip", num_workers=num_workers)
    assert [w.category for w in warned].count(UserWarning) == 1  # others warn of a fork
    assert [x.shape for x, _ in skipped] == [x.shape for x, _ in whole]
    differ = sum(
        not torch.equal(a, b)
        for (x, _), (z, _) in zip(whole, skipped, strict=True)
        for a, b in zip(x, z, strict=True)
    )
    # Of the shard that is cut, its first image may be whole still.
    assert differ in {"missing": (5,), "cut": (4, 5), "flipped": (1,)}[how]


@pytest.mark.parametrize("is_listed", [True, False], ids=["with its index", "without"])
def test_a_shard_that_is_missing_from_the_start_is_named(out, is_listed):
    problem = damage(out, "missing")
    if not is_listed:
        (out / "train-000003.json").unlink()
    (found,) = datasets.check(f"shards:{out}")
    assert found.startswith(problem)
    if is_listed:  # its images are known, so that others can take their places
        assert len(scan_shards(str(out), "train")) == NUM_TRAIN


def test_a_folder_may_have_any_name(folder, tmp_path):
    source, out = datasets.find(f"folder:{folder}@16"), tmp_path / "a [1] {b} *"
    write_shards(source, out)
    assert len(datasets.find(f"shards:{out}").scan(None, "train")) == NUM_TRAIN


def test_shards_of_an_interrupted_write_are_not_part_of_the_next(folder, tmp_path):
    source, out = datasets.find(f"folder:{folder}@16"), tmp_path / "s"

    def interrupt(shard):
        if shard.name == "train-000005.tar":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(source, out, images_per_shard=5, on_shard=interrupt)
    with pytest.raises(ValueError, match=r"train-000000\.tar exists already: delete the"):
        write_shards(source, out, images_per_shard=20)


def test_check_names_what_is_damaged(out):
    assert datasets.check(f"shards:{out}") == []
    problem = damage(out, "flipped")
    assert datasets.check(f"shards:{out}") == [problem]


def test_bad_shards_and_patterns_are_refused(folder, out, tmp_path):
    source = datasets.find(f"folder:{folder}@16")
    with pytest.raises(ValueError, match="has the shards of a data set already"):
        write_shards(source, out)
    with pytest.raises(ValueError, match="images_per_shard must be at least 1, got 0"):
        write_shards(source, tmp_path / "new", images_per_shard=0)
    with pytest.raises(ValueError, match=r"is no folder and has no \{split\} in it"):
        scan_shards(str(tmp_path / "nothing"), "train")
    with pytest.raises(FileNotFoundError, match=r"no file matches .*val-\*\.tar or .*test-\*\.tar"):
        scan_shards(str(tmp_path / "{split}-*.tar"), "test")
    with pytest.raises(ValueError, match="names no path; write shards:PATH"):
        datasets.find("shards:")
    index = out / "train-000001.json"
    index.write_text("{")
    with pytest.raises(ValueError, match=r"train-000001\.json is damaged .*delete it"):
        scan_shards(str(out), "train")
    index.unlink()
    shard = out / "train-000001.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:2000])
    with pytest.raises(ValueError, match=r"train-000001\.tar cannot be read as a shard"):
        scan_shards(str(out), "train")
    with tarfile.open(shard, "w") as tar:
        for name, data in (("x.png", b"no image"), ("x.cls", b"7"), ("y.png", b"no label")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
            if name == "x.cls":
                unlabeled = tar.offset
    with pytest.raises(ValueError, match=r"y\.png has no label"):
        scan_shards(str(out), "train")
    shard.write_bytes(shard.read_bytes()[:unlabeled] + bytes(1024))
    with pytest.raises(ValueError, match=r"x\.png has the label 7, and there are 2 classes"):
        scan_shards(str(out), "train")


def write_tar(path, members):
    """A shard made elsewhere: bytes, or the name of the member that a hard link leads to."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            if isinstance(data, str):
                info.type, info.linkname = tarfile.LNKTYPE, data
                tar.addfile(info)
            else:
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path.parent


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ([("a.jpg", b"photo"), ("a.png", b"mask"), ("a.cls", b"0")], "two images, a.jpg and a.png"),
        ([("a.jpg", b"1"), ("a.cls", b"0"), ("a.jpg", b"2"), ("a.cls", b"1")], "a.jpg and a.jpg"),
        (
            [("a.jpg", b"1"), ("a.cls", b"0"), ("b.jpg", "a.jpg"), ("b.cls", b"1")],
            "b.jpg is a link",
        ),
    ],
)
def test_no_image_of_a_shard_made_elsewhere_is_lost_in_silence(tmp_path, members, match):
    shards = write_tar(tmp_path / "s" / "train-0.tar", members)
    with pytest.raises(ValueError, match=match):
        scan_shards(str(shards), "train")


@pytest.mark.parametrize("label", [b"", b"cat", b"-1", b"1099511627776", b"9" * 30])
def test_a_label_that_is_no_class_number_is_named(tmp_path, label):
    """Of an id in its place, the classes up to it would not fit into memory."""
    shards = write_tar(tmp_path / "s" / "train-0.tar", [("a.jpg", b"photo"), ("a.cls", label)])
    with pytest.raises(ValueError, match=r"train-0\.tar .*a\.cls must hold the number of a class"):
        scan_shards(str(shards), "train")


def test_a_size_of_zero_is_refused(out):
    with pytest.raises(ValueError, match="image_size must be at least 1, got 0"):
        datasets.load(f"shards:{out}@0", "test")


def test_images_that_were_appended_to_a_shard_are_not_left_out(out):
    before = scan_shards(str(out), "train")
    data = np.random.default_rng(0).bytes(30_000)
    with tarfile.open(out / "train-000001.tar", "a") as tar:
        for name, content in (("new.png", data), ("new.cls", b"1")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    with pytest.raises(
        ValueError, match=r"train-000001\.tar has grown since .*01\.json was written"
    ):
        scan_shards(str(out), "train")
    (out / "train-000001.json").unlink()
    after = scan_shards(str(out), "train")
    assert len(after) == len(before) + 1
    assert data in [Member.of(path).read() for path in after.paths]


def test_a_sparse_image_is_refused(tmp_path):
    """Its bytes are not together in the tar: those at its offset are another file's."""
    shards = write_tar(tmp_path / "s" / "train-0.tar", [("a.bmp", bytes(512)), ("a.cls", b"0")])
    shard = shards / "train-0.tar"
    header = bytearray(shard.read_bytes()[:512])
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[386:398], header[398:410] = b"%011o\0" % 0, b"%011o\0" % 512  # one part, at 0
    header[483:495] = b"%011o\0" % 4096  # its size with the holes
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    shard.write_bytes(header + shard.read_bytes()[512:])
    with pytest.raises(ValueError, match=r"a\.bmp is a link or sparse"):
        scan_shards(str(shards), "train")


def test_images_without_files_are_written_without_loss(tmp_path):
    source = datasets.find("shapes")
    images = replace(datasets.load("shapes", "test"), boxes=None)
    few = replace(images, images=images.images[:6], labels=images.labels[:6])
    small = replace(source, function=lambda root, split: few)
    members = scan_shards(str(write_shards(small, tmp_path / "out")), "test")
    for pixels, path in zip(few.images, members.paths, strict=True):
        assert torch.equal(torch.from_numpy(np.array(read_rgb(path))).permute(2, 0, 1), pixels)
    assert members.class_names == images.class_names


def test_a_recipe_is_trained_on_shards(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "shard", f"folder:{folder}@16", "s", "--images", "7"]) == 0
    assert "train with --dataset shards:s" in capsys.readouterr().out
    recipe = on_data(find_recipe("cifar10-r18-baseline-fast"), "shards:s@16")
    assert recipe.data.stream
    assert recipe.name == "shards_s_16-r18-baseline-fast"
    small = ["--net.width", "4", "--train.batch-size", "8", "--train.device", "cpu"]
    train = ["train", "cifar10-r18-baseline-fast", "--dataset", "shards:s@16", "--out", "run"]
    train += [*small, "--train.epochs", "1", "--train.warmup-epochs", "0"]
    assert main(train) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["images"]["image_size"] == 16
