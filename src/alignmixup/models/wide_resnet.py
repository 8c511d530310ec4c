"""Wide residual networks for small images: WRN-d-k (Zagoruyko and Komodakis 2016).

Three stages of (d - 4) / 6 pre-activation blocks with 16k, 32k and 64k channels, then BN and ReLU.
WRN16-8 has 512 x 8 x 8 from images of 32 x 32: the feature tensor A of the paper.

    released block:  y = s(x) + conv(ReLU(BN(conv(ReLU(BN(x))))))      convolutions have biases
    standard block:  that of ``preact_resnet`` with identity shortcuts on x, no biases
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.models.normalize import ImageConv, Normalize, Rgb
from alignmixup.models.preact_resnet import (
    Block,
    Head,
    HeadKind,
    PreActBlock,
    check_block,
    make_stage,
    map_size,
)
from alignmixup.ops.norm_relu import NormReluSequential, norm_relu
from alignmixup.registry import register_model


@register_model("wrn16_8", layer="norm", initialize=True, autoencoder=True)
class WideResNet(nn.Module):
    """Images in [0, 1] to logits, through ``stem``, ``layer1`` to ``layer3``, ``norm``, ``head``.

    ``norm`` is the final BN and ReLU as one module, so that a tap on it gets the input of the head.
    ``width`` is the number of channels of the stem, 16 in every published network.

    ``block="released"`` is the network released with AlignMixup: every convolution has a bias, a
    block has its stride in the second convolution, shortcuts read x, and the final BN has momentum
    0.9. ``"standard"`` is the network of Zagoruyko and Komodakis.
    """

    def __init__(
        self,
        num_classes: int,
        mean: Rgb,
        std: Rgb,
        *,
        depth: int = 16,
        widen_factor: int = 8,
        dropout: float = 0.0,
        stem_stride: int = 1,
        width: int = 16,
        block: Block = "released",
        head: HeadKind = "pool",
        image_size: int = 32,
        last_stride: int = 2,
    ) -> None:
        super().__init__()
        num_blocks, rest = divmod(depth - 4, 6)
        if rest or num_blocks < 1:
            raise ValueError(f"depth must be 6 n + 4 (10, 16, 22, 28, ...), got {depth}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
        wide = [width, *(width * widen_factor * scale for scale in (1, 2, 4))]
        released = check_block(block) == "released"
        kind = _ReleasedBlock if released else partial(PreActBlock, activated_skip=False)
        make = partial(make_stage, partial(kind, dropout=dropout), num_blocks=num_blocks)
        strides = (1, 2, last_stride)
        stages = [make(wide[i], wide[i + 1], stride=stride) for i, stride in enumerate(strides)]
        self.normalize = Normalize(mean, std)
        self.stem = ImageConv(3, width, 3, stride=stem_stride, padding=1, bias=released)
        self.layer1, self.layer2, self.layer3 = stages
        norm: dict[str, nn.Module] = {
            "norm": nn.BatchNorm2d(wide[3], momentum=0.9 if released else 0.1),
            "relu": nn.ReLU(),
        }
        self.norm = NormReluSequential(OrderedDict(norm))
        side = map_size(image_size, (stem_stride, 2, last_stride))
        self.head = Head(wide[3], num_classes, kind=head, side=side)

    def forward(self, x: Tensor) -> Float[Tensor, "b k"]:
        out: Tensor = self.stem(self.normalize(x))
        out = self.norm(self.layer3(self.layer2(self.layer1(out))))
        logits: Tensor = self.head(out)
        return logits


class _ReleasedBlock(nn.Module):
    """The block of the released WRN; ``dropout`` acts between its convolutions."""

    def __init__(self, in_channels: int, channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1)
        self.dropout = dropout
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Conv2d(in_channels, channels, 1, stride=stride)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        out = norm_relu(self.norm2, self.conv1(norm_relu(self.norm1, x)))
        if self.dropout:
            out = F.dropout(out, self.dropout, self.training)
        skip = x if self.shortcut is None else self.shortcut(x)
        total: Tensor = skip + self.conv2(out)
        return total
