"""The state of a training: all that a checkpoint holds, so that a resumed run repeats exactly."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from alignmixup.contracts import Mixer
from alignmixup.device import rng_state, seed_rng, set_rng_state
from alignmixup.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    load_optimizer,
    load_state,
    optimizer_tensors,
)
from alignmixup.training.losses import Losses
from alignmixup.training.optim import EMA, make_optimizer
from alignmixup.training.settings import TrainSettings

Evaluate = Callable[[nn.Module], Mapping[str, float]]


class TrainState:
    """Network, attached mixer, optimizer, average, generators, and the position in the run.

    ``rng`` is the generator of all draws; dropout uses torch's own generators, which are part of
    the state as well. ``ledger_length`` is that of the ledger at the checkpoint.
    """

    def __init__(self, net: nn.Module, mixer: Mixer, settings: TrainSettings) -> None:
        self.net, self.mixer_module = net, mixer.module
        self.device = next(net.parameters()).device
        self.optimizer = make_optimizer(net, settings, mixer)
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

    def checkpoint(self, facts: Mapping[str, object]) -> Checkpoint:
        """Return the state with ``facts`` added to its own."""
        tensors = {f"model.{k}": v for k, v in self.net.state_dict().items()}
        if self.ema is not None:
            tensors |= {f"ema.{k}": v for k, v in self.ema.net.state_dict().items()}
        tensors |= optimizer_tensors(self.net, self.optimizer)
        if (module := self.mixer_module) is not None:
            tensors |= {f"mixer.{k}": v for k, v in module.state_dict().items()}
            tensors |= optimizer_tensors(module, self.optimizer, "mixer_optimizer")
        tensors |= {f"rng.{k}": v for k, v in rng_state(self.device).items()}
        tensors["rng.draws"] = self.rng.get_state()
        if self.losses.values:
            tensors["losses"] = torch.stack(self.losses.values)
        position = {"epoch": self.epoch, "step": self.step, "cases": list(self.losses.cases)}
        return Checkpoint(tensors, {**position, "seconds": self.seconds, **facts})

    def restore(self, path: Path) -> None:
        """Load the state of the checkpoint ``path``."""
        checkpoint = load_checkpoint(path)
        facts = cast(dict[str, Any], checkpoint.facts)
        load_state(self.net, checkpoint.part("model"), path)
        if self.ema is not None:
            average = checkpoint.part("ema")
            if not average:
                raise ValueError(
                    f"{path} has no averaged weights: resume the run without train.ema"
                )
            load_state(self.ema.net, average, path)
        load_optimizer(self.net, self.optimizer, checkpoint)
        if (module := self.mixer_module) is not None:
            self._restore_mixer(module, checkpoint, path)
        self.rng.set_state(checkpoint.tensors["rng.draws"])
        set_rng_state(self.device, checkpoint.part("rng"))
        self.epoch, self.step, self.seconds = facts["epoch"], facts["step"], facts["seconds"]
        self.losses.cases = facts["cases"]
        if "losses" in checkpoint.tensors:
            self.losses.values = list(checkpoint.tensors["losses"].to(self.device))
        self.ledger_length = int(facts["ledger_length"])

    def _restore_mixer(self, module: nn.Module, checkpoint: Checkpoint, path: Path) -> None:
        state = checkpoint.part("mixer")
        if not state and module.state_dict() and checkpoint.facts["step"]:
            raise ValueError(
                f"{path} has no state of the mixer: it was trained with another one; choose "
                "another folder"
            )
        if state:  # otherwise the first step of a phase whose mixer differs
            load_state(module, state, path)
            load_optimizer(module, self.optimizer, checkpoint, "mixer_optimizer")

    def scores(self, evaluate: Evaluate) -> dict[str, dict[str, float]]:
        """Evaluate as ``test``; with EMA that is the average, and the network is ``test_raw``.

        The teacher of a mixer is ``test_teacher``.
        """
        nets = {"test": self.net}
        if self.ema is not None:
            nets = {"test": self.ema.net, "test_raw": self.net}
        teacher = getattr(self.mixer_module, "teacher", None)
        if teacher is not None:
            nets["test_teacher"] = teacher
        scores = {name: dict(evaluate(net)) for name, net in nets.items()}
        if "top1" not in scores["test"]:
            names = list(scores["test"])
            raise ValueError(f"evaluate must return 'top1', in per cent; it returned {names}")
        return scores

    def where_stopped(self, number: int, epochs: int, folder: Path) -> str:
        """Return which signal ended the run of ``epochs``, where, and how to resume it."""
        by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self.epoch == epochs:
            return f"{by} after the last epoch; the run in {folder} is complete"
        if not (self.epoch or self.step):
            return f"stopped by {by} before the first step; run again to start"
        at = f"in epoch {self.epoch + 1} of {epochs}"
        return f"stopped by {by} {at}, saved in {folder}; run again to resume"
