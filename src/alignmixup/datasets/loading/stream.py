"""Batches of a set that does not fit in memory, decoded by worker processes.

The order of an epoch is a pure function of (seed, epoch), the augmentation of an image one of
(seed, epoch, index), and of the copy where images are repeated: neither depends on the number of
workers or on the step where an epoch starts.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from alignmixup.datasets.folder import FileSet
from alignmixup.datasets.loading.augment import to_float
from alignmixup.datasets.loading.decode import (
    DEAD_WORKER,
    PARALLEL_FROM,
    available_cores,
    end_with_parent,
    open_image,
)
from alignmixup.datasets.loading.device_loader import Batch, check_start, count_steps
from alignmixup.datasets.loading.order import EpochOrder, Key, shard_numbers
from alignmixup.datasets.loading.rand_augment import check_augmentation
from alignmixup.datasets.loading.view import Chance, View
from alignmixup.device import is_gpu

ALL = slice(None)

# In place of an unreadable file comes one of those behind it in the list; of an image in a shard,
# one of those far behind it, in other shards. If none of these can be read either, no file is
# damaged: the disk is gone.
SUBSTITUTES = 10

# Signals to stop; Windows has no SIGHUP.
STOPS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]


class StreamLoader:
    """Batches (x in [0, 1], integer labels) decoded from files, with the interface of DeviceLoader.

    For training, an image is a random part of ``area`` of its surface and of aspect ratio 3/4 to
    4/3, resized; or, with ``resize``, a random window of the image whose shorter side has been
    resized to it. It is mirrored half the time, and its colors change: brightness, contrast and
    saturation by factors in 1 +- ``jitter``, and along ImageNet's principal axes by ``lighting``
    (see ``augment.Colors``). ``rand_augment`` is the magnitude of RandAugment and ``erasing`` the
    probability that a rectangle of the image is erased (see ``rand_augment``). With ``repeats`` an
    epoch has a part of the images only, each that often in a row, augmented differently; it has as
    many steps.

    Otherwise (``is_train=False``) files come in order, each as the window at the center of the
    image resized to ``resize`` (by default 8/7 of ``image_size``: 256 for 224).

    ``reduced`` decodes a JPEG at 1/2, 1/4 or 1/8 of its size where the part that is shown has
    ``image_size`` pixels still: faster for large images, and other pixels in detail.

    ``squash`` resizes both sides to ``resize``, whatever the shape of the image. ``num_workers`` is
    the number of decoding processes, None for a choice by the machine; it does not change the
    batches. ``share`` is the part of each batch that this process decodes.

    A file that cannot be read raises a ``ValueError`` with its name. In training, with
    ``on_error="skip"``, it is named in a warning, and the next one in the list that can be read
    takes its place: batches keep their size, all else in them is the same. The same holds for an
    image in a damaged or missing shard, and one of another shard.
    """

    def __init__(
        self,
        file_set: FileSet,
        batch_size: int,
        image_size: int,
        seed: int,
        num_workers: int | None = 0,
        device: torch.device | str = "cpu",
        *,
        is_train: bool = True,
        area: tuple[float, float] = (0.08, 1.0),
        resize: int | None = None,
        squash: bool = False,
        flip: bool = True,
        jitter: float = 0.0,
        lighting: float = 0.0,
        rand_augment: float = 0.0,
        erasing: float = 0.0,
        repeats: int = 1,
        drop_last: bool = False,
        channels_last: bool = False,
        share: slice = ALL,
        on_error: Literal["raise", "skip"] = "raise",
        reduced: bool = False,
    ) -> None:
        if on_error == "skip" and not is_train:
            raise ValueError("on_error='skip' is for training alone; to evaluate, use 'raise'")
        colors = (file_set.mean, file_set.std)
        chance = Chance(seed, flip, jitter, lighting, rand_augment, erasing, *colors)
        view = View(image_size, area, resize, squash, reduced, chance if is_train else None)
        num_steps = count_steps(len(file_set), batch_size, drop_last)
        if num_workers is None:
            num_workers = available_cores() if len(file_set) >= PARALLEL_FROM else 0
        if num_workers < 0:
            raise ValueError(f"num_workers must be at least 0, got {num_workers}")
        self.batch_size = batch_size
        self.device = torch.device(device)
        self.channels_last = channels_last
        shards = shard_numbers(file_set.paths) if is_train else None
        check_augmentation(rand_augment, erasing, repeats)
        repeats = repeats if is_train else 1
        self._order = EpochOrder(
            len(file_set), batch_size, num_steps, seed, is_train, share, shards, repeats
        )
        self._named: set[str] = set()  # files that were skipped
        # Shared with the workers, who would otherwise finish their batch before they end.
        self._is_closed = multiprocessing.RawValue("b", 0)
        num_substitutes = SUBSTITUTES if on_error == "skip" else 0
        self._loader: DataLoader[Any] = DataLoader(
            _Files(file_set, view, num_substitutes, self._is_closed),
            batch_sampler=self._order,
            num_workers=num_workers,
            collate_fn=_collate,
            pin_memory=is_gpu(self.device),
            persistent_workers=num_workers > 0,
            worker_init_fn=partial(_start_worker, self._is_closed),
            # It seeds the workers, who draw nothing from it. From torch's own generator, an epoch
            # that is resumed would take a number more, and dropout would continue differently.
            generator=torch.Generator(),
        )
        self._closing: weakref.finalize[Any, Any] | None = None

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self._order.num_steps

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch, from ``start_step`` on; one epoch at a time."""
        check_start(start_step, len(self))
        self._order.epoch, self._order.start_step = epoch, start_step
        with _signals_held():
            batches = iter(self._loader)
        if self._closing is None:  # at exit it runs before torch waits for the workers
            self._closing = weakref.finalize(self, setattr, self._is_closed, "value", 1)
        for images, labels, problems in _all_of(batches):
            if images is None or labels is None:
                raise ValueError("; ".join(problems))
            self._name(problems)
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            yield to_float(images, self.channels_last), labels

    def _name(self, problems: Sequence[str]) -> None:
        """Warn of files that were skipped, of each once."""
        for problem in problems:
            if problem not in self._named:
                self._named.add(problem)
                warnings.warn(f"{problem}; skipped, another one takes its place", stacklevel=3)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold back signals to stop: a worker that is started here would end by one before it can
    leave it to the main process."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(is_closed: Any, _worker: int) -> None:
    """Leave signals to stop to the main process, which needs batches until it saves.

    A terminal and Slurm send them to all processes. torch ends a worker by SIGTERM, too, but only
    after the loader is closed.
    """
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if is_closed.value else None)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    end_with_parent()


