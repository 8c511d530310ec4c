"""The engine: draws, applies, steps, evaluates, keeps the ledger and the checkpoint.

It knows a mixer and a module, never a method or a data set by name. All chance of the steps comes
from one CPU generator, that of dropout from torch's own, all seeded and in the checkpoint, and the
order of the images is a pure function of (seed, epoch): a run killed at any instant and resumed
repeats the uninterrupted one, on the CPU bit for bit.
"""

from __future__ import annotations

import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from alignmixup.contracts import Mixer
from alignmixup.training.checkpoint import (
    CHECKPOINT,
    Checkpoint,
    CheckpointWriter,
    load_checkpoint,
    load_state,
    named_state,
)
from alignmixup.training.device import changes, compute_for
from alignmixup.training.distributed import Team
from alignmixup.training.ledger import LEDGER, Ledger
from alignmixup.training.progress import Estimate, Reporter
from alignmixup.training.resume import check_same, past_compute, resumed_settings
from alignmixup.training.schedule import learning_rate_share
from alignmixup.training.settings import TrainSettings
from alignmixup.training.signals import Stopped, stop_signals
from alignmixup.training.steps import (
    Batch,
    PlainStep,
    Step,
    make_optimizer,
    make_step,
    prepared,
    trying_convolutions,
)
from alignmixup.training.summary import Summary, summarise

__all__ = ["CHECKPOINT", "LEDGER", "Loader", "NonFiniteLoss", "fit"]

# How many steps on a GPU go by between two looks at the losses.
CHECK_EVERY = 100

Evaluate = Callable[[nn.Module], Mapping[str, float]]


class Loader(Protocol):
    """Batches of (images, labels) on the device, the order a pure function of the epoch."""

    def __len__(self) -> int: ...
    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]: ...


@runtime_checkable
class GatheringLoader(Protocol):
    """A loader whose batches are made on the device out of rows of numbers, as part of the step."""

    batch_size: int

    def __len__(self) -> int: ...
    def rows(self, epoch: int) -> Tensor: ...
    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor]: ...


class NonFiniteLoss(RuntimeError):
    """Training has diverged; the message names the step, the case and the last good checkpoint."""


def fit(
    net: nn.Module,
    mixer: Mixer,
    loader: Loader,
    evaluate: Evaluate,
    settings: TrainSettings,
    out: Path,
    *,
    notes: Mapping[str, Mapping[str, object]] | None = None,
    writer: Any | None = None,
    quiet: bool = False,
    team: Team | None = None,
    epochs: range | None = None,
) -> Summary:
    """Train ``net`` in the folder ``out``, or resume the run there.

    Args:
        net: The network, on the device to train on; it returns logits [b, k].
        mixer: The method of mixing.
        loader: Batches of the training images on the same device.
        evaluate: Called with the network; returns at least ``top1``, in per cent.
        settings: How to train. A run may be resumed on another device; with precision "auto" it
            keeps the precision it has.
        out: Folder of the ledger and the checkpoint.
        notes: Events to open the ledger with.
        writer: A TensorBoard SummaryWriter.
        quiet: Print nothing.
        team: The processes that train together; all of them call this, each with its own loader.
        epochs: The epochs of this call, counted from 0; None trains all. A run whose phases differ
            in loader, mixer or batch size is one call per phase, in order.

    Returns:
        The accuracies of the run.

    Raises:
        Stopped: Ctrl-C or SIGTERM has ended the run after a step, with a checkpoint.
        NonFiniteLoss: Training has diverged.
    """
    team, out = team or Team(), Path(out)
    _check_arguments(net, mixer, settings)
    if not len(loader):
        raise ValueError("the loader gives no batch: more images, or a smaller batch_size")
    out.mkdir(parents=True, exist_ok=True)
    weight = next(net.parameters())
    # Streams, events and captures belong to the current device, which must be the network's.
    # Torch's own generators, which dropout draws from, are given back to the caller as they were.
    with (
        torch.cuda.device_of(weight),  # type: ignore[no-untyped-call]
        torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []),
    ):
        now = resumed_settings(settings, out)
        run = _Run(net, mixer, loader, now, out, team, epochs or range(now.epochs))
        stopped_by = _fit(run, evaluate, notes or {}, writer, quiet or not team.is_leader)
    team.wait()  # for the last line of rank 0
    if stopped_by is not None:
        raise Stopped(stopped_by, run.where_stopped(stopped_by) if team.is_leader else "")
    return summarise(out)


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
    if next(cast(nn.Module, net).parameters(), None) is None:
        raise ValueError(f"net ({type(net).__name__}) has no parameters: there is nothing to train")


