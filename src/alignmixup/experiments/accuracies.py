"""The test accuracy of a run: measured in training, recorded at the end."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from alignmixup.contracts import ImageSet, Result
from alignmixup.datasets.folder import FileSet
from alignmixup.device import compute_for
from alignmixup.evaluation.tasks.accuracy import accuracy
from alignmixup.experiments.batches import eval_batches
from alignmixup.experiments.provenance import origin, provenance
from alignmixup.experiments.run_folder import RESULTS, append_results, whole_lines
from alignmixup.recipes.schema import Recipe
from alignmixup.training import summarize
from alignmixup.training.ledger import LEDGER


class Evaluator:
    """Top-1 on the test set, in the precision of training."""

    def __init__(self, recipe: Recipe, images: ImageSet | FileSet, device: torch.device) -> None:
        self._batches = eval_batches(recipe.data, recipe.train, images, device)
        precision = compute_for(recipe.train, device).precision
        self._amp = torch.bfloat16 if precision == "bf16" else None

    def __call__(self, net: nn.Module) -> dict[str, float]:
        results = accuracy(net, self._batches, amp_dtype=self._amp)
        return {r.metric: r.value for r in results if r.metric in ("top1", "top5")}


def record_accuracy(recipe: Recipe, folder: Path) -> None:
    """Append best, last and median of the last ten of a complete run, each once."""
    if not (folder / LEDGER).exists() or not (summary := summarize(folder)).is_complete:
        return
    where = origin(recipe, summary.epochs, folder)
    lines = map(json.loads, whole_lines(folder / RESULTS).splitlines())
    there = {(line.get("metric"), line.get("epoch")) for line in lines}
    figures = {
        "top1_median10": summary.median10,
        "top1_last": summary.last,
        "top1_best": summary.best,
    }
    append_results(
        folder,
        [
            Result("accuracy", metric, value).stamped(**where, **provenance())
            for metric, value in figures.items()
            if value is not None and not {(metric, summary.epochs), (metric, None)} & there
        ],
    )