def _all_of(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches; what torch raises where a worker has died becomes one sentence."""
    try:
        yield from batches
    except (OSError, EOFError, RuntimeError) as error:
        # The first two: it has died between a batch and the memory that the batch is in.
        if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
            raise
        raise RuntimeError(f"{DEAD_WORKER} ({error})") from None


@dataclass(frozen=True, slots=True)
class _Item:
    """A decoded image, or None; and what was wrong with the files before it."""

    image: UInt8[Tensor, "s s 3"] | None
    label: Tensor
    problems: tuple[str, ...]


class _Files(Dataset[_Item]):
    """Decodes the file of a key; returns the messages of errors as text.

    An exception raised in a worker would reach the user with the traceback of the worker.
    """

    def __init__(self, file_set: FileSet, view: View, num_substitutes: int, is_closed: Any) -> None:
        # One block of bytes: touching the reference counts of a million strings would copy them
        # into every worker.
        self.paths = np.array([os.fsencode(path) for path in file_set.paths])
        self.labels = file_set.labels
        self.view = view
        self.is_closed = is_closed
        self.num_substitutes = min(num_substitutes, len(file_set) - 1)
        is_sharded = shard_numbers(file_set.paths[:1]) is not None
        self.stride = max(len(file_set) // (SUBSTITUTES + 1), 1) if is_sharded else 1

    def __getitem__(self, key: Key) -> _Item:
        if self.is_closed.value:
            return _Item(None, self.labels[key.index], ("the loader is closed",))
        problems: list[str] = []
        for turn in range(1 + self.num_substitutes):
            index = (key.index + turn * self.stride) % len(self.paths)
            try:
                with open_image(os.fsdecode(self.paths[index])) as image:
                    shown = self.view.show(image, Key(key.epoch, index, key.copy))
            except (ValueError, OSError) as error:
                problems.append(str(error))
            else:
                return _Item(shown, self.labels[index], tuple(problems))
        return _Item(None, self.labels[key.index], tuple(problems))


# Images and labels, or None in their places; and messages.
_Batch = tuple[Tensor | None, Tensor | None, list[str]]


def _collate(items: Sequence[_Item]) -> _Batch:
    problems = [problem for item in items for problem in item.problems]
    images = [item.image for item in items if item.image is not None]
    if len(images) < len(items):
        lost = next(item for item in items if item.image is None)
        return None, None, list(lost.problems)
    return torch.stack(images), torch.stack([item.label for item in items]), problems
