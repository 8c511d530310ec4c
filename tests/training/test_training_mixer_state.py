"""Mixers with parameters and state: trained, saved, resumed to the same bits, averaged, scored."""

import copy
import dataclasses
import json

import pytest
import torch
from torch import nn

import alignmixup as am
from alignmixup.contracts import Draw, Mixed, Mixer, soft_targets
from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.training import TrainSettings, fit
from alignmixup.training.checkpoint import (
    CHECKPOINT,
    Checkpoint,
    CheckpointWriter,
    load_checkpoint,
    previous,
)
from alignmixup.training.ledger import LEDGER, read_ledger
from alignmixup.training.loggers import scalars
from alignmixup.training.optim import make_optimizer, set_learning_rate
from alignmixup.training.steps import PlainStep
from forked import finish, start_team

SETTINGS = TrainSettings(
    epochs=2, batch_size=16, lr=0.05, schedule="cosine", milestones=(), device="cpu", seed=5
)


class State(nn.Module):
    def __init__(self, net, x):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(()))  # from torch's generator, which the run seeds
        self.teacher = copy.deepcopy(net).requires_grad_(False)
        self.register_buffer("last", torch.zeros_like(x))


@dataclasses.dataclass(frozen=True)
class Echo(Mixer):
    """Adds the batch before, times a learned gain; a teacher follows the network."""

    cases = {"echo": 1.0}  # noqa: RUF012
    rate: float = 0.5
    clip: float = 1.0
    progress_seen = []  # noqa: RUF012

    @property
    def module(self):
        return vars(self).get("_module")

    @property
    def optimizer_group(self):
        return {"lr": self.rate, "min_lr": 0.1, "momentum": 0.0}

    def attach(self, net, x):
        attached = copy.copy(self)
        object.__setattr__(attached, "_module", State(net, x))
        return attached

    def draw(self, batch_size, rng, progress=0.0):
        self.progress_seen.append(progress)
        return Draw("echo", torch.randperm(batch_size, generator=rng), torch.tensor(1.0))

    def apply(self, net, x, y, draw):
        state = self.module
        mixed = x + self.clip * state.gain * state.last[draw.perm]
        if torch.is_grad_enabled():
            with torch.no_grad():
                pairs = zip(state.teacher.parameters(), net.parameters(), strict=True)
                for slow, fast in pairs:
                    slow.lerp_(fast, 0.5)
            mixed = mixed.clone()
            state.last.copy_(x)
        logits = net(mixed)
        return Mixed(logits, soft_targets(y, logits.shape[1]))


def make():
    torch.manual_seed(0)
    body = nn.Conv2d(3, 4, 3, 8, 1), nn.BatchNorm2d(4), nn.Dropout(0.1)
    net = nn.Sequential(*body, nn.Flatten(), nn.Linear(64, 10))
    return net, DeviceLoader(shapes("train", 64), 16, 0, "cpu")


def weight_sum(net):
    return {"top1": float(net[-1].weight.detach().abs().sum())}


def run(out, mixer=None, epochs=None, settings=SETTINGS):
    net, loader = make()
    fit(net, mixer or Echo(), loader, weight_sum, settings, out, quiet=True, epochs=epochs)
    return load_checkpoint(out / CHECKPOINT)


METHODS = [
    (Echo(), "last"),
    (am.RecursiveMix("0"), "images"),
    (am.AutoMix("0"), "teacher.0.weight"),
    (am.SAMix("0"), "block.value.1.running_mean"),
    (am.AdAutoMix("0"), "turn"),
]


@pytest.mark.parametrize(("mixer", "name"), METHODS, ids=lambda each: type(each).__name__)
def test_a_resumed_run_has_the_same_state_bit_for_bit(mixer, name, tmp_path):
    whole = run(tmp_path / "whole", mixer)
    run(tmp_path / "halves", mixer, epochs=range(1))
    halves = run(tmp_path / "halves", mixer)
    assert name in whole.part("mixer")
    assert whole.part("mixer_optimizer") or isinstance(mixer, Echo)  # which has no momentum
    for name, value in whole.tensors.items():
        assert torch.equal(value, halves.tensors[name]), name


