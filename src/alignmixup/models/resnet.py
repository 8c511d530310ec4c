"""ResNet-50 for ImageNet and CUB: bottleneck blocks, the stride in their 3 x 3 convolution.

    block:  y = ReLU(s(x) + BN(1x1 ReLU(BN(3x3 ReLU(BN(1x1 x))))))            (He et al. 2016a)

s is the identity, or a strided 1 x 1 convolution with BN where the shape changes. ``layer4`` has
2048 x 7 x 7 from images of 224 x 224, and 14 x 14 with ``last_stride=1`` for localization.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.models.normalize import ImageConv, Normalize, Rgb
from alignmixup.models.preact_resnet import Head, make_stage
from alignmixup.ops.norm_relu import NormReluSequential, norm_relu
from alignmixup.registry import register_model

EXPANSION = 4
# Names of tensors, torchvision's and ours: how they begin, and other parts of them.
TOP = {"conv1": "stem.conv", "bn1": "stem.norm", "fc": "head.linear"}
RENAMES = {"downsample.0": "shortcut.conv", "downsample.1": "shortcut.norm", ".bn": ".norm"}


@register_model(
    "resnet50", layer="layer4", initialize=True, autoencoder=True, pretrained="resnet50"
)
class ResNet50(nn.Module):
    """Images in [0, 1] to logits, through ``stem``, ``layer1`` to ``layer4`` and ``head``.

    ``width`` is the number of channels of the stem, 64 in the published network. ``zero_norms``
    starts the last norm of each block at zero, so that every block begins as its shortcut.
    """

    def __init__(
        self,
        num_classes: int,
        mean: Rgb,
        std: Rgb,
        *,
        width: int = 64,
        last_stride: int = 2,
        zero_norms: bool = False,
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
        block = partial(Bottleneck, last_norm=_ZeroNorm if zero_norms else nn.BatchNorm2d)
        stage = partial(make_stage, block, expansion=EXPANSION)
        self.layer1 = stage(width, width, num_blocks=3, stride=1)
        self.layer2 = stage(4 * width, 2 * width, num_blocks=4, stride=2)
        self.layer3 = stage(8 * width, 4 * width, num_blocks=6, stride=2)
        self.layer4 = stage(16 * width, 8 * width, num_blocks=3, stride=last_stride)
        self.head = Head(8 * width * EXPANSION, num_classes)

    def forward(self, x: Tensor) -> Float[Tensor, "b k"]:
        out: Tensor = self.stem(self.normalize(x))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        logits: Tensor = self.head(out)
        return logits

    def load_torchvision(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the weights of torchvision's resnet50, the head only for as many classes.

        The normalization, which torchvision's network does not have, is kept.
        """
        theirs = {_our_name(name): value for name, value in state_dict.items()}
        kept = {k: v for k, v in self.state_dict().items() if k.startswith(("normalize.", "head."))}
        if any(k in theirs and theirs[k].shape != v.shape for k, v in kept.items()):
            theirs = {k: v for k, v in theirs.items() if not k.startswith("head.")}
        self.load_state_dict({**kept, **theirs})


class _ZeroNorm(nn.BatchNorm2d):
    """BN whose scale starts at zero."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.weight)


class Bottleneck(nn.Module):
    """1 x 1 to ``channels``, 3 x 3, 1 x 1 to four times as many, and the shortcut."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        stride: int = 1,
        last_norm: type[nn.BatchNorm2d] = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, EXPANSION * channels, 1, bias=False)
        self.norm3 = last_norm(EXPANSION * channels)
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


def _our_name(name: str) -> str:
    """Return our name of a tensor in torchvision's resnet50."""
    first, _, rest = name.partition(".")
    if first in TOP:
        return f"{TOP[first]}.{rest}"
    for theirs, ours in RENAMES.items():
        name = name.replace(theirs, ours)
    return name


def their_name(name: str) -> str:
    """Return the name that a tensor of our ResNet-50 has in torchvision's."""
    for theirs, ours in TOP.items():
        if name.startswith(f"{ours}."):
            return f"{theirs}{name.removeprefix(ours)}"
    for theirs, ours in RENAMES.items():
        name = name.replace(ours, theirs)
    return name
