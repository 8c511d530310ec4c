"""Mixup for image classifiers: AlignMixup, the methods it is compared with, and the evaluations.

    mixer = alignmixup.AlignMixup(layer="layer4")
    loss = mixer(model, x, y).loss()

Every name is imported at its first use: ``import alignmixup`` is fast and loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from alignmixup.registry import MIXERS, suggestion

if TYPE_CHECKING:
    from alignmixup.contracts import (
        Draw as Draw,
        ImageSet as ImageSet,
        Mixed as Mixed,
        Mixer as Mixer,
        RecipeKey as RecipeKey,
        Result as Result,
    )
    from alignmixup.evaluation.effect import Effect as Effect, alignment_effect as alignment_effect
    from alignmixup.experiments.data_record import Sets as Sets
    from alignmixup.experiments.load import Run as Run, load_run as load_run
    from alignmixup.experiments.run import train as train
    from alignmixup.experiments.scoring import evaluate as evaluate
    from alignmixup.integrations.collate import MixCollate as MixCollate
    from alignmixup.mixers.adautomix import AdAutoMix as AdAutoMix
    from alignmixup.mixers.alignmixup import AlignMixup as AlignMixup
    from alignmixup.mixers.alignmixup_ae import (
        AlignMixupAE as AlignMixupAE,
        AlignMixupVAE as AlignMixupVAE,
    )
    from alignmixup.mixers.attentivemix import AttentiveMix as AttentiveMix
    from alignmixup.mixers.automix import AutoMix as AutoMix
    from alignmixup.mixers.comixup import CoMixup as CoMixup
    from alignmixup.mixers.cutmix import CutMix as CutMix
    from alignmixup.mixers.cutout import Cutout as Cutout
    from alignmixup.mixers.decoupled import Decoupled as Decoupled
    from alignmixup.mixers.fmix import FMix as FMix
    from alignmixup.mixers.gridmix import GridMix as GridMix
    from alignmixup.mixers.input_mixup import InputMixup as InputMixup
    from alignmixup.mixers.label_smoothing import LabelSmoothing as LabelSmoothing
    from alignmixup.mixers.manifold_mixup import ManifoldMixup as ManifoldMixup
    from alignmixup.mixers.multimix import DenseMultiMix as DenseMultiMix, MultiMix as MultiMix
    from alignmixup.mixers.nomix import NoMix as NoMix
    from alignmixup.mixers.oneof import OneOf as OneOf
    from alignmixup.mixers.puzzlemix import PuzzleMix as PuzzleMix
    from alignmixup.mixers.recursivemix import RecursiveMix as RecursiveMix
    from alignmixup.mixers.regmixup import RegMixup as RegMixup
    from alignmixup.mixers.resizemix import ResizeMix as ResizeMix
    from alignmixup.mixers.saliencymix import SaliencyMix as SaliencyMix
    from alignmixup.mixers.samix import SAMix as SAMix
    from alignmixup.mixers.smoothmix import SmoothMix as SmoothMix
    from alignmixup.mixers.snapmix import SnapMix as SnapMix
    from alignmixup.mixers.stylecutmix import StyleCutMix as StyleCutMix
    from alignmixup.mixers.stylemix import StyleMix as StyleMix
    from alignmixup.mixers.tokenmix import TokenMix as TokenMix
    from alignmixup.mixers.transmix import TransMix as TransMix
    from alignmixup.models.zoo import NetSpec as NetSpec
    from alignmixup.ops.align import align_mix as align_mix
    from alignmixup.ops.cost import pairwise_cost as pairwise_cost
    from alignmixup.ops.sinkhorn import Transport as Transport, sinkhorn as sinkhorn
    from alignmixup.outputs import as_logits as as_logits
    from alignmixup.recipes.schema import DataSpec as DataSpec, Recipe as Recipe
    from alignmixup.registry import (
        register_dataset as register_dataset,
        register_logger as register_logger,
        register_mixer as register_mixer,
        register_model as register_model,
        register_optimizer as register_optimizer,
        register_recipe as register_recipe,
        register_task as register_task,
    )
    from alignmixup.training.loggers import Logger as Logger
    from alignmixup.training.settings import TrainSettings as TrainSettings

# Where each public name is defined; mixers are found in their registry.
_MODULES = {
    "contracts": ("Draw", "ImageSet", "Mixed", "Mixer", "RecipeKey", "Result"),
    "evaluation.effect": ("Effect", "alignment_effect"),
    "experiments.data_record": ("Sets",),
    "experiments.load": ("Run", "load_run"),
    "experiments.run": ("train",),
    "experiments.scoring": ("evaluate",),
    "integrations.collate": ("MixCollate",),
    "models.zoo": ("NetSpec",),
    "ops.align": ("align_mix",),
    "ops.cost": ("pairwise_cost",),
    "ops.sinkhorn": ("Transport", "sinkhorn"),
    "outputs": ("as_logits",),
    "recipes.schema": ("DataSpec", "Recipe"),
    "registry": (
        "register_dataset",
        "register_logger",
        "register_mixer",
        "register_model",
        "register_optimizer",
        "register_recipe",
        "register_task",
    ),
    "training.loggers": ("Logger",),
    "training.settings": ("TrainSettings",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted({*_HOME, *MIXERS})
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("alignmixup")
        except PackageNotFoundError:  # imported from a source tree that is not installed
            return "0+source"
    if name in _HOME:
        value = getattr(importlib.import_module(f"alignmixup.{_HOME[name]}"), name)
    elif name[:1].isupper() and name in MIXERS:
        value = MIXERS[name]
    else:
        hint = "" if name.startswith("_") else suggestion(name, __dir__())
        raise AttributeError(f"module 'alignmixup' has no attribute {name!r}{hint}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__getattr__("__all__"), "__version__"]
