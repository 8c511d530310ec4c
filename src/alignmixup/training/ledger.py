"""The ledger of a run: one JSON line per event, appended and never rewritten.

A checkpoint records the length of the ledger. When a run that was killed later is resumed, the
ledger is truncated to that length, so its lines always belong to the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from alignmixup.checking import check_kind
from alignmixup.files import writing

LEDGER = "ledger.jsonl"
# The types of what events have, besides the epoch of an epoch.
FIELDS = {"settings": dict, "cases": dict, "compute": dict, "test": dict[str, float], "lines": list}


class Ledger:
    """Appends events to a file, after its first ``length`` bytes.

    With ``writes=False`` it does nothing: of several processes, rank 0 writes.
    """

    def __init__(self, path: Path, length: int = 0, *, writes: bool = True) -> None:
        self.path, self._writes = path, writes
        if not writes:
            return
        size = path.stat().st_size if path.exists() else 0
        if size < length:
            raise ValueError(
                f"{path} has {size} bytes, but its checkpoint was written after {length}; restore "
                "the file or start in a new folder"
            )
        with writing(path), path.open("ab") as file:
            file.truncate(length)

    def append(self, event: str, values: Mapping[str, object]) -> None:
        if not self._writes:
            return
        # A short-lived handle: nothing is buffered when the process dies.
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")

    @property
    def length(self) -> int:
        return self.path.stat().st_size


def read_ledger(path: Path) -> list[dict[str, object]]:
    """Return all events; a last line cut short by a kill is skipped, other damage raises."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: is this the folder of a run?")
    lines = path.read_bytes().split(b"\n")
    events = []
    for number, line in enumerate(lines[:-1], start=1):  # the last piece is empty or cut short
        try:
            events.append(_event(line))
        except ValueError as error:  # no JSON, no UTF-8, or no event
            raise ValueError(f"{path}, line {number} is damaged: {error}") from None
    return events


def _event(line: bytes) -> dict[str, object]:
    """Read one event; what is read of it elsewhere has the right type."""
    event = json.loads(line)
    check_kind("an event", event, dict)
    check_kind("event", event.get("event"), str)
    if event["event"] == "epoch":
        check_kind("epoch", event.get("epoch"), int)
    for name in FIELDS.keys() & event.keys():
        check_kind(name, event[name], FIELDS[name])
    if "test" in event:
        check_kind("top1", event["test"].get("top1"), float)
    return dict(event)
