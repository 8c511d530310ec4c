"""AdamW beside SGD: by hand, without decay of vectors, and resumed to the same weights."""

import dataclasses

import pytest
import torch
from torch import nn

import alignmixup as am
from alignmixup.cli.program import _place_in_user_code
from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.training import TrainSettings, fit
from alignmixup.training.checkpoint import CHECKPOINT, load_checkpoint
from alignmixup.training.optim import make_optimizer, set_learning_rate
from alignmixup.training.steps import PlainStep

ADAMW = TrainSettings(
    epochs=2,
    batch_size=16,
    lr=0.01,
    optimizer="adamw",
    weight_decay=0.1,
    decay_vectors=False,
    schedule="cosine",
    milestones=(),
    device="cpu",
)


def make():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, 8, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 10)
    )
    return net, DeviceLoader(shapes("train", 64), 16, 0)


@pytest.mark.parametrize(
    ("name", "make_it"),
    [
        ("nothing", lambda groups, settings: None),
        ("ungrouped", lambda groups, settings: torch.optim.SGD(groups[0]["params"])),
    ],
)
def test_what_is_no_optimizer_of_the_groups_is_named(name, make_it):
    am.register_optimizer(name)(make_it)
    named = rf"the optimizer '{name}' must return a torch.optim.Optimizer of the groups"
    with pytest.raises(ValueError, match=named):
        make_optimizer(make()[0], dataclasses.replace(ADAMW, optimizer=name))


@pytest.mark.parametrize(
    ("name", "make_it", "why"),
    [
        ("narrow", lambda groups: torch.optim.SGD(groups), "takes 1 positional argument but 2"),
        ("class", torch.optim.SGD, "instances of 'TrainSettings' and 'float'"),
        ("text", "sgd", "'str' object is not callable"),
    ],
)
def test_an_optimizer_that_takes_other_arguments_is_named(name, make_it, why):
    am.register_optimizer(name)(make_it)
    named = rf"the optimizer '{name}' fails \(.*{why}.*\): it must be .* \(groups, settings\)"
    with pytest.raises(ValueError, match=named):
        make_optimizer(make()[0], dataclasses.replace(ADAMW, optimizer=name))


def test_an_error_within_an_optimizer_keeps_its_place():
    def misspelled(groups, settings):
        return torch.optim.SGD(groups, moment=0.9)

    am.register_optimizer("misspelled")(misspelled)
    with pytest.raises(ValueError, match="'moment'") as caught:
        make_optimizer(make()[0], dataclasses.replace(ADAMW, optimizer="misspelled"))
    assert __file__ in _place_in_user_code(caught.value)


def test_a_first_step_is_adamw_by_hand():
    """The first step of Adam is the sign of the gradient; decay shrinks matrices alone."""
    net, loader = make()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    step = PlainStep(net, NoMix(), make_optimizer(net, ADAMW), ADAMW, loader.gather)
    step((loader.rows(0)[:16],), NoMix().draw(16, torch.Generator()))
    for name, parameter in net.named_parameters():
        kept = 1 - 0.01 * 0.1 if parameter.ndim > 1 else 1.0
        signs = parameter.grad / (parameter.grad.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), kept * before[name] - 0.01 * signs)


@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_of_sgd_by_hand(nesterov):
    settings = TrainSettings(lr=0.1, momentum=0.8, nesterov=nesterov, weight_decay=0.01)
    net = nn.Linear(3, 2)
    optimizer = make_optimizer(net, settings)
    weight, speed = net.weight.detach().clone(), torch.zeros(2, 3)
    for step in range(3):
        net.weight.grad = torch.full((2, 3), step + 1.0)
        optimizer.step()
        gradient = step + 1 + 0.01 * weight
        speed = 0.8 * speed + gradient
        weight = weight - 0.1 * (gradient + 0.8 * speed if nesterov else speed)
        torch.testing.assert_close(net.weight.detach(), weight)


class WithModule(NoMix):
    """A method with a parameter, which is trained in its own way."""

    module = nn.Linear(2, 2)
    optimizer_group = {"lr": 0.3, "min_lr": 0.2, "momentum": 0.5, "weight_decay": 0.4}  # noqa: RUF012


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_parameters_of_a_mixer_are_a_group_with_settings_of_their_own(name):
    settings = TrainSettings(optimizer=name, lr=0.1, min_lr=0.01, momentum=0.8, weight_decay=0.02)
    net, _ = make()
    ours, theirs = make_optimizer(net, settings, WithModule()).param_groups
    assert theirs["params"] == list(WithModule.module.parameters())
    for group, values in ((ours, (0.1, 0.01, 0.8, 0.02)), (theirs, (0.3, 0.2, 0.5, 0.4))):
        momentum = group["betas"][0] if name == "adamw" else group["momentum"]
        assert (group["lr"], group["min_lr"], momentum, group["weight_decay"]) == values
        assert group["base_lr"] == group["lr"]
        assert group.get("betas", (0, 0.999))[1] == 0.999


