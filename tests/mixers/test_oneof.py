"""OneOf and label smoothing: their laws, and timm's Mixup with its chance replaced by ours."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, Mixer, soft_targets
from alignmixup.experiments.plugins import plugins_of
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE
from alignmixup.mixers.boxes import BoxDraw
from alignmixup.mixers.comixup import CoMixup
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.decoupled import Decoupled
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.label_smoothing import LabelSmoothing
from alignmixup.mixers.manifold_mixup import ManifoldMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.mixers.oneof import OneOf
from alignmixup.mixers.recursivemix import RecursiveMix
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.schema import Recipe
from alignmixup.registry import imported_plugins, register_mixer
from cases import NUM_CLASSES, PixelRecorder, TinyNet, draw_case, images, labels
from torchvision_schemas import define_torchvision_schemas

# ---- timm ----------------------------------------------------------------------------------------


@pytest.fixture
def timm_mixup(monkeypatch: pytest.MonkeyPatch):
    """timm's Mixup of this draw: the numbers it asks numpy for are ours."""
    define_torchvision_schemas()
    data = pytest.importorskip("timm.data")

    def mixup(draw: Draw, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_cut = draw.case.startswith("CutMix")
        coins = iter([0.0, 0.0 if is_cut else 0.9])  # mix at all; CutMix below switch_prob = 0.5
        fractions = iter(draw.center.tolist() if isinstance(draw, BoxDraw) else ())
        monkeypatch.setattr(np.random, "rand", lambda: next(coins))
        monkeypatch.setattr(np.random, "beta", lambda a, b: float(draw.lam))
        monkeypatch.setattr(
            np.random, "randint", lambda low, high, size=None: int(next(fractions) * high)
        )
        mixer = data.Mixup(
            mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=NUM_CLASSES
        )
        # Its labels are made on the device of the second argument.
        return mixer(x.clone(), y)

    return mixup


@pytest.mark.parametrize("case", ["InputMixup/input", "CutMix/cut"])
def test_it_is_timms_mixup(case: str, timm_mixup) -> None:
    rng = torch.Generator().manual_seed(0)
    mixer, x, y = OneOf.deit(), torch.rand(6, 3, 32, 32, generator=rng), labels(6)
    for k in range(1, 16):
        draw = draw_case(mixer, case, 6, seed=k)
        # Sides of an even number of pixels: for an odd one timm's box is a pixel larger than that
        # of CutMix's authors.
        draw = dataclasses.replace(draw, lam=torch.tensor(1 - (k / 16) ** 2))
        net = PixelRecorder()
        mixed = mixer.apply(net, x, y, draw)
        their_images, their_targets = timm_mixup(draw, x, y)
        if case == "CutMix/cut":
            assert torch.equal(net.seen, their_images)
        else:  # lerp and two products round differently
            torch.testing.assert_close(net.seen, their_images, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(mixed.targets, their_targets, atol=1e-7, rtol=1e-6)


# ---- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [InputMixup(), CutMix(), AlignMixup(num_iters=10)], ids=repr)
def test_one_mixer_is_that_mixer(inner: Mixer) -> None:
    """Bit for bit, chance included."""
    ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    for _ in range(6):
        x, y = images(6), labels(6)
        one = OneOf((inner,))(TinyNet(), x, y, ours)
        other = inner(TinyNet(), x, y, theirs)
        assert torch.equal(one.logits, other.logits)
        assert torch.equal(one.targets, other.targets)
        assert torch.equal(one.loss(), other.loss())
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_cases_are_products_of_probabilities() -> None:
    mixer = OneOf((InputMixup(), CutMix(prob=0.5)), weights=(1.0, 3.0), prob=0.8)
    expected = {"InputMixup/input": 0.2, "CutMix/cut": 0.3, "CutMix/clean": 0.3, "clean": 0.2}
    assert mixer.cases == pytest.approx(expected)
    short = dataclasses.replace(mixer, until=0.5)
    assert sum(short.cases.values()) == pytest.approx(1)
    assert short.cases["clean"] == pytest.approx(1 - 0.5 * 0.8)
    assert OneOf(weights=(0.0, 1.0)).cases == {"CutMix/cut": 1.0}


def test_two_of_a_class_have_names_of_their_own() -> None:
    mixer = OneOf((InputMixup(0.2), CutMix(prob=1.0), InputMixup(2.0)))
    assert list(mixer.cases) == ["InputMixup/input", "CutMix/cut", "InputMixup2/input"]
    nested = OneOf((mixer, NoMix()))
    assert "OneOf/InputMixup2/input" in nested.cases
    draw = draw_case(nested, "OneOf/CutMix/cut", 6)
    assert nested.apply(TinyNet(), images(6), labels(6), draw).loss().isfinite()


def test_after_until_nothing_is_mixed_and_labels_stay_smooth() -> None:
    mixer, rng = OneOf(smoothing=0.1, until=0.75), torch.Generator().manual_seed(0)
    assert {mixer.draw(4, rng, 0.7499).case for _ in range(30)} == {
        "InputMixup/input",
        "CutMix/cut",
    }
    assert {mixer.draw(4, rng, p).case for p in (0.75, 0.9, 0.999)} == {"clean"}
    assert OneOf().draw(4, rng, 1.0).case != "clean"  # 1 is never, also at the very end
    net = PixelRecorder()
    mixed = mixer.apply(net, images(4), labels(4), mixer.draw(4, rng, 0.8))
    assert torch.equal(net.seen, images(4))
    expected = 0.9 * torch.eye(NUM_CLASSES)[labels(4)] + 0.1 / NUM_CLASSES
    torch.testing.assert_close(mixed.targets, expected)


def test_progress_reaches_the_inner_mixers() -> None:
    inner = OneOf((InputMixup(),), until=0.5)
    for outer in (OneOf((inner,)), LabelSmoothing(inner), Decoupled(inner)):
        draws = [outer.draw(4, torch.Generator().manual_seed(0), p).case for p in (0.4, 0.6)]
        assert [case.endswith("clean") for case in draws] == [False, True]


def test_the_layers_of_all_methods_are_named() -> None:
    inner = OneOf((ManifoldMixup(("input", "layer1")), LabelSmoothing(AlignMixup("layer4"))))
    mixer = OneOf((inner, InputMixup(), AlignMixupAE("layer2", embed="head", layers=("x", "e"))))
    assert mixer.tapped(TinyNet()) == ["layer1", "layer4", "head"]


def test_pairs_are_reversed() -> None:
    mixer, rng = OneOf(pairing="reverse"), torch.Generator().manual_seed(0)
    for _ in range(5):
        assert mixer.draw(5, rng).perm.tolist() == [4, 3, 2, 1, 0]
    perms = {tuple(OneOf().draw(5, rng).perm.tolist()) for _ in range(5)}
    assert len(perms) > 1


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_rows_sum_to_one_for_every_smoothing(smoothing: float) -> None:
    for mixer in (OneOf(smoothing=smoothing), LabelSmoothing(CutMix(prob=1.0), smoothing)):
        mixed = mixer(TinyNet(), images(6), labels(6), torch.Generator().manual_seed(0))
        torch.testing.assert_close(mixed.targets.sum(1), torch.ones(6))
        assert (mixed.targets >= smoothing / NUM_CLASSES - 1e-7).all()


def test_smoothing_spreads_over_all_classes_also_the_right_one() -> None:
    """off = s / K and on = 1 - s + s / K; not s / (K - 1), as in the code of RecursiveMix."""
    mixed = LabelSmoothing(NoMix(), 0.1)(TinyNet(), images(3), labels(3))
    assert mixed.targets[0].tolist() == pytest.approx([0.92, 0.02, 0.02, 0.02, 0.02])


@pytest.mark.parametrize("loss", ["bce", "sigmoid_bce"])
def test_clean_batches_have_the_loss_of_a_method_inside_wrappers(loss: str) -> None:
    plain = InputMixup(loss=loss)
    for wrapped in (LabelSmoothing(plain, 0.0), OneOf((LabelSmoothing(plain, 0.0), CutMix()))):
        mixers = (OneOf((mixer,), prob=0.0) for mixer in (plain, wrapped))
        losses = [mixer(TinyNet(), images(6), labels(6)).loss() for mixer in mixers]
        assert torch.equal(*losses)


def test_smoothing_before_mixing_is_the_same() -> None:
    draw, x = draw_case(InputMixup(), "input", 6), images(6)
    smooth = 0.9 * torch.eye(NUM_CLASSES)[labels(6)] + 0.1 / NUM_CLASSES
    before = InputMixup().apply(TinyNet(), x, smooth, draw)
    after = LabelSmoothing(InputMixup(), 0.1).apply(TinyNet(), x, labels(6), draw)
    torch.testing.assert_close(before.targets, after.targets)
    torch.testing.assert_close(before.loss(), after.loss())


def test_a_clean_case_has_the_loss_of_the_methods() -> None:
    mixer = OneOf((InputMixup(loss="bce"),), until=0.0)
    rng = torch.Generator().manual_seed(0)
    ours = mixer(TinyNet(), images(6), labels(6), rng).loss()
    assert torch.equal(ours, NoMix(loss="bce")(TinyNet(), images(6), labels(6), rng).loss())


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("wrap", [lambda m: m, LabelSmoothing], ids=["bare", "wrapped"])
def test_a_compiled_network_is_tapped_after_a_case_without_taps(wrap) -> None:
    """torch.compile ignores hooks that come after its first call."""
    torch.compiler.reset()
    mixer = OneOf((InputMixup(), wrap(AlignMixup("layer4", num_iters=3, weights={"feat": 1.0}))))
    plain, twin = TinyNet(), TinyNet()
    compiled = torch.compile(twin, backend="eager")
    for case in mixer.cases:
        draw = draw_case(mixer, case, 6)
        losses = [mixer.apply(net, images(6), labels(6), draw).loss() for net in (plain, compiled)]
        torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-5)


# ---- state ---------------------------------------------------------------------------------------


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))


