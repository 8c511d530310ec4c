"""Fine-tuning of a detector, step by step, so that it can be stopped and resumed anywhere.

    for _ in tuner.run_epoch(): ...                one iteration per step

The order of the images is a function of (seed, epoch), their augmentation of (seed, epoch, image),
and torchvision's sampling of (seed, epoch, step): a run resumes from weights, momentum and two
counters. Labels count from 0 here, from 1 inside torchvision's detectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignmixup.datasets.voc import DetectionSet
from alignmixup.device import fork_rng
from alignmixup.evaluation.detection.crops import Augmentation, augment
from alignmixup.evaluation.forward import model_device


@dataclass(frozen=True, slots=True)
class FineTuning:
    """SGD with linear warm-up; the learning rate drops by 10 at each milestone, an epoch."""

    num_epochs: int
    batch_size: int
    lr: float
    milestones: tuple[int, ...] = ()
    momentum: float = 0.9
    weight_decay: float = 1e-4
    num_warmup_steps: int = 500
    augmentation: Augmentation = "flip"
    seed: int = 0
    num_threads: int = 8

    def __post_init__(self) -> None:
        for name in ("num_epochs", "batch_size", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")

    def rate(self, epoch: int, step: int) -> float:
        """Return the learning rate of a step, counted over all epochs."""
        warm = min(1.0, (step + 1) / max(1, self.num_warmup_steps))
        return self.lr * warm * 0.1 ** sum(epoch >= m for m in self.milestones)


# The usual schedules of the two detectors; how the published transfer was trained is not known.
COCO_FASTER_RCNN = FineTuning(num_epochs=12, batch_size=16, lr=0.02, milestones=(8, 11))
VOC_SSD = FineTuning(
    num_epochs=240,
    batch_size=32,
    lr=1e-3,
    milestones=(160, 200),
    weight_decay=5e-4,
    augmentation="ssd",
)

# Steps between two checks of the loss, each of which is a host sync.
CHECK_EVERY = 50


class FineTuner:
    """A detector in training, on its device, with its optimizer and progress.

    Ignored objects are not trained on, and images without others are left out. ``step`` counts
    within ``epoch``, which has ``steps_per_epoch``; ``total`` is the sum of the losses of this
    epoch, and ``losses`` has the mean of each finished epoch.
    """

    def __init__(self, detector: nn.Module, examples: DetectionSet, settings: FineTuning) -> None:
        self.detector, self.examples, self.settings = detector, examples, settings
        self.usable = [i for i in range(len(examples)) if examples.is_trainable(i)]
        if not self.usable:
            raise ValueError("no example has an object to train on")
        self.steps_per_epoch = math.ceil(len(self.usable) / settings.batch_size)
        self.device = model_device(detector) or torch.device("cpu")
        self.optimizer = torch.optim.SGD(
            [p for p in detector.parameters() if p.requires_grad],
            settings.lr,
            settings.momentum,
            weight_decay=settings.weight_decay,
        )
        self.epoch, self.step = 0, 0
        self.total = torch.zeros((), device=self.device)
        self.losses: list[float] = []

    @property
    def is_done(self) -> bool:
        return self.epoch >= self.settings.num_epochs

    @property
    def steps_done(self) -> int:
        return self.epoch * self.steps_per_epoch + self.step

    def run_epoch(self) -> Iterator[None]:
        """Train to the end of the epoch, yielding after each step; it can be left there."""
        self.detector.train()
        for images, targets in self._batches():
            self._take_step(images, targets)
            self.step += 1
            if self.step % CHECK_EVERY == 0 or self.step == self.steps_per_epoch:
                self._check_finite()
            if self.step < self.steps_per_epoch:
                yield
        self.losses.append(float(self.total) / self.steps_per_epoch)
        self.epoch, self.step = self.epoch + 1, 0
        self.total = torch.zeros((), device=self.device)
        yield

    def _take_step(self, images: list[Tensor], targets: _Targets) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate(self.epoch, self.steps_done)
        # Torchvision samples its boxes from torch's own generators.
        seed = _mixed_seed(self.settings.seed, self.epoch, -1 - self.step)
        with fork_rng(self.device, seed):
            loss = torch.stack(list(self.detector(images, targets).values())).sum()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.total += loss.detach()

    def _check_finite(self) -> None:
        if not math.isfinite(float(self.total)):
            raise ValueError(
                f"the loss is not finite in epoch {self.epoch + 1}: use a smaller lr than "
                f"{self.settings.lr}"
            )

    def _batches(self) -> Iterator[tuple[list[Tensor], _Targets]]:
        """Yield the remaining batches of this epoch; threads read the images, in order."""
        settings, epoch = self.settings, self.epoch
        rng = torch.Generator().manual_seed(_mixed_seed(settings.seed, epoch, 0))
        order = [self.usable[i] for i in torch.randperm(len(self.usable), generator=rng).tolist()]

        def read(index: int) -> tuple[Tensor, Tensor, Tensor]:
            example = self.examples[index]
            use = ~example.is_ignored
            chance = torch.Generator().manual_seed(_mixed_seed(settings.seed, epoch, 1 + index))
            image = example.image.float() / 255
            return augment(
                image, example.boxes[use], example.labels[use], settings.augmentation, chance
            )

        size = settings.batch_size
        starts = range(self.step * size, len(order), size)
        with ThreadPoolExecutor(settings.num_threads) as pool:
            # One batch ahead: a whole epoch would not fit in memory.
            ahead = [pool.map(read, order[first : first + size]) for first in starts[:1]]
            for first in starts:
                following = order[first + size : first + 2 * size]
                ahead.append(pool.map(read, following))
                labeled = [[part.to(self.device) for part in row] for row in ahead.pop(0)]
                targets = [{"boxes": boxes, "labels": y + 1} for _, boxes, y in labeled]
                yield [image for image, _, _ in labeled], targets


_Targets = list[dict[str, Tensor]]


def _mixed_seed(seed: int, epoch: int, index: int) -> int:
    return ((seed * 1_000_003 + epoch) * 1_000_003 + index) % 2**63
