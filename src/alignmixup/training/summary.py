"""Best, last and median test accuracy of a run, read from its ledger."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from alignmixup.training.ledger import LEDGER, read_ledger

EPOCHS_FOR_MEDIAN = 30  # the last ten epochs of a shorter run are no plateau


@dataclass(frozen=True)
class Summary:
    """Test accuracy of a run and whether the run is complete.

    ``best`` is chosen on the test set; ``median10`` is the median of the last ten epochs, or None
    for a run of fewer than 30. With EMA all are those of the averaged weights.
    """

    epochs: int
    is_complete: bool
    best: float | None
    best_epoch: int | None
    last: float | None
    median10: float | None

    def __str__(self) -> str:
        length = f"{self.epochs} epoch{'' if self.epochs == 1 else 's'}"
        if self.last is None:
            return f"{length}, not evaluated yet"
        state = "" if self.is_complete else " (stopped early)"
        median = "" if self.median10 is None else f"median of the last ten {self.median10:.2f}, "
        return (
            f"top-1 after {length}{state}: {median}last {self.last:.2f}, best {self.best:.2f} "
            f"(epoch {self.best_epoch}, chosen on the test set)"
        )


def summarize(out: Path, part: str = "test") -> Summary:
    """Read best, last and median of the last ten epochs from a run's ledger.

    ``part`` is ``"test"``, or ``"test_teacher"`` for the teacher of a mixer.
    """
    events = cast(list[dict[str, Any]], read_ledger(out / LEDGER))
    # The last of them: a run that was extended has another length since.
    starts = [e.get("settings", {}) for e in events if e["event"] == "start"]
    settings: dict[str, Any] = starts[-1] if starts else {}
    epochs = [e for e in events if e["event"] == "epoch"]
    scored = [(e["epoch"], e[part]["top1"]) for e in epochs if part in e]
    reached = epochs[-1]["epoch"] if epochs else 0
    best = max(scored, key=lambda pair: pair[1], default=(None, None))
    last_ten = [top1 for epoch, top1 in scored if epoch > reached - 10]
    return Summary(
        epochs=reached,
        is_complete=reached == settings.get("epochs"),
        best=best[1],
        best_epoch=best[0],
        last=scored[-1][1] if scored else None,
        median10=statistics.median(last_ten) if last_ten and reached >= EPOCHS_FOR_MEDIAN else None,
    )