def test_the_rate_goes_from_that_of_each_group_to_its_least():
    settings = TrainSettings(lr=0.1, min_lr=0.02)
    optimizer = make_optimizer(nn.Linear(2, 2), settings, WithModule())
    for share, rates in ((1.0, (0.1, 0.3)), (0.5, (0.06, 0.25)), (0.0, (0.02, 0.2))):
        set_learning_rate(optimizer, share)
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx(rates)


def test_no_group_is_empty():
    net = nn.Linear(2, 2, bias=False)
    (group,) = make_optimizer(net, ADAMW).param_groups
    assert group["weight_decay"] == 0.1


def test_every_parameter_is_in_one_group_whatever_rates_and_decay_differ():
    net, _ = make()
    settings = dataclasses.replace(ADAMW, classifier_lr=0.5, classifier="3.")
    groups = make_optimizer(net, settings).param_groups
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in groups] == [
        *((0.01, 0.1, 1), (0.01, 0.0, 3), (0.5, 0.1, 1), (0.5, 0.0, 1)),
    ]
    assert sum(len(g["params"]) for g in groups) == len(list(net.parameters()))


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path):
    for name, pieces in (("whole", [range(2)]), ("halves", [range(1), range(1, 2)])):
        for epochs in pieces:
            net, loader = make()
            mixer, out = InputMixup(), tmp_path / name
            fit(net, mixer, loader, lambda _: {"top1": 1.0}, ADAMW, out, quiet=True, epochs=epochs)
    whole, halves = (
        load_checkpoint(tmp_path / n / CHECKPOINT).tensors for n in ("whole", "halves")
    )
    assert {name.split(".")[1] for name in whole if name.startswith("optimizer.")} == {
        *("step", "exp_avg", "exp_avg_sq")
    }
    assert whole.keys() == halves.keys()
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


def test_nesterov_is_refused():
    with pytest.raises(ValueError, match=r"nesterov is for optimizer='sgd', not 'adamw'"):
        dataclasses.replace(ADAMW, nesterov=True)


def test_an_optimizer_from_outside_trains_resumes_and_is_refused_under_another_name(tmp_path):
    @am.register_optimizer("adagrad")
    def adagrad(groups, settings):
        return torch.optim.Adagrad(groups, lr_decay=settings.momentum)

    def top1(net):
        return {"top1": 1.0}

    settings = dataclasses.replace(ADAMW, optimizer="adagrad")
    for name, pieces in (("whole", [range(2)]), ("halves", [range(1), range(1, 2)])):
        for epochs in pieces:
            net, loader = make()
            out = tmp_path / name
            fit(net, NoMix(), loader, top1, settings, out, quiet=True, epochs=epochs)
    whole, halves = (
        load_checkpoint(tmp_path / n / CHECKPOINT).tensors for n in ("whole", "halves")
    )
    assert any(name.startswith("optimizer.sum.") for name in whole)
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    with pytest.raises(ValueError, match=r"unknown optimizer 'adamv'; did you mean .*'adamw'"):
        dataclasses.replace(ADAMW, optimizer="adamv")


class Counting(torch.optim.Optimizer):
    """Counts its steps as the optimizers of other libraries do: in its groups and by parameter."""

    def __init__(self, groups, where):
        super().__init__(groups, {"count": 0})
        self.where = where

    def step(self):
        for group in self.param_groups:
            group["count"] += 1
            group.setdefault("ticks", torch.zeros(())).add_(1)
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                done = {"number": group["count"], "tensor": group["ticks"], "own": state["steps"]}
                parameter.data.sub_(parameter.grad, alpha=float(group["lr"] / done[self.where]))


@pytest.mark.parametrize("where", ["number", "tensor", "own"])
def test_what_an_optimizer_counts_is_resumed(tmp_path, where):
    am.register_optimizer(f"counting_{where}")(lambda groups, settings: Counting(groups, where))
    settings = dataclasses.replace(ADAMW, optimizer=f"counting_{where}")
    for name, pieces in (("whole", [range(2)]), ("halves", [range(1), range(1, 2)])):
        for epochs in pieces:
            net, loader = make()
            out, rest = tmp_path / name, {"quiet": True, "epochs": epochs}
            fit(net, NoMix(), loader, lambda _: {"top1": 1.0}, settings, out, **rest)
    whole, halves = (load_checkpoint(tmp_path / n / CHECKPOINT) for n in ("whole", "halves"))
    differ = [n for n, value in whole.tensors.items() if not torch.equal(value, halves.tensors[n])]
    assert not differ
    assert whole.facts["numbers"] == halves.facts["numbers"]
    assert whole.numbers("optimizer")["steps.0.weight"] == whole.numbers("group")["0.count"] == 8


def test_what_a_checkpoint_cannot_hold_of_an_optimizer_is_named(tmp_path):
    @am.register_optimizer("with_lists")
    class WithLists(torch.optim.SGD):
        def __init__(self, groups, settings):
            super().__init__(groups)
            self.state[groups[0]["params"][0]]["factors"] = [torch.zeros(2)]

    settings = dataclasses.replace(ADAMW, optimizer="with_lists")
    net, loader = make()
    with pytest.raises(ValueError, match=r"WithLists has a list as 'optimizer.factors.0.weight'"):
        fit(net, NoMix(), loader, lambda _: {"top1": 1.0}, settings, tmp_path, quiet=True)
