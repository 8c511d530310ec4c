"""Models that take images in [0, 1], one file each; ``zoo.build`` builds one by name."""

from alignmixup.models.autoencoder import AutoencodingClassifier
from alignmixup.models.external import Wrapped
from alignmixup.models.normalize import Normalize
from alignmixup.models.preact_resnet import Head, PreActResNet18
from alignmixup.models.resnet import ResNet50
from alignmixup.models.vgg_gap import VGGGAP
from alignmixup.models.wide_resnet import WideResNet
from alignmixup.models.wsol import ADL, ACoL, ErasingLoss, add_adl
from alignmixup.models.zoo import NetSpec, build, default_tap, initialize, names

__all__ = [
    "ADL",
    "VGGGAP",
    "ACoL",
    "AutoencodingClassifier",
    "ErasingLoss",
    "Head",
    "NetSpec",
    "Normalize",
    "PreActResNet18",
    "ResNet50",
    "WideResNet",
    "Wrapped",
    "add_adl",
    "build",
    "default_tap",
    "initialize",
    "names",
]