def _fit(
    run: _Run,
    evaluate: Evaluate,
    notes: Mapping[str, Mapping[str, object]],
    writer: Any | None,
    quiet: bool,
) -> int | None:
    """Train to the end of ``run.epochs``; return the signal that ended the run, if one did."""
    team, epochs = run.team, run.epochs
    if run.epoch >= epochs.stop and epochs.stop < run.settings.epochs:
        run.writer.close()
        return None  # a phase that is over
    steps = len(run.loader)
    done = (run.epoch - epochs.start) * steps + run.step
    with (
        Reporter(len(epochs) * steps, done, quiet=quiet) as reporter,
        stop_signals(quiet=quiet) as stop,
        trying_convolutions(),
    ):
        run.open_ledger(notes, reporter)
        try:
            while run.epoch < epochs.stop and not team.any(bool(stop), run.device):
                if not run.train_epoch(reporter, stop):
                    break
                run.close_epoch(evaluate, reporter, writer)
        finally:
            run.writer.close()
    if stop:
        return stop[0]
    # The signal may have reached another process.
    return None if run.epoch == epochs.stop else signal.SIGTERM


class _Run:
    """The state of one run: where it is, and everything a checkpoint holds."""

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
        self.epochs = epochs
        self.net, self.mixer, self.loader, self.settings = net, mixer, loader, settings
        self.team = team
        self.device = next(net.parameters()).device
        self.compute = compute_for(settings, self.device, team.size)
        self.past_compute = past_compute(out)
        self.optimizer = make_optimizer(net, settings)
        self.rng = torch.Generator().manual_seed(settings.seed)
        self.epoch, self.step = 0, 0
        self.losses: list[Tensor] = []
        self.cases: list[str] = []
        # Every method names a step without mixing "clean".
        self.is_mixing = set(mixer.cases) != {"clean"}
        # Whether the losses of each look are finite, and the moment that is known.
        self.asked: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        # An epoch and its rows, drawn ahead of it.
        self.drawn: tuple[int, Tensor] | None = None
        self.seconds = 0.0
        self.closed = time.perf_counter()
        is_cpu = self.device.type == "cpu"
        wait = (lambda: None) if is_cpu else partial(torch.accelerator.synchronize, self.device)
        self.estimate = Estimate(2 if is_cpu else 100, 3 if is_cpu else 300, wait)
        self.path = out / CHECKPOINT
        ledger_length = self._restore() if self.path.exists() else self._seed()
        team.wait()  # all have read before the leader writes
        self.ledger = Ledger(out / LEDGER, ledger_length, writes=team.is_leader)
        self.writer = CheckpointWriter(self.path)
        gather = loader.gather if isinstance(loader, GatheringLoader) else lambda x, y: (x, y)
        shared = team.wrap(net, uses_all=mixer.trains_all)
        plain = PlainStep(prepared(shared, settings), mixer, self.optimizer, settings, gather)
        # What passes between processes is not captured.
        self.take_step: Step = plain if team.size > 1 else make_step(plain, self.device)

    def steps_done(self) -> int:
        return self.epoch * len(self.loader) + self.step

    def open_ledger(self, notes: Mapping[str, Mapping[str, object]], reporter: Reporter) -> None:
        """Write how the run is begun, or what changes where it is resumed, and print it."""
        settings, cases, steps = asdict(self.settings), dict(self.mixer.cases), len(self.loader)
        compute = asdict(self.compute)
        reporter.say(f"training on {self.compute}")
        if self.epoch == self.epochs.start and not self.step:
            values = {"settings": settings, "cases": cases, "steps": steps, "compute": compute}
            self.ledger.append("start", values)
            for event, note in notes.items() if not self.epoch else ():
                self.ledger.append(event, note)
            return
        check_same(self.path.parent, {"train": settings, "cases": cases, "steps": steps})
        changed = changes(self.past_compute or {}, self.compute)
        if changed:
            at = {"epoch": self.epoch, "step": self.step}
            self.ledger.append("resume", {**at, "compute": compute})
            reporter.say(f"resumed otherwise than before: {', '.join(changed)}")

    def where_stopped(self, number: int) -> str:
        """Say what ended the run, where, and how to resume it."""
        by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self.epoch == self.settings.epochs:
            return f"{by} after the last epoch; the run in {self.path.parent} is complete"
        if not self.steps_done():
            return f"stopped by {by} before the first step; run again to start"
        at = f"in epoch {self.epoch + 1} of {self.settings.epochs}"
        return f"stopped by {by} {at}, saved in {self.path.parent}; run again to resume"

    def train_epoch(self, reporter: Reporter, stop: list[int]) -> bool:
        """Train to the end of the epoch; False if a signal ended it early, at a checkpoint."""
        self.net.train()
        begin = time.perf_counter()
        steps = len(self.loader)
        for batch in self._batches():
            self._set_learning_rate(self.epoch + self.step / steps)
            draw = self.mixer.draw(len(batch[0]), self.rng)
            self.losses.append(self.take_step(batch, draw))
            self.cases.append(draw.case)
            self.step += 1
            reporter.advance()
            if estimate := self.estimate.step(steps * self.epochs.stop - self.steps_done()):
                reporter.say(estimate)
            is_check = self.device.type == "cpu" or self.step % CHECK_EVERY == 0
            if is_check:
                self._look_at_losses()
            if self._is_stopping(stop, is_check) and self.step < steps:
                self.seconds += time.perf_counter() - begin
                self._check_losses()
                self._save()
                return False
        if isinstance(self.loader, GatheringLoader):  # while the device is still busy
            self.drawn = self.epoch + 1, self.loader.rows(self.epoch + 1)
        self._check_losses()
        self.seconds += time.perf_counter() - begin
        return True

    def _is_stopping(self, stop: list[int], is_check: bool) -> bool:
        """Whether a signal came. Several processes agree on it, where they look at losses anyway:
        one that stopped alone would leave the others waiting for its gradients."""
        if self.team.size == 1:
            return bool(stop)
        return is_check and self.team.any(bool(stop), self.device)

    def close_epoch(self, evaluate: Evaluate, reporter: Reporter, writer: Any | None) -> None:
        """Evaluate if it is time to, write the epoch into the ledger, and save."""
        self._check_weights()
        self.epoch += 1
        loss = float(self.team.mean(torch.stack(self.losses).float().mean()))
        values: dict[str, object] = {
            "epoch": self.epoch,
            "loss": loss,  # of mixed images against mixed labels: lower is not better
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "cases": dict(Counter(self.cases)),
            "seconds": round(self.seconds, 4),
            "step_path": self.take_step.path,
        }
        remaining = self.settings.epochs - self.epoch
        is_scored = remaining < 10 or self.epoch % self.settings.eval_every == 0
        if is_scored and self.team.is_leader:
            values["test"] = scores = dict(evaluate(self.net))
            if "top1" not in scores:
                raise ValueError(f"evaluate must give 'top1', in per cent; it gave {list(scores)}")
        # From the end of the last epoch's line to here: its checkpoint and this evaluation as well.
        now = time.perf_counter()
        values["wall_seconds"], self.closed = round(now - self.closed, 4), now
        self.ledger.append("epoch", values)
        if writer is not None and self.team.is_leader:
            _log(writer, values)
        self.step, self.seconds, self.losses, self.cases = 0, 0.0, [], []
        self.asked.clear()
        self._save()
        reporter.epoch(_epoch_line(values, self.settings.epochs, self.is_mixing))

    def _batches(self) -> Iterator[Batch]:
        if isinstance(self.loader, GatheringLoader):
            if self.drawn is None or self.drawn[0] != self.epoch:
                self.drawn = self.epoch, self.loader.rows(self.epoch)
            rows, b = self.drawn[1], self.loader.batch_size
            steps = range(self.step, len(self.loader))
            return ((rows[i * b : (i + 1) * b][self.team.share(b)],) for i in steps)
        return self.loader.epoch(self.epoch, self.step)

    def _set_learning_rate(self, progress: float) -> None:
        share = learning_rate_share(self.settings, progress)
        for group in self.optimizer.param_groups:
            rate = group["base_lr"] * share
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _look_at_losses(self) -> None:
        """Check the losses so far: on a GPU, which is steps behind, as far as it has come.

        What is asked now is answered at one of the next looks, and nothing waits for it.
        """
        if self.device.type != "cuda":
            self._check_losses()
            return
        while self.asked and self.asked[0][1].query():  # type: ignore[no-untyped-call]
            finite, _ = self.asked.popleft()
            if not bool(finite):
                self._check_losses()
        finite = torch.empty((), dtype=torch.bool, pin_memory=True)
        finite.copy_(torch.stack(self.losses[-CHECK_EVERY:]).isfinite().all(), non_blocking=True)
        answered = torch.cuda.Event()  # type: ignore[no-untyped-call]
        answered.record()
        self.asked.append((finite, answered))

    def _check_losses(self) -> None:
        """Raise if one of the losses is not finite; on a GPU this waits for the last of them."""
        recent = self.losses[-1:] if self.device.type == "cpu" else self.losses
        finite = torch.stack(recent).isfinite()
        if bool(finite.all()):
            return
        at = len(self.losses) - len(recent) + int(finite.logical_not().nonzero()[0])
        step = self.step - len(self.losses) + at + 1
        raise NonFiniteLoss(
            f"the loss is {float(self.losses[at])} at step {step} of epoch {self.epoch + 1}, "
            f"case {self.cases[at]!r}; {self._last_good()}"
        )

    def _check_weights(self) -> None:
        """The last update may have spoilt the weights with no loss left to show it."""
        norm = nn.utils.get_total_norm([p.detach() for p in self.net.parameters()])
        if not bool(norm.isfinite()):
            raise NonFiniteLoss(
                f"the weights are no longer finite after step {self.step} of epoch "
                f"{self.epoch + 1}, case {self.cases[-1]!r}; {self._last_good()}"
            )

    def _last_good(self) -> str:
        self.writer.wait()
        kept = "there is no checkpoint yet"
        if self.path.exists():
            facts = load_checkpoint(self.path).facts
            kept = f"the last good checkpoint is {self.path} (epoch {facts['epoch']})"
        return f"{kept}. Try a lower lr, warmup_epochs or clip_norm"

    def _save(self) -> None:
        if not self.team.is_leader:
            return
        tensors = {f"model.{k}": v for k, v in self.net.state_dict().items()}
        optimizer = named_state(self.net, self.optimizer)
        tensors |= {f"optimizer.{k}": v for k, v in optimizer.items()}
        tensors["rng.draws"] = self.rng.get_state()
        tensors["rng.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        if self.losses:
            tensors["losses"] = torch.stack(self.losses)
        facts = {
            "epoch": self.epoch,
            "step": self.step,
            "cases": list(self.cases),
            "seconds": self.seconds,
            "ledger_length": self.ledger.length,
            "compute": asdict(self.compute),
        }
        self.writer.save(Checkpoint(tensors, facts))

    def _seed(self) -> int:
        """Seed torch's own generators, each process its own way; the ledger is empty."""
        seed = self.settings.seed + self.team.rank
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        return 0

    def _restore(self) -> int:
        """Take up the state of the checkpoint; return the length of the ledger beside it."""
        checkpoint = load_checkpoint(self.path)
        facts = cast(dict[str, Any], checkpoint.facts)
        load_state(self.net, checkpoint, self.path)
        parameters = dict(self.net.named_parameters())
        for name, value in checkpoint.part("optimizer").items():
            key, parameter = name.split(".", 1)
            owner = parameters[parameter]
            # A buffer has the parameter's memory layout; AdamW's count of steps is a number.
            like = owner if value.shape == owner.shape else value
            buffer = torch.empty_like(like, device=owner.device).copy_(value)
            self.optimizer.state[owner][key] = buffer
        self.rng.set_state(checkpoint.tensors["rng.draws"])
        torch.set_rng_state(checkpoint.tensors["rng.cpu"])
        if self.device.type == "cuda" and "rng.cuda" in checkpoint.tensors:
            torch.cuda.set_rng_state(checkpoint.tensors["rng.cuda"], self.device)
        self.epoch, self.step = facts["epoch"], facts["step"]
        self.cases, self.seconds = facts["cases"], facts["seconds"]
        if "losses" in checkpoint.tensors:
            self.losses = list(checkpoint.tensors["losses"].to(self.device))
        return int(facts["ledger_length"])


def _epoch_line(values: Mapping[str, Any], epochs: int, is_mixing: bool) -> str:
    line = f"epoch {values['epoch']}/{epochs}  loss {values['loss']:.4f}"
    line += " (mixed)" if is_mixing else ""
    if "test" in values:
        line += f"  test top-1 {values['test']['top1']:.2f} %"
    return f"{line}  {values['seconds']:.1f} s"


def _log(writer: Any, values: Mapping[str, Any]) -> None:
    writer.add_scalar("train/mixed_loss", values["loss"], values["epoch"])
    writer.add_scalar("train/lr", values["lr"], values["epoch"])
    for name, value in values.get("test", {}).items():
        writer.add_scalar(f"test/{name}", value, values["epoch"])
