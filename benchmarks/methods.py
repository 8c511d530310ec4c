"""Milliseconds of a training step of several recipes, prepared side by side and timed one by one.

    python benchmarks/methods.py out.csv cifar100-r18-baseline-fast cifar100-r18-fmix-fast ...

Compiling twenty methods one after the other takes longer than timing them. Here each recipe has a
process of its own, which compiles and captures every case and then waits; when all are ready they
time their steps in turn, alone on the GPU. The first recipe is the one that the others are compared
with.
"""

from __future__ import annotations

import csv
import fcntl
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from alignmixup.experiments import bench

PREPARATION = 300.0  # seconds


def time_all(out: Path, names: list[str]) -> None:
    """Prepare all recipes in parallel, time them in turn, append the rows to ``out``."""
    bench.check_rows(out)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        words = [sys.executable, __file__, "--one", folder, str(out)]
        processes = {name: subprocess.Popen([*words, name]) for name in names}
        end = time.monotonic() + PREPARATION
        while time.monotonic() < end and not all(
            (place / name).exists() or process.poll() is not None
            for name, process in processes.items()
        ):
            time.sleep(0.5)
        (place / "go").touch()
        failed = [name for name, process in processes.items() if process.wait()]
    if failed:
        raise SystemExit(f"methods: no time for {', '.join(failed)}")
    _print(out, names)


def time_one(place: Path, out: Path, name: str) -> None:
    """Time one recipe; between the last warm-up step and the first timed one it waits its turn."""
    lock = (place / "lock").open("w")
    timed = bench.time_calls

    def in_turn(*args: object, **kwargs: object) -> list[float]:
        if not lock.closed and not (place / name).exists():
            (place / name).touch()
            while not (place / "go").exists():
                time.sleep(0.2)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return timed(*args, **kwargs)  # type: ignore[arg-type]

    bench.time_calls = in_turn  # type: ignore[assignment]
    bench.write_rows(out, bench.bench([name]))
    lock.close()


def _print(out: Path, names: list[str]) -> None:
    means = dict.fromkeys(names, 0.0)
    with out.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["recipe"] in means:
                means[row["recipe"]] += float(row["probability"]) * float(row["p50"])
    for name, mean in means.items():
        print(f"{name:<45} {mean:7.3f} ms  {mean / means[names[0]]:.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        time_one(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        time_all(Path(sys.argv[1]), sys.argv[2:])
