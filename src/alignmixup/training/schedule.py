"""The learning rate as a pure function of how far training has come.

    step     lr * decay^(number of milestones passed)
    cosine   lr * (1 + cos(pi t)) / 2,  t from 0 at the end of the warm-up to 1 at the end

Both rise linearly from zero during ``warmup_epochs``.
"""

from __future__ import annotations

import math

from alignmixup.training.settings import TrainSettings

__all__ = ["learning_rate_share"]


def learning_rate_share(settings: TrainSettings, progress: float) -> float:
    """Return the share of the initial learning rate after ``progress`` epochs (a fraction, too)."""
    warmup = settings.warmup_epochs
    if progress < warmup:
        return progress / warmup
    if settings.schedule == "cosine":
        t = (progress - warmup) / (settings.epochs - warmup)
        return (1 + math.cos(math.pi * min(t, 1.0))) / 2
    passed = sum(progress >= milestone for milestone in settings.milestones)
    return settings.decay**passed
