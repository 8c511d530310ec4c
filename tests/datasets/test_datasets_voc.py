"""The layouts of VOC and COCO, made at small size: pixels and boxes must agree."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from alignmixup.datasets.voc import (
    VOC_CLASSES,
    coco_splits,
    concatenate,
    scan_coco,
    scan_voc,
    voc_splits,
)

XML = """<annotation><filename>{name}.jpg</filename>
<size><width>{w}</width><height>{h}</height><depth>3</depth></size>{objects}</annotation>"""
OBJECT = """<object><name>{name}</name><pose>Left</pose><truncated>0</truncated>
<difficult>{difficult}</difficult><bndbox><xmin>{0}</xmin><ymin>{1}</ymin><xmax>{2}</xmax>
<ymax>{3}</ymax></bndbox>
<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox>
</part></object>"""


def write_voc(root, year=2007):
    """Two images; the first has two objects, the second none."""
    folder = root / "VOCdevkit" / f"VOC{year}"
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    objects = OBJECT.format(1, 1, 8, 16, name="dog", difficult=0)
    objects += OBJECT.format(17, 9, 32, 24, name="aeroplane", difficult=1)
    (folder / "Annotations/000001.xml").write_text(
        XML.format(name="000001", w=32, h=24, objects=objects)
    )
    (folder / "Annotations/000002.xml").write_text(
        XML.format(name="000002", w=10, h=20, objects="")
    )
    pixels = np.zeros((24, 32, 3), np.uint8)
    pixels[0:16, 0:8] = 255
    Image.fromarray(pixels).save(folder / "JPEGImages/000001.jpg", quality=95)
    Image.fromarray(np.zeros((20, 10, 3), np.uint8)).save(folder / "JPEGImages/000002.jpg")
    (folder / "ImageSets/Main/trainval.txt").write_text("000001\n000002\n")
    (folder / "ImageSets/Main/dog_trainval.txt").write_text("000001  1\n")
    return folder


def test_voc_boxes_are_where_the_pixels_are(tmp_path):
    write_voc(tmp_path)
    data = scan_voc(tmp_path)
    assert (len(data), data.num_classes, data.name) == (2, 20, "voc2007")
    first, second = data[0], data[1]
    assert first.boxes.tolist() == [[0, 0, 8, 16], [16, 8, 32, 24]]
    assert [VOC_CLASSES[k] for k in first.labels] == ["dog", "aeroplane"]
    assert first.is_ignored.tolist() == [False, True]
    assert first.areas.tolist() == [128, 256]
    assert (first.image[:, 0:16, 0:8] > 200).all()
    assert (first.image[:, :, 9:] < 50).all()
    assert second.image.shape == (3, 20, 10)
    assert second.boxes.shape == (0, 4)
    assert second.labels.dtype == torch.int64


def test_voc_lists_of_one_class_and_roots(tmp_path):
    folder = write_voc(tmp_path)
    assert len(scan_voc(folder, "dog_trainval")) == 1
    assert len(scan_voc(tmp_path / "VOCdevkit")) == 2
    write_voc(tmp_path, 2012)
    both = concatenate(scan_voc(tmp_path), scan_voc(tmp_path, year=2012))
    assert len(both) == 4
    assert [both[i].image_id for i in range(4)] == [0, 1, 2, 3]
    assert torch.equal(both[2].boxes, both[0].boxes)
    assert "VOC2012" in both.rows[2].path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("</annotation>", "", "is damaged"),
        ("<annotation>", '<!DOCTYPE a [<!ENTITY b "c">]><annotation>', "unsafe"),
        ("dog", "unicorn", "unknown class 'unicorn'"),
        ("<xmax>32</xmax>", "<xmax>33</xmax>", "is not inside its 32 x 24"),
        ("<xmin>17</xmin>", "<xmin>0</xmin>", "is not inside"),
        ("<xmin>17</xmin>", "<xmin>a</xmin>", "could not convert"),
        ("<width>32</width>", "", "no size/width"),
    ],
)
def test_damaged_voc_annotation_is_named(tmp_path, old, new, message):
    path = write_voc(tmp_path) / "Annotations/000001.xml"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=rf"000001\.xml.*{message}"):
        scan_voc(tmp_path)


def test_missing_voc_files_are_named(tmp_path):
    folder = write_voc(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"test\.txt is missing; .* trainval$"):
        scan_voc(tmp_path, "test")
    for place in (tmp_path, folder):  # the folder of one year holds no other
        with pytest.raises(FileNotFoundError, match="VOC 2012"):
            scan_voc(place, year=2012)
    Image.fromarray(np.zeros((24, 31, 3), np.uint8)).save(folder / "JPEGImages/000001.jpg")
    with pytest.raises(ValueError, match=r"000001\.jpg has 31 x 24 pixels, .* has 32 x 24"):
        scan_voc(tmp_path)[0]
    (folder / "JPEGImages/000002.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"000002\.jpg is missing"):
        scan_voc(tmp_path)
    (folder / "ImageSets/Main/trainval.txt").write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        scan_voc(tmp_path)


def test_the_splits_of_transfer_are_all_years_and_the_test_of_2007(tmp_path):
    for year in (2007, 2012):
        folder = write_voc(tmp_path, year)
        (folder / "ImageSets/Main/test.txt").write_text("000001\n")
    train, test = voc_splits(tmp_path)
    assert (len(train), len(test), train.name) == (4, 1, "voc2007+voc2012")
    assert "VOC2007" in test.rows[0].path
    assert [train.is_trainable(i) for i in range(4)] == [True, False, True, False]
    assert len(voc_splits(tmp_path, (2012,))[0].first(1)) == 1
    with pytest.raises(ValueError, match="years must not be empty"):
        voc_splits(tmp_path, ())
    with pytest.raises(FileNotFoundError, match="COCO: no annotations in any of"):
        coco_splits(tmp_path)


def write_coco(root):
    (root / "images").mkdir()
    for name, size in (("a.png", (20, 30)), ("b.png", (16, 16))):
        Image.new("RGB", size).save(root / "images" / name)
    document = {
        "images": [
            {"id": 7, "file_name": "a.png", "width": 20, "height": 30},
            {"id": 3, "file_name": "b.png", "width": 16, "height": 16},
        ],
        "categories": [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 90, "bbox": [1.5, 2, 3, 4.25], "area": 5.5},
            {"id": 2, "image_id": 7, "category_id": 1, "bbox": [10, 20, 30, 30], "iscrowd": 1},
            {"id": 3, "image_id": 7, "category_id": 1, "bbox": [4, 4, 0, 3]},
        ],
    }
    path = root / "instances_val.json"
    path.write_text(json.dumps(document))
    return path


def test_coco_layout(tmp_path):
    data = scan_coco(write_coco(tmp_path), tmp_path / "images")
    assert data.class_names == ("person", "toothbrush")
    assert (data.split, len(data)) == ("instances_val", 2)
    first = data[0]
    assert first.image_id == 7
    assert first.boxes.tolist() == [[1.5, 2, 4.5, 6.25], [10, 20, 20, 30]]
    assert first.labels.tolist() == [1, 0]
    assert first.is_ignored.tolist() == [False, True]
    assert first.areas.tolist() == [5.5, 900]
    assert data[1].boxes.shape == (0, 4)


def test_damaged_coco_files_are_named(tmp_path):
    path = write_coco(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nothing\.json is missing"):
        scan_coco(tmp_path / "nothing.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"a\.png of .*instances_val\.json is missing"):
        scan_coco(path, tmp_path)
    text = path.read_text()
    path.write_text(text.replace('"category_id": 90', '"category_id": 5'))
    with pytest.raises(ValueError, match=r"instances_val\.json is not a file of COCO .*5"):
        scan_coco(path, tmp_path / "images")
    path.write_text(text[:-10])
    with pytest.raises(ValueError, match=r"instances_val\.json is damaged"):
        scan_coco(path, tmp_path / "images")


@pytest.mark.parametrize("kind", ["categories", "images"])
def test_coco_files_with_one_id_for_two_are_refused(tmp_path, kind):
    """As a merge of two files makes them: the boxes of both would be of either."""
    path = write_coco(tmp_path)
    document = json.loads(path.read_text())
    first = document[kind][0]
    document[kind].append({**first, "name": "another"})
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=f"two of its {kind} have the id {first['id']}"):
        scan_coco(path, tmp_path / "images")


@pytest.mark.parametrize("splits", [voc_splits, coco_splits])
def test_a_missing_folder_names_the_flag_of_detect(splits, tmp_path):
    with pytest.raises(FileNotFoundError, match="contains it with --root or ALIGNMIXUP_DATA"):
        splits(tmp_path)
