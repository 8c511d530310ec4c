"""Mixers: every method of mixing behind one interface, one file a method."""

from alignmixup.mixing.align import align_mix
from alignmixup.mixing.alignmixup import AlignMixup
from alignmixup.mixing.alignmixup_ae import AlignMixupAE, AlignMixupVAE
from alignmixup.mixing.comixup import CoMixup
from alignmixup.mixing.cutmix import CutMix
from alignmixup.mixing.cutout import Cutout
from alignmixup.mixing.effect import Effect, alignment_effect
from alignmixup.mixing.input_mixup import InputMixup
from alignmixup.mixing.manifold_mixup import ManifoldMixup
from alignmixup.mixing.nomix import NoMix
from alignmixup.mixing.puzzlemix import PuzzleMix
from alignmixup.mixing.saliencymix import SaliencyMix
from alignmixup.mixing.stylecutmix import StyleCutMix
from alignmixup.mixing.stylemix import StyleMix

__all__ = [
    "AlignMixup",
    "AlignMixupAE",
    "AlignMixupVAE",
    "CoMixup",
    "CutMix",
    "Cutout",
    "Effect",
    "InputMixup",
    "ManifoldMixup",
    "NoMix",
    "PuzzleMix",
    "SaliencyMix",
    "StyleCutMix",
    "StyleMix",
    "align_mix",
    "alignment_effect",
]
