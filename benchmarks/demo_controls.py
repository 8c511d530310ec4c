"""The demo beside what it leaves out: no alignment, crops, more images, noise. One row a network.

    alignmixup demo --seed N --out demo-N                      for N = 0, 1, 2
    python benchmarks/demo_controls.py controls benchmarks/cpu_demo.csv demo-0 demo-1 demo-2

Trains the controls with seeds 0 to 2 into the folder `controls`, as the demo trains its networks,
scores controls and demos, the demos also against noise, and writes the rows of all.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from alignmixup.contracts import Mixer, Result
from alignmixup.demo.setup import LAYER, METHODS, UNSEEN, Size, recipe, score, sets_of
from alignmixup.experiments.data_record import Sets
from alignmixup.experiments.load import load_run
from alignmixup.experiments.run import train
from alignmixup.experiments.scoring import evaluate
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.recipes.schema import Recipe
from alignmixup.report.reading import read_results

SEEDS = (0, 1, 2)
PLAIN = [METHODS[name] for name in ("no mixing", "input mixup")]
NOISE = ("uniform", "gaussian")
# A column of percentages: its task, metric and, for outliers, their source.
COLUMNS = {
    "accuracy": ("accuracy", "top1", None),
    "ece": ("calibration", "ece", None),
    "fgsm_error": ("fgsm", "top1_error", None),
    "auroc_unseen": ("ood", "auroc", UNSEEN),
    **{f"auroc_{noise}": ("ood", "auroc", noise) for noise in NOISE},
}


def controls(seed: int) -> Iterator[tuple[str, Recipe, Sets]]:
    """Each control's name, recipe and images; its variant says what differs from the demo."""
    few, many = Size(seed=seed), Size(seed=seed, num_train=4000, epochs=8)
    unaligned = AlignMixup(LAYER, aligned=False)
    yield "unaligned", changed("alignmixup-unaligned", unaligned, few, "demo"), sets_of(few)
    for method, mixer in PLAIN:
        crops = changed(method, mixer, few, "demo-crops", pad=4)
        yield f"crops-{method}", crops, sets_of(few)
        yield f"4000-{method}", changed(method, mixer, many, "demo-4000"), sets_of(many)


def changed(method: str, mixer: Mixer, size: Size, variant: str, pad: int = 0) -> Recipe:
    own = recipe(method, mixer, size)
    key = dataclasses.replace(own.key, variant=variant)
    return dataclasses.replace(own, key=key, data=dataclasses.replace(own.data, pad=pad))


def with_noise(folder: Path) -> list[Result]:
    """The results of a network of the demo, with outliers of noise."""
    if not any(r.settings.get("source") in NOISE for r in read_results([folder])):
        run = load_run(folder, device="cpu")
        evaluate(run, sets_of(Size()).test, tasks=["ood"], ood=NOISE, device="cpu")
    return read_results([folder])


def row(results: list[Result]) -> dict[str, object]:
    """What is in the results of one network, and where they come from."""
    first = results[0]
    assert first.key is not None
    values = {(r.task, r.metric, r.settings.get("source")): f"{r.value:.1f}" for r in results}
    return {
        "variant": first.key.variant,
        "method": first.key.method,
        "seed": first.seed,
        "epochs": first.epoch,
        **{name: values.get(column, "") for name, column in COLUMNS.items()},
        "hardware": f"CPU, {os.cpu_count()} cores",
        "version": first.version,
        "commit": first.commit,
        "date": first.date,
        "command": first.command or shlex.join(["python", *sys.argv]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the controls; resumed if it is there")
    parser.add_argument("out", type=Path, help="CSV file of all rows")
    parser.add_argument("demos", type=Path, nargs="*", help="folders of alignmixup demo")
    args = parser.parse_args()
    rows = [row(with_noise(run)) for demo in args.demos for run in sorted(demo.glob("runs/*"))]
    for seed in SEEDS:
        for name, own, sets in controls(seed):
            run = args.folder / f"{name}-{seed}"
            train(own, run, sets=sets, quiet=True)
            rows.append(row(score(run, sets)))
    with args.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
