"""The test accuracy of a run: measured in training, recorded at the end."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from alignmixup.contracts import ImageSet, Result
from alignmixup.datasets.folder import FileSet
from alignmixup.device import compute_for
from alignmixup.evaluation.forward import Forward
from alignmixup.evaluation.shares import share_of
from alignmixup.evaluation.tasks.accuracy import count_hits
from alignmixup.experiments.batches import eval_batches
from alignmixup.experiments.provenance import origin, provenance
from alignmixup.experiments.run_folder import RESULTS, append_results, whole_lines
from alignmixup.recipes.schema import Recipe
from alignmixup.training import Team, summarize
from alignmixup.training.ledger import LEDGER


class Evaluator:
    """Top-1 on the test set, in the precision of training.

    Each process of a team evaluates its share of the images. All call this together, and all get
    the numbers of the whole set, which one process would get.
    """

    def __init__(
        self,
        recipe: Recipe,
        images: ImageSet | FileSet,
        device: torch.device,
        team: Team | None = None,
    ) -> None:
        self._team = team or Team()
        share: ImageSet | FileSet = share_of(images, self._team)  # type: ignore[type-var]
        self._batches = eval_batches(recipe.data, recipe.train, share, device)
        precision = compute_for(recipe.train, device).precision
        self._amp = torch.bfloat16 if precision == "bf16" else None

    def __call__(self, net: nn.Module) -> dict[str, float]:
        hits = count_hits(Forward(net, amp_dtype=self._amp), self._batches, self._team)
        whole = hits.percentages()
        return {name: value for name, value in whole.items() if name in ("top1", "top5")}


def record_accuracy(recipe: Recipe, folder: Path) -> None:
    """Append best, last and median of the last ten of a complete run, each once.

    Those of a mixer's teacher as well: ``teacher_top1_last`` and so on.
    """
    if not (folder / LEDGER).exists() or not (summary := summarize(folder)).is_complete:
        return
    where = origin(recipe, summary.epochs, folder)
    path = folder / RESULTS
    lines = enumerate(whole_lines(path).splitlines(), start=1)
    known = (Result.from_line(line, f"{path}:{number}") for number, line in lines)
    there = {(result.metric, result.epoch) for result in known}
    teacher = summarize(folder, "test_teacher")
    figures = {
        f"{prefix}top1_{name}": getattr(each, name)
        for prefix, each in (("", summary), ("teacher_", teacher))
        for name in ("median10", "last", "best")
    }
    append_results(
        folder,
        [
            Result("accuracy", metric, value).stamped(**where, **provenance())
            for metric, value in figures.items()
            if value is not None and not {(metric, summary.epochs), (metric, None)} & there
        ],
    )
