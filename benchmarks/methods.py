"""Milliseconds of a training step of several recipes, prepared side by side and timed one by one.

    python benchmarks/methods.py out.csv cifar100-r18-baseline-fast cifar100-r18-fmix-fast ...
    python benchmarks/methods.py out.csv train.batch_size=256 imagenet-deit-s-baseline ...

Compiling twenty methods one after the other takes longer than timing them. Here each recipe has a
process of its own, which compiles and captures every case and then waits; when all are ready they
time their steps in turn, alone on the GPU. The first recipe is the one that the others are compared
with. RECIPE:SnapMix is the recipe with that mixer and its default settings; NAME=VALUE changes a
setting of the recipes after it.
"""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import alignmixup
from alignmixup.experiments import bench
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.schema import changed

PREPARATION = 300.0  # seconds


def time_all(out: Path, jobs: dict[str, list[str]]) -> None:
    """Prepare all recipes in parallel, time them in turn, append the rows to ``out``."""
    bench.check_rows(out)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        words = [sys.executable, __file__, "--one", folder, str(out)]
        processes = {
            name: subprocess.Popen([*words, name, *changes]) for name, changes in jobs.items()
        }
        end = time.monotonic() + PREPARATION
        while time.monotonic() < end and not all(
            (place / name).exists() or process.poll() is not None
            for name, process in processes.items()
        ):
            time.sleep(0.5)
        (place / "go").touch()
        failed = [name for name, process in processes.items() if process.wait()]
    _print(out, [name for name in jobs if name not in failed])
    if failed:
        raise SystemExit(f"methods: no time for {', '.join(failed)}")


def time_one(place: Path, out: Path, name: str, settings: list[str]) -> None:
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
    recipe, _, mixer = name.partition(":")
    changes: dict[str, object] = {
        key: json.loads(value) for key, value in (s.split("=") for s in settings)
    }
    found = changed(find_recipe(recipe), changes)
    if mixer:
        found = dataclasses.replace(found, mixer=getattr(alignmixup, mixer)())
    times = bench.time_recipe(found, repeats=5 if changes else bench.REPEATS)
    bench.write_rows(out, [dataclasses.replace(times, recipe=name)])
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
        folder, file, name, *words = sys.argv[2:]
        time_one(Path(folder), Path(file), name, words)
    else:
        file, *words = sys.argv[1:]
        jobs: dict[str, list[str]] = {}
        changes: list[str] = []
        for word in words:
            if "=" in word:
                changes.append(word)
            else:
                jobs[word] = list(changes)
        time_all(Path(file), jobs)
