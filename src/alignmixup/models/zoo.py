"""Networks by name: ours, and those of timm and torchvision through the extras.

A network is a function of its ``NetSpec``, the data it is for and a seed; building one leaves
torch's own random state untouched. All take images in [0, 1].
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.models.autoencoder import AutoencodingClassifier
from alignmixup.models.decoder import ToImage
from alignmixup.models.normalize import Normalize, Rgb
from alignmixup.models.preact_resnet import Block, HeadKind, PreActResNet18, check_block
from alignmixup.models.resnet import ResNet50, load_torchvision_resnet50, zero_last_norms
from alignmixup.models.vgg_gap import VGGGAP, load_torchvision_vgg16
from alignmixup.models.wide_resnet import WideResNet
from alignmixup.models.wsol import ACoL, add_adl

__all__ = ["NetSpec", "Wrapped", "build", "default_tap", "initialise", "names"]


# Mean and deviation of ImageNet, by which its weights were trained.
IMAGENET_SCALE: tuple[Rgb, Rgb] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 1:
            raise ValueError(f"width must be at least 1, got {self.width}")
        check_block(self.block)
        for option in ("stem_stride", "last_stride"):
            if getattr(self, option) not in (1, 2, None):
                raise ValueError(f"{option} must be 1 or 2, got {getattr(self, option)}")


def build(
    spec: NetSpec, num_classes: int, mean: Rgb, std: Rgb, image_size: int, seed: int = 0
) -> nn.Module:
    """Return the network of ``spec`` for such data, its weights a function of ``seed``."""
    for option, value in (("num_classes", num_classes), ("image_size", image_size)):
        if value < 1:
            raise ValueError(f"{option} must be at least 1, got {value}")
    source, colon, foreign = spec.name.partition(":")
    if colon and source in _FOREIGN:
        _refuse_options(spec, {"pretrained"})
        with _seeded(seed):
            model = _FOREIGN[source](foreign, num_classes, image_size, spec.pretrained)
        if spec.pretrained:
            mean, std = _wanted_scale(model)
        return Wrapped(Normalize(mean, std), model)
    if spec.name not in _OWN:
        raise ValueError(_unknown(spec.name, names()))
    own = _OWN[spec.name]
    _refuse_options(spec, own.options)
    if spec.pretrained:
        mean, std = IMAGENET_SCALE
    with _seeded(seed):  # constructors draw from torch's own state before we initialise
        backbone = own.make(spec, num_classes, mean, std, image_size)
        net = _autoencoding(spec, backbone, image_size)
    initialise(net, torch.Generator().manual_seed(seed))
    if spec.zero_norms:
        zero_last_norms(backbone)
    if spec.pretrained:
        _load_pretrained(backbone)  # its modules are those of net
    if own.has_adl:
        add_adl(net, seed=seed)  # last: its counters are among no weights
    return net


def _wanted_scale(model: nn.Module) -> tuple[Rgb, Rgb]:
    """Mean and deviation that ImageNet's weights were trained with; timm's networks say theirs."""
    told = getattr(model, "pretrained_cfg", None) or {}
    mean, std = IMAGENET_SCALE
    return tuple(told.get("mean", mean)), tuple(told.get("std", std))


def _autoencoding(spec: NetSpec, backbone: nn.Module, image_size: int) -> nn.Module:
    if spec.autoencoder == "none":
        if spec.variational or not spec.decoder or spec.map_size is not None:
            raise ValueError(
                "variational, decoder and map_size need autoencoder='vector', for instance"
            )
        return backbone
    if spec.head != "pool":
        raise ValueError(
            f"head={spec.head!r} does not go with autoencoder={spec.autoencoder!r}, which takes "
            "the head's place: leave one of them out"
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


def names() -> tuple[str, ...]:
    """Return the names of our own networks, and the two forms that reach other people's."""
    return (*_OWN, "timm:NAME", "torchvision:NAME")


def initialise(net: nn.Module, generator: torch.Generator) -> None:
    """Draw all weights of ``net`` afresh from ``generator``, in the order of its modules.

    Convolutions and linear layers: uniform in +-1 / sqrt(fan-in), torch's own law, which the
    networks released with AlignMixup keep. BN: the identity, with fresh running statistics. A
    network without any BN, or such an encoder of an autoencoder, needs convolutions that keep the
    scale of the signal, or it fades on the way: He's normal law over the fan-out, biases zero.
    """
    encoder = net.encoder if isinstance(net, AutoencodingClassifier) else net
    has_norm = any(isinstance(module, nn.BatchNorm2d) for module in encoder.modules())
    without_norm = set() if has_norm else set(encoder.modules())
    for name, module in net.named_modules():
        if isinstance(module, ToImage):
            module.reset_parameters()  # it starts at zero, see there
        elif isinstance(module, nn.Conv2d) and module in without_norm:
            nn.init.kaiming_normal_(
                module.weight, mode="fan_out", nonlinearity="relu", generator=generator
            )
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d | nn.Linear):
            bound = 1 / math.sqrt(module.weight[0].numel())  # the fan-in of a unit
            for parameter in module.parameters(recurse=False):
                nn.init.uniform_(parameter, -bound, bound, generator=generator)
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
        elif list(module.parameters(recurse=False)):
            kind = type(module).__name__
            raise ValueError(
                f"cannot initialise {name!r}, a {kind}: only Conv2d, Linear and BatchNorm2d"
            )


