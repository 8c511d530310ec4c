"""What a run that is resumed has to keep, and what it may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from alignmixup.training.checkpoint import CHECKPOINT, read_facts
from alignmixup.training.ledger import LEDGER, read_ledger
from alignmixup.training.settings import TrainSettings, differences

__all__ = ["check_same", "past_compute", "resumed_settings"]


def resumed_settings(settings: TrainSettings, out: Path) -> TrainSettings:
    """Return the settings to train with in ``out``, the warm-up cut to fit.

    Precision is part of what was trained. With "auto", a run that is resumed keeps the precision of
    its last step, on any device; any other value switches to it, and the ledger records that.
    """
    settings = settings.fitted()
    past = past_compute(out)
    if past is None or settings.precision != "auto":
        return settings
    return dataclasses.replace(settings, precision=past["precision"])


def past_compute(out: Path) -> dict[str, Any] | None:
    """How the last step of the run in ``out`` was computed; None where no step has been saved.

    Of a run begun by an older version only the precision is known.
    """
    if not (out / CHECKPOINT).exists():
        return None
    past = read_facts(out / CHECKPOINT).get("compute")
    if past is None:
        past = {"precision": _start(out).get("settings", {}).get("precision", "float32")}
    return cast(dict[str, Any], past)


def check_same(out: Path, now: Mapping[str, Any]) -> None:
    """Raise where a run would be resumed with other settings, cases or number of steps."""
    begun = _start(out)
    settings = begun.get("settings", {})
    # What an older version did not write is not known to differ.
    there = {"train": settings, **{name: begun.get(name, now[name]) for name in ("cases", "steps")}}
    ours = {**now, "train": {name: now["train"].get(name) for name in settings}}
    found = differences(there, ours)
    if found:
        raise ValueError(
            f"{out} holds a run that was begun with other settings ({'; '.join(found)}): choose "
            "another folder"
        )


def _start(out: Path) -> dict[str, Any]:
    """The last start event: each phase of a run has one of its own."""
    events = cast(list[dict[str, Any]], read_ledger(out / LEDGER))
    return next((event for event in reversed(events) if event["event"] == "start"), {})
