"""Mixers: every method of mixing behind one interface, one file a method."""

from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE, AlignMixupVAE
from alignmixup.mixers.comixup import CoMixup
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.cutout import Cutout
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.manifold_mixup import ManifoldMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.mixers.puzzlemix import PuzzleMix
from alignmixup.mixers.saliencymix import SaliencyMix
from alignmixup.mixers.stylecutmix import StyleCutMix
from alignmixup.mixers.stylemix import StyleMix

__all__ = [
    "AlignMixup",
    "AlignMixupAE",
    "AlignMixupVAE",
    "CoMixup",
    "CutMix",
    "Cutout",
    "InputMixup",
    "ManifoldMixup",
    "NoMix",
    "PuzzleMix",
    "SaliencyMix",
    "StyleCutMix",
    "StyleMix",
]
