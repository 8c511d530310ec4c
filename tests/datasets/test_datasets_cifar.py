"""CIFAR readers: the official layouts read right, damaged files named, pickled code never run."""

import os
import pickle
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from alignmixup.datasets.cifar import CIFAR10, CIFAR100, check_cifar, load_cifar

SMALL10 = replace(CIFAR10, train_records=6, test_records=4)
SMALL100 = replace(CIFAR100, train_records=12, test_records=5)
FINE_NAMES = [f"fine{i}" for i in range(100)]


def python2_pickle(value):
    """Write ``value`` as Python 2 and its numpy wrote the official files (protocol 2)."""
    return b"\x80\x02" + _emit(value) + b"."


def _emit(value):
    if isinstance(value, bytes):  # a Python 2 str
        return b"T" + struct.pack("<i", len(value)) + value
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if value is None:
        return b"N"
    if isinstance(value, list):
        return b"](" + b"".join(map(_emit, value)) + b"e"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_emit, value)) + b"t"
    if isinstance(value, dict):
        return b"}(" + b"".join(_emit(k) + _emit(v) for k, v in value.items()) + b"u"
    assert isinstance(value, np.ndarray)
    assert value.dtype == np.uint8
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + _emit((0,)) + _emit(b"b")
    dtype = b"cnumpy\ndtype\n" + _emit((b"u1", 0, 1)) + b"R"
    dtype += _emit((3, b"|", None, None, None, -1, -1, 0)) + b"b"
    is_fortran = not value.flags.c_contiguous
    raw = value.tobytes(order="F" if is_fortran else "C")
    flag = b"\x88" if is_fortran else b"\x89"
    return array + b"tR(" + _emit(1) + _emit(value.shape) + dtype + flag + _emit(raw) + b"tb"


def random_batch(n, num_classes, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3072), dtype=np.uint8), rng.integers(0, num_classes, n).tolist()


def write_python10(root, dump=python2_pickle):
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for k, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
        pixels, labels = random_batch(4 if name == "test_batch" else 6, 10, k)
        content = {b"batch_label": name.encode(), b"labels": labels, b"data": pixels}
        (folder / name).write_bytes(dump(content))
    names = [f"name{i}".encode() for i in range(10)]
    (folder / "batches.meta").write_bytes(dump({b"num_vis": 3072, b"label_names": names}))
    return folder


def write_binary10(root):
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for k, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
        pixels, labels = random_batch(4 if name == "test_batch" else 6, 10, k)
        records = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def expected10(split):
    parts = (
        [random_batch(6, 10, k) for k in range(5)] if split == "train" else [random_batch(4, 10, 5)]
    )
    pixels = np.concatenate([p for p, _ in parts])
    return pixels, [label for _, labels in parts for label in labels]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("write", [write_python10, write_binary10])
def test_every_pixel_and_label_is_where_the_format_says(tmp_path, write, split):
    write(tmp_path)
    got = load_cifar(SMALL10, tmp_path, split)
    pixels, labels = expected10(split)
    assert got.labels.tolist() == labels
    assert got.images.shape == (len(labels), 3, 32, 32)
    for i, c, y, x in [(0, 0, 0, 0), (1, 2, 31, 5), (3, 1, 7, 30)]:
        assert got.images[i, c, y, x] == pixels[i, 1024 * c + 32 * y + x]
    assert torch.equal(got.images.flatten(1), torch.from_numpy(pixels))


def test_class_names_come_from_the_meta_file_or_are_built_in(tmp_path):
    folder = write_python10(tmp_path)
    assert load_cifar(SMALL10, tmp_path, "test").class_names[3] == "name3"
    (folder / "batches.meta").unlink()
    assert load_cifar(SMALL10, tmp_path, "test").class_names[3] == "cat"


def test_the_folder_itself_may_be_given(tmp_path):
    folder = write_binary10(tmp_path)
    assert len(load_cifar(SMALL10, folder, "train")) == 30


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_pickles_saved_again_by_python_3_are_read(tmp_path, protocol):
    write_python10(tmp_path, dump=lambda value: pickle.dumps(value, protocol=protocol))
    got = load_cifar(SMALL10, tmp_path, "test")
    assert torch.equal(got.images.flatten(1), torch.from_numpy(expected10("test")[0]))


def test_an_array_in_column_order_is_read_right(tmp_path):
    folder = write_python10(tmp_path)
    pixels, labels = expected10("test")
    content = {b"labels": labels, b"data": np.asfortranarray(pixels)}
    (folder / "test_batch").write_bytes(python2_pickle(content))
    got = load_cifar(SMALL10, tmp_path, "test")
    assert torch.equal(got.images.flatten(1), torch.from_numpy(pixels))