@dataclasses.dataclass(frozen=True)
class Scaled(Mixer):
    """A mixer with a learned factor."""

    cases = {"scaled": 1.0}  # noqa: RUF012

    @property
    def module(self):
        return vars(self).get("_module")

    @property
    def optimizer_group(self):
        return {"lr": 0.5}

    def attach(self, net, x):
        attached = copy.copy(self)
        object.__setattr__(attached, "_module", Gain())
        return attached

    def draw(self, batch_size, rng, progress=0.0):
        return Draw("scaled", torch.arange(batch_size), torch.ones(()))

    def apply(self, net, x, y, draw):
        logits = net(x) * self.module.gain
        return Mixed(logits, soft_targets(y, logits.shape[1]))


@pytest.mark.parametrize(
    "outer",
    [LabelSmoothing(Scaled()), Decoupled(Scaled()), OneOf((Scaled(),)), OneOf((NoMix(), Scaled()))],
    ids=["smoothing", "decoupled", "oneof", "oneof-two"],
)
def test_wrappers_attach_what_they_hold(outer: Mixer) -> None:
    assert outer.module is None
    attached = outer.attach(TinyNet(), images(2))
    assert outer.module is None
    (gain,) = attached.module.parameters()
    assert attached.optimizer_group == {"lr": 0.5}
    # While another method mixes, the gain has no gradient.
    assert attached.trains_all == (len(attached.cases) == 1)
    case = next(case for case in attached.cases if case.endswith("scaled"))
    draw = draw_case(attached, case, 4)
    attached.apply(TinyNet(), images(4), labels(4), draw).loss().backward()
    assert gain.grad is not None


