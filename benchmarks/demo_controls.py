"""What `alignmixup demo` leaves out: AlignMixup without alignment, crops, more images, noise.

    alignmixup demo --seed N --out demo-N                      for N = 0, 1, 2
    python benchmarks/demo_controls.py controls results/demo.jsonl demo-0 demo-1 demo-2

Trains the controls with seeds 0 to 2 into the folder `controls`, as the demo trains its networks;
scores controls and demos, the demos also against noise; writes all result lines to the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from alignmixup.contracts import Mixer, Result
from alignmixup.demo.setup import LAYER, METHODS, Size, recipe, score, sets_of
from alignmixup.experiments.data_record import Sets
from alignmixup.experiments.load import load_run
from alignmixup.experiments.run import train
from alignmixup.experiments.scoring import evaluate
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.recipes.schema import Recipe
from alignmixup.report.reading import read_results

SEEDS = (0, 1, 2)
PLAIN = {name: METHODS[name] for name in ("no mixing", "input mixup")}
NOISE = ("uniform", "gaussian")


def controls(seed: int) -> Iterator[tuple[str, Recipe, Sets]]:
    """Each control's name, recipe and images; its variant says what differs from the demo."""
    few, many = Size(seed=seed), Size(seed=seed, num_train=4000, epochs=8)
    unaligned = AlignMixup(LAYER, aligned=False)
    yield "unaligned", changed("alignmixup-unaligned", unaligned, few, "demo"), sets_of(few)
    for method, mixer in PLAIN.values():
        crops = changed(method, mixer, few, "demo-crops", pad=4)
        yield f"crops-{method}", crops, sets_of(few)
        yield f"4000-{method}", changed(method, mixer, many, "demo-4000"), sets_of(many)


def changed(method: str, mixer: Mixer, size: Size, variant: str, pad: int = 0) -> Recipe:
    own = recipe(method, mixer, size)
    key = dataclasses.replace(own.key, variant=variant)
    return dataclasses.replace(own, key=key, data=dataclasses.replace(own.data, pad=pad))


def noise(folder: Path) -> list[Result]:
    """Out-of-distribution detection against noise by a network of the demo."""
    run, test = load_run(folder, device="cpu"), sets_of(Size()).test
    if not any(r.settings.get("source") in NOISE for r in read_results([folder])):
        evaluate(run, test, tasks=["ood"], ood=NOISE, device="cpu")
    return list(read_results([folder]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the controls; resumed if it is there")
    parser.add_argument("out", type=Path, help="file of all result lines")
    parser.add_argument("demos", type=Path, nargs="*", help="folders of alignmixup demo")
    args = parser.parse_args()
    lines: list[Result] = []
    for demo in args.demos:
        for run in sorted((demo / "runs").iterdir()):
            lines += noise(run)
    for seed in SEEDS:
        for name, own, sets in controls(seed):
            run = args.folder / f"{name}-{seed}"
            train(own, run, sets=sets, quiet=True)
            lines += score(run, sets)
    command = shlex.join(["python", *sys.argv])
    where = f"CPU, {os.cpu_count()} cores"
    stamped = [line.stamped(hardware=where, command=line.command or command) for line in lines]
    args.out.write_text("".join(line.to_json() + "\n" for line in stamped), encoding="utf-8")


if __name__ == "__main__":
    main()
