"""Layer sets: where a batch may be mixed, and the cases that gives to draw from.

    x   the image                        input
    A   the feature tensor               feat, feat'
    e   its embedding, a vector          embed
    E   its embedding, a tensor          embed, embed'

A tensor gives two cases because alignment has two directions: the positions kept are the anchor's,
or the partner's (primed). A vector has no positions and is never aligned. Without alignment the two
directions are one computation, but stay two cases: the unaligned twin of a layer set then draws
each layer as often as the aligned one does, and alignment is all that differs.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["CLEAN", "Layer", "cases_of", "check_layers", "is_kept_partner"]

Layer = Literal["x", "A", "e", "E"]

CLEAN = "clean"
_CASES: dict[str, tuple[str, ...]] = {
    "x": ("input",),
    "A": ("feat", "feat'"),
    "e": ("embed",),
    "E": ("embed", "embed'"),
}


def cases_of(layers: tuple[Layer, ...], *, clean: bool) -> tuple[str, ...]:
    """Return the cases of a layer set, with the case that mixes nothing first where asked."""
    mixed = tuple(case for layer in layers for case in _CASES[layer])
    return (CLEAN, *mixed) if clean else mixed


def check_layers(layers: tuple[str, ...]) -> None:
    """Raise a ``ValueError`` for a layer set that no network can have."""
    unknown = sorted(set(layers) - set(_CASES))
    if unknown or not layers or len(set(layers)) < len(layers):
        raise ValueError(
            f"layers must be one or more different ones of {list(_CASES)}, got {layers}"
        )
    if {"e", "E"} <= set(layers):
        raise ValueError(
            f"an embedding is a vector 'e' or a tensor 'E', got both in layers={layers}: choose one"
        )


def is_kept_partner(case: str) -> bool:
    """Whether the positions kept in this case are the partner's."""
    return case.endswith("'")
