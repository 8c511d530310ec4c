"""The state of a training: all that a checkpoint holds, so that a resumed run repeats exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from alignmixup.contracts import Mixer
from alignmixup.device import rng_state, seed_rng, set_rng_state
from alignmixup.training.checkpoint import (
    POSITION,
    Checkpoint,
    has_checkpoint,
    load_checkpoint,
    load_state,
    naming_damage,
)
from alignmixup.training.distributed import Team
from alignmixup.training.losses import Losses
from alignmixup.training.optim import EMA, make_optimizer
from alignmixup.training.optimizer_state import (
    GroupState,
    load_optimizer,
    optimizer_numbers,
    optimizer_tensors,
)
from alignmixup.training.settings import TrainSettings
from alignmixup.training.signals import EvaluationStopped, signal_name, stopping_evaluation
from alignmixup.training.steps import Batches
from alignmixup.training.sync_norm import sync_norms
from alignmixup.training.tensor_file import check_tensors

Evaluate = Callable[[nn.Module], Mapping[str, float]]


def attached(
    mixer: Mixer, net: nn.Module, batches: Batches, settings: TrainSettings, team: Team, path: Path
) -> Mixer:
    """Return the mixer with its parameters and state, the same in all processes.

    With ``settings.sync_batchnorm`` its batch norms and those of the network share statistics.

    ``path`` is the run's checkpoint: a teacher that begins in a later phase begins with the weights
    of that time.
    """
    syncs = settings.sync_batchnorm and team.size > 1
    if type(mixer).attach is not Mixer.attach:  # otherwise no image needs to be read
        mixer = _attached(mixer, net, batches, settings.seed, team, path)
    for module in (net, mixer.module) if syncs else ():
        if module is not None:
            sync_norms(module)
    return mixer


def _attached(
    mixer: Mixer, net: nn.Module, batches: Batches, seed: int, team: Team, path: Path
) -> Mixer:
    device = next(net.parameters()).device
    if has_checkpoint(path):
        load_state(net, load_checkpoint(path).part("model"), path)
    seed_rng(device, seed)  # of its first parameters; the run seeds or restores generators later
    mixer = mixer.attach(net, batches.first())
    if mixer.module is not None:
        mixer.module.to(device)
        team.share_state(mixer.module)
    return mixer


class TrainState:
    """Network, attached mixer, optimizer, average, generators, and the position in the run.

    ``rng`` is the generator of all draws; dropout uses torch's own generators, which are part of
    the state as well. ``ledger_length`` is that of the ledger at the checkpoint.
    """

    def __init__(self, net: nn.Module, mixer: Mixer, settings: TrainSettings) -> None:
        self.net, self.mixer_module = net, mixer.module
        check_tensors({f"model.{k}": v for k, v in net.state_dict().items()})
        self.device = next(net.parameters()).device
        self.optimizer = make_optimizer(net, settings, mixer)
        self.group_state = GroupState(self.optimizer)
        self.rng = torch.Generator().manual_seed(settings.seed)
        self.ema: EMA | None = None
        self.epoch, self.step = 0, 0
        self.losses = Losses(self.device)
        self.seconds = 0.0
        self.ledger_length = 0

    def seed(self, seed: int) -> None:
        """Seed torch's own generators."""
        seed_rng(self.device, seed)

    def train_mode(self) -> None:
        """Put the network and the mixer's module in training mode."""
        self.net.train()
        if self.mixer_module is not None:
            self.mixer_module.train()

    def end_epoch(self) -> None:
        """Move to the first step of the next epoch."""
        self.epoch, self.step = self.epoch + 1, 0
        self.losses, self.seconds = Losses(self.device), 0.0

    def of_all(self, team: Team) -> dict[str, Tensor]:
        """Return what differs between processes, which call this together.

        These are the states of torch's own generators, ``rng.NAME`` for rank 0 and ``rng.NAME.r``
        for the others, and the losses, whose mean over the processes is saved.
        """
        tensors = {
            f"rng.{name}.{rank}" if rank else f"rng.{name}": theirs
            for name, own in rng_state(self.device).items()
            for rank, theirs in enumerate(team.gather(own, self.device))
        }
        if self.losses.values:
            tensors["losses"] = team.mean(torch.stack(self.losses.values))
        return tensors

    def checkpoint(self, facts: Mapping[str, object], of_all: Mapping[str, Tensor]) -> Checkpoint:
        """Return the state with ``facts`` added to its own, and with what ``of_all`` returned."""
        tensors = {f"model.{k}": v for k, v in self.net.state_dict().items()}
        if self.ema is not None:
            tensors |= {f"ema.{k}": v for k, v in self.ema.net.state_dict().items()}
        tensors |= optimizer_tensors(self.net, self.optimizer) | self.group_state.tensors()
        numbers = optimizer_numbers(self.net, self.optimizer) | self.group_state.numbers()
        if (module := self.mixer_module) is not None:
            tensors |= {f"mixer.{k}": v for k, v in module.state_dict().items()}
            tensors |= optimizer_tensors(module, self.optimizer, "mixer_optimizer")
            numbers |= optimizer_numbers(module, self.optimizer, "mixer_optimizer")
        tensors |= of_all
        tensors["rng.draws"] = self.rng.get_state()
        position = {"epoch": self.epoch, "step": self.step, "cases": list(self.losses.cases)}
        if numbers:
            facts = {**facts, "numbers": numbers}
        return Checkpoint(tensors, {**position, "seconds": self.seconds, **facts})

    def restore(self, path: Path, rank: int = 0) -> None:
        """Load the state of the checkpoint ``path``.

        A rank that the saved run did not have keeps its own generators of dropout.
        """
        checkpoint = load_checkpoint(path, POSITION)
        facts = cast(dict[str, Any], checkpoint.facts)
        load_state(self.net, checkpoint.part("model"), path)
        if self.ema is not None:
            average = checkpoint.part("ema")
            if not average:
                raise ValueError(
                    f"{path} has no averaged weights: resume the run without train.ema"
                )
            load_state(self.ema.net, average, path)
        with naming_damage(path):
            load_optimizer(self.net, self.optimizer, checkpoint)
            self.group_state.load(checkpoint)
            if (module := self.mixer_module) is not None:
                self._restore_mixer(module, checkpoint, path)
            self.rng.set_state(checkpoint.tensors["rng.draws"])
            set_rng_state(self.device, _generators_of(rank, checkpoint.part("rng")))
        self.epoch, self.step, self.seconds = facts["epoch"], facts["step"], facts["seconds"]
        self.losses.cases = facts["cases"]
        if "losses" in checkpoint.tensors:
            self.losses.values = list(checkpoint.tensors["losses"].to(self.device))
        self.ledger_length = int(facts["ledger_length"])

    def _restore_mixer(self, module: nn.Module, checkpoint: Checkpoint, path: Path) -> None:
        state = checkpoint.part("mixer")
        if not state and module.state_dict() and checkpoint.facts["step"]:
            raise ValueError(
                f"{path} has no state of the mixer, so another one was trained there: choose "
                "another folder"
            )
        if state:  # otherwise the first step of a phase whose mixer differs
            load_state(module, state, path)
            load_optimizer(module, self.optimizer, checkpoint, "mixer_optimizer")

    def scores(
        self, evaluate: Evaluate, team: Team, stop: list[int]
    ) -> dict[str, dict[str, float]]:
        """Evaluate as ``test``; with EMA that is the average, and the network is ``test_raw``.

        The teacher of a mixer is ``test_teacher``. All processes call this together.

        Raises:
            EvaluationStopped: ``stop`` has a signal; the state is that before the evaluation.
        """
        nets = {"test": self.net}
        if self.ema is not None:
            nets = {"test": self.ema.net, "test_raw": self.net}
        modules = [] if self.mixer_module is None else self.mixer_module.named_modules()
        # The first of them: a mixer that holds mixers has theirs further inside.
        teachers = (net for name, net in modules if name.rpartition(".")[2] == "teacher")
        if (teacher := next(teachers, None)) is not None:
            nets["test_teacher"] = teacher
        scores = {}
        generators = rng_state(self.device)  # an evaluation may draw from them
        try:
            for name, net in nets.items():
                with team.state_of_rank_zero(net), stopping_evaluation(stop, team.size):
                    scores[name] = dict(evaluate(net))
        except EvaluationStopped:
            set_rng_state(self.device, generators)
            raise
        if "top1" not in scores["test"]:
            names = list(scores["test"])
            raise ValueError(f"evaluate must return 'top1', in percent; it returned {names}")
        return scores

    def where_stopped(self, number: int, epochs: int, folder: Path) -> str:
        """Return which signal ended the run of ``epochs``, where, and how to resume it."""
        by = signal_name(number)
        if self.epoch == epochs:
            return f"{by} after the last epoch; the run in {folder} is complete"
        if not (self.epoch or self.step):
            return f"stopped by {by} before the first step; run again to start"
        at = f"in epoch {self.epoch + 1} of {epochs}"
        return f"stopped by {by} {at}, saved in {folder}; run again to resume"


def _generators_of(rank: int, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the states of one rank, by device type; none where the saved run had fewer ranks."""
    if not rank:
        return {"cpu": saved["cpu"], **saved}  # a checkpoint without it is damaged
    own = {name: f"{name}.{rank}" for name in ("cpu", "cuda")}
    return {name: saved[key] for name, key in own.items() if key in saved}
