"""Image folders: what is found, how odd images become squares, and which file is to blame."""

import os
import threading
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from alignmixup.datasets import find
from alignmixup.datasets.folder import (
    FileSet,
    check_image_folder,
    list_images,
    load_folder,
    load_images,
    scan_folder,
)
from alignmixup.datasets.loading.decode import (
    decode_files,
    empty_images,
    open_image,
    read_rgb,
    unreadable_files,
)

RED, BLUE = (220, 10, 10), (10, 10, 220)


def save(path, size=(8, 8), color=RED, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path)


@pytest.fixture
def root(tmp_path):
    for split in ("train", "val"):
        save(tmp_path / split / "ant" / "b.png")
        save(tmp_path / split / "ant" / "deep" / "a.PNG")
        save(tmp_path / split / "bee" / "c.bmp", color=BLUE)
        (tmp_path / split / "bee" / "notes.txt").write_text("not an image")
        (tmp_path / split / "bee" / ".hidden.png").write_text("not an image")
    return tmp_path


def test_images_open_at_the_same_time_leave_the_filters_of_warnings(tmp_path):
    """As in the threads that decode CUB: the first to open is not the last to close."""
    save(tmp_path / "a.png")
    before = list(warnings.filters)
    first, second = open_image(tmp_path / "a.png"), open_image(tmp_path / "a.png")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    warnings.warn("ignored as long as one is open", stacklevel=1)
    second.__exit__(None, None, None)
    assert warnings.filters == before


def test_labels_follow_sorted_folders_and_other_files_are_passed_over(root):
    images = load_folder(root, "train", 8)
    assert images.class_names == ("ant", "bee")
    assert images.labels.tolist() == [0, 0, 1]
    assert images.images[:, :, 3, 3].tolist() == [list(RED), list(RED), list(BLUE)]


def test_the_test_split_is_val_or_test(root):
    assert len(scan_folder(root, "test")) == 3
    (root / "val").rename(root / "test")
    assert all("/test/" in path for path in scan_folder(root, "test").paths)


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        ("L", 77, (77, 77, 77)),
        ("1", 1, (255, 255, 255)),
        ("I;16", 77 * 257, (77, 77, 77)),
        ("RGBA", (*RED, 128), RED),
        ("LA", (50, 0), (50, 50, 50)),
    ],
)
def test_every_mode_becomes_rgb(tmp_path, mode, color, expected):
    save(tmp_path / "image.png", mode=mode, color=color)
    assert read_rgb(tmp_path / "image.png").getpixel((4, 4)) == expected


@pytest.mark.parametrize("level", [-1, 2**16, 2**31 - 1])
def test_pixels_beyond_16_bits_are_refused(tmp_path, level):
    save(tmp_path / "image.tif", mode="I", color=level)
    with pytest.raises(ValueError, match=rf"image.tif .* {level}\.\.{level}, beyond 16 bits"):
        read_rgb(tmp_path / "image.tif")


def test_a_palette_with_transparency_becomes_rgb(tmp_path):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, *BLUE])
    image.save(tmp_path / "image.png", transparency=b"\x00\x80")
    assert read_rgb(tmp_path / "image.png").getpixel((1, 1)) == BLUE


@pytest.mark.parametrize("is_wide", [True, False])
def test_an_odd_size_gives_its_center_square(tmp_path, is_wide):
    # 60 x 20: the middle third is a gradient, the outer thirds are blue and must not show.
    pixels = np.zeros((20, 60, 3), dtype=np.uint8)
    pixels[:] = BLUE
    pixels[:, 20:40] = np.arange(20)[None, :, None] * 10
    if not is_wide:
        pixels = pixels.transpose(1, 0, 2)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    for size in (20, 10):
        square = decode_files([str(tmp_path / "image.png")], size)[0].float()
        along = square.mean(1 if is_wide else 2)[0]
        step = 20 // size
        expected = torch.arange(20).float().mul(10).view(size, step).mean(1)
        assert (along - expected)[1:-1].abs().max() <= 1
        assert square[2].max() <= 190 + 1


def test_one_pixel_fills_the_square(tmp_path):
    save(tmp_path / "image.png", size=(1, 5))
    assert decode_files([str(tmp_path / "image.png")], 4)[0, 0].unique().tolist() == [RED[0]]


