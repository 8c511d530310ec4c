"""What every evaluation shares: batches of checked pixels, and the model as a function of them.

Inside a task images are pixels in [0, 1]. For a loader that normalizes, ``normalized_by`` is its
mean and std: the task undoes the normalization of each batch and applies it again before the model.
Symbols: b images of a batch, n images in all, k classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from alignmixup.contracts import label_problem, widened
from alignmixup.hooks import evaluating
from alignmixup.ops.blend import check_logits
from alignmixup.training.distributed import Team

Batches = Iterable[tuple[Tensor, Tensor]]
ImageBatches = Iterable[Tensor] | Iterable[Sequence[Tensor]]
Normalization = tuple[Sequence[float], Sequence[float]]

# One process, which has all images.
ALONE = Team()

NO_IMAGES = (
    "there are no images: the batches are empty; a generator can be read only once, so pass a list "
    "or a loader"
)

# Undoing a normalization in float32 and resizing leave errors of this order.
RANGE_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class PixelBatches:
    """Batches of pixels in [0, 1], whatever ``normalized_by`` says; each iteration makes them."""

    make: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.make()


class Pixels(NamedTuple):
    """The mean and std per channel that a loader normalizes by; a plain pair is accepted too."""

    mean: Sequence[float]
    std: Sequence[float]

    @classmethod
    def of(cls, normalized_by: Normalization) -> Pixels:
        """Convert the pair of a user, or raise with an example."""
        try:
            mean, std = (tuple(float(v) for v in part) for part in normalized_by)
        except (TypeError, ValueError):
            raise ValueError(
                "normalized_by must be (mean, std), each with one number per channel, such as "
                f"((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)); got {normalized_by!r}"
            ) from None
        return cls(mean, std)

    def normalize(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """Normalize pixels."""
        mean, std = self._as_maps(x)
        return (x - mean) / std

    def restore(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """Return the pixels of normalized images."""
        mean, std = self._as_maps(x)
        return x * std + mean

    def check_normalized(self, ranges: Float[Tensor, "batches 2"]) -> None:
        """Raise if all values of a set that should be normalized look like pixels.

        Normalized images fill [0, 1] and stay inside only if all their pixels are above the mean,
        or if the normalization maps [0, 1] into itself.
        """
        low, high = float(ranges[:, 0].min()), float(ranges[:, 1].max())
        leads_out = any(m > 0 or 1 - m > s for m, s in zip(self.mean, self.std, strict=True))
        if leads_out and low >= 0 and high <= 1 and high - low > 0.5:
            raise ValueError(
                "normalized_by is given, but all values of the images lie in [0, 1], like pixels: "
                "pass the images as your normalizing loader returns them, or leave normalized_by "
                "out"
            )

    def _as_maps(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not len(self.mean) == len(self.std) == x.shape[1]:
            raise ValueError(
                f"normalized_by needs one mean and one std for each of {x.shape[1]} channels, "
                f"got {len(self.mean)} and {len(self.std)}"
            )
        if min(self.std) <= 0:
            raise ValueError(f"normalized_by needs a positive std, got {list(self.std)}")
        mean, std = (
            torch.as_tensor(v, dtype=x.dtype, device=x.device).view(-1, 1, 1) for v in self
        )
        return mean, std


class Predictions(NamedTuple):
    """The logits of all images of a set and their labels, in the order of the batches."""

    logits: Float[Tensor, "n k"]
    labels: Int[Tensor, " n"]


@dataclass(frozen=True, slots=True)
class Forward:
    """The model as a function from pixels to logits in float32 or better."""

    model: nn.Module
    normalized_by: Normalization | None = None
    amp_dtype: torch.dtype | None = None

    def prepared(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """Return pixels as the model expects them: normalized, in the dtype of its weights."""
        if self.normalized_by is not None:
            x = Pixels.of(self.normalized_by).normalize(x)
        return x.to(model_dtype(self.model) or x.dtype)

    def __call__(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        x = self.prepared(x)
        with autocast(x, self.amp_dtype):
            logits = self.model(x)
        check_logits(logits, len(x))
        return widened(logits)


def autocast(x: Tensor, amp_dtype: torch.dtype | None) -> torch.autocast:
    """Return autocast in ``amp_dtype`` on the device of ``x``; None disables it."""
    return torch.autocast(x.device.type, dtype=amp_dtype, enabled=amp_dtype is not None)


def collect_logits(
    model: nn.Module,
    batches: Batches,
    normalized_by: Normalization | None = None,
    amp_dtype: torch.dtype | None = None,
    team: Team = ALONE,
) -> Predictions:
    """Run the model in eval mode, without gradients, over all labeled images.

    The logits stay on the model's device. Labels out of range and logits that are not finite raise.
    Each process of ``team`` passes the batches of its share; all get the logits of all images, in
    the order of the whole set.
    """
    own = own_logits(Forward(model, normalized_by, amp_dtype), batches, team)
    return Predictions(_join(own.logits, team), team.join_rows(own.labels))


def own_logits(forward: Forward, batches: Batches, team: Team) -> Predictions:
    """The same for the images of this process, which may have none where there are several."""
    device = model_device(forward.model)
    logits, labels = [], []
    with team.agreed(), evaluating(forward.model), torch.no_grad():
        for x, y in labeled_pixels(batches, forward.normalized_by, device, team):
            logits.append(forward(x))
            labels.append(y)
        if not logits:
            labels.append(torch.empty(0, dtype=torch.int64, device=device))
            return Predictions(torch.empty(0, 0, device=device), labels[0])
        own = Predictions(torch.cat(logits), torch.cat(labels))
        check_finite(own.logits)
        check_classes(own.logits)
        check_labels(own.labels, own.logits.shape[1])
    return own


def _join(logits: Float[Tensor, "m k"], team: Team) -> Float[Tensor, "n k"]:
    """Return the logits of all processes, in float64 if there are several: one may have none."""
    if team.size == 1:
        return logits
    whole = team.join_rows(logits.double())
    if not len(whole):
        raise ValueError(NO_IMAGES)
    return whole


def predict(
    model: nn.Module,
    batches: ImageBatches,
    normalized_by: Normalization | None = None,
    amp_dtype: torch.dtype | None = None,
    team: Team = ALONE,
) -> Float[Tensor, "n k"]:
    """Return the logits of images with or without labels; labels are ignored.

    ``team`` is as in ``collect_logits``.
    """
    forward, device = Forward(model, normalized_by, amp_dtype), model_device(model)
    with team.agreed(), evaluating(model), torch.no_grad():
        images = pixel_batches(batches, normalized_by, device, team)
        parts = [forward(x) for x, _ in images]
        logits = torch.cat(parts) if parts else torch.empty(0, 0, device=device)
        check_finite(logits)
    return _join(logits, team)


def labeled_pixels(
    batches: Batches,
    normalized_by: Normalization | None,
    device: torch.device | None,
    team: Team = ALONE,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (pixels, labels) on ``device``; raise for a batch without integer labels."""
    for x, y in pixel_batches(batches, normalized_by, device, team):
        if y is None:
            raise ValueError("batches must be pairs (images, labels), got images alone")
        if not isinstance(y, Tensor) or y.shape != x.shape[:1] or y.is_floating_point():
            is_tensor = isinstance(y, Tensor)
            found = f"{y.dtype} of shape {list(y.shape)}" if is_tensor else type(y).__name__
            raise ValueError(
                f"labels must be a tensor of {len(x)} integers for {len(x)} images, got {found}"
            )
        yield x, y.to(x.device, torch.int64)


