"""alignment_effect: it must see that an exact plan before average pooling changes nothing."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from alignmixup.contracts import Draw, Mixer
from alignmixup.evaluation.effect import Effect, alignment_effect
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.decoupled import Decoupled
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.label_smoothing import LabelSmoothing
from alignmixup.mixers.oneof import OneOf
from cases import TinyNet, images, labels

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
    """Cross-attention normalizes the kept side; the other side would have other figures."""
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
    partner = points.roll(1, 0)
    carried = 16 * plan @ partner if keep == "anchor" else 16 * plan.mT @ points
    aligned = (carried + (points if keep == "anchor" else partner)) / 2
    plain = (points + partner) / 2
    logits = [net.fc(each.mT.flatten(1)).detach() for each in (aligned, plain)]
    pairs = {"features": (aligned, plain), "pooled": (aligned.mean(1), plain.mean(1))}
    for name, (one, other) in {**pairs, "logits": logits}.items():
        expected = float((one - other).norm() / other.norm())
        assert getattr(effect, name) == pytest.approx(expected, rel=1e-6)


def test_the_sentence_has_the_logits_of_each_case_and_mode_once() -> None:
    effect = alignment_effect(
        TinyNet("flatten").double(), AlignMixup(), images(8, dtype=torch.float64)
    )
    in_evaluation, in_training = str(effect).split("in training mode")
    for part, is_training in ((in_evaluation, False), (in_training, True)):
        for case in ("feat", "feat'"):
            (change,) = (
                c for c in effect.changes if (c.case, c.is_training) == (case, is_training)
            )
            assert part.count(f"({case})") == 1
            assert f"{change.logits:.2g} ({case})" in part


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


def test_images_are_taken_in_the_type_of_the_weights() -> None:
    """Images of numpy are float64."""
    effect = alignment_effect(TinyNet(), "layer4", images(4))
    assert alignment_effect(TinyNet(), "layer4", images(4).double()) == effect


def test_an_activation_in_place_changes_nothing() -> None:
    def net(*, inplace: bool) -> nn.Module:
        torch.manual_seed(0)
        parts = [nn.Conv2d(3, 8, 4, 4), nn.ReLU(inplace), nn.Flatten(), nn.Linear(8 * 16, 5)]
        return nn.Sequential(*parts)

    effect = alignment_effect(net(inplace=True), "0", images(4))
    assert effect == alignment_effect(net(inplace=False), "0", images(4))
    assert effect.pooled < 1e-5


@pytest.mark.parametrize("lam", [-0.1, 2.0])
def test_a_share_out_of_range_is_named(lam: float) -> None:
    with pytest.raises(ValueError, match=r"lam must lie in \[0, 1\]"):
        alignment_effect(TinyNet(), "layer4", images(4), lam=lam)


# ---- with a mixer's own settings -----------------------------------------------------------------


def changes_of(net: nn.Module, mixer: AlignMixup | AlignMixupAE) -> dict[tuple[str, bool], float]:
    effect = alignment_effect(net, mixer, images(8, dtype=torch.float64))
    return {(change.case, change.is_training): change.logits for change in effect.changes}


def loud_net(head: str = "pool", scale: float = 30.0) -> TinyNet:
    """Features so large that a hundred iterations at eps 0.1 are far from converged."""
    net = TinyNet(head).double()
    with torch.no_grad():
        net.layer4[1].weight.fill_(scale)
    return net


def test_the_released_feat_prime_changes_the_logits_and_exact_plans_do_not() -> None:
    """What the note of ``train`` is about: columns last in both directions, a pooled head."""
    net = loud_net()
    released = changes_of(net, AlignMixup.released())
    exact = changes_of(net, AlignMixup())
    assert released.keys() == exact.keys() == {(c, t) for c in ("feat", "feat'") for t in (0, 1)}
    for is_training in (False, True):
        assert released["feat", is_training] < 1e-10
        assert released["feat'", is_training] > 1e-3
    assert max(exact.values()) < 1e-10


def test_the_words_are_true_of_released_and_of_exact_settings() -> None:
    x = images(8, dtype=torch.float64)
    exact = alignment_effect(loud_net(), AlignMixup(), x)
    assert exact.is_exact
    assert exact.is_next_to_nothing
    assert "next to nothing: an aligned case trains as an unaligned one" in str(exact)
    released = alignment_effect(loud_net(), AlignMixup.released(), x)
    assert not released.is_exact
    assert not released.is_next_to_nothing
    assert "the plan of feat' does not keep the mean over positions" in str(released)
    assert "next to nothing" not in str(released)
    # Small features: the error is small now, but it is no law.
    quiet = alignment_effect(loud_net(scale=0.1), AlignMixup.released(), x)
    assert quiet.is_next_to_nothing
    assert "an unaligned one" not in str(quiet)
    assert "grows with the size of the features" in str(quiet)


def test_the_figures_are_those_of_the_case_that_changes_most_in_evaluation_mode() -> None:
    effect = alignment_effect(loud_net(), AlignMixup.released(), images(8, dtype=torch.float64))
    (most,) = (c for c in effect.changes if c.case == "feat'" and not c.is_training)
    assert (effect.logits, effect.pooled, effect.features) == (
        most.logits,
        most.pooled,
        most.features,
    )
    assert (effect.plan_entropy, effect.marginal_error) == (most.plan_entropy, most.marginal_error)
    assert most.marginal_error > 1e-3


@pytest.mark.parametrize(
    "settings", [{"eps": 5.0}, {"num_iters": 3}, {"resolution": 2}, {"last": "rows"}, {"tol": 0.5}]
)
def test_a_mixers_settings_are_those_that_mix(settings: dict[str, object]) -> None:
    """Against the mixer itself: the logits of its own draw, aligned and not."""
    net, x = loud_net("flatten").eval(), images(8, dtype=torch.float64)
    mixer = AlignMixup(**settings)
    perm, lam = torch.arange(8).roll(1), torch.tensor(0.5, dtype=torch.float64)
    net.requires_grad_(False)
    for change in alignment_effect(net, mixer, x).changes:
        draw = Draw(change.case, perm, lam)
        net.train(change.is_training)
        aligned, plain = (
            dataclasses.replace(mixer, aligned=is_aligned).apply(net, x, labels(8), draw).logits
            for is_aligned in (True, False)
        )
        assert change.logits == pytest.approx(
            float((aligned - plain).norm() / plain.norm()), rel=1e-6
        )


def test_by_the_name_of_a_layer_it_is_the_default_mixer_in_one_direction() -> None:
    net, x = TinyNet().double(), images(8, dtype=torch.float64)
    both = alignment_effect(net, AlignMixup("layer2"), x).changes
    for case, keep in (("feat", "anchor"), ("feat'", "partner")):
        by_name = alignment_effect(net, "layer2", x, keep=keep)
        assert by_name.changes == tuple(change for change in both if change.case == case)
        only = alignment_effect(net, AlignMixup("layer2"), x, keep=keep)
        assert only == by_name


def test_cases_that_are_never_drawn_are_not_measured() -> None:
    mixer = AlignMixup(weights={"input": 1.0, "feat'": 1.0})
    assert changes_of(TinyNet().double(), mixer).keys() == {("feat'", False), ("feat'", True)}


def test_an_autoencoders_mixer_is_measured_where_it_aligns() -> None:
    net = TinyNet().double()
    mixer = AlignMixupAE("layer4", layers=("x", "A"), clean=False, eps=3.0, last="columns")
    twin = AlignMixup("layer4", eps=3.0, last="columns")
    assert changes_of(net, mixer) == changes_of(net, twin)
    tensor = AlignMixupAE("layer1", embed="layer4", layers=("x", "E"), clean=False)
    assert alignment_effect(net, tensor, images(8, dtype=torch.float64)).layer == "layer4"


@pytest.mark.parametrize(
    "mixer",
    [
        AlignMixup(aligned=False),
        AlignMixup(weights={"input": 1.0}),
        AlignMixupAE("layer4", layers=("x", "e"), clean=False),
        InputMixup(),
    ],
)
def test_a_mixer_that_aligns_nothing_is_named(mixer: Mixer) -> None:
    with pytest.raises(ValueError, match="aligns no features"):
        alignment_effect(TinyNet(), mixer, images(8))


@pytest.mark.parametrize(
    "around",
    [LabelSmoothing, Decoupled, lambda m: OneOf((CutMix(), m)), lambda m: Decoupled(OneOf((m,)))],
)
def test_a_mixer_inside_another_is_measured(around: Callable[[Mixer], Mixer]) -> None:
    mixer = AlignMixup(eps=1.0, num_iters=7)
    expected = alignment_effect(TinyNet(), mixer, images(8))
    assert alignment_effect(TinyNet(), around(mixer), images(8)) == expected


def test_bytes_and_unknown_directions_are_named() -> None:
    with pytest.raises(ValueError, match=r"images must be floats, got torch\.uint8"):
        alignment_effect(TinyNet(), "layer4", images(8).to(torch.uint8))
    for mixer in ("layer4", AlignMixup()):
        with pytest.raises(ValueError, match="keep must be 'anchor' or 'partner', got 'both'"):
            alignment_effect(TinyNet(), mixer, images(8), keep="both")


def test_settings_beside_a_mixer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['eps'\] are settings of the mixer"):
        alignment_effect(TinyNet(), AlignMixup(), images(8), eps=0.2)


class Noisy(TinyNet):
    """Dropout, and a buffer that each forward in training mode replaces."""

    def __init__(self) -> None:
        super().__init__("pool")
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count = self.count + 1
        return super().forward(self.drop(x))


def test_training_mode_leaves_statistics_buffers_and_random_state_as_they_were() -> None:
    net, x = Noisy().double(), images(8, dtype=torch.float64)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    buffers = dict(net.named_buffers())
    state = torch.get_rng_state()
    effect = alignment_effect(net, AlignMixup(), x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(buffers[name] is value for name, value in net.named_buffers())
    # Dropout is the same with and without alignment, or the logits would differ.
    assert effect.is_next_to_nothing


def test_frozen_parts_stay_frozen_in_training_mode() -> None:
    frozen, free = TinyNet().double(), TinyNet().double()
    with torch.no_grad():
        for net in (frozen, free):
            net.layer1[1].running_var.fill_(50.0)
    frozen.layer1[1].eval()
    assert changes_of(frozen, AlignMixup()) != changes_of(free, AlignMixup())
    assert not frozen.layer1[1].training
