"""Mixers: every method of mixing behind one interface, one file a method."""

from alignmixup.mixing.align import align_mix
from alignmixup.mixing.alignmixup import AlignMixup
from alignmixup.mixing.cutmix import CutMix
from alignmixup.mixing.cutout import Cutout
from alignmixup.mixing.effect import Effect, alignment_effect
from alignmixup.mixing.input_mixup import InputMixup
from alignmixup.mixing.manifold_mixup import ManifoldMixup
from alignmixup.mixing.nomix import NoMix

__all__ = [
    "AlignMixup",
    "CutMix",
    "Cutout",
    "Effect",
    "InputMixup",
    "ManifoldMixup",
    "NoMix",
    "align_mix",
    "alignment_effect",
]
