"""ImageNet's folder layout at a small scale: what is listed, what is refused, what is said."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from alignmixup.datasets import check, fetch, find, load
from alignmixup.datasets.imagenet import (
    IMAGENET,
    ImageNetLayout,
    check_imagenet,
    load_imagenet,
    scan_imagenet,
)
from alignmixup.datasets.loading.decode import center_square
from alignmixup.registry import DATASETS

SMALL = ImageNetLayout(num_classes=3, num_train=6, num_val=3)
WNIDS = ("n01440764", "n01443537", "n02084071")


@pytest.fixture
def root(tmp_path):
    """DATA/imagenet with three classes, two train images and one val image each."""
    rng = np.random.default_rng(0)
    for wnid in WNIDS:
        for split, count in (("train", 2), ("val", 1)):
            folder = tmp_path / "imagenet" / split / wnid
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (40, 50 + i, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{wnid}_{i}.JPEG")
    return tmp_path


def test_the_official_numbers():
    assert (IMAGENET.num_classes, IMAGENET.num_images("train")) == (1000, 1_281_167)
    assert IMAGENET.num_images("test") == 50_000


def test_files_are_listed_by_class_and_val_is_the_test_split(root):
    train, test = (scan_imagenet(root, split, SMALL) for split in ("train", "test"))
    assert train.class_names == test.class_names == WNIDS
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert test.labels.tolist() == [0, 1, 2]
    for path, label in zip(test.paths, test.labels.tolist(), strict=True):
        assert f"imagenet/val/{WNIDS[label]}/" in path
    assert train.mean == (0.485, 0.456, 0.406)
    assert scan_imagenet(root / "imagenet", "train", SMALL).paths == train.paths


def test_val_is_loaded_as_it_is_evaluated(root):
    images = load_imagenet(root, "test", SMALL)
    assert images.images.shape == (3, 3, 224, 224)
    paths = scan_imagenet(root, "test", SMALL).paths
    for image, path in zip(images.images, paths, strict=True):
        expected = center_square(Image.open(path).convert("RGB"), 224, 224 / 256)
        assert torch.equal(image, torch.from_numpy(np.array(expected)).permute(2, 0, 1))


def test_training_images_are_not_loaded_into_memory(root):
    with pytest.raises(ValueError, match=r"do not fit in memory.*StreamLoader"):
        load_imagenet(root, "train", SMALL)


def test_check_says_what_is_missing(root, tmp_path):
    assert check_imagenet(root, SMALL) == []
    (tmp_path / "imagenet" / "val" / WNIDS[1] / f"{WNIDS[1]}_0.JPEG").unlink()
    (problem,) = check_imagenet(root, SMALL)
    assert problem.endswith("imagenet/val has 2 images, not 3: unpack it again")


def test_check_names_a_damaged_file(root, tmp_path):
    broken = tmp_path / "imagenet" / "train" / WNIDS[2] / f"{WNIDS[2]}_1.JPEG"
    broken.write_bytes(b"")
    assert check_imagenet(root, SMALL) == [f"{broken} is empty (0 bytes): replace or delete it"]


def test_too_few_classes_and_strange_folders_are_named(root, tmp_path):
    with pytest.raises(ValueError, match=r"imagenet/train has 3 class folders, not 1000: .*WNID"):
        scan_imagenet(root, "train")
    (tmp_path / "imagenet" / "train" / WNIDS[0]).rename(tmp_path / "imagenet" / "train" / "tench")
    (tmp_path / "imagenet" / "val" / WNIDS[0]).rename(tmp_path / "imagenet" / "val" / "tench")
    with pytest.raises(ValueError, match=r"train/tench is not named after a WordNet id"):
        scan_imagenet(root, "train", SMALL)


def test_what_is_not_there_is_said_once_with_how_to_get_it(tmp_path):
    (problem,) = check("imagenet", tmp_path)
    assert str(tmp_path / "imagenet") in problem
    assert "no program can fetch it" in problem
    assert "image-net.org" in problem
    assert "imagenet/val/WNID/*.JPEG" in problem
    with pytest.raises(ValueError, match=r"imagenet cannot be downloaded by .*image-net"):
        fetch("imagenet", tmp_path)


def test_the_source_lists_its_files(root, monkeypatch):
    source = find("imagenet")
    assert (source.image_size, source.num_classes) == (224, 1000)
    parts = {name: partial(getattr(source, name), layout=SMALL) for name in ("function", "scan")}
    monkeypatch.setitem(DATASETS._entries, "imagenet", dataclasses.replace(source, **parts))
    assert len(find("imagenet").scan(root, "train")) == 6
    assert len(load("imagenet", "test", root)) == 3


def test_boxes_come_from_the_challenges_list(root):
    lines = [f"{wnid}_0,{wnid} 10 4 29 33 " for wnid in WNIDS[:2]]
    text = "\n".join(["ImageId,PredictionString", *lines])
    (root / "imagenet" / "LOC_val_solution.csv").write_text(text)
    test = scan_imagenet(root, "test", SMALL)
    assert [b.tolist() for b in test.boxes] == [[[10, 4, 30, 34]]] * 2 + [[]]
    # Of 50 x 40 pixels the middle 35 x 35 are shown, at 224 x 224: from (7.5, 2.5) on.
    loaded = load_imagenet(root, "test", SMALL)
    for box in loaded.boxes[:2]:
        torch.testing.assert_close(box, 6.4 * torch.tensor([[2.5, 1.5, 22.5, 31.5]]))
    assert loaded.boxes[2].shape == (0, 4)
    assert not hasattr(scan_imagenet(root, "train", SMALL), "boxes")