def pixel_batches(
    batches: ImageBatches | Batches,
    normalized_by: Normalization | None,
    device: torch.device | None,
    team: Team = ALONE,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield each batch as pixels in [0, 1], in float32 or better, with its labels if it has any.

    Without a ``device`` the images stay on theirs. Raises if there is no image, unless several
    processes share them, or if the images are pixels although ``normalized_by`` is given.
    """
    if isinstance(batches, Tensor):
        raise ValueError(
            f"batches must be an iterable of batches, got one tensor of shape "
            f"{list(batches.shape)}; pass tensor.split(256)"
        )
    undo = None
    if normalized_by is not None and not isinstance(batches, PixelBatches):
        undo = Pixels.of(normalized_by)
    num_images = 0
    ranges = []
    for batch in batches:
        team.check_others()
        x, y = (batch, None) if isinstance(batch, Tensor) else (batch[0], batch[1])
        check_image_batch(x)
        if not len(x):
            continue
        num_images += len(x)
        # An attack changes pixels by less than half precision resolves.
        wide = torch.promote_types(x.dtype, torch.float32)
        x = x.to(device or x.device, wide, non_blocking=True)
        if undo is not None:
            ranges.append(torch.stack(torch.aminmax(x)))
        yield _checked_pixels(x, undo), y
    if not num_images and team.size == 1:
        raise ValueError(NO_IMAGES)
    if ranges and undo is not None:
        undo.check_normalized(torch.stack(ranges))


def check_image_batch(x: Tensor) -> None:
    """Raise unless this is a batch of images as floats."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim != 4:
        is_tensor = isinstance(x, Tensor)
        found = f"{x.dtype} of shape {list(x.shape)}" if is_tensor else type(x).__name__
        raise ValueError(
            f"images must be floats in [0, 1] of shape [b, 3, h, w], got {found}; divide bytes by "
            "255"
        )


def model_device(model: nn.Module) -> torch.device | None:
    """Return the device of the model's first parameter or buffer; None if it has neither."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return None


def model_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of the model's first floating parameter or buffer; None without one."""
    tensors = chain(model.parameters(), model.buffers())
    return next((t.dtype for t in tensors if t.is_floating_point()), None)


def _checked_pixels(x: Tensor, pixels: Pixels | None) -> Tensor:
    """Return pixels in [0, 1], or raise for values outside of it and for NaN."""
    remedy = "if your loader normalizes, pass its normalized_by=(mean, std)"
    if pixels is not None:
        x = pixels.restore(x)
        remedy = "after undoing normalized_by: are mean and std those of your loader?"
    check_range(x, remedy)
    return x.clamp(0, 1)


def check_range(x: Tensor, remedy: str) -> None:
    """Raise for values outside [0, 1] and for NaN; the message ends with ``remedy``."""
    low, high = (float(v) for v in torch.aminmax(x))
    # NaN compares false, so it raises as well.
    if not (low >= -RANGE_TOLERANCE and high <= 1 + RANGE_TOLERANCE):
        raise ValueError(
            f"images must lie in [0, 1], got values in [{low:.4g}, {high:.4g}]; {remedy}"
        )


def check_finite(logits: Tensor) -> None:
    """Raise if a logit is infinite or NaN."""
    bad = int((~logits.isfinite()).any(dim=1).sum())
    if bad:
        raise ValueError(
            f"the model returned logits that are not finite for {bad} of {len(logits)} images; "
            "check its weights, or try amp_dtype=None"
        )


def check_classes(logits: Float[Tensor, "n k"]) -> None:
    """Raise if there is one logit: its softmax says nothing."""
    if logits.shape[1] == 1:
        raise ValueError(
            "the model returns one logit, whose softmax is always 1: for the logit z of a sigmoid, "
            "score a model that returns torch.cat((torch.zeros_like(z), z), dim=1)"
        )


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Raise if a label is no class of the model."""
    if problem := label_problem(labels, num_classes):
        raise ValueError(f"{problem}; use the data that the model was trained on")


def amp_name(amp_dtype: torch.dtype | None) -> str | None:
    """Return the name of an autocast dtype as recorded in the settings of a result."""
    return None if amp_dtype is None else str(amp_dtype).removeprefix("torch.")
