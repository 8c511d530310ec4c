"""Mixup for image classifiers: AlignMixup, the methods it is compared with, and the evaluations.

mixer = alignmixup.AlignMixup(layer="layer4")
loss = mixer(model, x, y).loss()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from alignmixup.contracts import Draw, ImageSet, Mixed, Mixer, Result
from alignmixup.evaluation.effect import Effect, alignment_effect
from alignmixup.mixers import (
    AlignMixup,
    AlignMixupAE,
    AlignMixupVAE,
    CoMixup,
    CutMix,
    Cutout,
    InputMixup,
    ManifoldMixup,
    NoMix,
    PuzzleMix,
    SaliencyMix,
    StyleCutMix,
    StyleMix,
)
from alignmixup.ops import Transport, pairwise_cost, sinkhorn
from alignmixup.ops.align import align_mix

if TYPE_CHECKING:
    from alignmixup.experiments.run import train
    from alignmixup.experiments.scoring import evaluate

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
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("alignmixup")
        except PackageNotFoundError:  # imported from a source tree that is not installed
            return "0+source"
    # Training and evaluation bring the other rooms with them; who only mixes does not need those.
    if name == "train":
        from alignmixup.experiments.run import train

        return train
    if name == "evaluate":
        from alignmixup.experiments.scoring import evaluate

        return evaluate
    raise AttributeError(f"module 'alignmixup' has no attribute {name!r}")
