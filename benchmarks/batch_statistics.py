"""How much of a run's scores depends on the last draws of its mixer, by its batch statistics.

    PYTHONPATH=src python benchmarks/batch_statistics.py runs/RUN --data DIR

Batch norm evaluates with running statistics: of the last 20 or so steps, at its momentum of 0.1.
If a mixer draws one case per step, these are statistics of clean images, of mixed images, or of
both, as it happens. With the weights fixed, this estimates the statistics anew and scores the run:

    as saved             what the run ended with
    drawn again          from ``--steps`` steps of the mixer, several times with other draws
    CASE alone           from steps of that case only
    without mixing       from clean images

The scores are added to the results of the run, as the task ``batch_statistics``.
"""

from __future__ import annotations

import argparse
import copy
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

import alignmixup as am
from alignmixup.contracts import ImageSet, Mixer
from alignmixup.datasets import DeviceLoader
from alignmixup.experiments.batches import load_split, train_batches
from alignmixup.experiments.provenance import origin, provenance
from alignmixup.experiments.run_folder import append_results
from alignmixup.results import Result


@torch.no_grad()
def estimated(
    net: nn.Module, mixer: Mixer, case: str, batches: DeviceLoader, steps: int, seed: int
) -> nn.Module:
    """Return a copy of the network with statistics of ``steps`` draws; of one case, if named."""
    net, rng = copy.deepcopy(net), torch.Generator().manual_seed(seed)
    net.train()
    for _, (x, y) in zip(range(steps), batches.epoch(seed), strict=False):
        draw = mixer.draw(len(x), rng)
        while case and draw.case != case:
            draw = mixer.draw(len(x), rng)
        mixer.apply(net, x, y, draw.to(x.device))
    return net.eval()


def scores(net: nn.Module, images: ImageSet) -> tuple[float, float]:
    """Return top-1 accuracy and ECE, in percent."""
    found = am.evaluate(net, images, tasks=["accuracy", "calibration"])
    return found.value("accuracy", "top1"), found.value("calibration", "ece")


def measured(
    run: am.Run, root: Path | None, steps: int, draws: int
) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield each kind of statistics with the scores of its draws."""
    mixer, device = run.recipe.mixer, next(run.model.parameters()).device
    train, test = (load_split(run.recipe.data, split, root) for split in ("train", "test"))
    batches = train_batches(run.recipe.data, run.recipe.train, train, device)
    yield "as saved", [scores(run.model, test)]
    ways = [("drawn again", mixer, ""), *((f"{c} alone", mixer, c) for c in mixer.cases)]
    for name, by, case in [*ways, ("without mixing", am.NoMix(), "")]:
        seeds = range(draws)
        nets = (estimated(run.model, by, case, batches, steps, seed) for seed in seeds)
        yield name, [scores(net, test) for net in nets]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--draws", type=int, default=5, help="repetitions with other draws")
    chosen = parser.parse_args(arguments)
    run = am.load_run(chosen.run)
    found = []
    print("statistics          top-1 and ECE (%), for each draw")
    for name, pairs in measured(run, chosen.data, chosen.steps, chosen.draws):
        print(
            f"{name:20}" + ",  ".join("{:.2f} {:.2f}".format(*pair) for pair in pairs), flush=True
        )
        for draw, pair in enumerate(pairs):
            settings = {"statistics": name, "steps": chosen.steps, "draw": draw}
            for metric, value in zip(("top1", "ece"), pair, strict=True):
                found.append(Result("batch_statistics", metric, value, settings))
    device = next(run.model.parameters()).device
    words = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "benchmarks/batch_statistics.py", *words])
    where = {**origin(run.recipe, run.epoch, chosen.run), **provenance(device), "command": command}
    append_results(chosen.run, [result.stamped(**where) for result in found])


if __name__ == "__main__":
    main()