@pytest.mark.parametrize("kind", ["python", "binary"])
def test_cifar100_gives_fine_labels(tmp_path, kind):
    folder = tmp_path / f"cifar-100-{kind}"
    folder.mkdir()
    for seed, (name, n) in enumerate([("train", 12), ("test", 5)]):
        pixels, fine = random_batch(n, 100, seed)
        coarse = [label % 20 for label in fine]
        if kind == "python":
            content = {b"coarse_labels": coarse, b"fine_labels": fine, b"data": pixels}
            (folder / name).write_bytes(python2_pickle(content))
        else:
            labels = np.array([coarse, fine], dtype=np.uint8).T
            (folder / f"{name}.bin").write_bytes(np.concatenate([labels, pixels], 1).tobytes())
    if kind == "python":
        names = [name.encode() for name in FINE_NAMES]
        (folder / "meta").write_bytes(python2_pickle({b"fine_label_names": names}))
    else:
        (folder / "fine_label_names.txt").write_text("\n".join(FINE_NAMES) + "\n")
    got = load_cifar(SMALL100, tmp_path, "train")
    pixels, fine = random_batch(12, 100, 0)
    assert got.labels.tolist() == fine
    assert torch.equal(got.images.flatten(1), torch.from_numpy(pixels))
    assert got.class_names == tuple(FINE_NAMES)
    assert check_cifar(SMALL100, tmp_path) == []


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("where", ["test_batch", "batches.meta"])
def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path, where):
    folder = write_python10(tmp_path)
    trace = tmp_path / "was-here"
    (folder / where).write_bytes(pickle.dumps({b"data": Touch(trace)}, protocol=2))
    with pytest.raises(ValueError, match=rf"{where}.*mkdir"):
        load_cifar(SMALL10, tmp_path, "test")
    assert not trace.exists()
    # The same file does harm when it is simply unpickled, so the test can fail.
    pickle.loads((folder / where).read_bytes())
    assert trace.exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cbuiltins\neval\n(S'1+1'\ntR.",
        b"cnumpy.core.multiarray\nfromstring\n(tR.",
        b"(S'ls'\nios\nsystem\n.",
        b"cnumpy\ndtype\nN}S'__init__'\nNs\x86b.",  # alter a stand-in's class
        b"Ptoken\n.",
        b"",
        b"}.",
        b"I5\n.",
        b"}S'labels'\n](I1\nesS'data'\ncnumpy\nndarray\n)Rs.",
    ],
)
def test_odd_pickles_are_value_errors_that_name_the_file(tmp_path, program):
    folder = write_python10(tmp_path)
    (folder / "test_batch").write_bytes(program)
    with pytest.raises(ValueError, match="test_batch"):
        load_cifar(SMALL10, tmp_path, "test")
    write_again = python2_pickle({b"labels": expected10("test")[1], b"data": expected10("test")[0]})
    (folder / "test_batch").write_bytes(write_again)
    assert len(load_cifar(SMALL10, tmp_path, "test")) == 4  # nothing of it stayed behind


@pytest.mark.parametrize("cut", [1, 100, 3073])
@pytest.mark.parametrize("write", [write_python10, write_binary10])
def test_a_truncated_file_is_named(tmp_path, write, cut):
    folder = write(tmp_path)
    path = next(p for p in folder.iterdir() if p.stem == "data_batch_3")
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=r"data_batch_3.*damaged"):
        load_cifar(SMALL10, tmp_path, "train")
    problems = check_cifar(SMALL10, tmp_path)
    assert len(problems) == 1
    assert str(path) in problems[0]


def test_missing_files_are_named_with_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cifar-10-batches-py.*data fetch cifar10"):
        load_cifar(SMALL10, tmp_path, "train")
    folder = write_binary10(tmp_path)
    (folder / "data_batch_2.bin").unlink()
    (folder / "test_batch.bin").unlink()
    problems = check_cifar(SMALL10, tmp_path)
    assert [p.split(" ")[0] for p in problems] == [
        str(folder / "data_batch_2.bin"),
        str(folder / "test_batch.bin"),
    ]


def test_a_label_out_of_range_is_named(tmp_path):
    folder = write_binary10(tmp_path)
    path = folder / "test_batch.bin"
    path.write_bytes(b"\x0b" + path.read_bytes()[1:])
    with pytest.raises(ValueError, match=r"test_batch.bin.*label 11"):
        load_cifar(SMALL10, tmp_path, "test")


def test_the_official_number_of_images_is_expected(tmp_path):
    write_binary10(tmp_path)
    with pytest.raises(ValueError, match="has 6 images, not 10000"):
        load_cifar(CIFAR10, tmp_path, "train")
