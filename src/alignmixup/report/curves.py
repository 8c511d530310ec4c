"""Learning curves on disk: the ledgers of runs, and CSV files with ``epoch`` and ``top1``."""

from __future__ import annotations

import csv
import json
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alignmixup.contracts import RecipeKey, Result
from alignmixup.report.authors_logs import LOGS
from alignmixup.report.reading import LEDGER
from alignmixup.report.runs import method_name

MAX_POINTS = 250  # of one curve on the page


@dataclass(frozen=True)
class Curve:
    """Test accuracy in percent by epoch."""

    label: str
    method: str
    data: str
    network: str
    points: tuple[tuple[int, float], ...]
    is_published: bool = False


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of runs at or below the paths, in order, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        for file in sorted(path.rglob("run.json")) if path.is_dir() else []:
            found.setdefault(file.parent.resolve(), file.parent)
    return list(found.values())


def read_curves(paths: Sequence[Path], results: Sequence[Result]) -> list[Curve]:
    """Read every curve at or below the paths, and the authors' beside those of their setting.

    A CSV file belongs to the recipe whose name its own name begins with.
    """
    curves = [curve for folder in run_folders(paths) if (curve := _of_run(folder)) is not None]
    keys = {result.key.name: result.key for result in results if result.key is not None}
    tables = (file for path in paths if path.is_dir() for file in sorted(path.rglob("*.csv")))
    for file in {file.resolve(): file for file in tables}.values():
        curves += [curve] if (curve := _of_csv(file, keys)) is not None else []
    places = {(curve.data, curve.network) for curve in curves}
    for place, points in LOGS.items():
        if place in places:
            curves.append(Curve("authors' log", "alignmixup", *place, tuple(points), True))
    return curves


def _of_run(folder: Path) -> Curve | None:
    """Read the curve of a run from its ledger; None where nothing was evaluated yet."""
    known = _key(folder / "run.json")
    ledger = folder / LEDGER
    if known is None or not ledger.exists():
        return None
    points = []
    for line in ledger.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # the writer was stopped in the middle of it
            continue
        if event.get("event") == "epoch" and "top1" in event.get("test", {}):
            points.append((int(event["epoch"]), float(event["test"]["top1"])))
    if not points:
        return None
    label = f"{method_name(known.method)} ({folder.name})"
    return Curve(label, known.method, known.data, known.network, _thinned(points))


def _of_csv(file: Path, keys: dict[str, RecipeKey]) -> Curve | None:
    names = [name for name in keys if file.stem.startswith(name)]
    if not names or not (points := _csv_points(file)):
        return None
    name = max(names, key=len)
    rest = file.stem[len(name) :].strip("-")
    words = ", ".join(word for word in (keys[name].variant, rest) if word)
    label = f"{method_name(keys[name].method)} ({words})"
    key = keys[name]
    return Curve(label, key.method, key.data, key.network, _thinned(points))


def _csv_points(file: Path) -> list[tuple[int, float]]:
    """Read the epochs that were scored; none of a table of other columns or a damaged one."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = csv.DictReader(lines)
            if not {"epoch", "top1"} <= {*(rows.fieldnames or ())}:
                return []
            points = [(int(row["epoch"]), float(row["top1"])) for row in rows if row["top1"]]
        if not all(math.isfinite(top1) for _, top1 in points):
            raise ValueError("a top1 is not finite")
    except (OSError, ValueError, TypeError, csv.Error) as error:
        warnings.warn(f"{file} is damaged ({error}): its curve is left out", stacklevel=4)
        return []
    return points


def _thinned(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Keep at most ``MAX_POINTS``, evenly spaced, the last one among them."""
    step = -(-len(points) // MAX_POINTS)
    return tuple(points[::-1][::step][::-1])


def _key(path: Path) -> RecipeKey | None:
    """Read the key of a run; one of an older version has the names of its parts alone."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        names = {
            "data.name": record.get("data", {}).get("name", "unknown"),
            "net.name": record.get("net", {}).get("name", "unknown"),
            "mixer": record.get("mixer", {}).get("kind", "unknown"),
        }
        return RecipeKey.from_record(record, names, str(record.get("name", "")))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        warnings.warn(f"{path} is damaged ({error}): its curve is left out", stacklevel=4)
        return None
