"""Tiny-ImageNet reader: labels, boxes and gray images; the cache is used, and never trusted."""

import logging
import os
import shutil
from unittest import TestCase

import numpy as np
import pytest
import torch

from alignmixup.datasets import tiny_imagenet
from alignmixup.datasets.tiny_imagenet import TINY, TinyLayout, check_tiny, load_tiny, load_tiny_val
from tiny_folder import COLOURS, LAYOUT, WNIDS, make_tiny, save


@pytest.fixture
def root(tmp_path):
    make_tiny(tmp_path)
    return tmp_path


def nearest_color(image):
    mean = image.float().mean((1, 2))
    distance = {w: (mean - torch.tensor(c).float()).abs().max().item() for w, c in COLOURS.items()}
    return min(distance, key=distance.get), min(distance.values())


def test_labels_follow_the_sorted_wnids_in_both_splits(root):
    train = load_tiny(root, "train", LAYOUT)
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert train.class_names == ("goldfish", "toad", "n03")
    test = load_tiny(root, "test", LAYOUT)
    assert test.labels.tolist() == [1, 2, 0, 1]
    for image_set, skipped in [(train, 3), (test, None)]:
        for i, image in enumerate(image_set.images):
            if i != skipped:
                wnid, distance = nearest_color(image)
                assert sorted(WNIDS).index(wnid) == image_set.labels[i]
                assert distance < 4


def test_a_gray_image_has_three_equal_channels(root):
    image = load_tiny(root, "train", LAYOUT).images[3]
    assert torch.equal(image[0], image[1])
    assert torch.equal(image[0], image[2])
    assert (image.float() - 77).abs().max() <= 2


def test_boxes_end_outside_where_the_files_end_inside(root):
    train = load_tiny(root, "train", LAYOUT)
    assert train.boxes[0].tolist() == [[0, 10, 64, 21]]
    assert train.boxes[1].tolist() == [[1, 10, 64, 22]]
    assert load_tiny(root, "test", LAYOUT).boxes[2].tolist() == [[0, 2, 45, 63]]


def test_the_cache_gives_the_same_and_spares_the_decoding(root, monkeypatch):
    first = load_tiny(root, "train", LAYOUT)
    assert (root / "tiny-imagenet-200" / "decoded-train.safetensors").is_file()
    with monkeypatch.context() as patch:
        patch.setattr(tiny_imagenet, "decode_files", lambda *_: pytest.fail("decoded again"))
        again = load_tiny(root, "train", LAYOUT)
    assert torch.equal(first.images, again.images)


def test_a_changed_file_makes_the_cache_stale(root):
    load_tiny(root, "train", LAYOUT)
    path = root / "tiny-imagenet-200" / "train" / "n01" / "images" / "n01_0.JPEG"
    save(path, (250, 250, 0))
    os.utime(path, ns=(0, 12345))
    assert load_tiny(root, "train", LAYOUT).images[0, 0].float().mean() > 245


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\xff" * 64])
def test_a_damaged_cache_is_written_anew(root, content):
    first = load_tiny(root, "train", LAYOUT)
    cache = root / "tiny-imagenet-200" / "decoded-train.safetensors"
    cache.write_bytes(content)
    assert torch.equal(load_tiny(root, "train", LAYOUT).images, first.images)
    assert cache.stat().st_size > first.images.numel()


def test_a_cache_that_cannot_be_written_is_no_error(root, monkeypatch):
    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("safetensors.torch.save_file", refuse)
    with TestCase().assertLogs("alignmixup", logging.WARNING) as logs:
        assert len(load_tiny(root, "train", LAYOUT)) == 6
    assert "decoded-train.safetensors" in logs.output[0]
    assert not list(root.rglob("*.part")) + list(root.rglob("decoded-*"))