def default_tap(spec: NetSpec | str, net: nn.Module) -> str:
    """Return the layer of ``net`` that the paper mixes at, as ``net.named_modules()`` has it."""
    name = spec if isinstance(spec, str) else spec.name
    if isinstance(net, AutoencodingClassifier):
        return "encoder"
    if name in _OWN:
        return _OWN[name].tap
    source, colon, foreign = name.partition(":")
    if not colon or source not in _FOREIGN:
        raise ValueError(_unknown(name, names()))
    layers: list[str] = [layer for layer, _ in net.named_modules()]
    prefix = "model." if isinstance(net, Wrapped) else ""
    for family, tap in _FAMILIES.items():
        if re.match(family, foreign):
            # The pattern may hold a running number: the last layer that fits is the one.
            fitting = [layer for layer in layers if re.fullmatch(re.escape(prefix) + tap, layer)]
            if fitting:
                return fitting[-1]
    candidates = [layer for layer in layers if layer and layer.count(".") < 3]
    raise ValueError(
        f"no default layer is known for {name!r}: name the layer to mix at, one that gives "
        f"[b, c, h, w] or tokens [b, n, c]; there are {', '.join(candidates)}"
    )


# Families of timm and torchvision by the start of their names, and the layer to mix at. LeViT: the
# last layer of the convolutional stem, as the paper. ViT: the last block, whose output is tokens.
_FAMILIES: Mapping[str, str] = {
    r"(wide_)?(se|eca|sk)?res(net|next|nest|2net)": r"layer4",
    r"levit": r"stem",
    r"(vit|deit)": r"(blocks\.\d+|encoder\.layers\.encoder_layer_\d+)",
    r"(vgg|densenet)": r"features",
}


class Wrapped(nn.Module):
    """Somebody else's ``model`` behind our normalisation; its layers are ``model.layer4`` etc."""

    def __init__(self, normalize: Normalize, model: nn.Module) -> None:
        super().__init__()
        self.normalize = normalize
        self.model = model

    def forward(self, x: Tensor) -> Float[Tensor, "b k"]:
        logits = self.model(self.normalize(x))
        if not isinstance(logits, Tensor):
            kind = type(logits).__name__
            raise ValueError(f"the model gives a {kind}, not a tensor of logits: choose another")
        return logits


@dataclass(frozen=True)
class _Own:
    """How to make one of our networks, the options it has, and the layer to mix at."""

    make: Callable[[NetSpec, int, Rgb, Rgb, int], nn.Module]
    options: frozenset[str]
    tap: str
    has_adl: bool = False


def _preact_resnet18(spec: NetSpec, k: int, mean: Rgb, std: Rgb, image_size: int) -> nn.Module:
    return PreActResNet18(
        k,
        mean,
        std,
        stem_stride=spec.stem_stride,
        width=spec.width or 64,
        stem_norm=spec.stem_norm,
        block=spec.block,
        head=spec.head,
        image_size=image_size,
        last_stride=spec.last_stride or 2,
    )


def _wrn16_8(spec: NetSpec, k: int, mean: Rgb, std: Rgb, image_size: int) -> nn.Module:
    return WideResNet(
        k,
        mean,
        std,
        stem_stride=spec.stem_stride,
        width=spec.width or 16,
        block=spec.block,
        head=spec.head,
        image_size=image_size,
        last_stride=spec.last_stride or 2,
    )


def _resnet50(spec: NetSpec, k: int, mean: Rgb, std: Rgb, image_size: int) -> nn.Module:
    return ResNet50(k, mean, std, width=spec.width or 64, last_stride=spec.last_stride or 2)


def _vgg_gap(spec: NetSpec, k: int, mean: Rgb, std: Rgb, image_size: int) -> nn.Module:
    return VGGGAP(k, mean, std, width=spec.width or 64)


def _acol_vgg(spec: NetSpec, k: int, mean: Rgb, std: Rgb, image_size: int) -> nn.Module:
    return ACoL(k, mean, std, body="vgg", width=spec.width or 64)


_AUTOENCODER = frozenset({"autoencoder", "variational", "decoder", "map_size"})
_SMALL = frozenset({"width", "stem_stride", "block", "head", "last_stride"}) | _AUTOENCODER
_OWN: Mapping[str, _Own] = {
    "preact_resnet18": _Own(_preact_resnet18, _SMALL | {"stem_norm"}, tap="layer4"),
    "wrn16_8": _Own(_wrn16_8, _SMALL, tap="norm"),
    "resnet50": _Own(
        _resnet50,
        frozenset({"width", "last_stride", "pretrained", "zero_norms"}) | _AUTOENCODER,
        tap="layer4",
    ),
    "vgg_gap": _Own(_vgg_gap, frozenset({"width", "pretrained"}) | _AUTOENCODER, tap="conv6"),
    # Made for localisation; see wsol.
    "acol_vgg": _Own(_acol_vgg, frozenset({"width", "pretrained"}), tap="body"),
    "adl_vgg": _Own(_vgg_gap, frozenset({"width", "pretrained"}), tap="conv6", has_adl=True),
    "adl_resnet50": _Own(
        _resnet50, frozenset({"width", "last_stride", "pretrained"}), tap="layer4", has_adl=True
    ),
}


