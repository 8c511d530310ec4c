"""Result lines folded into the paper's tables, ours beside the published figure.

A table has one row per method and one column per data and network, out-of-distribution source or
metric, with its unit. A cell reads ``3.02 +/- 0.08, n=3 (2.95)`` (with a proper sign): mean and
standard deviation over three seeds, then in brackets what the paper prints; one seed has neither
spread nor n. Data, networks and methods that the paper does not know have their own names; what
others published for them stands in the notes, with its source. Results with different settings are
never averaged (see ``folding``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from alignmixup.contracts import RecipeKey, Result
from alignmixup.report import others, paper
from alignmixup.report.folding import IGNORED, SHORT, Column, Folded, RecipeSettings, Row, fold
from alignmixup.report.measures import ACCURACIES, KINDS, Measure, number
from alignmixup.report.render import Table
from alignmixup.report.runs import source_name
from alignmixup.report.statistics import spread


def table(
    results: Iterable[Result],
    kind: str,
    *,
    which: str = "median10",
    paper_rows: bool = True,
    recipe_settings: RecipeSettings = lambda key: None,
) -> Table:
    """Fold results into one of the paper's tables.

    Args:
        results: Result lines, as ``read_results`` returns them.
        kind: One of ``KINDS``.
        which: The accuracy: best, last or median10. A run of fewer than 30 epochs has no median of
            ten; its row shows the last epoch and is labeled so.
        paper_rows: Show methods without results as well, with their published figure alone.
        recipe_settings: The settings that the recipe of a key trains with; rows name what differs.

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
    folded = fold(results, measures, which, IGNORED, recipe_settings)
    cells = folded.cells
    if not cells:
        raise ValueError(f"no results for a table of {kind} ({which=})")
    columns = sorted({column for _, column in cells}, key=lambda c: _column_order(c, measures))
    rows = {row for row, _ in cells}
    if paper_rows:
        printed = [Row(method) for method in paper.METHODS]
        rows |= {row for row in printed if any(_printed(row, c) is not None for c in columns)}
    body = [
        (_row_label(row), *(_cell_text(row, c, cells.get((row, c))) for c in columns))
        for row in sorted(rows, key=_row_order)
    ]
    shown = ("Method", *_column_labels(columns))
    notes = _notes(kind, which, columns, folded)
    if kind == "accuracy":
        notes += _quoted_notes(rows, columns)
    return Table(_full_title(title, kind, which, columns), shown, tuple(body), tuple(notes))


def _printed(row: Row, column: Column) -> float | None:
    key = RecipeKey(column.data, column.network, row.method).labeled(*row.labels)
    return column.measure.published(key, column.source)


def _column_order(column: Column, measures: Sequence[Measure]) -> tuple[object, ...]:
    return (
        measures.index(column.measure) if not column.source else 0,
        *paper.order(column.data, paper.DATA),
        *paper.order(column.network, paper.NETWORKS),
        *paper.order(column.source, paper.SOURCES),
        measures.index(column.measure),
    )


def _row_order(row: Row) -> tuple[object, ...]:
    labels = [paper.order(label, paper.LABELS) for label in row.labels]
    return (*paper.order(row.method, others.NAMES), labels, row.settings)


def _row_label(row: Row) -> str:
    extra = [paper.LABELS.get(label, label) for label in row.labels]
    extra += [f"{key}={value}" if value else key for key, value in row.settings]
    name = others.NAMES.get(row.method, row.method)
    return f"{name} ({', '.join(extra)})" if extra else name


def _column_labels(columns: Sequence[Column]) -> list[str]:
    """Name each column by what varies, with its unit; what all share is in the title."""
    several = len({(c.data, c.network) for c in columns}) > 1
    several_sources = len({c.source for c in columns}) > 1
    labels = []
    for c in columns:
        what = [source_name(c.source)] if several_sources else []
        what += [c.measure.name()]
        where = [_pair(c.data, c.network)] if several or not any(what) else []
        unit = f"({c.measure.unit()})"
        labels.append(" ".join(word for word in [*where, *what, unit] if word))
    return labels


def _pair(data: str, network: str) -> str:
    return f"{paper.DATA.get(data, data)} {paper.NETWORKS.get(network, network)}"


def _full_title(title: str, kind: str, which: str, columns: Sequence[Column]) -> str:
    pairs, sources = {(c.data, c.network) for c in columns}, {c.source for c in columns}
    where = f", {_pair(*pairs.pop())}" if len(pairs) == 1 else ""
    if len(sources) == 1 and (source := sources.pop()):
        where += f", {source_name(source)}"
    return title + where + (f", {ACCURACIES[which]}" if kind == "accuracy" else "")


def _cell_text(row: Row, column: Column, seeds: Mapping[int | None, float] | None) -> str:
    digits = column.measure.digits
    printed = _printed(row, column)
    theirs = "" if printed is None else f"({printed:.{digits}f})"
    if not seeds:
        # A variant of ours is not in the paper: without a figure of ours its cell is empty.
        return "-" if row.labels or row.settings else theirs or "-"
    ours = spread(seeds)
    text = number(ours.mean, digits)
    if ours.deviation is not None:
        text += f" \u00b1 {number(ours.deviation, digits)}, n={len(seeds)}"
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
                f"Runs of fewer than {SHORT} epochs, and networks with clean statistics, have no "
                "median of ten: the last epoch is shown."
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


def _quoted_notes(rows: Iterable[Row], columns: Sequence[Column]) -> list[str]:
    """Quote what others published for the methods that are not in the paper, with its source."""
    quoted: dict[str, None] = {}
    for row in sorted(rows, key=_row_order):
        for column in columns:
            key = RecipeKey(column.data, column.network, row.method).labeled(*row.labels)
            if row.method in others.METHODS and (figures := others.quoted_beside(key)):
                where = f"{others.METHODS[row.method]}, {_pair(column.data, column.network)}"
                quoted[f"{where}: {others.quotation(figures)}"] = None
    if not quoted:
        return []
    return [f"Published by others, with another network and schedule: {'. '.join(quoted)}."]


def _log_notes(columns: Sequence[Column]) -> list[str]:
    """Quote the medians of the authors' own logs where the table has their column."""
    pairs = [(c.data, c.network) for c in columns]
    medians = [f for f in paper.find("logs") if (f.data, f.network) in pairs]
    if not medians:
        return []
    quoted = ", ".join(
        f"{_pair(f.data, f.network)} {100 - f.value:.2f}" for f in medians if f.value is not None
    )
    return [f"AlignMixup, median of the last ten epochs in the authors' own logs: {quoted}."]