def test_two_mixers_with_state_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"one mixer with parameters or state, got Scaled and Scal"
    ):
        OneOf((Scaled(), Scaled())).attach(TinyNet(), images(2))


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: OneOf(()), r"weights must be one number >= 0 for each of 0 mixers"),
        (lambda: OneOf(weights=(1,)), r"2 mixers, finite and not all zero, got \(1,\)"),
        (lambda: OneOf(weights=(math.nan, 1)), r"2 mixers, finite .*, got \(nan, 1\)"),
        (lambda: OneOf(weights=(1, math.nan)), r"2 mixers, finite .*, got \(1, nan\)"),
        (lambda: OneOf(weights=(math.inf, 1)), r"2 mixers, finite .*, got \(inf, 1\)"),
        (lambda: OneOf(weights=(1, -1)), "weights must be one number >= 0"),
        (lambda: OneOf(weights=(0, 0)), "not all zero"),
        (lambda: OneOf(prob=1.5), r"prob must lie in \[0, 1\], got 1.5"),
        (lambda: OneOf(until=-0.1), r"until must lie in \[0, 1\], got -0.1"),
        (lambda: OneOf(pairing="nearest"), "pairing must be 'random' or 'reverse', got 'nearest'"),
        (lambda: OneOf((CutMix(), CoMixup()), pairing="reverse"), "no effect on CoMixup, which"),
        (
            lambda: OneOf((LabelSmoothing(RecursiveMix()),), pairing="reverse"),
            "no effect on RecursiveMix, which",
        ),
        (lambda: OneOf((CutMix,)), "a mixer is needed, such as CutMix"),
        (lambda: LabelSmoothing("cutmix"), "a mixer is needed, such as CutMix.., got 'cutmix'"),
        (lambda: LabelSmoothing(NoMix(), 1.0), r"smoothing must lie in \[0, 1\), got 1.0"),
        (lambda: LabelSmoothing(Decoupled(NoMix())), "put Decoupled outside"),
        (lambda: OneOf((Decoupled(NoMix()),), smoothing=0.1), "put Decoupled outside"),
        (lambda: LabelSmoothing(OneOf((NoMix(), Decoupled(NoMix())))), "put Decoupled outside"),
    ],
)
def test_bad_settings_are_named(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("case", ["input", "InputMixup", "Other/input", "CutMix/layer9"])
def test_a_case_without_its_method_is_named(case: str) -> None:
    draw = dataclasses.replace(draw_case(OneOf(), "CutMix/cut", 6), case=case)
    with pytest.raises(ValueError, match=r"case is .*, but this mixer has .* its own draw"):
        OneOf().apply(TinyNet(), images(6), labels(6), draw)


# ---- records -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mixer",
    [
        OneOf.deit(),
        Decoupled(LabelSmoothing(AlignMixup(weights={"feat": 2.0}), 0.2)),
        OneOf((OneOf((InputMixup(), CutMix(0.3))), NoMix()), weights=(0.2, 0.8), until=0.5),
    ],
    ids=["deit", "decoupled", "nested"],
)
def test_a_recipe_with_wrappers_is_read_back(mixer: Mixer) -> None:
    recipe = dataclasses.replace(find_recipe("cifar10-r18-baseline"), mixer=mixer)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    json.dumps(recipe.chosen())  # what a result records


