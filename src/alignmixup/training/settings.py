"""How a network is trained: everything but the data, the network and the mixer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

__all__ = ["COMPUTE_SETTINGS", "FREE_SETTINGS", "TrainSettings", "differences"]

# Settings that a run may be resumed with other values of: the device and how often it evaluates,
FREE_SETTINGS = ("device", "eval_every")
# and how the device computes, where "auto" is what it does best (``training.device.compute_for``).
# The precision is part of what was trained: a run that changes it records so.
COMPUTE_SETTINGS = ("precision", "channels_last", "compile", "capture")

Switch = bool | Literal["auto"]


@dataclass(frozen=True)
class TrainSettings:
    """Settings of one training run; the defaults are the paper's for CIFAR.

    Args:
        epochs: Number of epochs.
        batch_size: Images per step, of all processes together.
        lr: Largest learning rate.
        classifier_lr: Learning rate of the parameters whose names start with `classifier`; None:
            the same.
        classifier: Start of the names of the classifier's parameters.
        optimizer: sgd or adamw.
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
        warmup_epochs: Epochs in which the learning rate rises from zero; cut to half of a run too
            short for it.
        clip_norm: Largest norm of the gradient; None: no clipping.
        seed: Seed of weights, order, augmentation and mixing.
        precision: auto: bf16 on a GPU that has it, else float32; a resumed run keeps the precision
            it has.
        channels_last: The memory layout of tensor cores; CUDA only, ignored elsewhere. auto: on
            CUDA.
        compile: Compile the network with torch.compile. auto: on CUDA with Triton.
        capture: Replay each case of the mixer as a CUDA graph where possible; CUDA only. auto: on
            CUDA.
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
    classifier_lr: float | None = None
    classifier: str = "head."
    optimizer: Literal["sgd", "adamw"] = "sgd"
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
    seed: int = 0
    precision: Literal["auto", "float32", "bf16"] = "auto"
    channels_last: Switch = "auto"
    compile: Switch = "auto"
    capture: Switch = "auto"
    eval_every: int = 1
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lr", "decay"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("momentum", "weight_decay", "warmup_epochs"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("clip_norm", "classifier_lr"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, or None for none, got {value}")
        if self.schedule not in ("step", "cosine", "linear"):
            raise ValueError(
                f"schedule must be 'step', 'cosine' or 'linear', got {self.schedule!r}"
            )
        if self.optimizer not in ("sgd", "adamw"):
            raise ValueError(f"optimizer must be 'sgd' or 'adamw', got {self.optimizer!r}")
        if self.nesterov and self.optimizer != "sgd":
            raise ValueError(f"nesterov is for optimizer='sgd', not {self.optimizer!r}")
        self._check_points()
        if self.precision not in ("auto", "float32", "bf16"):
            raise ValueError(
                f"precision must be 'auto', 'float32' or 'bf16', got {self.precision!r}"
            )
        for name in ("channels_last", "compile", "capture"):
            if getattr(self, name) not in ("auto", True, False):
                raise ValueError(
                    f"{name} must be True, False or 'auto', got {getattr(self, name)!r}"
                )
        if (
            list(self.milestones) != sorted(set(self.milestones))
            or min(self.milestones, default=1) < 1
        ):
            raise ValueError(
                f"milestones must be epochs from 1 on, and rise, got {self.milestones}"
            )
        if self.momentum >= 1:
            raise ValueError(f"momentum must be less than 1, got {self.momentum}")

    def _check_points(self) -> None:
        if (self.schedule == "linear") != bool(self.points):
            raise ValueError(
                f"points belong to schedule='linear', got {self.points} with {self.schedule!r}"
            )
        epochs = [epoch for epoch, _ in self.points]
        if epochs != sorted(epochs) or any(share < 0 for _, share in self.points):
            raise ValueError(
                f"points must have epochs that do not fall and shares from 0 on, got {self.points}"
            )

    def fitted(self) -> Self:
        """Return the settings with a warm-up that fits: half of the epochs, where it is longer."""
        if self.warmup_epochs < self.epochs:
            return self
        return dataclasses.replace(self, warmup_epochs=self.epochs / 2)


def differences(there: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List what differs between two records, either perhaps read from JSON.

    Settings of training that a run may be resumed with other values of are left out.
    """
    found = []
    for key in sorted({*there, *ours}):
        a, b = there.get(key), ours.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif (list(a) if isinstance(a, tuple) else a) != (list(b) if isinstance(b, tuple) else b):
            if prefix == "train." and key in (*FREE_SETTINGS, *COMPUTE_SETTINGS):
                continue
            found.append(f"{prefix}{key}: {a} there, {b} now")
    return found
