"""The runs behind result lines: what each is called, how long it was trained, with what settings.

Lines of one run have its key, seed, epoch and training settings. A **smoke test** is a run far
shorter than its recipe: fewer than 30 epochs, or less than a tenth of the recipe's. A run whose
recipe is not registered has the length its author chose and is none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from alignmixup.contracts import RecipeKey, Result
from alignmixup.report import others, paper
from alignmixup.report.folding import SHORT, STATISTICS, RecipeSettings, differences

# What does not set a run apart: checksums of a network that each run trains for itself.
_NOISE = {"style_weights"}


@dataclass(frozen=True)
class RunInfo:
    """One trained network: its identity, its length, its settings and its results.

    ``differences`` are the settings in which it differs from its recipe.
    """

    key: RecipeKey
    seed: int | None
    epochs: int | None
    is_smoke: bool
    trained: Mapping[str, object]
    differences: Mapping[str, str]
    results: tuple[Result, ...]
    number: int = 1  # of several runs that are otherwise called the same

    @property
    def title(self) -> str:
        """Its full name, with data, network, length and seed."""
        facts = self.facts()
        parts = (self.name, facts["epochs"], facts["seed"], facts["number"])
        return ", ".join(part for part in parts if part)

    @property
    def name(self) -> str:
        """The name of its recipe, and its batch statistics if they are not those of training."""
        statistics = self.trained.get(STATISTICS)
        return f"{self.key.name} ({statistics} statistics)" if statistics else self.key.name

    @property
    def length(self) -> str:
        """How long it was trained, in words; empty if that is not known."""
        return "" if self.epochs is None else f"{self.epochs:,} epoch{'s' * (self.epochs != 1)}"

    def facts(self) -> dict[str, str]:
        """What may tell it apart from other runs on the same data, in words."""
        words = [paper.LABELS.get(label, label) for label in self.key.labels]
        return {
            "epochs": self.length,
            "variant": ", ".join(words),
            **{k: f"{k}={v.strip(chr(34))}" for k, v in self.differences.items()},
            "seed": "" if self.seed is None else f"seed {self.seed}",
            "number": "" if self.number == 1 else f"#{self.number}",
        }

    @property
    def date(self) -> str:
        return max(result.date for result in self.results)

    @property
    def top1(self) -> float | None:
        """Its accuracy: the median of the last ten epochs, else the last, else as scored.

        Some short runs have recorded a median of their whole history, which no table shows.
        """
        is_short = self.epochs is not None and self.epochs < SHORT
        medians = () if is_short else ("top1_median10",)
        return self.value("accuracy", *medians, "top1_last", "top1")

    def value(self, task: str, *metrics: str) -> float | None:
        """Return the newest value of the first of these metrics that it has."""
        found = self.newest(task, *metrics)
        return None if found is None else found.value

    def newest(self, task: str, *metrics: str) -> Result | None:
        """Return the newest result of the first of these metrics that it has."""
        for metric in metrics:
            if found := self.of(task, metric):
                return latest(found)
        return None

    def of(self, task: str, metric: str) -> list[Result]:
        """Return its results of one metric; those on images that were passed if it has no others.

        Charts and lists of runs do not name the images. Tables do, and have a row for each.
        """
        found = [r for r in self.results if (r.task, r.metric) == (task, metric)]
        return [r for r in found if "images" not in r.settings] or found


def latest(results: Sequence[Result]) -> Result:
    """Return the result of the latest date; of equal dates the last line, as tables do."""
    return max(reversed(results), key=lambda r: r.date)


def method_name(method: str) -> str:
    """Return the published name of a method, or its own."""
    return others.NAMES.get(method, method)


def place_name(data: str, network: str) -> str:
    """Return the paper's names of a data set and a network, or their own."""
    return f"{paper.DATA.get(data, data)}, {paper.NETWORKS.get(network, network)}"


def source_name(source: str) -> str:
    """Return the paper's name of a source of out-of-distribution images, or its own."""
    return paper.SOURCES.get(source) or paper.DATA.get(source, source)


def short_labels(runs: Sequence[RunInfo]) -> list[str]:
    """Name runs for one chart: the method, and whatever else is not the same in all of them."""
    facts = [run.facts() for run in runs]
    names = list(dict.fromkeys(name for of_run in facts for name in of_run))
    varying = [name for name in names if len({of_run.get(name, "") for of_run in facts}) > 1]
    return [
        ", ".join([method_name(run.key.method), *(f[n] for n in varying if f.get(n))])
        for run, f in zip(runs, facts, strict=True)
    ]


def planned_epochs(result: Result, recipe_settings: RecipeSettings) -> int | None:
    """Return the epochs of the result's recipe, if it is registered."""
    key = result.base or result.key
    known = None if key is None else recipe_settings(key)
    epochs = (known or {}).get("train.epochs")
    return epochs if isinstance(epochs, int) else None


def is_smoke_test(epochs: int | None, of_recipe: int | None) -> bool:
    """Return whether a run of so many epochs is far shorter than its recipe."""
    if epochs is None or of_recipe is None:
        return False
    return epochs < min(of_recipe, max(SHORT, of_recipe / 10))


def smoke_filter(recipe_settings: RecipeSettings) -> Callable[[Result], bool]:
    """Return a function that tells whether a result is that of a smoke test."""
    known = cache(recipe_settings)
    return lambda result: is_smoke_test(result.epoch, planned_epochs(result, known))


def runs_of(results: Iterable[Result], recipe_settings: RecipeSettings) -> list[RunInfo]:
    """Sort results by the run that they measure, in the order of the paper's tables."""
    known = cache(recipe_settings)
    is_smoke = smoke_filter(known)
    groups: dict[str, list[Result]] = {}
    for result in results:
        trained = {k: v for k, v in result.trained.items() if k not in _NOISE}
        own = [str(result.key), result.seed, result.epoch, trained]
        groups.setdefault(json.dumps(own, sort_keys=True), []).append(result)
    runs = []
    for group in groups.values():
        first = group[0]
        if first.key is None:
            continue
        runs.append(
            RunInfo(
                first.key,
                first.seed,
                first.epoch,
                is_smoke(first),
                first.trained,
                differences(first, known),
                tuple(group),
            )
        )
    return _numbered(sorted(runs, key=_order))


def _order(run: RunInfo) -> tuple[object, ...]:
    key = run.key
    names = (key.data, paper.DATA), (key.network, paper.NETWORKS), (key.method, others.NAMES)
    where = [paper.order(name, known) for name, known in names]
    return (*where, run.is_smoke, -(run.epochs or 0), key.variant, run.seed or 0)


def _numbered(runs: Sequence[RunInfo]) -> list[RunInfo]:
    counts: dict[tuple[str, str], int] = {}
    numbered = []
    for run in runs:
        name = (run.key.name, json.dumps(run.facts()))
        counts[name] = counts.get(name, 0) + 1
        numbered.append(replace(run, number=counts[name]))
    return numbered
