"""Result lines read from disk; a damaged line is an error with its place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

from alignmixup.contracts import Result

LEDGER = "ledger.jsonl"


def read_results(paths: Iterable[str | Path]) -> list[Result]:
    """Read result lines from files, and from all ``results*.jsonl`` below folders.

    A folder without such files is read for its own ``*.jsonl``. An unfinished last line (the writer
    was stopped) is skipped with a warning. So is a path without results among others: ``runs/*``
    names logs beside the runs, and runs that are not scored yet.
    """
    named = [Path(path) for path in paths]
    # By resolved path, so that a file named twice, or within a named folder, is read once.
    files = {file.resolve(): file for path in named for file in _found(path, len(named) > 1)}
    return [result for file in files.values() for result in _read_file(file)]


def _found(path: Path, among_others: bool) -> list[Path]:
    """Return the files of results that ``path`` stands for."""
    if among_others and path.is_file() and (path.suffix != ".jsonl" or path.name == LEDGER):
        warnings.warn(f"{path} is no file of results: skipped", stacklevel=3)
        return []
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; give a run folder or a results file")
    own = (file for file in path.glob("*.jsonl") if file.name != LEDGER)
    files = sorted(path.rglob("results*.jsonl")) or sorted(own)
    if not files:
        message = (
            f"{path} holds no results (*.jsonl): a run has them once it is trained to its end, or "
            "scored by 'alignmixup evaluate'"
        )
        if not among_others:
            raise FileNotFoundError(message)
        warnings.warn(f"{message}: skipped", stacklevel=3)
    return files


def _read_file(file: Path) -> list[Result]:
    results = []
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            results.append(Result.from_line(line, f"{file}:{number}"))
        except ValueError:
            if number < len(lines):
                raise
            # No line end behind it: the writer was stopped in the middle.
            warnings.warn(f"{file}:{number}: skipped an unfinished last line", stacklevel=3)
    return results
