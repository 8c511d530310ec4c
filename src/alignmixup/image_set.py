"""A labeled set of images in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from alignmixup.losses import label_problem


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A labeled set of images of one size, in memory.

    Args:
        name: Name of the data set, as results show it.
        split: ``"train"`` or ``"test"``.
        images: Pixels, uint8 ``[n, 3, h, w]``.
        labels: Class of each image, ``[n]``.
        class_names: Names of the classes, in the order of the labels.
        mean: Channel means of the source in [0, 1], for the normalization layer of a network.
        std: Channel standard deviations of the source, likewise.
        boxes: One tensor ``[k, 4]`` of boxes ``(x0, y0, x1, y1)`` per image, if known.

    Raises:
        ValueError: If shapes, types or label range do not fit together.

    Example:
        ```python
        images = torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8)
        labels = torch.arange(20) % 2
        pets = am.ImageSet("pets", "test", images, labels, ("cat", "dog"), (0.5,) * 3, (0.25,) * 3)
        print(len(pets), pets.num_classes)
        ```
    """

    name: str
    split: str
    images: UInt8[Tensor, "n 3 h w"]
    labels: Int[Tensor, " n"]
    class_names: tuple[str, ...]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    boxes: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        where = f"{self.name}/{self.split}"
        for name in ("images", "labels"):
            value = getattr(self, name)
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                raise ValueError(
                    f"{where}: {name} must be a tensor, got {kind}: use torch.as_tensor"
                )
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[1] != 3:
            raise ValueError(
                f"{where}: images must be uint8 [n, 3, h, w], "
                f"got {self.images.dtype} {list(self.images.shape)}"
            )
        if self.labels.ndim != 1 or self.labels.is_floating_point():
            raise ValueError(
                f"{where}: labels must be integers [n], "
                f"got {self.labels.dtype} {list(self.labels.shape)}"
            )
        if len(self.images) != len(self.labels):
            raise ValueError(f"{where}: {len(self.images)} images but {len(self.labels)} labels")
        if problem := label_problem(self.labels, len(self.class_names)):
            raise ValueError(f"{where}: {problem}; add class_names, or correct the labels")
        if self.boxes is not None and len(self.boxes) != len(self.images):
            raise ValueError(f"{where}: {len(self.images)} images but boxes for {len(self.boxes)}")

    def __repr__(self) -> str:
        rows, columns = self.images.shape[2:]
        return (
            f"ImageSet({self.name!r}, {self.split!r}, {len(self)} images of {rows} x {columns}, "
            f"{self.num_classes} classes{', boxes' if self.boxes is not None else ''})"
        )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)
