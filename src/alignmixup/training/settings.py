"""How a network is trained: everything but the data, the network and the mixer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from alignmixup.checking import check_choices
from alignmixup.device import Switch
from alignmixup.registry import OPTIMIZERS

# Settings that may change when a run is resumed: the device and how often it evaluates,
FREE_SETTINGS = ("device", "eval_every")
# and how the device computes, where "auto" is what it does best (``device.compute_for``). The
# precision is part of what was trained: the ledger records a change of it.
COMPUTE_SETTINGS = ("precision", "channels_last", "compile", "capture", "accumulate")


@dataclass(frozen=True)
class TrainSettings:
    """Settings of one training run; the defaults are the paper's for CIFAR.

    Args:
        epochs: Number of epochs.
        batch_size: Images per step, of all processes together.
        lr: Largest learning rate.
        min_lr: Learning rate that the schedule falls to instead of 0.
        classifier_lr: Learning rate of the parameters whose names start with `classifier`; None:
            the same.
        classifier: Start of the names of the classifier's parameters.
        optimizer: sgd, adamw, or one registered with `register_optimizer`.
        momentum: Of SGD; with AdamW the first of its two betas, the second being 0.999.
        nesterov: Nesterov momentum; SGD only.
        weight_decay: Weight decay of all parameters.
        decay_vectors: False: biases and the scales of norms (one-dimensional parameters) have no
            weight decay.
        schedule: Learning rate that falls at `milestones`, by a cosine, or through `points`.
        milestones: Epochs at which the step schedule multiplies the learning rate by `decay`.
        decay: Factor of the step schedule.
        points: (epoch, share of `lr`) between which the linear schedule interpolates; an epoch that
            stands twice is a jump.
        warmup_epochs: Epochs in which the learning rate rises from `min_lr`; cut to half of a run
            too short for it.
        clip_norm: Largest norm of the gradient; None: no clipping.
        ema: Decay of a moving average of the weights, e.g. 0.999, which is then what is evaluated
            and loaded; None: no average.
        seed: Seed of weights, order, augmentation and mixing.
        precision: auto: bf16 on a GPU that has it, else float32; a resumed run keeps the precision
            it has.
        channels_last: The memory layout of tensor cores; CUDA only, ignored elsewhere. auto: on
            CUDA.
        compile: Compile the network with torch.compile. auto: on CUDA with Triton.
        accumulate: Parts that each process takes its share of a batch in, to need less memory.
            Partners are within a part. The same gradients as of the whole batch, except through
            batch statistics, which are those of a part.
        sync_batchnorm: With several processes: batch statistics of the batch of all of them.
        partners: With several processes: share takes partners from the share of the same process;
            batch from the batch of all, which then exchange images, features and logits. Batch
            gives the weights of one process.
        capture: Replay each case of the mixer as a CUDA graph where possible; CUDA only. auto: on
            CUDA with one process. True also captures NCCL's communication between processes.
        eval_every: Epochs between evaluations; each of the last ten epochs is always evaluated.
        device: cuda, cpu, ...; auto: a GPU if there is one.

    Raises:
        ValueError: If a setting is out of range, or settings contradict each other.

    Example:
        ```python
        settings = am.TrainSettings(epochs=100, lr=0.05, schedule="cosine", milestones=())
        ```
    """

    epochs: int = 2000
    batch_size: int = 128
    lr: float = 0.1
    min_lr: float = 0.0
    classifier_lr: float | None = None
    classifier: str = "head."
    optimizer: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    decay_vectors: bool = True
    schedule: Literal["step", "cosine", "linear"] = "step"
    milestones: tuple[int, ...] = (500, 1000, 1500)
    decay: float = 0.1
    points: tuple[tuple[float, float], ...] = ()
    warmup_epochs: float = 0.0
    clip_norm: float | None = None
    ema: float | None = None
    seed: int = 0
    precision: Literal["auto", "float32", "bf16"] = "auto"
    channels_last: Switch = "auto"
    compile: Switch = "auto"
    accumulate: int = 1
    sync_batchnorm: bool = False
    partners: Literal["share", "batch"] = "share"
    capture: Switch = "auto"
    eval_every: int = 1
    device: str = "auto"

    def __post_init__(self) -> None:
        self._require("epochs batch_size eval_every accumulate", lambda v: v >= 1, "be at least 1")
        self._require("lr decay", lambda v: v > 0, "be positive")
        self._require(
            "min_lr momentum weight_decay warmup_epochs", lambda v: v >= 0, "not be negative"
        )
        self._require("seed", lambda v: abs(v) < 2**62, "be from -2**62 to 2**62")
        self._require("momentum", lambda v: v < 1, "be less than 1")
        self._require("min_lr", lambda v: v <= self.lr, f"not exceed lr ({self.lr})")
        for name, is_valid, text in (
            ("clip_norm", lambda v: v > 0, "be positive, or None for none"),
            ("classifier_lr", lambda v: v > 0, "be positive, or None for none"),
            ("ema", lambda v: 0 <= v < 1, "be from 0 to below 1, or None for none"),
        ):
            if getattr(self, name) is not None:
                self._require(name, is_valid, text)
        if self.classifier_lr is not None:
            least = self.classifier_lr
            self._require("min_lr", lambda v: v <= least, f"not exceed classifier_lr ({least})")
        check_choices(self)
        OPTIMIZERS[self.optimizer]  # raises for an unknown name
        if self.nesterov and self.optimizer != "sgd":
            raise ValueError(f"nesterov is for optimizer='sgd', not {self.optimizer!r}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0: set momentum, or nesterov=False")
        if self.partners == "batch" and self.compile is True:
            raise ValueError("partners='batch' cannot be compiled: set compile=False")
        self._check_schedule()

    def _require(self, names: str, is_valid: Callable[[Any], bool], text: str) -> None:
        for name in names.split():
            value = getattr(self, name)
            if not is_valid(value):
                raise ValueError(f"{name} must {text}, got {value!r}")

    def _check_schedule(self) -> None:
        if (self.schedule == "linear") != bool(self.points):
            raise ValueError(
                f"schedule='linear' needs points, and no other schedule takes them; got "
                f"{self.points} with {self.schedule!r}"
            )
        rising, first = sorted(set(self.milestones)), min(self.milestones, default=1)
        if list(self.milestones) != rising or first < 1:
            raise ValueError(
                f"milestones must be increasing epochs from 1 on, got {self.milestones}"
            )
        epochs = [epoch for epoch, _ in self.points]
        is_finite = all(math.isfinite(number) for point in self.points for number in point)
        if not is_finite or epochs != sorted(epochs) or any(s < 0 for _, s in self.points):
            raise ValueError(
                "points must have epochs in order and shares of at least 0, all finite, got "
                f"{self.points}"
            )

    def fitted(self) -> Self:
        """Return the settings with a warm-up that fits: half of the epochs, where it is longer."""
        if self.warmup_epochs < self.epochs:
            return self
        return dataclasses.replace(self, warmup_epochs=self.epochs / 2)


def check_same(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    what: str,
    remedy: str,
    error: type[Exception] = ValueError,
) -> None:
    """Raise ``error`` with ``what``, each difference and the ``remedy`` if two records differ."""
    found = differences(before, now)
    if found:
        raise error(f"{what} ({'; '.join(found)}); {remedy}")


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List the differences between two records, either of which may have been read from JSON.

    Settings that may change when a run is resumed are left out.
    """
    found = []
    for key in sorted({*before, *now}):
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            if a.get("kind") != b.get("kind"):  # two methods: their settings do not compare
                a, b = ({"kind": each.get("kind")} for each in (a, b))
            found += differences(a, b, f"{prefix}{key}.")
        elif _listed(a) != _listed(b):
            if prefix == "train." and key in (*FREE_SETTINGS, *COMPUTE_SETTINGS):
                continue
            if f"{prefix}{key}" == "data.on_error":
                continue
            found.append(f"{prefix}{key}: {a} before, {b} now")
    return found


def _listed(value: Any) -> Any:
    """JSON has no tuples."""
    return [_listed(each) for each in value] if isinstance(value, list | tuple) else value
