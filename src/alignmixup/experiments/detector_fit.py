"""A detector's fine-tuning in a folder: resumed from its checkpoint, saved, reported.

A checkpoint is written after each epoch, every ten minutes within one, and at a signal. Where there
is no terminal for a bar, a line a minute says how far it is and how long it will take.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

from alignmixup.contracts import Result
from alignmixup.evaluation.detection.fine_tuning import FineTuner
from alignmixup.training.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    load_checkpoint,
    load_state,
    named_state,
)
from alignmixup.training.ledger import LEDGER, Ledger, read_ledger
from alignmixup.training.progress import Reporter
from alignmixup.training.signals import stop_signals
from alignmixup.training.trainer import CHECKPOINT

__all__ = ["DetectorFit", "Stopped"]

SAVE_EVERY = 600.0  # seconds between two checkpoints within an epoch
TELL_EVERY = 60.0  # seconds between two lines about one, where there is no terminal


class Stopped(KeyboardInterrupt):
    """A signal ended the fine-tuning, after a checkpoint."""


class DetectorFit:
    """The fine-tuning in the folder ``place``; made there, it is where its checkpoint was."""

    def __init__(self, tuner: FineTuner, place: Path, quiet: bool) -> None:
        self.tuner, self.quiet = tuner, quiet
        self.path = place / CHECKPOINT
        length = self._restore() if self.path.exists() else 0
        self.begun = tuner.steps_done
        if tuner.is_done:  # the results may stand behind the last epoch
            length = max(length, (place / LEDGER).stat().st_size)
        self.ledger = Ledger(place / LEDGER, length)

    def results(self) -> list[Result] | None:
        """The results of a fine-tuning that has been scored already."""
        events = read_ledger(self.ledger.path) if self.ledger.path.exists() else []
        lines = [event["lines"] for event in events if event["event"] == "results"]
        if not lines:
            return None
        return [Result.from_json(json.dumps(line)) for line in cast(list[Any], lines[-1])]

    def train(self) -> None:
        """Fine-tune to the end; a signal ends it at a checkpoint."""
        tuner, total = self.tuner, self.tuner.settings.num_epochs * self.tuner.steps_per_epoch
        writer = CheckpointWriter(self.path)
        start = saved = told = time.monotonic()
        try:
            with (
                Reporter(total, tuner.steps_done, quiet=self.quiet) as reporter,
                stop_signals() as stop,
            ):
                while not tuner.is_done:
                    for _ in tuner.run_epoch():
                        reporter.advance()
                        now = time.monotonic()
                        is_over = tuner.step == 0
                        if is_over:
                            self._close_epoch(reporter, now - start, total)
                        elif now - told > TELL_EVERY and not sys.stderr.isatty():
                            reporter.say(self._line(now - start, total))
                            told = now
                        if is_over or stop or now - saved > SAVE_EVERY:
                            self._save(writer)
                            saved = now
                        if stop and not tuner.is_done:
                            reporter.say("stopped by a signal; the same command resumes")
                            raise Stopped
        finally:
            writer.close()

    def _close_epoch(self, reporter: Reporter, seconds: float, total: int) -> None:
        tuner = self.tuner
        rate = float(tuner.optimizer.param_groups[0]["lr"])
        values = {"epoch": tuner.epoch, "loss": tuner.losses[-1], "lr": rate}
        self.ledger.append("epoch", values)
        reporter.epoch(self._line(seconds, total))

    def _line(self, seconds: float, total: int) -> str:
        """How far it is, and how long it will take at the pace since this process began."""
        tuner = self.tuner
        done = tuner.steps_done
        left = seconds / max(1, done - self.begun) * (total - done)
        loss = f"  loss {tuner.losses[-1]:.4f}" if tuner.losses else ""
        where = f"epoch {tuner.epoch}/{tuner.settings.num_epochs}"
        if tuner.step:
            where += f" and {tuner.step}/{tuner.steps_per_epoch} steps"
        return f"{where}{loss}  about {_duration(left)} left"

    def _save(self, writer: CheckpointWriter) -> None:
        tuner = self.tuner
        tensors = {f"model.{k}": v for k, v in tuner.detector.state_dict().items()}
        momentum = named_state(tuner.detector, tuner.optimizer)
        tensors |= {f"optimizer.{k}": v for k, v in momentum.items()}
        tensors["total"] = tuner.total
        facts = {
            "epoch": tuner.epoch,
            "step": tuner.step,
            "losses": list(tuner.losses),
            "ledger_length": self.ledger.length,
        }
        writer.save(Checkpoint(tensors, facts))

    def _restore(self) -> int:
        tuner, checkpoint = self.tuner, load_checkpoint(self.path)
        facts = cast(dict[str, Any], checkpoint.facts)
        load_state(tuner.detector, checkpoint, self.path)
        parameters = dict(tuner.detector.named_parameters())
        for name, value in checkpoint.part("optimizer").items():
            key, parameter = name.split(".", 1)
            tuner.optimizer.state[parameters[parameter]][key] = value.to(tuner.device)
        tuner.total = checkpoint.tensors["total"].to(tuner.device)
        tuner.epoch, tuner.step = facts["epoch"], facts["step"]
        tuner.losses = list(facts["losses"])
        return int(facts["ledger_length"])


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
