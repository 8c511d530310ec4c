"""Labels of a user's images by a trained network, prepared as the run evaluates its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from alignmixup.datasets.loading.decode import center_square, read_rgb, to_rgb
from alignmixup.datasets.loading.view import shown_fraction
from alignmixup.evaluation.forward import check_range, model_dtype
from alignmixup.experiments.data_record import DataRecord
from alignmixup.hooks import evaluating
from alignmixup.recipes.schema import DataSpec

REMEDY = "divide bytes by 255, and leave the normalization to the model"

if TYPE_CHECKING:
    from PIL import Image

    Source = Image.Image | Path | str
    Sources = Tensor | Source | Sequence[Source]


@dataclass(frozen=True, eq=False)
class Prediction:
    """For each of n images its label, the name of that class, and the probability of every class.

    Args:
        labels: The class of the largest probability.
        class_names: The names of these classes.
        probabilities: Softmax of the logits, in the order of the run's ``class_names``.
    """

    labels: Int64[Tensor, " n"]
    class_names: tuple[str, ...]
    probabilities: Float[Tensor, "n k"]


def predict(
    model: nn.Module, images: Sources, spec: DataSpec, data: DataRecord, batch_size: int
) -> Prediction:
    """Classify ``images`` by ``model``, in evaluation mode, in batches of ``batch_size``."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    device, dtype = next(model.parameters()).device, model_dtype(model)
    shares = []
    with torch.inference_mode(), evaluating(model):
        for batch in _batches(images, spec, data.image_size, batch_size):
            x = batch.to(device)
            x = x if x.is_floating_point() else x.float() / 255
            check_range(x, REMEDY)
            shares.append(model(x.to(dtype)).float().softmax(dim=1).cpu())
    if not shares:
        raise ValueError("there is no image to classify")
    probabilities = torch.cat(shares)
    labels = probabilities.argmax(dim=1)
    names = tuple(data.class_names[label] for label in labels.tolist())
    return Prediction(labels, names, probabilities)


def _batches(images: Sources, spec: DataSpec, size: int, count: int) -> Iterator[Tensor]:
    if isinstance(images, Tensor):
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be a tensor [b, 3, h, w], got {list(images.shape)}")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise ValueError(f"images must be bytes, or floats in [0, 1], got {images.dtype}")
        for start in range(0, len(images), count):
            batch = images[start : start + count]
            is_whole = batch.shape[-2:] == (size, size)
            yield batch if is_whole else _stacked(map(_as_pil, batch), spec, size)
        return
    if isinstance(images, str | Path) or not isinstance(images, Sequence):
        images = [images]
    for start in range(0, len(images), count):
        yield _stacked(map(_opened, images[start : start + count]), spec, size)


def _opened(image: Source) -> Image.Image:
    from PIL import Image

    if isinstance(image, Image.Image):
        try:
            return to_rgb(image)
        except ValueError as error:
            raise ValueError(f"a PIL image cannot be classified ({error})") from None
    if not isinstance(image, str | Path):
        raise ValueError(
            f"an image must be a PIL image or a path, got {type(image).__name__}; pass tensors as "
            "one, [b, 3, h, w]"
        )
    return read_rgb(image)


def _as_pil(image: Tensor) -> Image.Image:
    from PIL import Image

    if image.is_floating_point():
        check_range(image, REMEDY)
        image = (255 * image).round().byte()
    return Image.fromarray(image.permute(1, 2, 0).cpu().numpy())


def _stacked(images: Iterator[Image.Image], spec: DataSpec, size: int) -> Tensor:
    """The part of each image that evaluation shows: all of its center, or as streamed files are."""
    fraction = shown_fraction(size, spec.eval_resize) if spec.stream else 1.0
    squash = spec.stream and spec.squash
    squares = [np.array(center_square(image, size, fraction, squash=squash)) for image in images]
    return torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2)
