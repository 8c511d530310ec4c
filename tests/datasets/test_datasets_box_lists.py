"""Lists of boxes: both forms, how files are named in them, and boxes in centered squares."""

import numpy as np
import pytest
import torch
from PIL import Image

from alignmixup.datasets.folder import FileSet
from alignmixup.datasets.loading.box_lists import boxes_in_view, find_box_list, listed_boxes
from alignmixup.datasets.loading.decode import decode_files
from alignmixup.datasets.loading.stream import StreamLoader


def write(path, name, text):
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_text(text)
    return find_box_list(path)


def test_the_benchmarks_list_has_a_line_a_box(tmp_path):
    text = "val/n01/a.JPEG,1,2,3,4\nval/n01/b.JPEG,0,0,9,9\nval/n01/a.JPEG,5,5,5,5\n"
    found = write(tmp_path, "localization.txt", text)
    assert found.of(f"{tmp_path}/val/n01/a.JPEG") == [(1, 2, 4, 5), (5, 5, 6, 6)]
    assert found.of(f"{tmp_path}/val/n01/c.JPEG") == ()


def test_the_challenges_list_has_a_line_an_image(tmp_path):
    text = "ImageId,PredictionString\nval_07,n01 1 2 3 4 n01 0 0 9 9 \nval_08,n02 5 6 7 8 \n"
    found = write(tmp_path, "LOC_val_solution.csv", text)
    assert found.of(f"{tmp_path}/val/n01/val_07.JPEG") == [(1, 2, 4, 5), (0, 0, 10, 10)]
    assert found.of(f"{tmp_path}/val/n02/val_08.JPEG") == [(5, 6, 8, 9)]


@pytest.mark.parametrize("name", ["val/ant/x.png", "ant/x.png", "val/x.png", "x.png", "x"])
def test_a_file_is_known_by_its_path_or_its_last_part(tmp_path, name):
    found = write(tmp_path, "localization.txt", f"{name},1,2,3,4")
    assert found.of(f"{tmp_path}/val/ant/x.png") == [(1, 2, 4, 5)]


@pytest.mark.parametrize("name", ["val/x.png", "x.png", "x"])
def test_a_last_part_that_two_files_have_is_refused(tmp_path, name):
    paths = [f"{tmp_path}/val/{folder}/x.png" for folder in ("ant", "bee")]
    found = write(tmp_path, "localization.txt", f"{name},1,2,3,4\n")
    with pytest.raises(ValueError, match=rf"{name}' stands for .*ant/x\.png and for .*bee/x\.png"):
        listed_boxes(found, paths)
    clear = write(tmp_path, "localization.txt", f"{name},5,5,5,5\nbee/x.png,1,2,3,4\n")
    assert [boxes.tolist() for boxes in listed_boxes(clear, paths)] == [
        [[5, 5, 6, 6]],
        [[1, 2, 4, 5]],
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("localization.txt", "a.png,1,2,3,4\n"),
        ("LOC_val_solution.csv", "ImageId,PredictionString\na,n01 1 2 3 4\n"),
    ],
)
def test_a_list_may_begin_with_a_byte_order_mark(tmp_path, name, text):
    found = write(tmp_path, name, f"\ufeff{text}")
    assert found.of(f"{tmp_path}/val/ant/a.png") == [(1, 2, 4, 5)]


def test_a_list_in_another_encoding_is_named(tmp_path):
    (tmp_path / "localization.txt").write_bytes("caf\u00e9.png,1,2,3,4".encode("latin1"))
    with pytest.raises(ValueError, match=r"localization\.txt is damaged or not UTF-8 text"):
        find_box_list(tmp_path)


def test_a_folder_without_a_list_has_none(tmp_path):
    assert find_box_list(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("localization.txt", "a.png,1,2,3,4\na.png,1,2,3\n"),
        ("localization.txt", "b.png,1,2,3,4\na.png,1,2,x,4\n"),
        ("localization.txt", "b.png,1,2,3,4\na.png,5,2,3,4\n"),
        ("localization.txt", "b.png,1,2,3,4\na.png,1,2,nan,4\n"),
        ("LOC_val_solution.csv", "ImageId,PredictionString\na,n01 1 2 3\n"),
        ("LOC_val_solution.csv", "ImageId,PredictionString\na,\n"),
    ],
)
def test_a_line_that_cannot_be_read_is_quoted(tmp_path, name, text):
    line = text.splitlines()[1]
    with pytest.raises(ValueError, match="cannot read line 2") as caught:
        write(tmp_path, name, text)
    assert repr(line) in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_an_empty_list_and_one_of_other_images_are_errors(tmp_path):
    with pytest.raises(ValueError, match="has no box"):
        write(tmp_path, "localization.txt", "\n")
    found = write(tmp_path, "localization.txt", "other.png,1,2,3,4")
    with pytest.raises(ValueError, match=r"names none of the 1 images.*'other\.png'.*x\.png"):
        listed_boxes(found, [f"{tmp_path}/x.png"])


@pytest.mark.parametrize("fraction", [1.0, 0.875])
@pytest.mark.parametrize("size", [(60, 40), (40, 64), (50, 50)])
def test_boxes_lie_where_their_pixels_lie_after_decoding(tmp_path, size, fraction):
    """Each image has one white box; the decoded square shows it where the box says."""
    width, height = size
    corners = [(18, 10, 29, 21), (0, 0, width - 1, 19), (25, 24, width - 1, height - 1)]
    paths, lines = [], []
    for i, (x0, y0, x1, y1) in enumerate(corners):
        pixels = np.zeros((height, width, 3), np.uint8)
        pixels[y0 : y1 + 1, x0 : x1 + 1] = 255
        paths.append(str(tmp_path / f"{i}.png"))
        Image.fromarray(pixels).save(paths[-1])
        lines.append(f"{i}.png,{x0},{y0},{x1},{y1}")
    found = write(tmp_path, "localization.txt", "\n".join(lines))
    boxes = boxes_in_view(listed_boxes(found, paths), paths, 32, fraction)
    images = decode_files(paths, 32, num_workers=1, fraction=fraction)
    check_shown(images, boxes)
    boxes = boxes_in_view(listed_boxes(found, paths), paths, 32, fraction, squash=True)
    files = FileSet("x", "test", tuple(paths), torch.zeros(3, dtype=torch.int64), ("a",))
    loader = StreamLoader(files, 3, 32, 0, is_train=False, resize=round(32 / fraction), squash=True)
    ((images, _),) = loader.epoch(0)
    check_shown(255 * images, boxes)


def check_shown(images, boxes):
    for image, box in zip(images, boxes, strict=True):
        bright = image[0] > 127
        rows, columns = bright.any(1).nonzero(), bright.any(0).nonzero()
        shown = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        np.testing.assert_allclose(box[0].numpy(), shown, atol=1)


def test_a_box_outside_the_square_is_left_out(tmp_path):
    Image.new("RGB", (40, 20)).save(tmp_path / "x.png")
    found = write(tmp_path, "localization.txt", "x.png,0,0,9,9\nx.png,0,0,10,9\nx.png,0,0,99,99")
    paths = [str(tmp_path / "x.png")]
    (boxes,) = boxes_in_view(listed_boxes(found, paths), paths, 10)
    # The square is columns 10 to 30; the second box has one column of it.
    torch.testing.assert_close(boxes, torch.tensor([[0, 0, 0.5, 5], [0, 0, 10, 10]]))
