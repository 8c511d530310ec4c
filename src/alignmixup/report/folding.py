"""Results folded into cells: which are averaged, and which must not be.

Results that differ in a setting of their evaluation, or of the training of their network, are never
averaged. A row names every training setting in which it differs from its recipe, and the evaluation
settings, paths of data and sources of plugins in which the results of one cell differ. If the
recipe is not known, rows name the training settings in which the results of one cell differ. Batch
statistics that are not those of training are named in any case. Of the evaluation settings only
plain values count: a list or an object is a measured curve.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from alignmixup.contracts import RecipeKey, Result
from alignmixup.report.measures import Measure

# The settings that the recipe of a key trains with, as results record them; None: not known.
RecipeSettings = Callable[[RecipeKey], Mapping[str, object] | None]
Facts = dict[str, str]

# A setting of training that a result does not name has its default.
DEFAULT = "default"
# Among the settings of training: of which images batch norm has statistics, if not of training's.
STATISTICS = "statistics"
# Runs of fewer epochs have no plateau: their last epoch is shown.
SHORT = 30
LAST_EPOCH = "last epoch"
# Settings that do not separate results: the seed of an attack's random start, a note, the checksum
# of a style network that each run trains for itself, the spread of a time.
IGNORED = ("seed", "note", "style_weights", "p20", "p80")
_IN_KEY = {"data.name", "data.limit"}  # shown as column, or as label of the variant
# What the accuracy of an epoch does not record, and that of an evaluation does.
_OF_SCORING = {"num_images", "num_classes", "amp_dtype"}


@dataclass(frozen=True, slots=True)
class Column:
    """Data, network and measure of a column; the source of out-of-distribution images."""

    data: str
    network: str
    source: str
    measure: Measure


@dataclass(frozen=True, slots=True)
class Row:
    """A method, the labels of its variant, and the settings in which it differs from its recipe."""

    method: str
    labels: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()


Cells = dict[tuple[Row, Column], dict[int | None, float]]


@dataclass(frozen=True, slots=True)
class Folded:
    """The values of each cell by seed, and how many measurements a newer one has replaced.

    ``usual`` has the training settings in which rows of unknown recipes differ, with their most
    common values, which rows do not name. ``has_differences``: a row differs from its recipe.
    """

    cells: Cells
    num_repeated: int
    usual: Mapping[str, str]
    has_differences: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    """A result in its place, with all that must be equal in results that are averaged."""

    result: Result
    key: RecipeKey
    column: Column
    trained: Facts
    evaluated: Facts
    recipe: Facts | None

    def row(self, usual: Mapping[str, str], split: set[str]) -> Row:
        """Return its row, with what differs in training and what is ``split`` in evaluation."""
        named = self.differences(usual) | {k: v for k, v in self.evaluated.items() if k in split}
        is_median = self.result.metric == "top1_median10"
        is_last = is_median and (_is_short(self.result) or has_clean_statistics(self.result))
        settings = (*sorted(named.items()), *([(LAST_EPOCH, "")] if is_last else []))
        return Row(self.key.method, self.key.labels, settings)

    def differences(self, usual: Mapping[str, str]) -> Facts:
        """Return the training settings that are not those of its recipe, or not the usual ones."""
        base = usual if self.recipe is None else self.recipe
        names = {*usual} if self.recipe is None else {*self.trained, *self.recipe} - _IN_KEY
        names |= {STATISTICS} & {*self.trained}
        facts = {name: self.trained.get(name, DEFAULT) for name in names}
        return {k: v for k, v in facts.items() if v != base.get(k, DEFAULT)}


def fold(
    results: Iterable[Result],
    measures: Sequence[Measure],
    which: str,
    ignore: Sequence[str],
    recipe_settings: RecipeSettings,
) -> Folded:
    """Sort the results of these measures into cells; settings to ``ignore`` do not split them."""
    by_name = {(m.task, m.metric.format(which=which)): m for m in measures}
    entries = [
        _entry(r, by_name[r.task, r.metric], ignore, recipe_settings)
        for r in (_shown(result, which) for result in results)
        if r is not None and (r.task, r.metric) in by_name
    ]
    newest = _newest(entries)
    usual = _usual(newest)
    has_differences = any(e.recipe is not None and e.differences(usual) for e in newest)
    return Folded(_cells(newest, usual), len(entries) - len(newest), usual, has_differences)


def differences(result: Result, recipe_settings: RecipeSettings) -> Facts:
    """Return the settings in which the run of a result differs from its recipe, but its length.

    Where the recipe is not registered, its batch statistics alone are known to differ.
    """
    entry = _entry(result, Measure("", ""), ("style_weights", "epochs"), recipe_settings)
    return dict(sorted(entry.differences({}).items()))


def has_clean_statistics(result: Result) -> bool:
    """Return whether its network has statistics of batch norm from images without mixing."""
    return result.trained.get(STATISTICS) == "clean"


def _shown(result: Result, which: str) -> Result | None:
    """Return the result as this table shows it; the last epoch in place of a short run's median.

    With clean statistics a network has no history: it is scored once, after its last epoch.
    """
    if has_clean_statistics(result) and (result.task, result.metric) == ("accuracy", "top1"):
        kept = {k: v for k, v in result.settings.items() if k not in _OF_SCORING}
        return None if which == "best" else result.stamped(metric=f"top1_{which}", settings=kept)
    if which != "median10" or not _is_short(result):
        return result
    if result.metric == "top1_median10":
        return None
    if result.metric == "top1_last":
        return result.stamped(metric="top1_median10")
    return result


def _is_short(result: Result) -> bool:
    return result.epoch is not None and result.epoch < SHORT


# What "auto" may choose on a device.
CHOSEN = {"train.precision": ("bf16", "float32"), "train.channels_last": (True,)}


def place_of(result: Result) -> tuple[str, str, str]:
    """Return data and network of a result, and the source of its out-of-distribution images.

    Raises:
        ValueError: If the result has no recipe key.
    """
    key, settings = result.key, result.settings
    if key is None:
        raise ValueError(
            f"the result {result.task} {result.metric} = {result.value} has no recipe key; add one "
            "with result.stamped(key=RecipeKey(data, network, method))"
        )
    # Those of a detector, not of its backbone.
    known = settings if result.task == "detection" else {}
    data, network = known.get("data", key.data), known.get("network", key.network)
    source = settings.get("source", "") if result.task == "ood" else ""
    return str(data), str(network), str(source)


def _entry(
    result: Result, measure: Measure, ignore: Sequence[str], recipe_settings: RecipeSettings
) -> _Entry:
    data, network, source = place_of(result)
    assert result.key is not None  # checked by place_of
    key = result.key
    ignored = {*ignore, "source"} if source else set(ignore)
    evaluated = {
        key: value
        for key, value in result.settings.items()
        if not isinstance(value, list | tuple | dict)
    }
    if result.task == "cost":  # a time is that of a machine
        evaluated["hardware"] = result.hardware
    trained, known = dict(result.trained), recipe_settings(result.base or key)
    if trained.get("data.name", key.data) != key.data:  # paths that end alike share a key
        evaluated["data.name"] = trained.pop("data.name")
    if "plugins" in trained:  # which source; no difference from a recipe
        evaluated["plugins"] = trained.pop("plugins")
    if known is not None:  # what "auto" chose is no difference from the recipe
        auto = {name for name, values in CHOSEN.items() if trained.get(name) in values}
        trained = {
            name: value for name, value in trained.items() if name not in auto - known.keys()
        }
    # Old results have not recorded how they were trained: their length alone is known.
    recipe = dict(known) if known and trained else {}
    if result.epoch is not None:
        (evaluated if known is None else trained).setdefault("epochs", result.epoch)
        recipe |= {"epochs": known["train.epochs"]} if known else {}
        if trained.get("train.epochs") == result.epoch:  # else it has not been trained to its end
            del trained["train.epochs"]
            recipe.pop("train.epochs", None)
    return _Entry(
        result,
        key,
        Column(data, network, source, measure),
        _facts(trained, ignored),
        _facts(evaluated, ignored),
        None if known is None else _facts(recipe, ignored),
    )


def _facts(values: Mapping[str, object], ignored: set[str]) -> Facts:
    """Values as text, so that tuples and what JSON makes of them agree."""
    return {
        k: json.dumps(v, sort_keys=True, ensure_ascii=False)
        for k, v in values.items()
        if k not in ignored
    }


def _newest(entries: list[_Entry]) -> list[_Entry]:
    """Keep the newest of repeated measurements: the later date, or else the later line."""
    latest: dict[tuple[object, ...], _Entry] = {}
    for e in sorted(entries, key=lambda entry: entry.result.date):
        facts = tuple(sorted({**e.trained, **e.evaluated}.items()))
        latest[e.key, e.column, e.result.seed, facts] = e
    return list(latest.values())


def _usual(entries: Sequence[_Entry]) -> Facts:
    """Return the training settings that differ within a cell, with their most common values."""
    unknown = [e for e in entries if e.recipe is None]
    split = _split(unknown, lambda entry: entry.trained) - {STATISTICS}
    return {
        key: Counter(e.trained.get(key, DEFAULT) for e in unknown).most_common(1)[0][0]
        for key in split
    }


def _cells(entries: Sequence[_Entry], usual: Mapping[str, str]) -> Cells:
    """Return the values of each cell by seed; rows are split where settings differ in a cell."""
    split = _split(entries, lambda entry: entry.evaluated)
    cells: Cells = {}
    for e in entries:
        cell = cells.setdefault((e.row(usual, split), e.column), {})
        cell[e.result.seed] = e.column.measure.ours(e.result.value)
    return cells


def _split(entries: Sequence[_Entry], facts: Callable[[_Entry], Facts]) -> set[str]:
    """Return the settings in which the results of one cell differ."""
    groups: dict[tuple[Column, str, str], list[Facts]] = {}
    for e in entries:
        groups.setdefault((e.column, e.key.method, e.key.variant), []).append(facts(e))
    return {
        key
        for group in groups.values()
        for key in {k for f in group for k in f}
        if len({f.get(key) for f in group}) > 1
    }
