"""Result lines folded into the paper's tables, ours beside the published figure.

A table has a row a method and a column a (data, network), an out-of-distribution source or a
metric, with its unit. A cell reads ``3.02 +/- 0.08, n=3 (2.95)`` (with a proper sign): mean and
standard deviation over three seeds, then in brackets what the paper prints; one seed has neither
spread nor n. Results with different settings are never averaged (see ``folding``).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from alignmixup.contracts import Result
from alignmixup.report import ablation, paper
from alignmixup.report.folding import SHORT, Column, Folded, RecipeSettings, Row, fold
from alignmixup.report.measures import ACCURACIES, KINDS, Measure, kinds_in
from alignmixup.report.names import RecipeName, parse_recipe
from alignmixup.report.reading import read_results
from alignmixup.report.render import Table

__all__ = [
    "ACCURACIES",
    "KINDS",
    "RecipeName",
    "kinds_in",
    "parse_recipe",
    "read_results",
    "table",
]


def table(
    results: Iterable[Result],
    kind: str,
    *,
    which: str = "median10",
    settings: Mapping[str, object] | None = None,
    ignore: Sequence[str] = ("seed", "note", "style_weights"),
    paper_rows: bool = True,
    recipe_settings: RecipeSettings = lambda name: None,
) -> Table:
    """Fold results into one of the paper's tables.

    Args:
        results: Result lines, as ``read_results`` returns them.
        kind: One of ``KINDS``.
        which: The accuracy: best, last or median10. A run of fewer than 30 epochs has no median of
            ten; its row shows the last epoch and is called so.
        settings: Keeps the results that have these settings.
        ignore: Settings that do not tell results apart: the seed of an attack's random start, a
            note, the checksum of a style network that each run trains for itself.
        paper_rows: Shows the methods we have not run as well, with their published figure alone; of
            an ablation table only the competitors at its head.
        recipe_settings: The settings a recipe trains with, by its name; rows name what differs.

    Returns:
        The table, to be rendered by ``render``.

    Raises:
        ValueError: If the kind or the accuracy is unknown, or no result belongs to the table.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of table {kind!r}; choose from {', '.join(KINDS)}")
    if which not in ACCURACIES:
        raise ValueError(f"unknown accuracy {which!r}; choose from {', '.join(ACCURACIES)}")
    title, measures = KINDS[kind]
    folded = fold(results, measures, which, settings or {}, ignore, recipe_settings)
    cells = folded.cells
    if not cells:
        raise ValueError(f"no results for a table of {kind} ({which=}, settings={settings})")
    columns = sorted({column for _, column in cells}, key=lambda c: _column_order(c, measures))
    rows = {row for row, _ in cells}
    if paper_rows:
        rows |= {Row(m, "") for m in paper.METHODS if _is_printed(m, columns)}
    body = [
        (_row_label(row), *(_cell_text(row, c, cells.get((row, c))) for c in columns))
        for row in sorted(rows, key=_row_order)
    ]
    shown = ("Method", *_column_labels(columns))
    notes = _notes(kind, which, columns, folded)
    return Table(_full_title(title, kind, which, columns), shown, tuple(body), tuple(notes))


def _printed(method: str, column: Column, suffix: str = "") -> float | None:
    return column.measure.published(column.data, column.network, method, column.source, suffix)


def _is_printed(method: str, columns: Iterable[Column]) -> bool:
    return any(_printed(method, column) is not None for column in columns)


def _column_order(column: Column, measures: Sequence[Measure]) -> tuple[object, ...]:
    return (
        measures.index(column.measure) if not column.source else 0,
        *_place(column.data, paper.DATA),
        *_place(column.network, paper.NETWORKS),
        *_place(column.source, paper.SOURCES),
        measures.index(column.measure),
    )


def _place(name: str, known: Mapping[str, str]) -> tuple[int, str]:
    """The paper's order first, then the alphabet."""
    names = list(known)
    return (names.index(name), "") if name in known else (len(names), name)