def _refuse_options(spec: NetSpec, known: set[str] | frozenset[str]) -> None:
    """Raise where ``spec`` asks for something that its network does not have."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name != "name" and field.name not in known and value != field.default:
            raise ValueError(
                f"{field.name}={value!r} does not apply to {spec.name}: leave it out; "
                f"its options are {', '.join(sorted(known))}"
            )
    if spec.pretrained and spec.width is not None:
        raise ValueError(
            f"{spec.name} with width={spec.width} has no pretrained weights: leave one of them out"
        )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Give torch's own CPU generator this seed for a while, and its state back afterwards."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would reach the generators of all devices.
        torch.default_generator.manual_seed(seed)
        yield


def _unknown(name: str, known: tuple[str, ...] | list[str]) -> str:
    """Say that a name is unknown, with the names that are close, or else all of a short list."""
    close = difflib.get_close_matches(name, known, n=5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    listed = f"; choose from {', '.join(known)}" if len(known) < 20 else ""
    return f"unknown network {name!r}{hint}{listed}"


def _from_timm(name: str, num_classes: int, image_size: int, pretrained: bool) -> nn.Module:
    timm = _extra("timm")
    if not timm.is_model(name):
        raise ValueError(_unknown(f"timm:{name}", [f"timm:{n}" for n in timm.list_models()]))
    # A network with position tables is made for one size; the others have no such argument.
    fixed = timm.get_pretrained_cfg(name).fixed_input_size
    sized = {"img_size": image_size} if fixed else {}
    model: nn.Module = timm.create_model(
        name, pretrained=pretrained, num_classes=num_classes, **sized
    )
    return model


def _from_torchvision(name: str, num_classes: int, image_size: int, pretrained: bool) -> nn.Module:
    models = _extra("torchvision").models
    known = models.list_models(module=models)
    if name not in known:
        raise ValueError(_unknown(f"torchvision:{name}", [f"torchvision:{n}" for n in known]))
    sized = {"image_size": image_size} if name.startswith("vit_") else {}
    model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **sized)
    if pretrained:
        _load_all_but_classifier(model, _torchvision_weights(name, "DEFAULT"), num_classes)
    return model


_FOREIGN: Mapping[str, Callable[[str, int, int, bool], nn.Module]] = {
    "timm": _from_timm,
    "torchvision": _from_torchvision,
}


def _extra(package: str) -> Any:
    """Import a package that comes with an extra, or say which extra is missing."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"{package} is missing: pip install alignmixup[timm]") from error
    except RuntimeError as error:
        # torchvision's compiled operators must come from the build that fits torch's.
        raise ImportError(
            f"{package} does not import beside torch {torch.__version__} ({error}): "
            "install the torchvision build made for it, then pip install alignmixup[timm]"
        ) from error


def _load_pretrained(net: nn.Module) -> None:
    """Load ImageNet's weights as the localisation tables have them: torchvision's first ones."""
    if isinstance(net, ResNet50):
        state = _torchvision_weights("resnet50", "IMAGENET1K_V1")
        same_classes = net.head.linear.out_features == len(state["fc.bias"])
        load_torchvision_resnet50(net, state, with_head=same_classes)
    elif isinstance(net, VGGGAP):
        load_torchvision_vgg16(net, _torchvision_weights("vgg16", "IMAGENET1K_V1"))
    elif isinstance(net, ACoL):
        net.load_torchvision(_torchvision_weights("vgg16", "IMAGENET1K_V1"))


def _torchvision_weights(name: str, version: str) -> Mapping[str, Tensor]:
    """Return weights by torchvision's name, downloaded at first use and checked by their hash."""
    weights = _extra("torchvision").models.get_model_weights(name)[version]
    state: Mapping[str, Tensor] = weights.get_state_dict(progress=True, check_hash=True)
    return state


def _load_all_but_classifier(
    model: nn.Module, state: Mapping[str, Tensor], num_classes: int
) -> None:
    """Load ``state``; only tensors with a row a class may differ in shape, and then stay drawn."""
    ours = model.state_dict()
    # Files of DenseNet are older than the names of its layers.
    old = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
    state = {old.sub(r"\1\2", name): value for name, value in state.items()}
    fitting = {k: v for k, v in state.items() if k in ours and v.shape == ours[k].shape}
    for name in set(ours) - set(fitting):
        if name.endswith("num_batches_tracked"):  # not in files older than it; nothing reads it
            continue
        shape = list(ours[name].shape)
        if name not in state or shape[:1] != [num_classes]:
            given = list(state[name].shape) if name in state else "nothing"
            raise ValueError(f"pretrained weights do not fit: {name} is {shape}, they have {given}")
    model.load_state_dict(fitting, strict=False)
