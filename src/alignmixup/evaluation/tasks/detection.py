"""Transfer to detection: fine-tune a detector on a trained backbone, and score it.

    detector = ssd300(net, num_classes=20)                  or faster_rcnn(net, 80)
    fine_tune(detector, voc_trainval, VOC_SSD)
    results = detection(detector, voc_test, style="voc")

Examples are anything that gives images in bytes with boxes (see ``Example``). Labels count from 0
here, from 1 inside torchvision's detectors. All figures are in percent.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from alignmixup.contracts import Result
from alignmixup.evaluation.average_precision import (
    Detected,
    Truth,
    VocPrecision,
    coco_average_precision,
    voc_average_precision,
)
from alignmixup.evaluation.detection_crops import Augmentation, augment
from alignmixup.evaluation.forward import evaluating, model_device

__all__ = [
    "COCO_FASTER_RCNN",
    "VOC_SSD",
    "Example",
    "Examples",
    "FineTuning",
    "detect",
    "detection",
    "fine_tune",
]


class Example(Protocol):
    """One image (bytes [3, h, w]) with its objects; ends of boxes are exclusive."""

    @property
    def image(self) -> Tensor: ...
    @property
    def boxes(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def is_ignored(self) -> Tensor: ...
    @property
    def areas(self) -> Tensor: ...


class Examples(Protocol):
    """A set of examples, read one at a time."""

    @property
    def class_names(self) -> tuple[str, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Example: ...


@dataclass(frozen=True, slots=True)
class FineTuning:
    """SGD with linear warm-up; the rate falls to a tenth at each milestone, an epoch count."""

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
        if self.lr <= 0:
            raise ValueError(f"lr must be positive, got {self.lr}")

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


def fine_tune(
    detector: nn.Module,
    examples: Examples,
    settings: FineTuning,
    *,
    on_epoch: Callable[[int, float], None] | None = None,
) -> tuple[float, ...]:
    """Train the detector in place, on its device, and return the mean loss of each epoch.

    Objects marked to be ignored are not trained on, and images without others are left out.
    ``on_epoch`` is told (epoch, loss).
    """
    device = model_device(detector) or torch.device("cpu")
    trained = [p for p in detector.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(
        trained, settings.lr, settings.momentum, weight_decay=settings.weight_decay
    )
    losses: list[float] = []
    step = 0
    with evaluating(detector), _seeded(settings.seed, device):
        detector.train()
        for epoch in range(settings.num_epochs):
            total, num_steps = torch.zeros((), device=device), 0
            for images, targets in _training_batches(examples, settings, epoch, device):
                for group in optimizer.param_groups:
                    group["lr"] = settings.rate(epoch, step)
                loss = torch.stack(list(detector(images, targets).values())).sum()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total += loss.detach()
                num_steps, step = num_steps + 1, step + 1
            losses.append(float(total) / num_steps)
            if not math.isfinite(losses[-1]):
                raise ValueError(
                    f"the loss is not finite in epoch {epoch}: take a smaller lr than {settings.lr}"
                )
            if on_epoch is not None:
                on_epoch(epoch, losses[-1])
    return tuple(losses)


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's own generators for a while: torchvision samples its boxes from them."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


_Targets = list[dict[str, Tensor]]


def _training_batches(
    examples: Examples, settings: FineTuning, epoch: int, device: torch.device
) -> Iterator[tuple[list[Tensor], _Targets]]:
    """Give the batches of one epoch, a function of (seed, epoch); read by threads, in order."""
    rng = torch.Generator().manual_seed(_mixed_seed(settings.seed, epoch, 0))
    order = torch.randperm(len(examples), generator=rng).tolist()

    def read(index: int) -> tuple[Tensor, Tensor, Tensor] | None:
        example = examples[index]
        use = ~example.is_ignored
        if not use.any():
            return None
        chance = torch.Generator().manual_seed(_mixed_seed(settings.seed, epoch, 1 + index))
        image = example.image.float() / 255
        return augment(
            image, example.boxes[use], example.labels[use], settings.augmentation, chance
        )

    images: list[Tensor] = []
    targets: _Targets = []
    num_found = 0
    with ThreadPoolExecutor(settings.num_threads) as pool:
        # A window of two batches at a time: a whole epoch at once would not fit in memory.
        window = 2 * settings.batch_size
        for first in range(0, len(order), window):
            for found in pool.map(read, order[first : first + window]):
                if found is None:
                    continue
                num_found += 1
                image, boxes, labels = found
                images.append(image.to(device))
                targets.append({"boxes": boxes.to(device), "labels": labels.to(device) + 1})
                if len(images) == settings.batch_size:
                    yield images, targets
                    images, targets = [], []
    if not num_found:
        raise ValueError("no example has an object to train on")
    if images:
        yield images, targets


def _mixed_seed(seed: int, epoch: int, index: int) -> int:
    return ((seed * 1_000_003 + epoch) * 1_000_003 + index) % 2**63


def detect(
    detector: nn.Module, examples: Examples, *, batch_size: int = 8
) -> tuple[list[Detected], list[Truth]]:
    """Run the detector over all examples, in order, and return what it says and what is true."""
    if not len(examples):
        raise ValueError("there are no examples to detect in")
    device = model_device(detector) or torch.device("cpu")
    found: list[Detected] = []
    truths: list[Truth] = []
    with evaluating(detector), torch.no_grad():
        for first in range(0, len(examples), batch_size):
            batch = [examples[i] for i in range(first, min(first + batch_size, len(examples)))]
            images = [example.image.to(device).float() / 255 for example in batch]
            for example, said in zip(batch, detector(images), strict=True):
                found.append(_detected(said))
                truths.append(_truth(example))
    return found, truths


def _detected(said: dict[str, Tensor]) -> Detected:
    return Detected(
        boxes=said["boxes"].double().cpu().numpy(),
        labels=said["labels"].cpu().numpy() - 1,
        scores=said["scores"].double().cpu().numpy(),
    )


def _truth(example: Example) -> Truth:
    return Truth(
        boxes=example.boxes.double().cpu().numpy(),
        labels=example.labels.cpu().numpy(),
        is_ignored=example.is_ignored.cpu().numpy().astype(bool),
        areas=example.areas.double().cpu().numpy(),
        size=(example.image.shape[2], example.image.shape[1]),
    )


def detection(
    detector: nn.Module,
    examples: Examples,
    *,
    style: Literal["voc", "coco"],
    batch_size: int = 8,
) -> list[Result]:
    """Return ``map`` and what belongs to it, in percent, by the rules of VOC or of COCO.

    VOC: ``map`` is the 11-point AP at IoU 0.5 and ``map_area`` the area under the curve. COCO:
    ``map`` over IoU 0.50 to 0.95, ``map50``, ``map75``.
    """
    if style not in ("voc", "coco"):
        raise ValueError(f"style must be 'voc' or 'coco', got {style!r}")
    found, truths = detect(detector, examples, batch_size=batch_size)
    names = examples.class_names
    settings: dict[str, object] = {
        "style": style,
        "detector": type(detector).__name__,
        "num_images": len(truths),
        "num_classes": len(names),
    }
    if style == "coco":
        values = coco_average_precision(truths, found, len(names))
        return [Result("detection", m, 100 * float(v), settings) for m, v in values.items()]
    precision = voc_average_precision(truths, found, len(names))
    results = []
    for metric, kind in (("map", "eleven_point"), ("map_area", "area")):
        by_class = getattr(precision, kind)
        shown = {n: v if v is None else 100 * v for n, v in zip(names, by_class, strict=True)}
        details = {**settings, "iou_threshold": 0.5, "precision": kind, "by_class": shown}
        value = 100 * VocPrecision.mean(by_class)
        results.append(Result("detection", metric, value, details))
    return results
