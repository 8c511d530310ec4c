"""AutoMix and SAMix against loops that follow OpenMixup: statistics, steps without the block."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alignmixup.mixers.automix import AutoMix
from alignmixup.mixers.learned import Learned, attend
from alignmixup.mixers.samix import SAMix, SAMixBlock
from alignmixup.recipes.catalog import find_recipe
from cases import TinyNet, images, labels
from learned_cases import METHODS, attached, drawn, maps


def statistics(net: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in net.named_buffers() if "running" in name}


@pytest.mark.parametrize("name", ["automix", "samix", "automix-heads2"])
def test_the_teacher_sees_clean_and_mixed_images_in_every_layer(name: str) -> None:
    """The layers after that of the block, too: the teacher is scored on clean images."""
    two_heads = AutoMix("layer2", heads=2, classifier="fc")
    settings = dataclasses.replace(METHODS.get(name, two_heads), ema=(1.0, 1.0))
    (mixer, net), (twin, _) = attached(settings), attached(settings)
    draw, x = drawn(mixer), images(6)
    expected = copy.deepcopy(twin.learner.teacher)
    mask = twin.mask(maps(twin), draw.block_perm, draw.block_lam, (16, 16))
    with torch.no_grad():
        expected(x)
        expected(mask * x + (1 - mask) * x[draw.block_perm])
    mixer.apply(net, x, labels(6), draw)
    found = statistics(mixer.learner.teacher)
    assert len(found) == 6
    for key, value in statistics(expected).items():
        torch.testing.assert_close(found[key], value, msg=lambda text, key=key: f"{key}: {text}")


def test_without_statistics_the_clean_pass_of_the_teacher_ends_at_the_layer() -> None:
    """Nothing of what follows is read there, as in a transformer."""
    net = TinyNet()
    for stage in (net.layer1, net.layer2, net.layer4):
        stage[1] = nn.Identity()
    mixer = AutoMix("layer2").attach(net, images(6))
    runs: list[int] = []
    mixer.learner.teacher.fc.register_forward_hook(lambda *_: runs.append(1))
    mixer.apply(net, images(6), labels(6), drawn(mixer))
    assert len(runs) == 1  # the mixed images


@pytest.mark.parametrize("mixer", [AutoMix("layer2"), SAMix("layer2")], ids=["automix", "samix"])
def test_a_step_without_the_block_keeps_the_loss_of_its_mask(mixer: Learned) -> None:
    """Without the teacher's loss; the mask is still pulled to the share of the labels."""
    found = []
    for prob in (1.0, 0.0):
        own, net = attached(dataclasses.replace(mixer, block_prob=prob, mask_margin=0.0))
        mixed = own.apply(net, images(6), labels(6), drawn(own))
        found.append((own, mixed))
    (_, trained), (own, skipped) = found
    torch.testing.assert_close(skipped.extra["mask"], trained.extra["mask"])
    assert skipped.extra["mask"].detach().abs() > 1e-4
    assert skipped.extra["block"] == 0
    block = list(own.learner.block.parameters())
    torch.autograd.backward([skipped.extra["block"], skipped.extra["mask"]])
    given = [p.grad for p in block]
    twin, net = attached(dataclasses.replace(mixer, mask_margin=0.0))
    penalty = twin.apply(net, images(6), labels(6), drawn(twin)).extra["mask"]
    for one, other in zip(
        given, torch.autograd.grad(penalty, list(twin.learner.block.parameters())), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_the_weight_of_the_mask_falls_to_zero_on_imagenet() -> None:
    """For ResNets and for DeiT; on CIFAR and Tiny-ImageNet it stays."""
    rng = torch.Generator()
    samix = find_recipe("imagenet-deit-s-samix").mixer
    for mixer in (AutoMix.imagenet(), AutoMix.deit(), SAMix.imagenet(), samix):
        weights = [float(mixer.draw(2, rng, p).mask_weight) for p in (0.0, 0.5, 0.9999)]
        assert weights == pytest.approx([0.1, 0.05, 0.0], abs=1e-6)
    for mixer in (AutoMix(), AutoMix.tiny_imagenet(), SAMix(), SAMix.tiny_imagenet()):
        assert float(mixer.draw(2, rng, 0.9).mask_weight) == pytest.approx(0.1)


def test_dropout_of_samix_acts_on_the_values() -> None:
    """Whole positions of the map of values are dropped, not channels inside of its network."""
    rng = torch.Generator().manual_seed(0)
    h, other = (torch.randn(3, 8, 4, 4, generator=rng) for _ in range(2))
    torch.manual_seed(0)
    block = SAMixBlock(8, dropout=0.5)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=rng))
    plain = copy.deepcopy(block)
    both = torch.cat([h, other], dim=1)
    torch.manual_seed(1)
    found = block(h, other)
    convs = [m for m in plain.value if isinstance(m, nn.Conv2d)]
    (norm,) = (m for m in plain.value if isinstance(m, nn.BatchNorm2d))
    values = F.conv2d(F.elu(norm(F.conv2d(other, convs[0].weight))), convs[1].weight)
    torch.manual_seed(1)
    values = F.dropout(values, 0.5)
    assert (values == 0).any()
    torch.testing.assert_close(found, attend(plain.query(both), plain.key(both), values))
    assert {"value.0.weight", "value.1.weight", "value.4.weight"} <= {*block.state_dict()}
