"""Fine-tuning of a detector in a folder, resumed from its checkpoint and recorded in its ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from alignmixup.contracts import Result
from alignmixup.evaluation.detection.fine_tuning import FineTuner
from alignmixup.training.checkpoint import (
    CHECKPOINT,
    Checkpoint,
    has_checkpoint,
    load_checkpoint,
    load_state,
    naming_damage,
)
from alignmixup.training.ledger import LEDGER, Ledger, read_ledger
from alignmixup.training.loop import run_steps
from alignmixup.training.optimizer_state import load_optimizer, optimizer_tensors

FACTS = {"epoch": int, "step": int, "losses": list[float], "ledger_length": int}


class DetectorFit:
    """The fine-tuning in the folder ``place``, at the position of its checkpoint."""

    def __init__(self, tuner: FineTuner, place: Path, quiet: bool) -> None:
        self.tuner, self.quiet = tuner, quiet
        self.path = place / CHECKPOINT
        length = self._restore() if has_checkpoint(self.path) else 0
        if tuner.is_done:  # results may follow the last epoch
            length = max(length, (place / LEDGER).stat().st_size)
        self.ledger = Ledger(place / LEDGER, length)

    def results(self) -> list[Result] | None:
        """Return the results of a fine-tuning that has been scored already."""
        events = read_ledger(self.ledger.path) if self.ledger.path.exists() else []
        lines = [event["lines"] for event in events if event["event"] == "results"]
        if not lines:
            return None
        return [Result.from_json(json.dumps(line)) for line in cast(list[Any], lines[-1])]

    def train(self) -> None:
        """Fine-tune to the end; a signal raises ``Stopped`` after a checkpoint."""
        tuner = self.tuner
        run_steps(
            self._steps(),
            tuner.settings.num_epochs * tuner.steps_per_epoch,
            done=tuner.steps_done,
            state=self._checkpoint,
            path=self.path,
            quiet=self.quiet,
        )

    def _steps(self) -> Iterator[str]:
        tuner = self.tuner
        while not tuner.is_done:
            for _ in tuner.run_epoch():
                yield "" if tuner.step else self._close_epoch()

    def _close_epoch(self) -> str:
        tuner = self.tuner
        loss, rate = tuner.losses[-1], float(tuner.optimizer.param_groups[0]["lr"])
        self.ledger.append("epoch", {"epoch": tuner.epoch, "loss": loss, "lr": rate})
        return f"epoch {tuner.epoch}/{tuner.settings.num_epochs}  loss {loss:.4f}"

    def _checkpoint(self) -> Checkpoint:
        tuner = self.tuner
        tensors = {f"model.{k}": v for k, v in tuner.detector.state_dict().items()}
        tensors |= optimizer_tensors(tuner.detector, tuner.optimizer)
        tensors["total"] = tuner.total
        facts = {
            "epoch": tuner.epoch,
            "step": tuner.step,
            "losses": list(tuner.losses),
            "ledger_length": self.ledger.length,
        }
        return Checkpoint(tensors, facts)

    def _restore(self) -> int:
        tuner, checkpoint = self.tuner, load_checkpoint(self.path, FACTS)
        facts = cast(dict[str, Any], checkpoint.facts)
        load_state(tuner.detector, checkpoint.part("model"), self.path)
        with naming_damage(self.path):
            load_optimizer(tuner.detector, tuner.optimizer, checkpoint)
            tuner.total = checkpoint.tensors["total"].to(tuner.device)
        tuner.epoch, tuner.step = facts["epoch"], facts["step"]
        tuner.losses = list(facts["losses"])
        return int(facts["ledger_length"])
