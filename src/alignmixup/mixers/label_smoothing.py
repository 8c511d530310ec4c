"""Label smoothing (Szegedy et al. 2016) of the mixed labels: t <- (1 - s) t + s / K.

The same as smoothing the labels first and mixing them then, because the shares sum to 1.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from alignmixup.contracts import Mixed, Mixer
from alignmixup.mixers.decoupled import Decoupled
from alignmixup.mixers.wrapper import Wrapper, within
from alignmixup.registry import register_mixer


@register_mixer
@dataclass(frozen=True)
class LabelSmoothing(Wrapper):
    """Label smoothing (Szegedy et al. 2016) for any mixer.

    Terms that a method adds to its loss by itself (``Mixed.extra``) keep their labels.

    Args:
        mixer: The method that mixes.
        smoothing: Share of each label that is spread evenly over all classes.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.LabelSmoothing(am.CutMix(), smoothing=0.1)
        mixer(model, x, y).loss().backward()
        ```
    """

    mixer: Mixer
    smoothing: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_smoothing(self.smoothing, (self.mixer,))

    @property
    def needs_network(self) -> bool:
        return self.mixer.needs_network

    def _wrap(self, mixed: Mixed) -> Mixed:
        return smoothed(mixed, self.smoothing)


def check_smoothing(smoothing: float, mixers: tuple[Mixer, ...]) -> None:
    """Raise a ``ValueError`` for a share out of range, or a loss that would see every class."""
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must lie in [0, 1), got {smoothing}")
    inner = (held for mixer in mixers for held in within(mixer))
    if smoothing and any(isinstance(mixer, Decoupled) for mixer in inner):
        raise ValueError(
            f"smoothing={smoothing} around Decoupled would give every class a share of the label: "
            "put Decoupled outside"
        )


def smoothed(mixed: Mixed, smoothing: float) -> Mixed:
    """Return the result with smoothed targets."""
    if mixed.targets is None or smoothing == 0:
        return mixed
    targets = (1 - smoothing) * mixed.targets + smoothing / mixed.targets.shape[1]
    spread = 1 - (1 - smoothing) * (1 - mixed.smoothing)
    return dataclasses.replace(mixed, targets=targets, smoothing=spread)
