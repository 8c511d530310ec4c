"""alignment_effect: it must see that an exact plan before average pooling changes nothing."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

from alignmixup.evaluation.effect import Effect, alignment_effect
from cases import TinyNet, images

KEEPS = ["anchor", "partner"]


def effect_of(net: nn.Module, layer: str = "layer4", **settings) -> Effect:
    return alignment_effect(net, layer, images(8, dtype=torch.float64), **settings)


@pytest.mark.parametrize("keep", KEEPS)
def test_before_a_pooled_head_alignment_changes_nothing(keep: str) -> None:
    effect = effect_of(TinyNet("pool").double(), keep=keep)
    assert effect.logits < 1e-5
    assert effect.pooled < 1e-5
    assert effect.features > 0.05
    assert effect.is_next_to_nothing
    assert "layer4" in str(effect)
    assert "next to nothing" in str(effect)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(
    ("head", "layer"), [("flatten", "layer4"), ("pool", "layer2"), ("pool", "layer1")]
)
def test_elsewhere_alignment_changes_the_logits(head: str, layer: str, keep: str) -> None:
    effect = effect_of(TinyNet(head).double(), layer, keep=keep)
    assert effect.pooled < 1e-5
    assert effect.logits > 1e-2
    assert not effect.is_next_to_nothing
    assert "next to nothing" not in str(effect)


def test_the_other_marginal_leaves_a_larger_change_before_pooling() -> None:
    """The authors' code makes columns exact in both directions: feat' keeps the mean less well."""
    exact = effect_of(TinyNet("pool").double(), keep="partner", num_iters=20)
    released = effect_of(TinyNet("pool").double(), keep="partner", num_iters=20, last="columns")
    assert exact.pooled < 1e-10 < 1e-6 < released.pooled
    assert exact.logits < 1e-10 < 1e-6 < released.logits


def test_more_of_the_anchor_means_less_change() -> None:
    net = TinyNet("flatten").double()
    changes = [effect_of(net, lam=lam).features for lam in (0.2, 0.5, 0.8, 1.0)]
    assert changes == sorted(changes, reverse=True)
    assert changes[-1] == 0


def test_entropy_runs_from_a_matching_to_none() -> None:
    net = TinyNet("flatten").double()
    soft, hard = effect_of(net, eps=1e6), effect_of(net, eps=1e-4, num_iters=500)
    assert soft.plan_entropy == pytest.approx(1.0, abs=1e-3)
    assert hard.plan_entropy < 0.3 < effect_of(net, eps=1.0).plan_entropy < soft.plan_entropy
    assert soft.marginal_error < 1e-6


@pytest.mark.parametrize("keep", KEEPS)
def test_without_iterations_the_reported_plan_is_the_one_that_mixed(keep: str) -> None:
    """Cross-attention normalises the kept side; the other side would have other figures."""
    net = nn.Sequential(OrderedDict(layer4=nn.Identity(), flat=nn.Flatten(), fc=nn.Linear(48, 2)))
    x = torch.rand(3, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([0.1, 1.0, 3.0])[:, None, None, None]
    effect = alignment_effect(net.double(), "layer4", x, keep=keep, num_iters=0)
    points = x.flatten(2).mT
    similar = -torch.cdist(points, points.roll(1, 0)).square() / 0.1
    plan = (similar.softmax(-1) if keep == "anchor" else similar.softmax(-2)) / 16
    off = sum((plan.sum(side) - 1 / 16).abs().sum(-1).mean() for side in (-1, -2))
    entropy = -(plan * plan.log()).sum((-2, -1)).mean()
    assert effect.marginal_error == pytest.approx(float(off), rel=1e-6)
    assert effect.plan_entropy == pytest.approx(float(entropy) / math.log(16) - 1, rel=1e-6)


@pytest.mark.parametrize("layer", ["layer4", "layer2.0"])
def test_the_model_is_left_as_it_was(layer: str) -> None:
    net = TinyNet().double().train()
    net.layer2[1].eval()  # a frozen batch norm in a training network
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    effect_of(net, layer)
    assert [module.training for module in net.modules()] == modes
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not any(module._forward_hooks for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_the_model_is_left_as_it_was_after_an_error() -> None:
    net = TinyNet().double().train()
    with pytest.raises(ValueError, match="there is no layer 'layer3'"):
        effect_of(net, "layer3")
    with pytest.raises(ValueError, match=r"\[8, 5\]"):
        effect_of(net, "fc")
    assert all(module.training for module in net.modules())
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.unchecked_shapes
def test_through_torch_compile_it_is_the_plain_module() -> None:
    torch.compiler.reset()
    net = TinyNet().double()
    expected = effect_of(net)
    assert effect_of(torch.compile(net, backend="eager")) == expected
    compiled = torch.compile(TinyNet().double().eval(), backend="eager")
    with torch.no_grad():
        compiled(images(8, dtype=torch.float64))  # too late for a tap of the compiled code
    assert effect_of(compiled) == expected


@pytest.mark.unchecked_shapes
def test_a_module_that_compiled_itself_and_ran_is_measured_too() -> None:
    torch.compiler.reset()
    net, twin = (TinyNet().double().eval() for _ in range(2))
    net.compile(backend="eager")
    with torch.no_grad():
        net(images(8, dtype=torch.float64))  # just as the measurement will call it
    assert effect_of(net) == effect_of(twin)


@pytest.mark.unchecked_shapes
def test_a_layer_that_gives_a_tuple_is_named() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    net = TinyNet().double()
    net.layer4.append(Pair())
    with pytest.raises(ValueError, match="tuple"):
        effect_of(net)


@pytest.mark.parametrize("batch_size", [0, 1])
def test_a_batch_of_one_is_refused(batch_size: int) -> None:
    with pytest.raises(ValueError, match=f"two samples or more, got a batch of {batch_size}"):
        alignment_effect(TinyNet(), "layer4", images(batch_size))


def test_float32_works_too() -> None:
    effect = alignment_effect(TinyNet("pool"), "layer4", images(4))
    assert effect.logits < 1e-4
    assert effect.features > 0.05
