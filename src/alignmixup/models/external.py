"""Models of timm and torchvision by name, behind our normalization; both packages are extras."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.models.normalize import Normalize, Rgb
from alignmixup.registry import suggestion

# Mean and standard deviation that ImageNet weights were trained with.
IMAGENET_SCALE: tuple[Rgb, Rgb] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def build_external(
    name: str,
    num_classes: int,
    mean: Rgb,
    std: Rgb,
    image_size: int,
    *,
    pretrained: bool,
    drop_path: float = 0.0,
) -> nn.Module:
    """Return ``timm:NAME`` or ``torchvision:NAME`` with its own initialization."""
    source, _, rest = name.partition(":")
    options = {"drop_path_rate": drop_path} if drop_path else {}
    try:
        model = EXTERNAL[source](rest, num_classes, image_size, pretrained, **options)
    except AssertionError as error:  # e.g. of patches that do not divide the side
        raise ValueError(
            f"{name} cannot be built for images of {image_size} x {image_size} ({error}): use "
            "images of another size, or another network"
        ) from error
    if pretrained:
        mean, std = _pretrained_scale(model)
    return Wrapped(Normalize(mean, std), model)


class Wrapped(nn.Module):
    """An external ``model`` behind our normalization; its layers are ``model.layer4`` etc."""

    def __init__(self, normalize: Normalize, model: nn.Module) -> None:
        super().__init__()
        self.normalize = normalize
        self.model = model

    def forward(self, x: Tensor) -> Float[Tensor, "b k"]:
        logits = self.model(self.normalize(x))
        if not isinstance(logits, Tensor):
            kind = type(logits).__name__
            raise ValueError(f"the model returns a {kind}, not a tensor of logits: choose another")
        return logits


def external_layer(name: str, net: nn.Module) -> str:
    """Return the layer to mix at of a model of timm or torchvision."""
    layers: list[str] = [layer for layer, _ in net.named_modules()]
    prefix = "model." if isinstance(net, Wrapped) else ""
    for family, tap in _FAMILIES.items():
        if re.match(family, name.partition(":")[2]):
            # The pattern may contain a running number: take the last layer that matches.
            fitting = [layer for layer in layers if re.fullmatch(re.escape(prefix) + tap, layer)]
            if fitting:
                return fitting[-1]
    candidates = [layer for layer in layers if layer and layer.count(".") < 3]
    raise ValueError(
        f"no default layer is known for {name!r}: name the layer to mix at, one that returns "
        f"[b, c, h, w] or tokens [b, n, c]; choose from {', '.join(candidates)}"
    )


# Families of timm and torchvision by the start of their names, and the layer to mix at. LeViT:
# the last layer of the convolutional stem, as in the paper. ViT: the last block, which has tokens.
_FAMILIES: Mapping[str, str] = {
    r"(wide_)?(se|eca|sk)?res(net|next|nest|2net)": r"layer4",
    r"levit": r"stem",
    r"(vit|deit)": r"(blocks\.\d+|encoder\.layers\.encoder_layer_\d+)",
    r"(vgg|densenet)": r"features",
}


def _pretrained_scale(model: nn.Module) -> tuple[Rgb, Rgb]:
    """Mean and std that ImageNet weights were trained with; timm's models record theirs."""
    config = getattr(model, "pretrained_cfg", None) or {}
    mean, std = IMAGENET_SCALE
    return tuple(config.get("mean", mean)), tuple(config.get("std", std))


def _from_timm(
    name: str, num_classes: int, image_size: int, pretrained: bool, **options: float
) -> nn.Module:
    timm = import_extra("timm")
    if not timm.is_model(name):
        raise _unknown(f"timm:{name}", [f"timm:{n}" for n in timm.list_models()])
    # A model with position embeddings has a fixed size; the others have no such argument.
    fixed = timm.get_pretrained_cfg(name).fixed_input_size
    sized = {"img_size": image_size} if fixed else {}
    try:
        model: nn.Module = timm.create_model(
            name, pretrained=pretrained, num_classes=num_classes, **sized, **options
        )
    except TypeError as error:
        if "drop_path_rate" not in str(error):
            raise
        raise ValueError(f"timm:{name} has no stochastic depth: leave drop_path out") from None
    return model


def _from_torchvision(name: str, num_classes: int, image_size: int, pretrained: bool) -> nn.Module:
    models = import_extra("torchvision").models
    known = models.list_models(module=models)
    if name not in known:
        raise _unknown(f"torchvision:{name}", [f"torchvision:{n}" for n in known])
    sized = {"image_size": image_size} if name.startswith("vit_") else {}
    model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **sized)
    if pretrained:
        _load_all_but_classifier(model, torchvision_weights(name, "DEFAULT"), num_classes)
    return model


EXTERNAL: Mapping[str, Callable[..., nn.Module]] = {
    "timm": _from_timm,
    "torchvision": _from_torchvision,
}


def _unknown(name: str, known: list[str]) -> ValueError:
    return ValueError(f"unknown model {name!r}{suggestion(name, known)}")


def import_extra(module: str, extra: str = "timm") -> Any:
    """Import a module of an extra, or raise with the name of the extra."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{package} is missing: pip install alignmixup[{extra}]") from error
    except RuntimeError as error:
        # torchvision's compiled operators must come from the build that fits torch's.
        raise ImportError(
            f"{package} does not import beside torch {torch.__version__} ({error}): "
            f"install the torchvision build made for it, then pip install alignmixup[{extra}]"
        ) from error


def torchvision_weights(name: str, version: str) -> Mapping[str, Tensor]:
    """Return weights by torchvision's name, downloaded at first use and checked by their hash."""
    weights = import_extra("torchvision").models.get_model_weights(name)[version]
    state: Mapping[str, Tensor] = weights.get_state_dict(progress=True, check_hash=True)
    return state


def _load_all_but_classifier(
    model: nn.Module, state: Mapping[str, Tensor], num_classes: int
) -> None:
    """Load ``state``; only tensors with one row per class may differ in shape and are kept."""
    ours = model.state_dict()
    # The files of DenseNet have older names of its layers.
    old = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
    state = {old.sub(r"\1\2", name): value for name, value in state.items()}
    fitting = {k: v for k, v in state.items() if k in ours and v.shape == ours[k].shape}
    for name in set(ours) - set(fitting):
        if name.endswith("num_batches_tracked"):  # missing in old files, and not used
            continue
        shape = list(ours[name].shape)
        if name not in state or shape[:1] != [num_classes]:
            given = list(state[name].shape) if name in state else "none"
            raise ValueError(f"pretrained weights do not fit: {name} is {shape}, they have {given}")
    model.load_state_dict(fitting, strict=False)
