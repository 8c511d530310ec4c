"""How a network is trained: everything but the data, the network and the mixer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["FREE_SETTINGS", "TrainSettings", "differences"]

# Where and how often, not what: a run may go on with other values of these.
FREE_SETTINGS = ("device", "capture", "compile", "eval_every")


@dataclass(frozen=True)
class TrainSettings:
    """Settings of one training run; the defaults are the paper's for CIFAR."""

    epochs: int = 2000
    batch_size: int = 128
    lr: float = 0.1
    classifier_lr: float | None = None
    """Learning rate of the parameters whose names start with `classifier`; None: the same."""
    classifier: str = "head."
    optimizer: Literal["sgd", "adamw"] = "sgd"
    momentum: float = 0.9
    """Of SGD; with AdamW the first of its two betas, the second being 0.999."""
    nesterov: bool = False
    weight_decay: float = 1e-4
    decay_vectors: bool = True
    """False: biases and the scales of norms (one-dimensional parameters) have no weight decay."""
    schedule: Literal["step", "cosine", "linear"] = "step"
    milestones: tuple[int, ...] = (500, 1000, 1500)
    """Epochs at which the step schedule multiplies the learning rate by `decay`."""
    decay: float = 0.1
    points: tuple[tuple[float, float], ...] = ()
    """(epoch, share of `lr`) between which the linear schedule interpolates; an epoch that stands
    twice is a jump."""
    warmup_epochs: float = 0.0
    clip_norm: float | None = None
    """Largest norm of the gradient; None: no clipping."""
    seed: int = 0
    precision: Literal["float32", "bf16"] = "float32"
    channels_last: bool = False
    """The memory layout tensor cores like; a GPU's affair, ignored on a CPU."""
    compile: bool = False
    capture: bool = False
    """On CUDA, replay each case of the mixer as one CUDA graph; falls back where it cannot."""
    eval_every: int = 1
    """Epochs between evaluations; each of the last ten epochs is always evaluated."""
    device: str = "auto"
    """cuda, cpu, ...; auto: a GPU if there is one."""

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
        if self.precision not in ("float32", "bf16"):
            raise ValueError(f"precision must be 'float32' or 'bf16', got {self.precision!r}")
        if self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"warmup_epochs ({self.warmup_epochs}) must be fewer than epochs ({self.epochs})"
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


def differences(there: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Say in what two records differ, one of them perhaps read from JSON; free settings may."""
    found = []
    for key in sorted({*there, *ours}):
        a, b = there.get(key), ours.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif (list(a) if isinstance(a, tuple) else a) != (list(b) if isinstance(b, tuple) else b):
            if prefix == "train." and key in FREE_SETTINGS:
                continue
            found.append(f"{prefix}{key}: {a} there, {b} now")
    return found
