"""Mixup for image classifiers: AlignMixup, the methods it is compared with, and the evaluations.

mixer = alignmixup.AlignMixup(layer="layer4")
loss = mixer(model, x, y).loss()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from alignmixup.contracts import Draw, ImageSet, Mixed, Mixer, Result
from alignmixup.mixing import (
    AlignMixup,
    AlignMixupAE,
    AlignMixupVAE,
    CoMixup,
    CutMix,
    Cutout,
    Effect,
    InputMixup,
    ManifoldMixup,
    NoMix,
    PuzzleMix,
    SaliencyMix,
    StyleCutMix,
    StyleMix,
    align_mix,
    alignment_effect,
)
from alignmixup.ot import Transport, pairwise_cost, sinkhorn

if TYPE_CHECKING:
    from alignmixup.recipes.run import train
    from alignmixup.recipes.scoring import evaluate

__all__ = [
    "AlignMixup",
    "AlignMixupAE",
    "AlignMixupVAE",
    "CoMixup",
    "CutMix",
    "Cutout",
    "Draw",
    "Effect",
    "ImageSet",
    "InputMixup",
    "ManifoldMixup",
    "Mixed",
    "Mixer",
    "NoMix",
    "PuzzleMix",
    "Result",
    "SaliencyMix",
    "StyleCutMix",
    "StyleMix",
    "Transport",
    "align_mix",
    "alignment_effect",
    "evaluate",
    "pairwise_cost",
    "sinkhorn",
    "train",
]


def __getattr__(name: str) -> Any:
    # Training and evaluation bring the other rooms with them; who only mixes does not need those.
    if name == "train":
        from alignmixup.recipes.run import train

        return train
    if name == "evaluate":
        from alignmixup.recipes.scoring import evaluate

        return evaluate
    raise AttributeError(f"module 'alignmixup' has no attribute {name!r}")
