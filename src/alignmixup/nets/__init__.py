"""Networks that take images in [0, 1]; see ``zoo`` for building one by name."""

from alignmixup.nets.autoencoder import AutoencodingClassifier
from alignmixup.nets.normalize import Normalize
from alignmixup.nets.preact_resnet import Head, PreActResNet18
from alignmixup.nets.resnet import ResNet50, load_torchvision_resnet50
from alignmixup.nets.vgg_gap import VGGGAP, load_torchvision_vgg16
from alignmixup.nets.wide_resnet import WideResNet
from alignmixup.nets.wsol import ADL, ACoL, ErasingLoss, add_adl
from alignmixup.nets.zoo import NetSpec, Wrapped, build, default_tap, initialise, names

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
    "initialise",
    "load_torchvision_resnet50",
    "load_torchvision_vgg16",
    "names",
]
