"""ResNet-50 for ImageNet and CUB: bottleneck blocks, the stride in their 3 x 3 convolution.

    block:  y = ReLU(s(x) + BN(1x1 ReLU(BN(3x3 ReLU(BN(1x1 x))))))            (He et al. 2016a)

s is the identity, or a strided 1 x 1 convolution with BN where the shape changes. ``layer4`` gives
2048 x 7 x 7 from images of 224 x 224, and 14 x 14 with ``last_stride=1`` for localisation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.models.normalize import ImageConv, Normalize, Rgb
from alignmixup.models.preact_resnet import Head
from alignmixup.ops.norm_relu import NormReluSequential, norm_relu

__all__ = ["Bottleneck", "ResNet50", "load_torchvision_resnet50", "zero_last_norms"]

EXPANSION = 4


class ResNet50(nn.Module):
    """Images in [0, 1] to logits, through ``stem``, ``layer1`` to ``layer4`` and ``head``.

    ``width`` is the channels of the stem, 64 in the published network.
    """

    def __init__(
        self, num_classes: int, mean: Rgb, std: Rgb, *, width: int = 64, last_stride: int = 2
    ) -> None:
        super().__init__()
        self.normalize = Normalize(mean, std)
        stem: dict[str, nn.Module] = {
            "conv": ImageConv(3, width, 7, stride=2, padding=3, bias=False),
            "norm": nn.BatchNorm2d(width),
            "relu": nn.ReLU(),
            "pool": nn.MaxPool2d(3, stride=2, padding=1),
        }
        self.stem = NormReluSequential(OrderedDict(stem))
        self.layer1 = _stage(width, width, num_blocks=3, stride=1)
        self.layer2 = _stage(4 * width, 2 * width, num_blocks=4, stride=2)
        self.layer3 = _stage(8 * width, 4 * width, num_blocks=6, stride=2)
        self.layer4 = _stage(16 * width, 8 * width, num_blocks=3, stride=last_stride)
        self.head = Head(8 * width * EXPANSION, num_classes)

    def forward(self, x: Tensor) -> Float[Tensor, "b k"]:
        out: Tensor = self.stem(self.normalize(x))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        logits: Tensor = self.head(out)
        return logits


def _stage(in_channels: int, channels: int, *, num_blocks: int, stride: int) -> nn.Sequential:
    """Return ``num_blocks`` blocks, the first of which changes width and resolution."""
    first = Bottleneck(in_channels, channels, stride=stride)
    others = [Bottleneck(EXPANSION * channels, channels) for _ in range(num_blocks - 1)]
    return nn.Sequential(first, *others)


class Bottleneck(nn.Module):
    """1 x 1 to ``channels``, 3 x 3, 1 x 1 to four times as many, and the shortcut."""

    def __init__(self, in_channels: int, channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, EXPANSION * channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(EXPANSION * channels)
        self.shortcut: nn.Sequential | None = None
        if stride != 1 or in_channels != EXPANSION * channels:
            shortcut: dict[str, nn.Module] = {
                "conv": nn.Conv2d(in_channels, EXPANSION * channels, 1, stride=stride, bias=False),
                "norm": nn.BatchNorm2d(EXPANSION * channels),
            }
            self.shortcut = nn.Sequential(OrderedDict(shortcut))

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        skip = x if self.shortcut is None else self.shortcut(x)
        out = norm_relu(self.norm1, self.conv1(x))
        out = norm_relu(self.norm2, self.conv2(out))
        return F.relu(skip + self.norm3(self.conv3(out)))


def zero_last_norms(net: nn.Module) -> None:
    """Set the scale of the last norm of each block to zero: the block is then its shortcut."""
    for module in net.modules():
        if isinstance(module, Bottleneck):
            nn.init.zeros_(module.norm3.weight)


def load_torchvision_resnet50(
    net: ResNet50, state_dict: Mapping[str, Tensor], *, with_head: bool = True
) -> None:
    """Put the weights of torchvision's resnet50 into ``net``; without its classifier if asked."""
    renamed = {_our_name(name): value for name, value in state_dict.items()}
    if with_head:
        num_classes = net.head.linear.out_features
        bias = renamed.get("head.linear.bias")
        given = 0 if bias is None else len(bias)
        if given != num_classes:
            raise ValueError(
                f"the weights are for {given} classes, the network for {num_classes}: "
                "pass with_head=False to keep the network's own classifier"
            )
    # Normalisation has no counterpart there: ours is kept. Any other absence is an error.
    kept = ("normalize.",) if with_head else ("normalize.", "head.")
    ours = {name: value for name, value in net.state_dict().items() if name.startswith(kept)}
    net.load_state_dict({**renamed, **ours})


def _our_name(name: str) -> str:
    """Return our name of a tensor in torchvision's resnet50."""
    first, _, rest = name.partition(".")
    top = {"conv1": "stem.conv", "bn1": "stem.norm", "fc": "head.linear"}
    if first in top:
        return f"{top[first]}.{rest}"
    renames = {"downsample.0": "shortcut.conv", "downsample.1": "shortcut.norm", ".bn": ".norm"}
    for theirs, ours in renames.items():
        name = name.replace(theirs, ours)
    return name