def damage(root):
    good = (root / "train" / "ant" / "b.png").read_bytes()
    (root / "train" / "ant" / "b.png").write_bytes(good[: len(good) // 2])
    (root / "train" / "bee" / "c.bmp").write_bytes(b"")
    (root / "val" / "ant" / "b.png").write_bytes(b"this is no image at all")
    return ["train/ant/b.png", "train/bee/c.bmp", "val/ant/b.png"]


def test_corrupt_and_empty_files_are_named(root):
    assert check_image_folder(root) == []
    names = damage(root)
    problems = check_image_folder(root)
    assert len(problems) == 3
    for name, problem in zip(names, problems, strict=True):
        assert str(root / name) in problem
    assert "empty" in problems[1]
    with pytest.raises(ValueError, match=r"train/ant/b\.png"):
        load_folder(root, "train", 8)
    with pytest.raises(ValueError, match=r"val/ant/b\.png"):
        load_folder(root, "test", 8)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_worker_processes_give_the_same_as_one(root, monkeypatch):
    monkeypatch.setattr("alignmixup.datasets.loading.decode.BLOCK", 2)
    paths = list(scan_folder(root, "train").paths) * 3
    assert torch.equal(decode_files(paths, 8, num_workers=2), decode_files(paths, 8, num_workers=1))
    damage(root)
    assert unreadable_files(paths, num_workers=2) == unreadable_files(paths, num_workers=1)
    with pytest.raises(ValueError, match=r"b\.png"):
        decode_files(paths, 8, num_workers=2)


def test_folders_that_do_not_fit_the_layout_are_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*train"):
        scan_folder(tmp_path, "train")
    with pytest.raises(FileNotFoundError, match=r"size after @ must be a number .*, got 'x'$"):
        scan_folder(f"{tmp_path}@x", "train")
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match="no subfolders"):
        scan_folder(tmp_path, "train")
    (tmp_path / "train" / "ant").mkdir()
    with pytest.raises(ValueError, match=r"ant has no image"):
        scan_folder(tmp_path, "train")
    save(tmp_path / "train" / "ant" / "a.png")
    save(tmp_path / "val" / "wasp" / "a.png")
    with pytest.raises(ValueError, match="wasp is not a class"):
        scan_folder(tmp_path, "test")
    assert len(check_image_folder(tmp_path)) == 1


def test_arguments_out_of_range_are_refused(root):
    with pytest.raises(ValueError, match="image_size must be at least 1, got 0"):
        load_folder(root, "train", 0)
    with pytest.raises(ValueError, match=r"'val'.*'test'"):
        load_folder(root, "val", 8)
    with pytest.raises(ValueError, match="1 files but 2 labels"):
        FileSet("x", "train", ("a.png",), torch.tensor([0, 0]), ("a",))


def test_images_of_any_depth_and_kind_are_listed_and_loaded(root):
    files = list_images(root)
    assert [f.removeprefix(f"{root}/") for f in files] == [
        f"{split}/{name}"
        for split in ("train", "val")
        for name in ("ant/b.png", "ant/deep/a.PNG", "bee/c.bmp")
    ]
    save(root / "gray.png", (9, 30), 77, "L")
    images = load_images(list_images(root), 6)
    assert images[0, :, 2, 2].tolist() == [77, 77, 77]
    assert images[1, :, 2, 2].tolist() == list(RED)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        list_images(root / "nowhere")
    (root / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty and its subfolders have no image file \(bmp,"):
        list_images(root / "empty")


def test_a_crop_is_the_central_pixels_and_too_small_a_file_is_named(tmp_path):
    pixels = np.arange(7 * 9 * 3, dtype=np.uint8).reshape(7, 9, 3)
    Image.fromarray(pixels).save(tmp_path / "odd.png")
    (image,) = load_images([str(tmp_path / "odd.png")], 5, "crop")
    assert np.array_equal(image.permute(1, 2, 0).numpy(), pixels[1:6, 2:7])
    with pytest.raises(ValueError, match=r"odd\.png has 9 x 7 pixels, too few for a crop of 8 x 8"):
        load_images([str(tmp_path / "odd.png")], 8, "crop")
    with pytest.raises(ValueError, match="'stretch'"):
        load_images([], 8, "stretch")
    with pytest.raises(ValueError, match="image_size"):
        load_images([], 0)


def test_hidden_folders_are_not_looked_into_and_a_name_may_end_like_a_size(tmp_path):
    place = tmp_path / "run@2"
    for split in ("train", "val"):
        for label in ("a", "b"):
            folder = place / split / label
            (folder / ".ipynb_checkpoints").mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(folder / "x.png")
            Image.new("RGB", (8, 8)).save(folder / ".ipynb_checkpoints" / "x-checkpoint.png")
    source = find(f"folder:{place}")
    assert source.image_size == find("folder:elsewhere").image_size
    assert len(source.function(None, "train")) == 2
    assert find(f"folder:{place}@16").image_size == 16


def test_two_folders_that_link_to_each_other_are_followed_once(root):
    ant, bee = (root / "train" / name for name in ("ant", "bee"))
    (ant / "more").symlink_to(bee)
    (bee / "more").symlink_to(ant)
    names = [os.path.relpath(path, root / "train") for path in scan_folder(root, "train").paths]
    assert names == [
        *("ant/b.png", "ant/deep/a.PNG", "ant/more/c.bmp"),
        *("bee/c.bmp", "bee/more/b.png", "bee/more/deep/a.PNG"),
    ]


def test_links_to_folders_are_followed_but_not_in_circles(root):
    ant, bee = (root / "train" / name for name in ("ant", "bee"))
    before = list_images(ant)
    (ant / "deep" / "again").symlink_to(ant)
    assert list_images(ant) == before
    (ant / "more").symlink_to(bee)
    assert list_images(ant) == sorted([*before, str(ant / "more" / "c.bmp")])


def test_a_pipe_is_read_as_the_file_that_is_written_to_it(root):
    file, pipe = root / "train" / "bee" / "c.bmp", root / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(file.read_bytes()), daemon=True)
    writer.start()
    assert read_rgb(str(pipe)) == read_rgb(file)
    writer.join()


def test_floating_point_images_are_refused(tmp_path):
    Image.fromarray(np.full((4, 4), 0.5, dtype=np.float32)).save(tmp_path / "x.tif")
    with pytest.raises(ValueError, match=r"x\.tif .*floating-point pixels"):
        read_rgb(str(tmp_path / "x.tif"))


def test_images_that_do_not_fit_into_memory_are_named() -> None:
    with pytest.raises(ValueError, match=r"1,000 images of 10000000 x .* data\.stream=True"):
        empty_images(1000, 10_000_000)
