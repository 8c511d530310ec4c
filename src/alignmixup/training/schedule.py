"""The learning rate as a pure function of how far training has come.

    step     lr * decay^(number of milestones passed)
    cosine   lr * (1 + cos(pi t)) / 2,  t from 0 at the end of the warm-up to 1 at the end
    linear   lr * (what lies on the straight line between the two nearest points)

All rise linearly from zero during ``warmup_epochs``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    if settings.schedule == "linear":
        return _between(settings.points, progress)
    passed = sum(progress >= milestone for milestone in settings.milestones)
    return settings.decay**passed


def _between(points: Sequence[tuple[float, float]], progress: float) -> float:
    """The value at ``progress`` of the line through ``points``, constant before and after them."""
    done = sum(epoch <= progress for epoch, _ in points)
    if done in (0, len(points)):
        return points[max(done - 1, 0)][1]
    (begin, first), (end, last) = points[done - 1 : done + 1]
    return first + (last - first) * (progress - begin) / (end - begin)
