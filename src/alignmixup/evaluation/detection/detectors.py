"""Detectors on a trained ResNet-50: torchvision's Faster R-CNN with FPN, and SSD at 300 pixels.

The weights come from our ResNet-50 or from torchvision's, without the classifier; batch
normalization is frozen. Detectors take images in [0, 1]: their normalization is that of our network
if it has one, else ImageNet's. Their label 0 is background.

SSD reads six maps of a 300 x 300 image: 38 x 38, 19 x 19 and 10 x 10 from ``layer2`` to
``layer4``, and 5 x 5, 3 x 3 and 1 x 1 from three added pairs of convolutions, with the default
boxes of the published SSD300.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from alignmixup.device import fork_rng
from alignmixup.models.external import IMAGENET_SCALE, import_extra
from alignmixup.models.resnet import their_name


def faster_rcnn(
    trained: nn.Module | Mapping[str, Tensor],
    num_classes: int,
    *,
    min_size: int = 800,
    max_size: int = 1333,
    trainable_layers: int = 3,
    seed: int = 0,
) -> nn.Module:
    """Return a Faster R-CNN (FPN) whose backbone has the ``trained`` weights.

    ``num_classes`` does not count the background. Of the stem and the four stages the last
    ``trainable_layers`` are trained. New layers are drawn by ``seed``.
    """
    _check(num_classes, trainable_layers)
    models = import_extra("torchvision.models.detection", "detection")
    utils = import_extra("torchvision.models.detection.backbone_utils", "detection")
    mean, std = _normalization(_state(trained))
    with fork_rng(torch.device("cpu"), seed):
        backbone = utils._resnet_fpn_extractor(_resnet50(trained), trainable_layers)
        detector: nn.Module = models.FasterRCNN(
            backbone,
            num_classes + 1,
            min_size=min_size,
            max_size=max_size,
            image_mean=mean,
            image_std=std,
        )
    return detector


def ssd300(
    trained: nn.Module | Mapping[str, Tensor],
    num_classes: int,
    *,
    trainable_layers: int = 4,
    seed: int = 0,
) -> nn.Module:
    """Return an SSD for images of 300 x 300 whose trunk has the ``trained`` weights."""
    _check(num_classes, trainable_layers)
    ssd = import_extra("torchvision.models.detection.ssd", "detection")
    anchors = import_extra(
        "torchvision.models.detection.anchor_utils", "detection"
    ).DefaultBoxGenerator(
        [[2], [2, 3], [2, 3], [2, 3], [2], [2]],
        scales=[0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05],
        steps=[8, 16, 32, 64, 100, 300],
    )
    mean, std = _normalization(_state(trained))
    with fork_rng(torch.device("cpu"), seed):
        trunk = _SSDTrunk(_resnet50(trained))
        layers = [trunk.stem, trunk.layer1, trunk.layer2, trunk.layer3, trunk.layer4]
        for layer in layers[: 5 - trainable_layers]:
            layer.requires_grad_(False)
        head = ssd.SSDHead(trunk.out_channels, anchors.num_anchors_per_location(), num_classes + 1)
        detector: nn.Module = ssd.SSD(
            trunk, anchors, (300, 300), num_classes + 1, image_mean=mean, image_std=std, head=head
        )
    return detector


def torchvision_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a ResNet-50, ours or torchvision's, by torchvision's names.

    Classifier and normalization are left out, and so are the embedding and the decoder of an
    autoencoder; other weights raise.
    """
    body = {name.removeprefix("model.").removeprefix("encoder."): v for name, v in state.items()}
    body = {name: value for name, value in body.items() if not name.startswith(_NOT_BACKBONE)}
    renamed = {their_name(name): value for name, value in body.items()}
    if "conv1.weight" not in renamed or "layer4.2.conv3.weight" not in renamed:
        raise ValueError(
            "these are not the weights of a ResNet-50, ours or torchvision's; their names begin "
            f"{sorted(state)[:3]}"
        )
    return renamed


_NOT_BACKBONE = ("normalize.", "head.", "fc.", "embed.", "classifier.", "decoder.")


def _check(num_classes: int, trainable_layers: int) -> None:
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}")
    if not 0 <= trainable_layers <= 5:
        raise ValueError(f"trainable_layers must lie in 0..5, got {trainable_layers}")


def _state(trained: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return trained.state_dict() if isinstance(trained, nn.Module) else trained


def _normalization(state: Mapping[str, Tensor]) -> tuple[list[float], list[float]]:
    """Return mean and std, ours if the network has them."""
    if "normalize.mean" not in state:
        mean, std = map(list, IMAGENET_SCALE)
    else:
        mean, std = (state[f"normalize.{name}"].flatten().tolist() for name in ("mean", "std"))
    return mean, std


def _resnet50(trained: nn.Module | Mapping[str, Tensor]) -> Any:
    """Return torchvision's ResNet-50 with these weights, batch normalization frozen."""
    frozen = import_extra("torchvision.ops.misc", "detection").FrozenBatchNorm2d
    resnet = import_extra("torchvision.models", "detection").resnet50(
        weights=None, norm_layer=frozen
    )
    resnet.fc = nn.Identity()
    try:
        resnet.load_state_dict(torchvision_state(_state(trained)))
    except RuntimeError as error:
        raise ValueError(f"the weights do not fit a ResNet-50 of width 64: {error}") from None
    return resnet


class _SSDTrunk(nn.Module):
    """The ResNet-50 and the added convolutions: six maps of decreasing resolution."""

    def __init__(self, resnet: Any) -> None:
        super().__init__()
        self.stem = nn.Sequential(resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool)
        self.layer1, self.layer2 = resnet.layer1, resnet.layer2
        self.layer3, self.layer4 = resnet.layer3, resnet.layer4
        self.extra = nn.ModuleList(
            [
                _added(2048, 256, 512, padding=1),
                _added(512, 128, 256, padding=1),
                _added(256, 128, 256, padding=0, stride=1),
            ]
        )
        self.out_channels = [512, 1024, 2048, 512, 256, 256]

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        out = self.layer1(self.stem(x))
        maps: OrderedDict[str, Tensor] = OrderedDict()
        for layer in (self.layer2, self.layer3, self.layer4, *self.extra):
            out = layer(out)
            maps[str(len(maps))] = out
        return maps


def _added(channels: int, hidden: int, out: int, *, padding: int, stride: int = 2) -> nn.Sequential:
    layers = nn.Sequential(
        nn.Conv2d(channels, hidden, 1),
        nn.ReLU(),
        nn.Conv2d(hidden, out, 3, stride=stride, padding=padding),
        nn.ReLU(),
    )
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return layers
