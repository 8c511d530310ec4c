"""Layout of what a layer returns: maps ``[b, c, h, w]``, or ``[b, h, w, c]`` as in a Swin; tokens.

Tokens ``[b, n, c]`` may begin with some that are no positions of the image, such as a class token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from alignmixup.wrappers import attribute_around, find_layer, own_parameters, parameters_around

# Modules that work on [b, c, h, w] also inside a network whose maps are [b, h, w, c].
CHANNELS_FIRST = (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d)

UNKNOWN = -1  # number of prefix tokens of a network that has some and does not say how many
# How names of parameters begin in networks that have such tokens (CoaT: cls_token1, CLIP:
# class_embedding), and names of modules that come before they are added.
TOKENS = (
    "class_embedding",
    "class_token",
    "cls_token",
    "dist_token",
    "distillation_token",
    "reg_token",
    "register_token",
)
PATCHES = "patch_embed"
# What to do where the number of tokens does not fit.
COUNT = "set num_prefix_tokens of the network to the number of tokens that are no patches"


@dataclass(frozen=True)
class PrefixTokens:
    """How many of the first tokens of a layer are no positions of the image.

    ``count`` is what was set or what the network says, or ``UNKNOWN``. A layer that returns as many
    tokens as there are patches has no others: CaiT, XCiT and ConViT of timm add their class token
    in or after the blocks, and since timm 1.0.31 they say one for the layers before, too.
    """

    count: int
    num_patches: int | None = None

    def of(self, tokens: Tensor) -> int:
        """Return the number for the tokens ``[b, n, c]`` that the layer returned."""
        return 0 if tokens.shape[1] == self.num_patches else self.count


def prefix_tokens(net: nn.Module, layer: str) -> PrefixTokens:
    """Return what the network says of ``layer``, as timm's do."""
    is_early = any(part.startswith(PATCHES) for part in layer.split("."))
    if is_early and not _has_tokens(own_parameters(find_layer(net, layer)[0])):
        return PrefixTokens(0)
    count = attribute_around(net, layer, "num_prefix_tokens")
    if count is None:
        count = UNKNOWN if _has_tokens(parameters_around(net, layer)) else 0
    patches = getattr(attribute_around(net, layer, "patch_embed"), "num_patches", None)
    return PrefixTokens(count, patches if isinstance(patches, int) else None)


def _has_tokens(parameters: set[str]) -> bool:
    return any(name.startswith(TOKENS) for name in parameters)


def patch_tokens(net: nn.Module, layer: str, tokens: Tensor) -> Tensor:
    """Return the tokens that are positions of the image: all where the network counts none."""
    return tokens[:, max(prefix_tokens(net, layer).of(tokens), 0) :]


def returns_channels_last(net: nn.Module, layer: str) -> bool:
    """Whether the network says, as timm's do, that the layer returns maps ``[b, h, w, c]``."""
    if isinstance(find_layer(net, layer)[0], CHANNELS_FIRST):
        return False
    return bool(attribute_around(net, layer, "output_fmt") == "NHWC")


def looks_channels_last(shape: Sequence[int]) -> bool:
    """Whether the shape is that of square maps ``[b, h, h, c]``, read as ``[b, c, h, w]``."""
    return shape[1] == shape[2] != shape[3] != 1


def channels_first(net: nn.Module, layer: str, output: Tensor, x: Tensor) -> Tensor:
    """Return maps as ``[b, c, h, w]``, and any other output of the layer as it is.

    Raises a ``ValueError`` where square images ``x`` have maps that look like ``[b, h, w, c]`` and
    the network does not say so: rows would be taken for channels.
    """
    if output.ndim != 4:
        return output
    if returns_channels_last(net, layer):
        return output.movedim(-1, 1)
    if x.shape[2] == x.shape[3] and looks_channels_last(output.shape):
        raise ValueError(
            f"layer {layer!r} returns {list(output.shape)}, which looks like maps [b, h, w, c]; "
            "maps [b, c, h, w] are needed: choose a layer that returns them, or set output_fmt of "
            "the network to 'NHWC'"
        )
    return output