_LABELS: Mapping[str, str] = {
    **paper.METHODS,
    **{name: row.label for name, row in ablation.ROWS.items()},
}


def _row_order(row: Row) -> tuple[object, ...]:
    return (*_place(row.method, _LABELS), row.suffix, row.settings)


def _row_label(row: Row) -> str:
    extra = [row.suffix] if row.suffix else []
    extra += [f"{key}={value}" if value else key for key, value in row.settings]
    name = _LABELS.get(row.method, row.method)
    return f"{name} ({', '.join(extra)})" if extra else name


def _column_labels(columns: Sequence[Column]) -> list[str]:
    """Name each column by what varies, with its unit; a single data and network is in the title."""
    several = len({(c.data, c.network) for c in columns}) > 1
    labels = []
    for c in columns:
        what = [paper.SOURCES.get(c.source, c.source), c.measure.name()]
        where = [_pair(c.data, c.network)] if several or not any(what) else []
        unit = f"({c.measure.unit()})"
        labels.append(" ".join(word for word in [*where, *what, unit] if word))
    return labels


def _pair(data: str, network: str) -> str:
    known = paper.DATA if data == ablation.FAMILY else paper.NETWORKS
    return f"{paper.DATA.get(data, data)} {known.get(network, network)}"


def _full_title(title: str, kind: str, which: str, columns: Sequence[Column]) -> str:
    pairs = {(c.data, c.network) for c in columns}
    where = f", {_pair(*pairs.pop())}" if len(pairs) == 1 else ""
    return title + where + (f", {ACCURACIES[which]}" if kind == "accuracy" else "")


def _cell_text(row: Row, column: Column, seeds: Mapping[object, float] | None) -> str:
    digits = column.measure.digits
    # An unaligned twin is another method than the one the paper prints under this name.
    printed = None if "unaligned" in row.suffix else _printed(row.method, column, row.suffix)
    theirs = "" if printed is None else f"({printed:.{digits}f})"
    if not seeds:
        # A variant of ours is not in the paper: without a figure of ours its cell is empty.
        return "-" if row.suffix or row.settings else theirs or "-"
    values = list(seeds.values())
    text = f"{statistics.fmean(values):.{digits}f}"
    if len(values) > 1:
        text += f" \u00b1 {statistics.stdev(values):.{digits}f}, n={len(values)}"
    return f"{text} {theirs}".strip()


def _notes(kind: str, which: str, columns: Sequence[Column], folded: Folded) -> list[str]:
    notes = [
        "In brackets: the figure published in the paper. "
        "\u00b1: standard deviation over n seeds; without n, one seed."
    ]
    if kind == "accuracy":
        notes.append(
            f"Ours is {ACCURACIES[which]}. The paper does not say which it prints; for AlignMixup "
            "it is the best test epoch of the authors' logs."
        )
        if any(("last epoch", "") in row.settings for row, _ in folded.cells):
            notes.append(
                f"Runs of fewer than {SHORT} epochs have no median of ten: the last epoch is shown."
            )
        notes.extend(_log_notes(columns))
    if folded.has_differences:
        notes.append(
            "A row names the settings in which it differs from its recipe; on other data, from the "
            "recipe it was made from."
        )
    if folded.usual:
        usual = ", ".join(f"{key}={value}" for key, value in sorted(folded.usual.items()))
        notes.append(f"Where a row does not say otherwise: {usual}.")
    if folded.num_repeated:
        notes.append(f"{folded.num_repeated} repeated measurements: the newest of each is shown.")
    return notes


def _log_notes(columns: Sequence[Column]) -> list[str]:
    """Quote the medians of the authors' own logs where the table has their column."""
    pairs = [(c.data, c.network) for c in columns]
    medians = [f for f in paper.find(table="logs") if (f.data, f.network) in pairs]
    if not medians:
        return []
    quoted = ", ".join(
        f"{_pair(f.data, f.network)} {100 - f.value:.2f}" for f in medians if f.value is not None
    )
    return [f"AlignMixup, median of the last ten epochs in the authors' own logs: {quoted}."]
