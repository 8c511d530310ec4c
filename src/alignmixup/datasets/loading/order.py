"""The order of an epoch: which images are in which batch, a pure function of (seed, epoch).

Files come in any order. Images in shards come in windows of ``WINDOW`` shards: the shards are
shuffled, then all images of the first ones, of the next ones, and so on. What is read within some
time is then in a few files, which a disk, a network or the page cache likes.

With repeated augmentation (Hoffer et al. 2020) an image comes ``repeats`` times in a row, and an
epoch, which has as many batches as without, ends before the last images of the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Sampler

from alignmixup.datasets.loading.augment import derive_seed
from alignmixup.datasets.loading.members import Member, shard_of

# Shards whose images are shuffled together.
WINDOW = 16


@dataclass(frozen=True, slots=True)
class Key:
    """What a worker gets: which image, in which epoch, and which of its copies."""

    epoch: int
    index: int
    copy: int = 0


@dataclass
class EpochOrder(Sampler[list[Key]]):
    """The batches of the epoch that is set as its attribute."""

    num_images: int
    batch_size: int
    num_steps: int
    seed: int
    is_shuffled: bool
    share: slice
    shards: Tensor | None = None  # the number of the shard of each image
    repeats: int = 1
    epoch: int = 0
    start_step: int = 0

    def __len__(self) -> int:
        return self.num_steps - self.start_step

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, start_step = self.epoch, self.start_step
        order = torch.arange(self.num_images)
        if self.is_shuffled:
            rng = torch.Generator().manual_seed(derive_seed("epoch", self.seed, epoch))
            order = torch.randperm(self.num_images, generator=rng)
            if self.shards is not None:
                places = torch.randperm(int(self.shards.max()) + 1, generator=rng)
                windows = places[self.shards] // WINDOW
                order = order[windows[order].argsort(stable=True)]
        keys = torch.stack([order, torch.zeros_like(order)], dim=1)
        if self.repeats > 1:
            keys = keys.repeat_interleave(self.repeats, dim=0)[: self.num_images]
            keys[:, 1] = torch.arange(self.num_images) % self.repeats
        for step in range(start_step, self.num_steps):
            chosen = keys[step * self.batch_size : (step + 1) * self.batch_size]
            yield [Key(epoch, index, copy) for index, copy in chosen[self.share].tolist()]


def shard_numbers(paths: Sequence[str]) -> Tensor | None:
    """Return the number of the shard of each image; None for images in files of their own."""
    if not paths or Member.of(paths[0]) is None:
        return None
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(shard_of(path), len(numbers)) for path in paths])
