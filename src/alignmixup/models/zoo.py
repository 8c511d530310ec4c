"""Models by name: the registered ones, and those of timm and torchvision.

A model is a function of its ``NetSpec``, the data it is for and a seed; building one leaves torch's
random state unchanged. All models take images in [0, 1].
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from alignmixup.checking import check_call, check_choices
from alignmixup.device import fork_rng
from alignmixup.models.autoencoder import AutoencodingClassifier
from alignmixup.models.decoder import ToImage
from alignmixup.models.external import (
    EXTERNAL,
    IMAGENET_SCALE,
    build_external,
    external_layer,
    torchvision_weights,
)
from alignmixup.models.normalize import Rgb
from alignmixup.models.preact_resnet import Block, HeadKind
from alignmixup.registry import MODELS, ModelEntry, suggestion


@dataclass(frozen=True)
class NetSpec:
    """A network by name, with its options; an option that a network does not have is an error.

    Args:
        name: Network of this package, or ``"timm:NAME"`` or ``"torchvision:NAME"``.
        width: Channels of the first convolution; None: as published.
        stem_stride: Stride of the first convolution of the CIFAR networks.
        stem_norm: Whether the first convolution is followed by a norm and ReLU.
        block: Residual block of the CIFAR networks: the one released with AlignMixup, or the
            standard one.
        head: Classifier of the CIFAR networks: of the pooled or of the flattened map.
        last_stride: Stride of the last stage; None: 2.
        pretrained: Start from ImageNet weights, with ImageNet's mean and deviation.
        zero_norms: Start the last norm of each residual branch at zero, so that every block begins
            as its shortcut.
        autoencoder: Embedding, with a decoder, in place of the head: a vector of the flattened or
            of the pooled map, or a tensor.
        variational: Whether the autoencoder is variational.
        decoder: Whether the autoencoder has its decoder.
        map_size: Side the map is averaged down to before the embedding; None: its own.
        drop_path: Stochastic depth of a model of timm: largest probability that a sample skips a
            block in training; in a ViT it rises linearly from 0 in the first block.

    Example:
        ```python
        net = am.NetSpec("preact_resnet18", width=16, head="flatten")
        ```
    """

    name: str
    width: int | None = None
    stem_stride: int = 1
    stem_norm: bool = True
    block: Block = "released"
    head: HeadKind = "pool"
    last_stride: int | None = None
    pretrained: bool = False
    zero_norms: bool = False
    autoencoder: Literal["none", "vector", "pooled", "tensor"] = "none"
    variational: bool = False
    decoder: bool = True
    map_size: int | None = None
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 1:
            raise ValueError(f"width must be at least 1, got {self.width}")
        check_choices(self)
        if not 0 <= self.drop_path < 1:
            raise ValueError(f"drop_path must be from 0 to below 1, got {self.drop_path}")
        for option in ("stem_stride", "last_stride"):
            if getattr(self, option) not in (1, 2, None):
                raise ValueError(f"{option} must be 1 or 2, got {getattr(self, option)}")


def build(
    spec: NetSpec, num_classes: int, mean: Rgb, std: Rgb, image_size: int, seed: int = 0
) -> nn.Module:
    """Return the model of ``spec`` for such data, its weights a function of ``seed``."""
    for option, value in (("num_classes", num_classes), ("image_size", image_size)):
        if value < 1:
            raise ValueError(f"{option} must be at least 1, got {value}")
    cpu = torch.device("cpu")  # constructors draw from torch's global generator
    _refuse_options(spec, options_of(spec.name))
    if _is_external(spec.name):
        with fork_rng(cpu, seed):
            return build_external(
                spec.name,
                num_classes,
                mean,
                std,
                image_size,
                pretrained=spec.pretrained,
                drop_path=spec.drop_path,
            )
    entry = _find(spec.name)
    if spec.pretrained:
        mean, std = IMAGENET_SCALE
    with fork_rng(cpu, seed):
        backbone = _construct(entry, spec, num_classes, mean, std, image_size)
        net = _autoencoding(spec, backbone, image_size)
    if entry.initialize:
        initialize(net, torch.Generator().manual_seed(seed))
    if spec.pretrained:
        assert entry.pretrained is not None
        backbone.load_torchvision(torchvision_weights(entry.pretrained, "IMAGENET1K_V1"))  # type: ignore[operator]
    if entry.finish is not None:
        entry.finish(net, seed=seed)
    return net


def names() -> tuple[str, ...]:
    """Return the names of the registered models, and the two forms for timm and torchvision."""
    return (*sorted(MODELS), "timm:NAME", "torchvision:NAME")


def default_tap(spec: NetSpec | str, net: nn.Module) -> str:
    """Return the layer of ``net`` to mix at, as ``net.named_modules()`` has it."""
    name = spec if isinstance(spec, str) else spec.name
    if isinstance(net, AutoencodingClassifier):
        return "encoder"
    return external_layer(name, net) if _is_external(name) else _find(name).layer


def _is_external(name: str) -> bool:
    source, colon, _ = name.partition(":")
    return bool(colon) and source in EXTERNAL


def _find(name: str) -> ModelEntry:
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}{suggestion(name, list(names()))}")
    return MODELS[name]


_AUTOENCODER = {"autoencoder", "variational", "decoder", "map_size"}


def options_of(name: str) -> set[str]:
    """Return the fields of ``NetSpec`` that apply to a model."""
    if _is_external(name):
        return {"pretrained", "drop_path"} if name.startswith("timm:") else {"pretrained"}
    entry = _find(name)
    fields = {field.name for field in dataclasses.fields(NetSpec)}
    options = fields & set(inspect.signature(entry.function).parameters)
    options |= _AUTOENCODER if entry.autoencoder else set()
    return options | ({"pretrained"} if entry.pretrained else set())


def _construct(
    entry: ModelEntry, spec: NetSpec, num_classes: int, mean: Rgb, std: Rgb, image_size: int
) -> nn.Module:
    """Call the registered class or function with the options it has; None leaves its default."""
    parameters = inspect.signature(entry.function).parameters
    chosen = {
        field.name: getattr(spec, field.name)
        for field in dataclasses.fields(spec)
        if field.name in parameters and getattr(spec, field.name) is not None
    }
    if "image_size" in parameters:
        chosen["image_size"] = image_size
    named = ("mean", "std", *chosen)
    check_call(f"the model {spec.name!r}", entry.function, "num_classes", named=named)
    net = entry.function(num_classes, mean=mean, std=std, **chosen)
    if not isinstance(net, nn.Module):
        raise ValueError(
            f"the function that builds {spec.name!r} must return an nn.Module, got "
            f"{type(net).__name__}"
        )
    return net


def _autoencoding(spec: NetSpec, backbone: nn.Module, image_size: int) -> nn.Module:
    if spec.autoencoder == "none":
        if spec.variational or not spec.decoder or spec.map_size is not None:
            raise ValueError(
                f"variational={spec.variational}, decoder={spec.decoder} and map_size="
                f"{spec.map_size} need an autoencoder: set autoencoder='vector' or 'tensor'"
            )
        return backbone
    if spec.head != "pool":
        raise ValueError(
            f"head={spec.head!r} does not apply with autoencoder={spec.autoencoder!r}, which "
            "replaces the head: leave one of them out"
        )
    return AutoencodingClassifier(
        backbone,
        image_size,
        embedding="tensor" if spec.autoencoder == "tensor" else "vector",
        pooled=spec.autoencoder == "pooled",
        variational=spec.variational,
        decoder=spec.decoder,
        map_size=spec.map_size,
    )


def initialize(net: nn.Module, generator: torch.Generator) -> None:
    """Redraw all weights of ``net`` from ``generator``, in the order of its modules.

    Convolutions and linear layers: uniform in +-1 / sqrt(fan-in), torch's default, which the
    networks released with AlignMixup use. BN: the identity, with reset running statistics. A
    network without BN, or an autoencoder with such an encoder, needs convolutions that keep the
    scale of the signal: He's normal initialization over the fan-out, biases zero.
    """
    encoder = net.encoder if isinstance(net, AutoencodingClassifier) else net
    has_norm = any(isinstance(module, nn.BatchNorm2d) for module in encoder.modules())
    without_norm = set() if has_norm else set(encoder.modules())
    for name, module in net.named_modules():
        if isinstance(module, ToImage):
            module.reset_parameters()  # zero
        elif isinstance(module, nn.Conv2d) and module in without_norm:
            nn.init.kaiming_normal_(
                module.weight, mode="fan_out", nonlinearity="relu", generator=generator
            )
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d | nn.Linear):
            bound = 1 / math.sqrt(module.weight[0].numel())  # the fan-in
            for parameter in module.parameters(recurse=False):
                nn.init.uniform_(parameter, -bound, bound, generator=generator)
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
        elif list(module.parameters(recurse=False)):
            kind = type(module).__name__
            raise ValueError(
                f"cannot initialize {name!r}, a {kind}: only Conv2d, Linear and BatchNorm2d"
            )


def _refuse_options(spec: NetSpec, known: set[str]) -> None:
    """Raise for an option that the model does not have."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name != "name" and field.name not in known and value != field.default:
            raise ValueError(
                f"{field.name}={value!r} does not apply to {spec.name}: leave it out; "
                f"its options are {', '.join(sorted(known)) or 'none'}"
            )
    if spec.pretrained and spec.width is not None:
        raise ValueError(
            f"{spec.name} with width={spec.width} has no pretrained weights: leave one of them out"
        )
