"""CUB-200-2011 in its official layout, made at small size."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from alignmixup.cli import main
from alignmixup.datasets import fetch, find
from alignmixup.datasets.cub import check_cub, load_cub, scan_cub
from alignmixup.datasets.loading.stream import StreamLoader
from alignmixup.registry import DATASETS
from cub_folder import BIRDS, CLASSES, IS_TRAIN, LAYOUT, make_cub


@pytest.fixture
def root(tmp_path):
    make_cub(tmp_path)
    return tmp_path


def test_splits_labels_and_names(root):
    train, test = scan_cub(root, "train", LAYOUT), scan_cub(root, "test", LAYOUT)
    assert train.labels.tolist() == [0, 0, 1, 1]
    assert test.labels.tolist() == [0, 1]
    assert train.class_names == ("Black footed Albatross", "Laysan Albatross")
    assert [p.rsplit("_", 1)[1] for p in test.paths] == ["1.png", "4.png"]
    assert test.boxes[1].tolist() == [[25, 5, 45, 15]]


@pytest.mark.parametrize("image_size", [16, 40])
def test_boxes_are_scaled_with_the_images(root, image_size):
    data = load_cub(root, "train", image_size, LAYOUT)
    assert data.images.shape == (4, 3, image_size, image_size)
    birds = [BIRDS[i] for i in range(6) if IS_TRAIN[i]]
    for image, boxes, (width, height, (x, y, w, h)) in zip(
        data.images, data.boxes, birds, strict=True
    ):
        scale = np.array([image_size / width, image_size / height] * 2)
        corners = np.array([x, y, x + w, min(y + h, height)]) * scale
        np.testing.assert_allclose(boxes[0].numpy(), corners, rtol=1e-6)
        # What is white in the squashed image is what the box says.
        bright = image[0].float() > 127
        rows, columns = bright.any(dim=1).nonzero(), bright.any(dim=0).nonzero()
        found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        np.testing.assert_allclose(found, corners, atol=1)


def test_folder_itself_may_be_named(root):
    direct = load_cub(root / "CUB_200_2011", "test", 16, LAYOUT)
    assert torch.equal(direct.images, load_cub(root, "test", 16, LAYOUT, num_workers=1).images)


def test_files_stream(root):
    loader = StreamLoader(scan_cub(root, "train", LAYOUT), 2, 16, seed=0)
    batches = list(loader.epoch(0))
    assert sorted(torch.cat([y for _, y in batches]).tolist()) == [0, 0, 1, 1]


def damage(root, name, change):
    path = root / "CUB_200_2011" / name
    path.write_text(change(path.read_text()))


def test_good_folder_has_no_problems(root):
    assert check_cub(root, LAYOUT) == []


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "images.txt",
            lambda t: t.rsplit("\n", 2)[0],
            r"images\.txt is damaged: 5 ids, not 1 to 6",
        ),
        ("bounding_boxes.txt", lambda t: t[:-5], r"bounding_boxes\.txt is damaged.*line 6"),
        ("bounding_boxes.txt", lambda t: t.replace("20.0", "-2"), "bounding_boxes.*line 1"),
        ("bounding_boxes.txt", lambda t: t + "1 0 0 9 9", "line 7, '1 0 0 9 9'"),  # of two boxes
        ("image_class_labels.txt", lambda t: t.replace("5 2", "5 9"), "image 5 has class 9"),
        ("train_test_split.txt", lambda t: t.replace("2 0", "2 1"), "5 training images, not 4"),
        ("train_test_split.txt", lambda t: t.replace("2 0", "2 x"), "line 2, '2 x'"),
        ("classes.txt", lambda t: "", r"classes\.txt is damaged: 0 ids"),
    ],
)
def test_damaged_lists_are_named(root, name, change, message):
    damage(root, name, change)
    with pytest.raises(ValueError, match=message):
        [scan_cub(root, split, LAYOUT) for split in ("train", "test")]
    (problem,) = check_cub(root, LAYOUT)
    assert name in problem


def test_a_list_of_damaged_bytes_is_named(root):
    path = root / "CUB_200_2011" / "classes.txt"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    (problem,) = check_cub(root, LAYOUT)
    assert str(path) in problem


def test_missing_files_are_named(root, tmp_path):
    with pytest.raises(FileNotFoundError, match="CUB_200_2011"):
        scan_cub(tmp_path / "nowhere", "train", LAYOUT)
    image = root / "CUB_200_2011" / "images" / CLASSES[0] / "bird_1.png"
    image.write_bytes(image.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"bird_1\.png cannot be read"):
        load_cub(root, "test", 16, LAYOUT)
    image.unlink()
    with pytest.raises(FileNotFoundError, match=r"bird_1\.png is missing"):
        load_cub(root, "test", 16, LAYOUT)
    assert len(check_cub(root, LAYOUT)) == 1
    (root / "CUB_200_2011" / "bounding_boxes.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"bounding_boxes\.txt is missing"):
        scan_cub(root, "test", LAYOUT)


def test_box_outside_its_image_and_bad_options(root):
    with pytest.raises(ValueError, match="image_size"):
        load_cub(root, "test", 0, LAYOUT)
    with pytest.raises(ValueError, match="split"):
        load_cub(root, "val", 16, LAYOUT)
    damage(root, "bounding_boxes.txt", lambda t: t.replace("2 0.0 0.0", "2 20.0 0.0"))
    with pytest.raises(ValueError, match=r"bird_1\.png: its box .* outside its 20 x 40"):
        load_cub(root, "test", 16, LAYOUT)


def test_the_source_is_known_by_name(root, capsys, monkeypatch):
    source = find("cub200")
    assert (source.num_classes, source.image_size) == (200, 224)
    with pytest.raises(ValueError, match=r"cannot be downloaded by a program.*CUB_200_2011\.tgz"):
        fetch("cub200", root)
    assert main(["data", "check", "cub200", "--data", str(root)]) == 1
    assert r"classes.txt is damaged: 2 ids, not 1 to 200" in capsys.readouterr().err
    small = replace(source, check=partial(check_cub, layout=LAYOUT))
    monkeypatch.setitem(DATASETS._entries, "cub200", small)
    assert main(["data", "check", "cub200", "--data", str(root)]) == 0
    assert capsys.readouterr().out == "cub200: complete\n"
    assert main(["data", "check", "cub200", "--data", str(root / "nowhere")]) == 1
    assert "CUB_200_2011.tgz" in capsys.readouterr().err
