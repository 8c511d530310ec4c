"""Fine-grained saliency against a loop over pixels, against OpenCV, and where it must peak."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from alignmixup.ops.saliency import _blur, _gray, fine_grained_saliency, saliency_peak
from learning import small_shapes

NEIGHBOURHOODS = (12, 24, 48, 28, 56, 112)


# ---- the oracle: OpenCV's algorithm, pixel by pixel ----------------------------------------------


def saliency_by_loop(gray: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The steps of OpenCV's implementation on a blurred gray image, before its last 8-bit cast."""
    h, w = gray.shape
    integral = np.zeros((h + 1, w + 1), np.float32)
    integral[1:, 1:] = gray.astype(np.int64).cumsum(0).cumsum(1)
    on, off = np.zeros((h, w), np.int64), np.zeros((h, w), np.int64)
    for n in NEIGHBOURHOODS:
        for y in range(h):
            top, bottom = max(y - n + 1, 0), min(y + n + 1, h)
            for x in range(w):
                left, right = max(x - n + 1, 0), min(x + n + 1, w)
                corners = integral[bottom, right] + integral[top, left]
                total = corners - integral[bottom, left] - integral[top, right]
                center = np.float32(gray[y, x])
                others = np.float32((bottom - top) * (right - left) - 1)
                difference = center - np.float32((total - center) / others)
                on[y, x] += int(max(difference, 0))
                off[y, x] += int(max(-difference, 0))
    return sum(to_255(t) for t in (on, off))


def to_255(total: NDArray[np.int64]) -> NDArray[np.int64]:
    share = total.astype(np.float32) / np.float32(max(total.max(), 1))
    return (255.0 * share.astype(np.float64)).astype(np.int64)


def blurred_gray(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """An image [h, w, 3] in fixed-point gray, blurred twice."""
    r, g, b = (image[..., c].astype(np.int64) for c in range(3))
    gray = (9798 * r + 19235 * g + 3735 * b + (1 << 14)) >> 15
    for _ in range(2):
        wide, total = np.pad(gray, 1, mode="reflect"), np.zeros_like(gray)
        for i, row_weight in enumerate((1, 2, 1)):
            for j, weight in enumerate((1, 2, 1)):
                part = wide[i : i + gray.shape[0], j : j + gray.shape[1]]
                total += row_weight * weight * part
        gray = (total + 8) >> 4
    return gray.astype(np.uint8)


def to_batch(images: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(images.transpose(0, 3, 1, 2) / np.float32(255))


@functools.cache
def natural_crops(count: int, side: int) -> NDArray[np.uint8]:
    """Square pieces of the two photographs that come with scikit-learn, [n, side, side, 3]."""
    datasets = pytest.importorskip("sklearn.datasets")
    photographs = datasets.load_sample_images().images
    rng = np.random.default_rng(0)
    crops = []
    for i in range(count):
        # Every fourth pixel, so that a small piece holds more than a texture.
        photograph = photographs[i % 2][::4, ::4]
        y, x = (rng.integers(0, length - side) for length in photograph.shape[:2])
        crops.append(photograph[y : y + side, x : x + side])
    return np.stack(crops)


# ---- agreements ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("h", "w"), [(2, 2), (5, 9), (16, 16), (31, 40)])
def test_map_is_that_of_the_loop_bit_for_bit(h: int, w: int) -> None:
    rng = np.random.default_rng(h)
    images = rng.integers(0, 256, (2, h, w, 3), dtype=np.uint8)
    ours = fine_grained_saliency(to_batch(images))
    for image, saliency in zip(images, ours, strict=True):
        expected = saliency_by_loop(blurred_gray(image))
        np.testing.assert_array_equal(saliency.numpy(), expected)


def test_map_of_shapes_is_that_of_the_loop_bit_for_bit() -> None:
    images = small_shapes("test", 12).images
    ours = fine_grained_saliency(images / 255)
    for image, saliency in zip(images, ours, strict=True):
        expected = saliency_by_loop(blurred_gray(image.permute(1, 2, 0).numpy()))
        np.testing.assert_array_equal(saliency.numpy(), expected)


def test_peak_is_where_opencv_would_find_it_in_photographs() -> None:
    """OpenCV keeps 8 bits of the sum, so that 256 becomes 0: that may move a peak, but rarely."""
    images = natural_crops(40, 32)
    peaks = saliency_peak(fine_grained_saliency(to_batch(images))).numpy()
    near = 0
    for image, peak in zip(images, peaks, strict=True):
        wrapped = saliency_by_loop(blurred_gray(image)) % 256
        other = np.unravel_index(wrapped.argmax(), wrapped.shape)
        near += bool(np.abs(peak - np.array(other)).max() <= 2)
    assert near >= 0.95 * len(images)


def test_gray_and_blur_are_opencvs() -> None:
    cv2 = pytest.importorskip("cv2", reason="pip install opencv-contrib-python-headless")
    images = np.concatenate(
        [natural_crops(8, 32), np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), np.uint8)]
    )
    gray = _gray(to_batch(images))
    blurred = _blur(gray)
    for image, one, other in zip(images, gray, blurred, strict=True):
        expected = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
        np.testing.assert_array_equal(one.numpy(), expected)
        np.testing.assert_array_equal(other.numpy(), cv2.GaussianBlur(expected, (3, 3), 0))


