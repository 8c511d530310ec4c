"""VGG-GAP: VGG-16 for class activation maps (Zhou et al. 2016), as in the localization tables.

VGG-16 up to conv5_3 without the pool after it, one more 3 x 3 convolution with 1024 channels and
ReLU, the mean over positions, a linear layer: 1024 x 14 x 14 from images of 224 x 224.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.models.normalize import Normalize, Rgb
from alignmixup.models.preact_resnet import Head
from alignmixup.registry import register_model

# Convolutions as multiples of the width, in five groups with a max pool in between.
_GROUPS = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))


@register_model("vgg_gap", layer="conv6", initialize=True, autoencoder=True, pretrained="vgg16")
class VGGGAP(nn.Module):
    """Images in [0, 1] to logits, through ``features``, ``conv6`` and ``head``.

    ``conv6`` is the added convolution with its ReLU: the map for taps and class activation maps.
    ``width`` is the number of channels of the first convolution, 64 in the published network.
    """

    def __init__(self, num_classes: int, mean: Rgb, std: Rgb, *, width: int = 64) -> None:
        super().__init__()
        self.normalize = Normalize(mean, std)
        self.features = _features(width)
        added = nn.Conv2d(8 * width, 16 * width, 3, padding=1)
        self.conv6 = nn.Sequential(added, nn.ReLU())
        self.head = Head(16 * width, num_classes)

    def forward(self, x: Tensor) -> Float[Tensor, "b k"]:
        logits: Tensor = self.head(self.conv6(self.features(self.normalize(x))))
        return logits

    def load_torchvision(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the convolutions of torchvision's vgg16; ``conv6`` and the head are kept."""
        start = "features."
        theirs = {k.removeprefix(start): v for k, v in state_dict.items() if k.startswith(start)}
        self.features.load_state_dict(theirs)


def _features(width: int) -> nn.Sequential:
    """Return conv1_1 to conv5_3, each with ReLU, at the indices of torchvision's vgg16."""
    layers: list[nn.Module] = []
    channels = 3
    for group in _GROUPS:
        if layers:
            layers.append(nn.MaxPool2d(2, stride=2))
        for scale in group:
            layers += [
                nn.Conv2d(channels, scale * width, 3, padding=1),
                nn.ReLU(),
            ]
            channels = scale * width
    return nn.Sequential(*layers)
