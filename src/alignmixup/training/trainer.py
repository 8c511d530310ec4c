"""The trainer: draws, applies, steps, evaluates, writes the ledger and the checkpoint.

It knows a mixer and a module, never a method or a data set by name. All draws come from one CPU
generator, dropout from torch's own; all are seeded and in the checkpoint, and the order of the
images is a pure function of (seed, epoch). A run killed at any instant and resumed repeats the
uninterrupted one, on a CPU bit for bit.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from alignmixup.contracts import Mixer
from alignmixup.device import (
    changes,
    compute_for,
    current_device,
    fast_convolutions,
    fork_rng,
    synchronize,
)
from alignmixup.training.checkpoint import CHECKPOINT, CheckpointWriter, has_checkpoint
from alignmixup.training.distributed import Team
from alignmixup.training.ledger import LEDGER, Ledger
from alignmixup.training.loggers import Console, Logger, Loggers, scalars
from alignmixup.training.losses import NonFiniteLoss
from alignmixup.training.optim import EMA, learning_rate_share, mixer_parameters, set_learning_rate
from alignmixup.training.progress import Estimate
from alignmixup.training.resume import check_resumed, past_compute, resumed_settings
from alignmixup.training.settings import TrainSettings
from alignmixup.training.signals import EvaluationStopped, Stopped, step_under, stop_signals
from alignmixup.training.state import Evaluate, TrainState, attached
from alignmixup.training.steps import (
    Batches,
    Loader,
    PlainStep,
    Step,
    capture_stream,
    draw_size,
    make_step,
    prepared,
)
from alignmixup.training.summary import Summary, summarize


def fit(
    net: nn.Module,
    mixer: Mixer,
    loader: Loader,
    evaluate: Evaluate,
    settings: TrainSettings,
    out: Path,
    *,
    notes: Mapping[str, Mapping[str, object]] | None = None,
    loggers: Iterable[Logger] | None = None,
    quiet: bool = False,
    team: Team | None = None,
    epochs: range | None = None,
) -> Summary:
    """Train ``net`` in the folder ``out``, or resume the run there.

    Args:
        net: The network, on the device to train on; it returns logits [b, k].
        mixer: The method of mixing.
        loader: Batches of the training images on the same device.
        evaluate: Called with the network; returns at least ``top1``, in per cent. With
            ``settings.ema`` it is called with the average and with the network itself, and with
            the teacher of a mixer that has one. Every process calls it, with the weights and the
            batch statistics of rank 0; what rank 0 returns is recorded. A signal ends it between
            two batches where it calls ``alignmixup.evaluate``, else it is completed.
        settings: How to train. A run may be resumed on another device; with precision "auto" it
            keeps its precision.
        out: Folder of the ledger and the checkpoint.
        notes: Events to open the ledger with.
        loggers: Where the values of each epoch go; defaults to the console, or none if ``quiet``.
        quiet: Print nothing.
        team: The processes that train together; each calls this with its own loader.
        epochs: The epochs of this call, counted from 0; None trains all. A run whose phases differ
            in loader, mixer or batch size is one call per phase, in order.

    Returns:
        The accuracies of the run.

    Raises:
        Stopped: Ctrl-C or SIGTERM has ended the run after a step or within an evaluation, with a
            checkpoint.
        NonFiniteLoss: Training has diverged.
        RankLost: Another process of ``team`` has ended; the message has its rank and the reason.
    """
    team, out = team or Team(), Path(out)
    _check_arguments(net, mixer, settings)
    if not len(loader):
        raise ValueError("the loader has no batch: use more images, or a smaller batch_size")
    out.mkdir(parents=True, exist_ok=True)
    quiet = quiet or not team.is_rank_zero
    if loggers is None:
        loggers = () if quiet else (Console(),)
    device = next(net.parameters()).device
    # The caller's generators are restored.
    with team.guarded(), current_device(device), fork_rng(device):
        now = resumed_settings(settings, out)
        run = _Run(net, mixer, loader, now, out, team, epochs or range(now.epochs))
        stopped_by = run.train(
            evaluate, notes or {}, Loggers(loggers if team.is_rank_zero else ()), quiet
        )
        team.wait()  # for the last line of rank 0
    if stopped_by is not None:
        where = run.state.where_stopped(stopped_by, now.epochs, out) if team.is_rank_zero else ""
        raise Stopped(stopped_by, where)
    return summarize(out)


def _check_arguments(net: object, mixer: object, settings: object) -> None:
    kinds = {
        "net": (net, nn.Module),
        "mixer": (mixer, Mixer),
        "settings": (settings, TrainSettings),
    }
    for name, (value, kind) in kinds.items():
        if not isinstance(value, kind):
            given = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
            raise ValueError(f"{name} must be of type {kind.__name__}, got {given}")
    parameters = list(cast(nn.Module, net).parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        which = "parameters that require a gradient" if parameters else "parameters"
        raise ValueError(f"net ({type(net).__name__}) has no {which}: there is nothing to train")


class _Run:
    """One call of ``fit``: the state of the training and what acts on it."""

    def __init__(
        self,
        net: nn.Module,
        mixer: Mixer,
        loader: Loader,
        settings: TrainSettings,
        out: Path,
        team: Team,
        epochs: range,
    ) -> None:
        self.settings = settings
        self.team, self.epochs, self.path = team, epochs, out / CHECKPOINT
        self.batches = Batches(loader, team)
        self.mixer = attached(mixer, net, self.batches, settings, team, self.path)
        self.state = TrainState(net, self.mixer, settings)
        self.device = self.state.device
        self.compute = compute_for(settings, self.device, team.size)
        self.past_compute = past_compute(out)
        if settings.ema is not None:
            self.state.ema = EMA(net, settings.ema)
        self.state.seed(settings.seed + team.rank)
        if has_checkpoint(self.path):
            self.state.restore(self.path, team.rank)
            self._set_rate(self.state.step - 1)
        self.closed = time.perf_counter()
        skipped, measured = (2, 3) if self.device.type == "cpu" else (100, 300)
        self.estimate = Estimate(skipped, measured, partial(synchronize, self.device))
        team.wait()  # all have read before rank 0 writes
        self.ledger = Ledger(out / LEDGER, self.state.ledger_length, writes=team.is_rank_zero)
        self.writer = CheckpointWriter(self.path)
        stream = capture_stream(self.device) if self.compute.capture else None
        with torch.cuda.stream(stream):
            module = prepared(team.wrap(net, uses_all=self.mixer.trains_all), settings)
        optimizer, ema = self.state.optimizer, self.state.ema
        gather = self.batches.gather
        plain = PlainStep(module, self.mixer, optimizer, settings, gather, ema, team)
        self.take_step: Step = make_step(plain, self.device, stream)

    def train(
        self,
        evaluate: Evaluate,
        notes: Mapping[str, Mapping[str, object]],
        loggers: Loggers,
        quiet: bool,
    ) -> int | None:
        """Train to the end of ``epochs``; return the signal that ended the run, if one did."""
        state, epochs = self.state, self.epochs
        if state.epoch >= epochs.stop and epochs.stop < self.settings.epochs:
            self.writer.close()
            return None  # a phase that is over
        with stop_signals(quiet=quiet) as stop, fast_convolutions():
            try:
                self._start(notes, loggers)
                while state.epoch < epochs.stop and not self.team.any(bool(stop), self.device):
                    if not self._train_epoch(loggers, stop):
                        break
                    if not self._close_epoch(evaluate, loggers, stop):
                        break
            finally:
                loggers.finish()
                self.writer.close()
        if stop:
            return stop[0]
        # The signal may have reached another process.
        return None if state.epoch == epochs.stop else signal.SIGTERM

    def _start(self, notes: Mapping[str, Mapping[str, object]], loggers: Loggers) -> None:
        """Start the loggers; write the start of the run, or what changes where it is resumed."""
        state = self.state
        record = {
            "settings": asdict(self.settings),
            "cases": dict(self.mixer.cases),
            "steps": len(self.batches),
            "compute": asdict(self.compute),
        }
        is_new = state.epoch == self.epochs.start and not state.step
        if not is_new:
            check_resumed(self.path.parent, record)
        position = (state.epoch, state.step)
        ends = (self.epochs.start, self.epochs.stop)
        loggers.start({**record, "epochs": ends, "position": position})
        if state.epoch >= self.epochs.stop:
            loggers.say(f"already finished: {state.epoch} of {self.settings.epochs} epochs")
            return
        loggers.say(f"training on {self.compute}")
        if is_new:
            self.ledger.append("start", record)
            for event, note in notes.items() if not state.epoch else ():
                self.ledger.append(event, note)
        elif changed := changes(self.past_compute or {}, self.compute):
            at = {"epoch": state.epoch, "step": state.step}
            self.ledger.append("resume", {**at, "compute": record["compute"]})
            loggers.say(f"resumed with changes: {', '.join(changed)}")

    def _train_epoch(self, loggers: Loggers, stop: list[int]) -> bool:
        """Train to the end of the epoch; False if a signal ended it early, with a checkpoint."""
        state, steps = self.state, len(self.batches)
        state.train_mode()
        begin = time.perf_counter()
        for batch in self.batches.of(state.epoch, state.step):
            progress = self._set_rate(state.step)
            size = draw_size(batch, self.settings, self.team)
            draw = self.mixer.draw(size, state.rng, progress / self.settings.epochs)
            with step_under(stop if self.team.size == 1 else ()):
                loss = self.take_step(batch, draw)
            state.losses.add(loss, draw.case)
            state.step += 1
            loggers.step()
            remaining = steps * (self.epochs.stop - state.epoch) - state.step
            if estimate := self.estimate.step(remaining):
                loggers.say(estimate)
            is_check = state.losses.is_check_due()
            if is_check:
                self._check_losses(state.losses.find_non_finite())
            if self._is_stopping(stop, is_check) and state.step < steps:
                state.seconds += time.perf_counter() - begin
                self._check_losses(state.losses.first_non_finite())
                self._save()
                return False
        self.batches.prepare(state.epoch + 1)  # while the device is still busy
        self._check_losses(state.losses.first_non_finite())
        state.seconds += time.perf_counter() - begin
        return True

    def _set_rate(self, step: int) -> float:
        """Set the learning rate of a step of this epoch; return its place in the run, in epochs."""
        progress = self.state.epoch + step / len(self.batches)
        set_learning_rate(self.state.optimizer, learning_rate_share(self.settings, progress))
        return progress

    def _is_stopping(self, stop: list[int], is_check: bool) -> bool:
        """Whether a signal came. Several processes agree on it, where they check losses anyway: one
        that stopped alone would leave the others waiting for its gradients."""
        if self.team.size == 1:
            return bool(stop)
        return is_check and self.team.any(bool(stop), self.device)

    def _close_epoch(self, evaluate: Evaluate, loggers: Loggers, stop: list[int]) -> bool:
        """Evaluate if it is due, write the epoch into the ledger, and save.

        Return False if a signal ended the evaluation: saved is then the epoch without its line, and
        the resumed run repeats the evaluation.
        """
        state = self.state
        self._check_weights()
        epoch = state.epoch + 1
        values: dict[str, Any] = {
            "epoch": epoch,
            "loss": float(self.team.mean(state.losses.mean())),  # mixed: lower is not better
            "lr": float(state.optimizer.param_groups[0]["lr"]),
            "cases": state.losses.count_cases(),
            "seconds": round(state.seconds, 4),
            "step_path": self.take_step.path,
        }
        is_last = self.settings.epochs - epoch < 10
        if is_last or epoch % self.settings.eval_every == 0:
            try:
                values |= state.scores(evaluate, self.team, stop)
            except EvaluationStopped:
                self._save()
                return False
        # From the previous line to this one, so with a checkpoint and an evaluation.
        now = time.perf_counter()
        values["wall_seconds"], self.closed = round(now - self.closed, 4), now
        self.ledger.append("epoch", values)
        loggers.log(scalars(values), epoch)
        state.end_epoch()
        self._save()
        return True

    def _check_losses(self, bad: int | None) -> None:
        """Raise for the loss at the index ``bad`` of this epoch, if there is one."""
        if bad is None:
            return
        losses, step = self.state.losses, self.state.step - len(self.state.losses) + bad + 1
        raise NonFiniteLoss(
            f"the loss is {float(losses.values[bad])} at step {step} of epoch "
            f"{self.state.epoch + 1}, case {losses.cases[bad]!r}; {self.writer.last_good()}"
        )

    def _check_weights(self) -> None:
        """Raise if the last update has spoiled the weights, which no loss would show."""
        state = self.state
        weights = [*state.net.parameters(), *mixer_parameters(self.mixer)]
        norm = nn.utils.get_total_norm([p.detach() for p in weights])
        if not bool(norm.isfinite()):
            raise NonFiniteLoss(
                f"the weights are no longer finite after step {state.step} of epoch "
                f"{state.epoch + 1}, case {state.losses.cases[-1]!r}; {self.writer.last_good()}"
            )

    def _save(self) -> None:
        of_all = self.state.of_all(self.team)
        if self.team.is_rank_zero:
            facts = {"ledger_length": self.ledger.length, "compute": asdict(self.compute)}
            self.writer.save(self.state.checkpoint(facts, of_all))
