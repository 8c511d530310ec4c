"""Record finished runs in ``results/``: their result lines, and their learning curves.

    PYTHONPATH=src python benchmarks/record.py runs/RUN...
    PYTHONPATH=src python benchmarks/readme_tables.py          # then make the tables of README.md

Result lines are appended to ``results/DATA.jsonl``, by the data set of their key; a line that is
there already is left out, so the same call twice records a run once. The ledger becomes
``results/curves/RUN.csv``. Folders in the commands are shortened to ``runs`` and ``--data`` is left
out: where a run or its data lay says nothing about them.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
COLUMNS = ("epoch", "loss", "lr", "seconds", "top1", "top5")


def record(run: Path, results: Path = RESULTS) -> int:
    """Record one run; return the number of new result lines."""
    if not (run / "results.jsonl").is_file():
        raise ValueError(f"{run} has no results.jsonl: train it to its end first")
    lines = [json.loads(line) for line in _lines(run / "results.jsonl")]
    for line in lines:
        command = re.sub(r" --data[= ]('[^']*'|\S+)", "", line["command"] or "")
        line["command"] = re.sub(r"\S*/runs\b", "runs", command)
    names = {line["key"]["data"] for line in lines}
    if len(names) != 1:
        raise ValueError(f"{run} has results of several data sets: {sorted(names)}")
    target = results / f"{names.pop()}.jsonl"
    known = set(_lines(target)) if target.is_file() else set()
    new = [text for text in map(json.dumps, lines) if text not in known]
    with target.open("a", encoding="utf-8") as file:
        file.writelines(text + "\n" for text in new)
    (results / "curves").mkdir(exist_ok=True)
    with (results / "curves" / f"{run.name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(_curve(run / "ledger.jsonl"))
    return len(new)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _curve(ledger: Path) -> list[list[object]]:
    """Return a row per epoch; accuracies are empty where an epoch was not scored."""
    rows = []
    for event in map(json.loads, _lines(ledger)):
        if event["event"] == "epoch":
            test = event.get("test", {})
            numbers = [f"{event['loss']:.4f}", f"{event['lr']:.6g}", f"{event['seconds']:.4f}"]
            scores = [f"{test[name]:g}" if name in test else "" for name in ("top1", "top5")]
            rows.append([event["epoch"], *numbers, *scores])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    for run in parser.parse_args(arguments).runs:
        print(f"{run}: {record(run)} new result lines")


if __name__ == "__main__":
    main()