def test_an_inner_mixer_that_is_unknown_is_named() -> None:
    recipe = dataclasses.replace(find_recipe("cifar10-r18-baseline"), mixer=OneOf())
    record = json.loads(json.dumps(recipe.to_json()))
    record["mixer"]["mixers"][1]["kind"] = "CutMixx"
    with pytest.raises(ValueError, match="unknown mixer 'CutMixx'; did you mean 'CutMix'"):
        Recipe.from_json(record)


def test_a_plugin_of_an_inner_mixer_is_recorded() -> None:
    recipe = dataclasses.replace(find_recipe("cifar10-r18-baseline"), mixer=OneOf((Scaled(),)))
    assert Scaled.__module__ in plugins_of(recipe)
    assert plugins_of(dataclasses.replace(recipe, mixer=OneOf())) == imported_plugins()


def test_a_setting_that_would_hide_the_class_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Stripes has a setting 'kind', .* choose another name"):

        @register_mixer
        @dataclasses.dataclass(frozen=True)
        class Stripes(InputMixup):
            kind: str = "narrow"


def test_it_needs_the_network_if_one_of_its_methods_does() -> None:
    assert OneOf((InputMixup(), AlignMixup())).needs_network
    assert OneOf((AlignMixup(), InputMixup())).needs_network
    assert not OneOf((InputMixup(), CutMix())).needs_network
