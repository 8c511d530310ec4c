"""What a resumed run must keep, and what it may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from alignmixup.training.checkpoint import CHECKPOINT, POSITION, has_checkpoint, read_facts
from alignmixup.training.ledger import LEDGER, read_ledger
from alignmixup.training.settings import TrainSettings, check_same


def resumed_settings(settings: TrainSettings, out: Path) -> TrainSettings:
    """Return the settings to train with in ``out``, the warm-up cut to fit.

    Precision is part of what was trained. With "auto", a resumed run keeps the precision of its
    last step, on any device; any other value switches to it, and the ledger records the change.
    """
    settings = settings.fitted()
    past = past_compute(out)
    if past is None or settings.precision != "auto":
        return settings
    return dataclasses.replace(settings, precision=past["precision"])


def past_compute(out: Path) -> dict[str, Any] | None:
    """Return how the last step of the run in ``out`` was computed; None if no step was saved.

    A run of an older version has only the precision.
    """
    if not has_checkpoint(out / CHECKPOINT):
        return None
    past = read_facts(out / CHECKPOINT, POSITION).get("compute")
    if past is None:
        past = {"precision": _start(out).get("settings", {}).get("precision", "float32")}
    if not isinstance(past, dict) or not isinstance(past.get("precision"), str):
        raise ValueError(f"{out / CHECKPOINT} is damaged: its compute is {past!r}")
    return past


def check_resumed(out: Path, record: Mapping[str, Any]) -> None:
    """Raise if the run in ``out`` was started with other settings, cases or number of steps."""
    begun = _start(out)
    # What an older version did not write is not known to differ.
    there = {"train": begun.get("settings", {})}
    now = {"train": {name: record["settings"].get(name) for name in there["train"]}}
    for name in ("cases", "steps"):
        there[name], now[name] = begun.get(name, record[name]), record[name]
    what = f"{out} holds a run that was started with other settings"
    check_same(there, now, what, "choose another folder")


def _start(out: Path) -> dict[str, Any]:
    """Return the last start event; each phase of a run has one."""
    events = cast(list[dict[str, Any]], read_ledger(out / LEDGER))
    return next((event for event in reversed(events) if event["event"] == "start"), {})
