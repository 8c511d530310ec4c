"""Results folded into cells: which belong together, and which must not be averaged.

A result's settings are part of what it is, and so are those its network was trained with: results
that differ in them are never averaged. A row names every setting of training in which it differs
from its recipe, and the settings of its evaluation in which the results of one cell differ. Of a
recipe that is not known, rows name the settings of training in which the results of one cell
differ. Of a result's own settings only plain values count: a list or an object there is a curve
that was measured on the way.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from alignmixup.contracts import Result
from alignmixup.report.measures import Measure
from alignmixup.report.names import RecipeName, parse_recipe

__all__ = ["SHORT", "Cells", "Column", "Folded", "RecipeSettings", "Row", "fold"]

# The settings that a recipe of this name trains with, as results record them; None: not known.
RecipeSettings = Callable[[str], Mapping[str, object] | None]
Facts = dict[str, str]

# A setting of training that a result does not name has its default.
DEFAULT = "default"
# The last ten of so few epochs are no plateau: such runs show their last epoch.
SHORT = 30
LAST_EPOCH = "last epoch"
_COLUMN = {"data.name"}  # a column says it


@dataclass(frozen=True, slots=True)
class Column:
    """What a column shows, of which data and network; a source for out-of-distribution images."""

    data: str
    network: str
    source: str
    measure: Measure


@dataclass(frozen=True, slots=True)
class Row:
    """A method, or a variant of it; ``settings`` are the names and values that tell it apart."""

    method: str
    suffix: str
    settings: tuple[tuple[str, str], ...] = ()


Cells = dict[tuple[Row, Column], dict[object, float]]


@dataclass(frozen=True, slots=True)
class Folded:
    """The values of each cell by seed, and how many measurements a newer one has replaced.

    ``usual`` has the settings of training in which rows of recipes that are not known differ, as
    most of them have them: their rows do not name them. ``has_differences`` says whether a row
    differs from a recipe that is known.
    """

    cells: Cells
    num_repeated: int
    usual: Mapping[str, str]
    has_differences: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    """A result in its place, with all that must agree for another to be of the same thing."""

    result: Result
    name: RecipeName
    column: Column
    trained: Facts
    evaluated: Facts
    recipe: Facts | None

    def row(self, usual: Mapping[str, str], split: set[str]) -> Row:
        """Its row, named by what differs in training and what is ``split`` in evaluation."""
        told = self.differences(usual) | {k: v for k, v in self.evaluated.items() if k in split}
        is_short = self.result.metric == "top1_median10" and _is_short(self.result)
        settings = (*sorted(told.items()), *([(LAST_EPOCH, "")] if is_short else []))
        return Row(self.name.method, self.name.suffix, settings)

    def differences(self, usual: Mapping[str, str]) -> Facts:
        """In what it was trained otherwise than its recipe says, or else than is usual."""
        base = usual if self.recipe is None else self.recipe
        names = {*usual} if self.recipe is None else {*self.trained, *self.recipe} - _COLUMN
        facts = {name: self.trained.get(name, DEFAULT) for name in names}
        return {k: v for k, v in facts.items() if v != base.get(k, DEFAULT)}


def fold(
    results: Iterable[Result],
    measures: Sequence[Measure],
    which: str,
    settings: Mapping[str, object],
    ignore: Sequence[str],
    recipe_settings: RecipeSettings,
) -> Folded:
    """Sort the results of these measures into cells; the arguments are those of ``table``."""
    by_name = {(m.task, m.metric.format(which=which)): m for m in measures}
    chosen = [
        _shown(r, which)
        for r in results
        if all(r.settings.get(k) == v for k, v in settings.items())
    ]
    entries = [
        _entry(r, by_name[r.task, r.metric], ignore, recipe_settings)
        for r in chosen
        if r is not None and (r.task, r.metric) in by_name
    ]
    newest = _newest(entries)
    usual = _usual(newest)
    has_differences = any(e.recipe is not None and e.differences(usual) for e in newest)
    return Folded(_cells(newest, usual), len(entries) - len(newest), usual, has_differences)


def _shown(result: Result, which: str) -> Result | None:
    """The result as a table of this accuracy shows it: a short run has no median of ten epochs."""
    if which != "median10" or not _is_short(result):
        return result
    if result.metric == "top1_median10":
        return None
    if result.metric == "top1_last":
        return result.stamped(metric="top1_median10")
    return result


def _is_short(result: Result) -> bool:
    return result.epoch is not None and result.epoch < SHORT


def _entry(
    result: Result, measure: Measure, ignore: Sequence[str], recipe_settings: RecipeSettings
) -> _Entry:
    name = parse_recipe(result.recipe)
    source = str(result.settings.get("source", "")) if result.task == "ood" else ""
    ignored = {*ignore, "source"} if source else set(ignore)
    evaluated = {
        key: value
        for key, value in result.settings.items()
        if not isinstance(value, list | tuple | dict)
    }
    trained, known = dict(result.trained), recipe_settings(result.recipe)
    # Results of before have not recorded how they were trained: their length alone is known.
    recipe = dict(known) if known and trained else {}
    if result.epoch is not None:
        (evaluated if known is None else trained).setdefault("epochs", result.epoch)
        recipe |= {"epochs": known["train.epochs"]} if known else {}
        if trained.get("train.epochs") == result.epoch:  # else it has not been trained to its end
            del trained["train.epochs"]
            recipe.pop("train.epochs", None)
    data, network = name.data, name.network
    if result.task == "detection":  # on other data than the backbone's, by another network
        data = str(result.settings.get("data", data))
        network = str(result.settings.get("network", network))
    return _Entry(
        result,
        name,
        Column(data, network, source, measure),
        _facts(trained, ignored),
        _facts(evaluated, ignored),
        None if known is None else _facts(recipe, ignored),
    )


def _facts(values: Mapping[str, object], ignored: set[str]) -> Facts:
    """Values as text, so that tuples and what JSON makes of them agree."""
    return {k: json.dumps(v, sort_keys=True) for k, v in values.items() if k not in ignored}


def _newest(entries: list[_Entry]) -> list[_Entry]:
    """Keep the newest of repeated measurements: the later date, or else the later line."""
    latest: dict[tuple[object, ...], _Entry] = {}
    for e in sorted(entries, key=lambda entry: entry.result.date):
        facts = tuple(sorted({**e.trained, **e.evaluated}.items()))
        latest[e.name, e.column, e.result.seed, facts] = e
    return list(latest.values())


def _usual(entries: Sequence[_Entry]) -> Facts:
    """The settings of training that differ within a cell, each as most results have it."""
    unknown = [e for e in entries if e.recipe is None]
    split = _split(unknown, lambda entry: entry.trained)
    return {
        key: Counter(e.trained.get(key, DEFAULT) for e in unknown).most_common(1)[0][0]
        for key in split
    }


def _cells(entries: Sequence[_Entry], usual: Mapping[str, str]) -> Cells:
    """The values of each cell by seed; rows are split where settings differ within a cell."""
    split = _split(entries, lambda entry: entry.evaluated)
    cells: Cells = {}
    for e in entries:
        cell = cells.setdefault((e.row(usual, split), e.column), {})
        cell[e.result.seed] = e.column.measure.ours(e.result.value)
    return cells


def _split(entries: Sequence[_Entry], facts: Callable[[_Entry], Facts]) -> set[str]:
    """The settings in which the results of one cell differ."""
    groups: dict[tuple[Column, str, str], list[Facts]] = {}
    for e in entries:
        groups.setdefault((e.column, e.name.method, e.name.suffix), []).append(facts(e))
    return {
        key
        for group in groups.values()
        for key in {k for f in group for k in f}
        if len({f.get(key) for f in group}) > 1
    }
