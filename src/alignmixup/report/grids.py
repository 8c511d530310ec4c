"""Results as the grids that people read: one per kind of table, data set and network.

A row is a method with its variant, its length in epochs and, for out-of-distribution detection, the
source of the images; a column is a measure. Runs of different length are different rows, and each
row states its length. What the paper prints stands beside each cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from alignmixup.contracts import RecipeKey, Result
from alignmixup.report import others, paper
from alignmixup.report.folding import IGNORED, LAST_EPOCH, RecipeSettings, Row, fold
from alignmixup.report.measures import ACCURACIES, KINDS, Measure
from alignmixup.report.runs import is_smoke_test, method_name, place_name, planned_epochs
from alignmixup.report.statistics import Comparison, Spread, compare, spread


@dataclass(frozen=True)
class Cell:
    """Our values by seed, None if it is not recorded, and the published value; both optional."""

    seeds: Mapping[int | None, float]
    published: float | None

    @property
    def spread(self) -> Spread | None:
        """Mean and deviation over the seeds, if there are values."""
        return spread(self.seeds) if self.seeds else None


@dataclass(frozen=True)
class GridRow:
    """A method as it was trained; ``epochs`` is None where only the paper has it."""

    method: str
    labels: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    epochs: int | None
    planned: int | None
    source: str
    cells: Mapping[Measure, Cell]

    @property
    def is_measured(self) -> bool:
        return any(cell.seeds for cell in self.cells.values())

    @property
    def is_smoke(self) -> bool:
        return is_smoke_test(self.epochs, self.planned)

    @property
    def name(self) -> str:
        return method_name(self.method)

    def name_without(self, shared: Sequence[str]) -> str:
        """Its method and its variant, of which some words are said elsewhere."""
        words = [word for word in self.variant if word not in shared]
        return f"{self.name} ({', '.join(words)})" if words else self.name

    @property
    def variant(self) -> tuple[str, ...]:
        """What sets it apart from the paper's row: labels and settings."""
        labels = [paper.LABELS.get(label, label) for label in self.labels]
        # Values are JSON: a string without its quotes reads better.
        settings = [f"{k}={v.strip(chr(34))}" if v else k for k, v in self.settings]
        return (*labels, *settings)

    @property
    def length(self) -> str:
        """Its epochs, and those of its recipe where it has fewer."""
        if self.epochs is None:
            return ""
        is_part = self.planned is not None and self.epochs < self.planned
        return f"{self.epochs:,} of {self.planned:,}" if is_part else f"{self.epochs:,}"

    @property
    def num_seeds(self) -> int:
        return max((len(cell.seeds) for cell in self.cells.values()), default=0)


@dataclass(frozen=True)
class Grid:
    """One table: a kind of measurement on one data set with one network."""

    kind: str
    data: str
    network: str
    measures: tuple[Measure, ...]
    rows: tuple[GridRow, ...]
    note: str = ""

    @property
    def place(self) -> str:
        return place_name(self.data, self.network)

    def is_published(self, measure: Measure) -> bool:
        """Whether the paper prints this measure in any row."""
        return any(row.cells[measure].published is not None for row in self.rows)

    @property
    def has_sources(self) -> bool:
        return any(row.source for row in self.rows)


@dataclass(frozen=True)
class Claim:
    """A paired comparison of two rows of a grid by one measure, each with its name."""

    first: GridRow
    second: GridRow
    names: tuple[str, str]
    measure: Measure
    comparison: Comparison

    @property
    def verdict(self) -> str:
        """Which is better, only where the interval excludes zero."""
        verdict, better = self.comparison.verdict, better_way(self.measure)
        if self.comparison.num_seeds < 2:
            return "one seed: no comparison"
        if verdict == "not shown":
            return "no difference shown"
        if better is None:
            return f"{self.names[0]} is {verdict}"
        return f"{self.names[0 if verdict == better else 1]} is better"


def better_way(measure: Measure) -> str | None:
    """Return whether ``"lower"`` or ``"higher"`` values of a measure are better."""
    if measure.printed:
        return paper.METRICS[measure.printed].better
    return "higher" if measure.metric == "det_acc_best" else "lower"


