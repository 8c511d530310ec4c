"""Results folded into cells: which belong together, and which must not be averaged.

A result's settings are part of what it is, and so are those its network was trained with: results
that differ in them are never averaged, they make rows of their own that say in what they differ.
Only plain values of a result's own settings count for this: a list or an object there is a curve
that was measured along the way.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from alignmixup.contracts import Result
from alignmixup.report.measures import Measure
from alignmixup.report.names import parse_recipe

__all__ = ["Cells", "Column", "Folded", "Row", "fold"]


@dataclass(frozen=True, slots=True)
class Column:
    """What a column shows, of which data and network; a source for out-of-distribution images."""

    data: str
    network: str
    source: str
    measure: Measure


@dataclass(frozen=True, slots=True)
class Row:
    """A method, or a variant of it."""

    method: str
    suffix: str
    settings: tuple[tuple[str, str], ...] = ()  # those in which results of one cell differ


# A setting of training that a result does not name has its default.
DEFAULT = "default"

Cells = dict[tuple[Row, Column], dict[object, float]]


@dataclass(frozen=True, slots=True)
class Folded:
    """The values of each cell by seed, and how many measurements a newer one has replaced.

    ``usual`` has the settings of training that rows differ in, as most results have them: their
    rows do not name them.
    """

    cells: Cells
    num_repeated: int
    usual: Mapping[str, str]


def fold(
    results: Iterable[Result],
    measures: Sequence[Measure],
    which: str,
    settings: Mapping[str, object],
    ignore: Sequence[str],
) -> Folded:
    """Sort the results of these measures into cells; the arguments are those of ``table``."""
    chosen = _choose(results, measures, which, settings)
    newest = _newest(chosen, ignore)
    cells, usual = _cells(newest, measures, which, ignore)
    return Folded(cells, len(chosen) - len(newest), usual)


def _choose(
    results: Iterable[Result],
    measures: Sequence[Measure],
    which: str,
    settings: Mapping[str, object],
) -> list[Result]:
    wanted = {(m.task, m.metric.format(which=which)) for m in measures}
    return [
        r
        for r in results
        if (r.task, r.metric) in wanted and all(r.settings.get(k) == v for k, v in settings.items())
    ]


def _newest(results: list[Result], ignore: Sequence[str]) -> list[Result]:
    """Keep the newest of repeated measurements: the later date, or else the later line."""
    latest: dict[tuple[object, ...], Result] = {}
    for r in sorted(results, key=lambda r: r.date):
        name = parse_recipe(r.recipe)
        latest[name, r.seed, r.task, r.metric, _facts(r, ignore)] = r
    return list(latest.values())


def _facts(result: Result, ignore: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """What must agree for two results to be of the same thing."""
    facts = dict(result.trained)
    facts |= {k: v for k, v in result.settings.items() if not isinstance(v, list | tuple | dict)}
    if result.epoch is not None:
        facts.setdefault("epochs", result.epoch)
        if facts.get("train.epochs") == result.epoch:  # else it has not been trained to its end
            del facts["train.epochs"]
    return tuple(
        (key, json.dumps(facts[key], sort_keys=True)) for key in sorted(facts) if key not in ignore
    )


def _cells(
    results: list[Result], measures: Sequence[Measure], which: str, ignore: Sequence[str]
) -> tuple[Cells, dict[str, str]]:
    """Sort results into cells by seed, splitting rows where settings differ within a cell."""
    by_name = {(m.task, m.metric.format(which=which)): m for m in measures}
    places = []
    seen: dict[tuple[Column, str, str], list[dict[str, str]]] = {}
    for r in results:
        name = parse_recipe(r.recipe)
        source = str(r.settings.get("source", "")) if r.task == "ood" else ""
        data, network = name.data, name.network
        if r.task == "detection":  # on other data than the backbone's, by another network
            data = str(r.settings.get("data", data))
            network = str(r.settings.get("network", network))
        column = Column(data, network, source, by_name[r.task, r.metric])
        rest = dict(_facts(r, (*ignore, "source") if source else ignore))
        seen.setdefault((column, name.method, name.suffix), []).append(rest)
        places.append((r, name, column, rest))
    split = {
        key
        for group in seen.values()
        for key in {k for s in group for k in s}
        if len({s.get(key) for s in group}) > 1
    }
    of_training = split & {key for r in results for key in r.trained}
    usual = _usual([rest for _, _, _, rest in places], of_training)
    cells: Cells = {}
    for r, name, column, rest in places:
        facts = {**dict.fromkeys(of_training, DEFAULT), **rest}
        told = sorted((k, v) for k, v in facts.items() if k in split and v != usual.get(k))
        cell = cells.setdefault((Row(name.method, name.suffix, tuple(told)), column), {})
        cell[r.seed] = column.measure.ours(r.value)
    return cells, usual


def _usual(facts: Sequence[Mapping[str, str]], keys: Iterable[str]) -> dict[str, str]:
    """The value of each key that most of the results have."""
    return {key: Counter(f.get(key, DEFAULT) for f in facts).most_common(1)[0][0] for key in keys}
