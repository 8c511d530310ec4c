"""Base class of the mixers that hold another mixer and change the labels or the loss of a batch."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, Mixer


class Wrapper(Mixer):
    """Draws and applies ``mixer``; ``_wrap`` changes what it returns."""

    mixer: Mixer

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mixers((self.mixer,))

    @property
    def cases(self) -> Mapping[str, float]:
        return self.mixer.cases

    @property
    def trains_all(self) -> bool:
        return self.mixer.trains_all

    @property
    def module(self) -> nn.Module | None:
        return self.mixer.module

    @property
    def optimizer_group(self) -> Mapping[str, float]:
        return self.mixer.optimizer_group

    def tapped(self, net: nn.Module) -> Sequence[str]:
        return self.mixer.tapped(net)

    def attach(self, net: nn.Module, x: Tensor) -> Mixer:
        attached = self.mixer.attach(net, x)
        return dataclasses.replace(self, mixer=attached)  # type: ignore[type-var]

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        return self.mixer.draw(batch_size, rng, progress)

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        return self._wrap(self.mixer.apply(net, x, y, draw))

    @abstractmethod
    def _wrap(self, mixed: Mixed) -> Mixed:
        """Return the result with other targets or another loss."""


def within(mixer: Mixer) -> Iterator[Mixer]:
    """Yield the mixer and those that it holds, at any depth."""
    yield mixer
    for value in vars(mixer).values():
        for held in value if isinstance(value, tuple | list) else (value,):
            if isinstance(held, Mixer):
                yield from within(held)


def check_mixers(mixers: tuple[object, ...]) -> None:
    """Raise a ``ValueError`` for something that is not a mixer, such as a class or a name."""
    for mixer in mixers:
        if not isinstance(mixer, Mixer):
            raise ValueError(f"a mixer is needed, such as CutMix(), got {mixer!r}")
