"""PreActResNet-18 for small images, and the block and the head that other networks share.

    released block:  o = ReLU(BN(x));  y = s(o) + conv(ReLU(BN(conv(o))))
    standard block:  the same, but where s is the identity it is applied to x   (He et al. 2016b)

s is the identity, or a 1 x 1 convolution where the shape changes. Four stages of two blocks; the
raw output of the last one is the feature tensor A of the paper (512 x 4 x 4 for 32 x 32 images).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, get_args

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.models.normalize import ImageConv, Normalize, Rgb
from alignmixup.ops.norm_relu import NormReluSequential, norm_relu
from alignmixup.registry import register_model

Block = Literal["released", "standard"]
HeadKind = Literal["pool", "flatten"]


@register_model("preact_resnet18", layer="layer4", initialize=True, autoencoder=True)
class PreActResNet18(nn.Module):
    """Images in [0, 1] to logits, through ``stem``, ``layer1`` to ``layer4`` and ``head``.

    There is no BN or ReLU between ``layer4`` and ``head``, as in the manifold mixup family of
    networks and in the network released with AlignMixup.

    ``block="released"`` is the block of the network released with AlignMixup: the identity shortcut
    carries ReLU(BN(x)). ``"standard"`` carries x itself, as in the manifold mixup, PuzzleMix and
    Co-Mixup networks; with cross-entropy at a learning rate of 0.1 it needs warm-up or clipping.

    ``stem_norm`` adds BN and ReLU after the first convolution. It is on by default because the
    released AlignMixup network has it; the manifold mixup, PuzzleMix and Co-Mixup networks do not.
    These use ``stem_stride=2`` on Tiny-ImageNet (a 4 x 4 map from 64 x 64), AlignMixup ``1`` (8 x
    8). ``last_stride=1`` leaves out the last downsampling: A is 8 x 8 on CIFAR.
    ``head="flatten"`` needs the ``image_size``; a pooled head accepts any.
    """

    def __init__(
        self,
        num_classes: int,
        mean: Rgb,
        std: Rgb,
        *,
        stem_stride: int = 1,
        width: int = 64,
        stem_norm: bool = True,
        block: Block = "released",
        head: HeadKind = "pool",
        image_size: int = 32,
        last_stride: int = 2,
    ) -> None:
        super().__init__()
        self.normalize = Normalize(mean, std)
        conv = ImageConv(3, width, 3, stride=stem_stride, padding=1, bias=False)
        stem: dict[str, nn.Module] = {"conv": conv}
        if stem_norm:
            stem |= {"norm": nn.BatchNorm2d(width), "relu": nn.ReLU()}
        self.stem = NormReluSequential(OrderedDict(stem))
        skips = check_block(block) == "released"
        stage = partial(make_stage, partial(PreActBlock, activated_skip=skips), num_blocks=2)
        self.layer1 = stage(width, width, stride=1)
        self.layer2 = stage(width, 2 * width, stride=2)
        self.layer3 = stage(2 * width, 4 * width, stride=2)
        self.layer4 = stage(4 * width, 8 * width, stride=last_stride)
        side = map_size(image_size, (stem_stride, 2, 2, last_stride))
        self.head = Head(8 * width, num_classes, kind=head, side=side)

    def forward(self, x: Tensor) -> Float[Tensor, "b k"]:
        out: Tensor = self.stem(self.normalize(x))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        logits: Tensor = self.head(out)
        return logits


def check_block(block: str) -> str:
    """Return ``block``, or raise for an unknown one."""
    if block not in get_args(Block):
        raise ValueError(f"unknown block {block!r}; choose 'released' or 'standard'")
    return block


def make_stage(
    block: Callable[..., nn.Module],
    in_channels: int,
    channels: int,
    *,
    num_blocks: int,
    stride: int,
    expansion: int = 1,
) -> nn.Sequential:
    """Return ``num_blocks`` blocks, the first of which changes width and resolution.

    A block returns ``expansion`` times ``channels``.
    """
    first = block(in_channels, channels, stride=stride)
    wide = expansion * channels
    return nn.Sequential(first, *(block(wide, channels, stride=1) for _ in range(num_blocks - 1)))


class PreActBlock(nn.Module):
    """A pre-activation block of two 3 x 3 convolutions; ``dropout`` acts between them.

    With ``activated_skip`` an identity shortcut carries ReLU(BN(x)), else x. A shortcut that is a
    convolution reads ReLU(BN(x)) in both.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        stride: int,
        activated_skip: bool,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.activated_skip = activated_skip
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.dropout = dropout
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        out = norm_relu(self.norm1, x)
        if self.shortcut is not None:
            skip = self.shortcut(out)
        else:
            skip = out if self.activated_skip else x
        out = norm_relu(self.norm2, self.conv1(out))
        if self.dropout:
            out = F.dropout(out, self.dropout, self.training)
        total: Tensor = skip + self.conv2(out)
        return total


class Head(nn.Module):
    """The classifier: one linear layer on the mean over positions, or on all of them.

    ``kind="pool"`` reads only the mean, which alignment by an exact plan does not change;
    ``"flatten"`` has weights for each position of a map of ``side`` x ``side``.
    """

    def __init__(
        self, channels: int, num_classes: int, *, kind: str = "pool", side: int = 1
    ) -> None:
        super().__init__()
        if kind not in ("pool", "flatten"):
            raise ValueError(f"unknown head {kind!r}; choose 'pool' or 'flatten'")
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, got {num_classes}")
        self.kind = kind
        self.side = side
        self.linear = nn.Linear(channels * (side**2 if kind == "flatten" else 1), num_classes)

    def forward(self, features: Float[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        if self.kind == "pool":
            logits: Tensor = self.linear(features.mean(dim=(2, 3)))
            return logits
        height, width = features.shape[2:]
        if (height, width) != (self.side, self.side):
            raise ValueError(
                f"this flattened head was built for maps of {self.side} x {self.side}, got "
                f"{height} x {width}: build the network with this image_size"
            )
        logits = self.linear(features.flatten(1))
        return logits


def map_size(image_size: int, strides: Iterable[int]) -> int:
    """Return the side of the map after padded 3 x 3 convolutions of these strides."""
    for stride in strides:
        image_size = -(-image_size // stride)
    return image_size
