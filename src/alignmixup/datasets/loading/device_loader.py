"""Batches of a set that is on the device as a whole, cropped and mirrored there.

The order and the augmentation of an epoch are a pure function of (seed, epoch): a resumed run
continues exactly, and a rank can take its share of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from alignmixup.contracts import ImageSet, fusible, to_device
from alignmixup.datasets.loading.augment import crop_and_flip, draw_rows, pad_images, to_float

Batch = tuple[Float[Tensor, "b 3 h w"], Int64[Tensor, " b"]]


class DeviceLoader:
    """Training batches (x in [0, 1], integer labels) gathered on the device.

    >>> loader = DeviceLoader(images, batch_size=128, seed=0, device=device)
    >>> for x, y in loader.epoch(0): ...
    """

    def __init__(
        self,
        image_set: ImageSet,
        batch_size: int,
        seed: int,
        device: torch.device | str = "cpu",
        *,
        pad: int = 4,
        flip: bool = True,
        drop_last: bool = False,
        channels_last: bool = False,
    ) -> None:
        if pad < 0:
            raise ValueError(f"pad must be at least 0, got {pad}")
        self._num_steps = count_steps(len(image_set), batch_size, drop_last)
        self.batch_size = batch_size
        self.seed = seed
        self.pad = pad
        self.flip = flip
        self.channels_last = channels_last
        height, width = image_set.images.shape[-2:]
        self._padded = pad_images(image_set.images, pad, device)
        self._labels = image_set.labels.to(device, torch.int64)
        self._ys = torch.arange(height, device=device)
        self._xs = torch.arange(width, device=device)

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self._num_steps

    def rows(self, epoch: int) -> Int64[Tensor, "n 4"]:
        """Return all random choices of an epoch, on the device: (index, top, left, flip)."""
        rows = draw_rows(
            len(self._labels), seed=self.seed, epoch=epoch, pad=self.pad, flip=self.flip
        )
        return to_device(rows, self._labels.device)

    def gather(self, rows: Int64[Tensor, "b 4"]) -> Batch:
        """Return the batch of these rows, without a host sync, so that it can be captured."""
        x = _gather(self._padded, rows, self._ys, self._xs, self.channels_last)
        return x, self._labels[rows[:, 0]]

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch, from ``start_step`` on."""
        check_start(start_step, len(self))
        rows = self.rows(epoch)
        for step in range(start_step, len(self)):
            yield self.gather(rows[step * self.batch_size : (step + 1) * self.batch_size])


@fusible
def _gather(
    padded: UInt8[Tensor, "n hp wp 3"],
    rows: Int64[Tensor, "b 4"],
    ys: Int64[Tensor, " h"],
    xs: Int64[Tensor, " w"],
    channels_last: bool,
) -> Float[Tensor, "b 3 h w"]:
    return to_float(crop_and_flip(padded, rows, ys, xs), channels_last)


def count_steps(num_images: int, batch_size: int, drop_last: bool) -> int:
    """Return the number of steps in an epoch; raise if there is none."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if num_images == 0:
        raise ValueError("the set has no image: there is nothing to load")
    if drop_last and num_images < batch_size:
        raise ValueError(
            f"{num_images} images make no full batch of {batch_size}, and drop_last leaves "
            "nothing; use a smaller batch_size or drop_last=False"
        )
    return num_images // batch_size if drop_last else -(-num_images // batch_size)


def check_start(start_step: int, num_steps: int) -> None:
    """Raise unless an epoch of ``num_steps`` can start at ``start_step``."""
    if not 0 <= start_step <= num_steps:
        raise ValueError(f"start_step must lie in 0..{num_steps}, got {start_step}")


@dataclass(frozen=True)
class EvalBatches:
    """Batches of a set on the device, in order; they can be iterated again."""

    images: UInt8[Tensor, "n h w 3"]
    labels: Int64[Tensor, " n"]
    batch_size: int
    channels_last: bool

    def __len__(self) -> int:
        return count_steps(len(self.labels), self.batch_size, drop_last=False)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.labels), self.batch_size):
            here = slice(start, start + self.batch_size)
            yield to_float(self.images[here], self.channels_last), self.labels[here]


def eval_batches(
    image_set: ImageSet,
    batch_size: int,
    device: torch.device | str = "cpu",
    *,
    channels_last: bool = False,
) -> EvalBatches:
    """Return batches for evaluation: every image once, in order, uncropped."""
    count_steps(len(image_set), batch_size, drop_last=False)
    return EvalBatches(
        images=pad_images(image_set.images, 0, device),
        labels=image_set.labels.to(device, torch.int64),
        batch_size=batch_size,
        channels_last=channels_last,
    )