def test_the_teacher_is_scored_beside_the_network(tmp_path, capsys):
    net, loader = make()
    fit(net, Echo(), loader, weight_sum, SETTINGS, tmp_path)
    checkpoint = load_checkpoint(tmp_path / CHECKPOINT)
    last = read_ledger(tmp_path / LEDGER)[-1]
    for weights, name in (
        (checkpoint.part("mixer")["teacher.4.weight"], "test_teacher"),
        (checkpoint.part("model")["4.weight"], "test"),
    ):
        assert last[name] == {"top1": pytest.approx(float(weights.abs().sum()), rel=1e-6)}
    top1 = last["test_teacher"]["top1"]
    assert f"(teacher {top1:.2f} %)" in capsys.readouterr().err
    assert scalars(last)["test_teacher/top1"] == top1


@dataclasses.dataclass(frozen=True)
class Held(Echo):
    """A mixer that holds another one has its module inside of its own."""

    def attach(self, net, x):
        attached = copy.copy(self)
        inner = nn.ModuleList([nn.Identity(), State(net, x)])
        object.__setattr__(attached, "_module", inner)
        return attached

    def apply(self, net, x, y, draw):
        logits = net(x + self.module[1].gain)
        return Mixed(logits, soft_targets(y, logits.shape[1]))


def test_a_teacher_further_inside_is_scored_too(tmp_path):
    run(tmp_path, Held())
    assert "test_teacher" in read_ledger(tmp_path / LEDGER)[-1]


def test_a_draw_is_given_the_share_of_training_done(tmp_path):
    Echo.progress_seen.clear()
    run(tmp_path)
    assert Echo.progress_seen == [i / 8 for i in range(8)]


def test_the_parameters_have_a_group_of_their_own(tmp_path):
    net, loader = make()
    mixer = Echo().attach(net, loader.gather(loader.rows(0)[:16])[0])
    optimizer = make_optimizer(net, SETTINGS, mixer)
    *_, own = optimizer.param_groups
    assert own["params"] == [mixer.module.gain]  # the teacher is not trained
    assert (own["momentum"], own["weight_decay"]) == (0.0, SETTINGS.weight_decay)
    for share, ours, nets in ((1.0, 0.5, 0.05), (0.25, 0.2, 0.0125), (0.0, 0.1, 0.0)):
        set_learning_rate(optimizer, share)
        assert own["lr"] == pytest.approx(ours)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(nets)
    assert own["min_lr"] == 0.1
    floored = make_optimizer(net, dataclasses.replace(SETTINGS, min_lr=0.01), InputMixup())
    set_learning_rate(floored, 0.5)
    assert [group["lr"] for group in floored.param_groups] == [pytest.approx(0.03)]
    with pytest.raises(ValueError, match=r"min_lr must not exceed lr \(0.05\), got 0.2"):
        dataclasses.replace(SETTINGS, min_lr=0.2)
    adamw = dataclasses.replace(SETTINGS, optimizer="adamw")
    *_, own = make_optimizer(net, adamw, mixer).param_groups
    assert own["betas"] == (0.0, 0.999)


def test_the_group_is_clipped_by_itself():
    """A gain with a huge gradient does not shrink that of the network."""

    def gradients(clip):
        net, loader = make()
        net[2].p = 0.0
        settings = dataclasses.replace(SETTINGS, clip_norm=0.01)
        mixer = Echo(clip=clip).attach(net, loader.gather(loader.rows(0)[:16])[0])
        mixer.module.gain.data.zero_()
        mixer.module.last.uniform_(generator=torch.Generator().manual_seed(0))
        optimizer = make_optimizer(net, settings, mixer)
        step = PlainStep(net, mixer, optimizer, settings, loader.gather)
        step((loader.rows(0)[:16],), mixer.draw(16, torch.Generator().manual_seed(0)))
        return net[4].weight.grad, mixer.module.gain.grad

    (small, _), (large, gain) = gradients(1.0), gradients(1e6)
    torch.testing.assert_close(large, small)
    assert gain.abs() == pytest.approx(0.01, rel=1e-3)