def make_grids(
    results: Iterable[Result],
    kind: str,
    which: str = "median10",
    recipe_settings: RecipeSettings = lambda key: None,
) -> list[Grid]:
    """Fold the results of one kind into a grid per data set and network, in the paper's order.

    The arguments are those of ``tables.table``.

    Raises:
        ValueError: If a result of this kind has no recipe key.
    """
    _, measures = KINDS[kind]
    by_length: dict[tuple[int | None, int | None], list[Result]] = {}
    for result in results:
        length = (result.epoch, planned_epochs(result, recipe_settings))
        by_length.setdefault(length, []).append(result)
    places: dict[tuple[str, str], _Rows] = {}
    for (epochs, planned), group in by_length.items():
        folded = fold(group, measures, which, (*IGNORED, "epochs"), recipe_settings)
        for (row, column), seeds in folded.cells.items():
            rows = places.setdefault((column.data, column.network), {})
            of_row = rows.setdefault((row, epochs, planned, column.source), {})
            of_row[column.measure] = seeds
    return [
        _grid(kind, place, rows, measures, which)
        for place, rows in sorted(places.items(), key=lambda item: _place_order(*item[0]))
    ]


# A row by its method, epochs, those of its recipe and source; its values by measure and seed.
_Id = tuple[Row, int | None, int | None, str]
_Rows = dict[_Id, dict[Measure, Mapping[int | None, float]]]


def _grid(
    kind: str, place: tuple[str, str], rows: _Rows, measures: Sequence[Measure], which: str
) -> Grid:
    data, network = place
    note = ""
    if kind == "accuracy":
        is_last = all((LAST_EPOCH, "") in row.settings for row, *_ in rows)
        shown_epoch = ACCURACIES["last" if is_last else which]
        note = f"Ours is {shown_epoch}."
    used = tuple(m for m in measures if any(m in cells for cells in rows.values()))

    def made(of: _Id, values: Mapping[Measure, Mapping[int | None, float]]) -> GridRow:
        row, epochs, planned, source = of
        key = RecipeKey(data, network, row.method).labeled(*row.labels)
        cells = {m: Cell(values.get(m, {}), m.published(key, source)) for m in used}
        return GridRow(row.method, row.labels, row.settings, epochs, planned, source, cells)

    shown = [made(of, values) for of, values in rows.items()]
    sources = {row.source for row in shown}
    printed = [
        made((Row(method), None, None, source), {})
        for method in paper.METHODS
        for source in sources
    ]
    # A row of the paper alone is needed only where none of ours, which pages show by default, has
    # its figures beside it.
    beside = {(row.method, row.source) for row in shown if not row.is_smoke and _has_paper(row)}
    shown += [row for row in printed if _has_paper(row) and (row.method, row.source) not in beside]
    return Grid(kind, data, network, used, tuple(sorted(shown, key=_row_order)), note)


def _has_paper(row: GridRow) -> bool:
    return any(cell.published is not None for cell in row.cells.values())


def _row_order(row: GridRow) -> tuple[object, ...]:
    return (
        paper.order(row.source, paper.SOURCES),
        paper.order(row.method, others.NAMES),
        not row.is_measured,
        -(row.epochs or 0),
        row.labels,
        row.settings,
    )


def _place_order(data: str, network: str) -> tuple[object, ...]:
    return paper.order(data, paper.DATA), paper.order(network, paper.NETWORKS)


def shared_variant(rows: Iterable[GridRow]) -> tuple[str, ...]:
    """What the variants of all measured rows have in common: said once, below a table."""
    variants = [row.variant for row in rows if row.is_measured]
    if len(variants) < 2:
        return ()
    return tuple(word for word in variants[0] if all(word in other for other in variants))


def claims_of(grid: Grid) -> list[Claim]:
    """Compare rows pairwise that differ in their method alone, or in the variant of one method.

    Rows of another length or source, or without a seed in common, are not compared.
    """
    claims = []
    shared = shared_variant(grid.rows)
    # The paper lists its own method last: it stands first, as the one that is compared.
    for second, first in combinations([row for row in grid.rows if row.is_measured], 2):
        is_alike = first.variant == second.variant
        of_one = first.method == second.method
        if is_alike == of_one or (first.epochs, first.source) != (second.epochs, second.source):
            continue
        for measure in (each for each in grid.measures if each.varies):
            made = compare(_known(first, measure), _known(second, measure))
            if made is not None:
                names = (first.name_without(shared), second.name_without(shared))
                claims.append(Claim(first, second, names, measure, made))
    return claims


def _known(row: GridRow, measure: Measure) -> dict[int, float]:
    """The values whose seed is recorded: others cannot be paired."""
    return {seed: value for seed, value in row.cells[measure].seeds.items() if seed is not None}


def without_smoke_tests(
    results: Sequence[Result], is_smoke: Callable[[Result], bool]
) -> tuple[list[Result], int]:
    """Leave out the lines of smoke tests, unless there is nothing else; return how many."""
    kept = [result for result in results if not is_smoke(result)]
    return (kept, len(results) - len(kept)) if kept else (list(results), 0)
