"""Layout of the maps that a layer returns: ``[b, c, h, w]``, or ``[b, h, w, c]`` as in a Swin."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from alignmixup.hooks import attribute_around, find_layer

# Modules that work on [b, c, h, w] also inside a network whose maps are [b, h, w, c].
CHANNELS_FIRST = (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d)


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