def test_a_mixer_without_state_leaves_no_trace(tmp_path):
    checkpoint = run(tmp_path, InputMixup())
    assert not checkpoint.part("mixer")
    assert "test_teacher" not in read_ledger(tmp_path / LEDGER)[-1]


def test_a_checkpoint_of_another_mixer_is_named(tmp_path):
    checkpoint = run(tmp_path)
    kept = {k: v for k, v in checkpoint.tensors.items() if not k.startswith("mixer")}
    writer = CheckpointWriter(tmp_path / CHECKPOINT)
    writer.save(Checkpoint(kept, {**checkpoint.facts, "epoch": 1, "step": 2}))
    writer.close()
    with pytest.raises(ValueError, match=r"has no state of the mixer.*choose another folder"):
        run(tmp_path)


def test_a_phase_may_begin_with_a_mixer_of_its_own(tmp_path):
    """Cases differ between phases; the state begins with the phase that has one."""
    first = run(tmp_path, NoMix(), epochs=range(1)).part("model")
    still = am.AutoMix("0", ema=(1.0, 1.0))
    second = run(tmp_path, still, epochs=range(1, 2))
    teacher = second.part("mixer.teacher")
    for name in ("0.weight", "4.weight"):
        assert torch.equal(teacher[name], first[name])  # of that time, not of the start
        assert not torch.equal(second.part("model")[name], first[name])


def test_a_teacher_begins_with_the_previous_checkpoint_where_the_last_is_missing(tmp_path):
    first = run(tmp_path, NoMix(), epochs=range(1)).part("model")
    (tmp_path / CHECKPOINT).rename(previous(tmp_path / CHECKPOINT))
    with pytest.warns(UserWarning, match="the one before it is used"):
        second = run(tmp_path, am.AutoMix("0", ema=(1.0, 1.0)), epochs=range(1, 2))
    assert torch.equal(second.part("mixer.teacher")["4.weight"], first["4.weight"])


class TwoArguments(InputMixup):
    """As mixers were written before ``progress``."""

    def draw(self, batch_size, rng):
        return super().draw(batch_size, rng)


def test_a_draw_without_progress_still_works(tmp_path):
    rng, twin = (torch.Generator().manual_seed(0) for _ in range(2))
    ours, theirs = TwoArguments().draw(4, rng, progress=0.5), InputMixup().draw(4, twin, 0.5)
    assert torch.equal(ours.perm, theirs.perm)
    new, old = run(tmp_path / "new", InputMixup()), run(tmp_path / "old", TwoArguments())
    for name, value in new.part("model").items():
        assert torch.equal(value, old.part("model")[name])


TOGETHER = """
import json, sys
from pathlib import Path
import torch
from alignmixup.training import fit, join_team
from training.test_training_mixer_state import SETTINGS, Echo, make, weight_sum

torch.set_num_threads(1)
team, device = join_team(torch.device("cpu"))
net, loader = make()
net[2].p = 0.0
kept = []
class Kept(Echo):
    def attach(self, net, x):
        torch.manual_seed(team.rank)  # other first parameters: those of rank 0 count
        kept.append(super().attach(net, x))
        return kept[0]
fit(net, Kept(), loader, weight_sum, SETTINGS, Path(sys.argv[1]), quiet=True, team=team)
module = kept[0].module
print(json.dumps([float(module.gain), float(module.teacher[4].weight.double().norm())]), flush=True)
"""


@pytest.mark.slow
def test_processes_keep_the_same_parameters(tmp_path):
    one, two = (json.loads(line) for line in finish(start_team(TOGETHER, tmp_path)))
    assert one == two
    first = torch.rand((), generator=torch.Generator().manual_seed(0))
    assert one[0] != float(first)  # it has been trained
