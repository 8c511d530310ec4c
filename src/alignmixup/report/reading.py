"""Result lines read from disk: what is damaged is an error that says where."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path

from alignmixup.contracts import Result

__all__ = ["read_results"]

LEDGER = "ledger.jsonl"


def read_results(paths: Iterable[str | Path]) -> list[Result]:
    """Read result lines from files, and from all ``results*.jsonl`` below folders.

    A folder without such files is read for its own ``*.jsonl``. A damaged line is an error; a last
    line that was never finished (the writer was stopped) is skipped with a warning, and so is what
    holds no results where several paths are named.
    """
    named = [Path(path) for path in paths]
    # By resolved path, so that a file named twice, or within a named folder, is read once.
    files = {file.resolve(): file for path in named for file in _found(path, len(named) > 1)}
    return [result for file in files.values() for result in _read_file(file)]


def _found(path: Path, among_others: bool) -> list[Path]:
    """The files of results that ``path`` stands for; ``among_others``, what has none is skipped,
    as ``runs/*`` names logs beside the runs, and runs that are not scored yet."""
    if among_others and path.is_file() and (path.suffix != ".jsonl" or path.name == LEDGER):
        warnings.warn(f"{path} is no file of results: skipped", stacklevel=3)
        return []
    try:
        return _result_files(path)
    except FileNotFoundError as error:
        if not among_others or not path.exists():
            raise
        warnings.warn(f"{error}: skipped", stacklevel=3)
        return []


def _result_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; give a run folder or a results file")
    files = sorted(path.rglob("results*.jsonl")) or sorted(
        # The ledger of a run that has no results yet is no file of results.
        file
        for file in path.glob("*.jsonl")
        if file.name != LEDGER
    )
    if not files:
        raise FileNotFoundError(f"{path} holds no results (*.jsonl); evaluate the run first")
    return files


def _read_file(file: Path) -> list[Result]:
    results = []
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            results.append(_read_line(line))
        except (TypeError, ValueError) as error:
            if number == len(lines):  # no line end behind it: the writer was stopped in the middle
                warnings.warn(f"{file}:{number}: skipped an unfinished last line", stacklevel=3)
            else:
                raise ValueError(f"{file}:{number}: not a result line: {error}") from error
    return results


def _read_line(line: bytes) -> Result:
    text = line.decode("utf-8")
    if not isinstance(json.loads(text), dict):
        raise ValueError("expected a JSON object")
    result = Result.from_json(text)
    if isinstance(result.value, bool) or not isinstance(result.value, int | float):
        raise ValueError(f"value must be a number, got {result.value!r}")
    if not isinstance(result.seed, int | None):
        raise ValueError(f"seed must be an integer or null, got {result.seed!r}")
    for name in ("settings", "trained"):
        if not isinstance(getattr(result, name), dict):
            raise ValueError(f"{name} must be an object, got {getattr(result, name)!r}")
    for name in ("task", "metric", "recipe", "date"):
        if not isinstance(getattr(result, name), str):
            raise ValueError(f"{name} must be a string, got {getattr(result, name)!r}")
    return result