def test_check_names_everything_that_is_wrong(root):
    assert check_tiny(root, LAYOUT) == []
    folder = root / "tiny-imagenet-200"
    (folder / "train" / "n01" / "images" / "n01_1.JPEG").unlink()
    broken = folder / "train" / "n03" / "images" / "n03_0.JPEG"
    broken.write_bytes(broken.read_bytes()[:200])
    (folder / "val" / "images" / "val_3.JPEG").write_bytes(b"")
    problems = check_tiny(root, LAYOUT)
    assert len(problems) == 3
    for problem, name in zip(problems, ["n01_1.JPEG", "n03_0.JPEG", "val_3.JPEG"], strict=True):
        assert name in problem
    with pytest.raises(FileNotFoundError, match=r"n01_1\.JPEG is missing"):
        load_tiny(root, "train", LAYOUT)


@pytest.mark.parametrize(
    ("file", "text", "match"),
    [
        ("val/val_annotations.txt", "val_0.JPEG\tn02\t0\t0\t9\t9\n", "1 lines, not 4"),
        ("val/val_annotations.txt", "val_0.JPEG\tn99\t0\t0\t9\t9\n" * 4, "n99"),
        ("val/val_annotations.txt", "val_0.JPEG\tn02\t0\t0\tx\t9\n" * 4, "cannot read the line"),
        ("val/val_annotations.txt", "val_0.JPEG\t0\t0\t9\t9\n" * 4, "cannot read the line"),
        ("wnids.txt", "n01\nn02\n", "2 classes, not 3"),
        ("wnids.txt", "n01\nn02\nn03\nn02\n", "4 lines with 3 classes, not 3"),
    ],
)
def test_damaged_lists_are_named(root, file, text, match):
    path = root / "tiny-imagenet-200" / file
    path.write_text(text)
    with pytest.raises(ValueError, match=match) as caught:
        load_tiny(root, "test", LAYOUT)
    assert str(path) in str(caught.value)
    assert any(match in problem for problem in check_tiny(root, LAYOUT))


def test_the_official_counts_are_expected(root):
    with pytest.raises(ValueError, match="3 classes, not 200"):
        load_tiny(root, "train", TINY)
    with pytest.raises(FileNotFoundError, match="data fetch tiny"):
        load_tiny(root / "nowhere", "train")


def test_the_val_part_alone_gives_its_images(root, monkeypatch):
    whole = load_tiny(root, "test", LAYOUT).images
    folder = root / "tiny-imagenet-200"
    with monkeypatch.context() as patch:
        patch.setattr(tiny_imagenet, "decode_files", lambda *_: pytest.fail("decoded again"))
        assert torch.equal(load_tiny_val(root, LAYOUT), whole)  # one cache for both
    for path in (folder / "wnids.txt", folder / "words.txt", folder / "val/val_annotations.txt"):
        path.unlink()
    shutil.rmtree(folder / "train")
    (folder / "decoded-test.safetensors").unlink()
    assert torch.equal(load_tiny_val(root, LAYOUT), whole)
    assert torch.equal(load_tiny_val(folder, LAYOUT), whole)
    (folder / "val" / "images" / "val_2.JPEG").write_bytes(b"rubbish")
    with pytest.raises(ValueError, match=r"val_2\.JPEG cannot be read"):
        load_tiny_val(root, LAYOUT)
    (folder / "val" / "images" / "val_2.JPEG").unlink()
    with pytest.raises(ValueError, match="3 images, not 4"):
        load_tiny_val(root, LAYOUT)
    with pytest.raises(FileNotFoundError, match=r"val/images.*data fetch tiny"):
        load_tiny_val(root / "nowhere", LAYOUT)


def test_val_is_in_the_order_of_its_numbers(tmp_path):
    for i in range(12):
        save(tmp_path / "val" / "images" / f"val_{i}.JPEG", (20 * i, 20 * i, 20 * i))
    means = load_tiny_val(tmp_path, TinyLayout(num_val=12)).float().mean((1, 2, 3))
    assert (means - 20 * torch.arange(12)).abs().max() < 3


def test_the_folder_itself_may_be_given(root):
    renamed = root / "tiny-imagenet-200"
    renamed = renamed.rename(root / "small")
    assert np.array_equal(load_tiny(renamed, "test", LAYOUT).labels, [1, 2, 0, 1])