def test_peaks_are_opencvs_own() -> None:
    wanted = "pip install opencv-contrib-python-headless: OpenCV's saliency is part of it alone"
    cv2 = pytest.importorskip("cv2", reason=wanted)
    if not hasattr(cv2, "saliency"):
        pytest.skip(wanted)
    images = natural_crops(200, 64)
    maps = fine_grained_saliency(to_batch(images)).numpy()
    peaks = saliency_peak(torch.from_numpy(maps)).numpy()
    detector, near = cv2.saliency.StaticSaliencyFineGrained_create(), 0
    for image, ours, peak in zip(images, maps, peaks, strict=True):
        _, saliency = detector.computeSaliency(np.ascontiguousarray(image[..., ::-1]))
        np.testing.assert_array_equal(np.round(saliency * 255), ours % 256)
        other = np.unravel_index(saliency.argmax(), saliency.shape)
        near += bool(np.abs(peak - np.array(other)).max() <= 2)
    assert near >= 0.95 * len(images)  # where the sum passes 255, OpenCV's wraps around


def test_a_batch_is_a_loop_over_images() -> None:
    images = to_batch(natural_crops(8, 32))
    together = fine_grained_saliency(images)
    assert torch.equal(together, torch.cat([fine_grained_saliency(i[None]) for i in images]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_changes_little(dtype: torch.dtype) -> None:
    """8-bit levels survive float64; bf16 has 8 bits and moves a level by one."""
    images = to_batch(natural_crops(8, 32))
    peak = saliency_peak(fine_grained_saliency(images))
    other = saliency_peak(fine_grained_saliency(images.to(dtype)))
    if dtype == torch.float64:
        assert torch.equal(peak, other)
    assert ((peak - other).abs().amax(1) <= 2).float().mean() >= 0.75


@pytest.mark.gpu
def test_cuda_gives_the_same_map() -> None:
    images = to_batch(natural_crops(16, 64))
    assert torch.equal(
        fine_grained_saliency(images.to("cuda")).cpu(), fine_grained_saliency(images)
    )


# ---- laws ----------------------------------------------------------------------------------------


def test_a_uniform_image_has_no_saliency() -> None:
    shades = torch.tensor([0.0, 0.3, 1.0]).view(3, 1, 1, 1).expand(3, 3, 9, 12)
    assert torch.equal(fine_grained_saliency(shades), torch.zeros(3, 9, 12))


@pytest.mark.parametrize(("spot", "ground"), [(1.0, 0.2), (0.0, 0.8)])
def test_nothing_is_more_salient_than_a_spot(spot: float, ground: float) -> None:
    """There may be equals: the faint opposite of the spot in its surroundings is stretched too."""
    places = [(4, 7), (20, 3), (31, 31), (0, 16)]
    images = torch.full((len(places), 3, 32, 32), ground)
    for image, (row, column) in zip(images, places, strict=True):
        image[:, row, column] = spot
    saliency = fine_grained_saliency(images)
    for one, (row, column) in zip(saliency, places, strict=True):
        assert one[row, column] == one.max() == 255


def test_a_gray_image_is_its_rgb_twin() -> None:
    gray = to_batch(natural_crops(4, 32))[:, :1]
    assert torch.equal(
        fine_grained_saliency(gray), fine_grained_saliency(gray.expand(-1, 3, -1, -1))
    )


def test_the_first_of_equal_peaks_counts() -> None:
    saliency = torch.zeros(2, 3, 4)
    saliency[0, 1, 2] = saliency[0, 2, 0] = 5
    assert saliency_peak(saliency).tolist() == [[1, 2], [0, 0]]


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 4, 8, 8), (2, 3, 1, 8)])
def test_what_is_no_image_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"RGB or gray images .* at least 2 x 2 pixels, got"):
        fine_grained_saliency(torch.rand(shape))
