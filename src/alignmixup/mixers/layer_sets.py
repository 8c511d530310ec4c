"""Layer sets of AlignMixup/AE: where a step mixes, and the cases that follow."""

from __future__ import annotations

from typing import Literal

from alignmixup.mixers.sampling import CLEAN

Layer = Literal["x", "A", "e", "E"]
# x: the image. A: the features. e, E: the embedding, a vector or a tensor. A tensor has two cases,
# one per direction of alignment: the positions of the anchor are kept, or (primed) those of the
# partner. Without alignment both are the same computation, but remain two cases, so that an
# unaligned mixer draws each layer as often as the aligned one.
_CASES: dict[str, tuple[str, ...]] = {
    "x": ("input",),
    "A": ("feat", "feat'"),
    "e": ("embed",),
    "E": ("embed", "embed'"),
}


def cases_of(layers: tuple[Layer, ...], *, clean: bool) -> tuple[str, ...]:
    """Return the cases of a layer set, preceded by the clean case if ``clean``."""
    mixed = tuple(case for layer in layers for case in _CASES[layer])
    return (CLEAN, *mixed) if clean else mixed


def check_layers(layers: tuple[str, ...]) -> None:
    """Raise a ``ValueError`` for an invalid layer set."""
    if not layers or set(layers) - set(_CASES) or len(set(layers)) < len(layers):
        raise ValueError(f"layers must be different ones of {list(_CASES)}, got {layers}")
    if {"e", "E"} <= set(layers):
        raise ValueError(f"an embedding is a vector 'e' or a tensor 'E', got layers={layers}")
