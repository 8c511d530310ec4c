"""The short form of a report: one table per kind, comparisons, the most recent runs."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from alignmixup.contracts import Result
from alignmixup.report.folding import LAST_EPOCH, RecipeSettings, place_of
from alignmixup.report.grids import (
    Cell,
    Claim,
    Grid,
    claims_of,
    make_grids,
    shared_variant,
    without_smoke_tests,
)
from alignmixup.report.measures import ACCURACIES, KINDS, kinds_in, number
from alignmixup.report.render import Table
from alignmixup.report.runs import runs_of, smoke_filter, source_name
from alignmixup.report.tables import table

MAX_ROWS = 12  # of a table
MAX_MEASURES = 4
MAX_VARIANT = 16  # letters of a variant beside the name of its method
NUM_RECENT = 10
NUM_CLAIMS = 10


@dataclass(frozen=True)
class Summary:
    """Tables and lines to print, and what they are made of."""

    tables: tuple[Table, ...]
    lines: tuple[str, ...]
    grids: tuple[Grid, ...]
    results: tuple[Result, ...]


def summarize(
    results: Sequence[Result],
    which: str,
    recipe_settings: RecipeSettings,
    *,
    smoke_tests: bool = False,
) -> Summary:
    """Return what ``alignmixup report`` prints."""
    recipe_settings = cache(recipe_settings)
    kept, num_smoke = list(results), 0
    if not smoke_tests:
        kept, num_smoke = without_smoke_tests(results, smoke_filter(recipe_settings))
    by_kind = {kind: make_grids(kept, kind, which, recipe_settings) for kind in kinds_in(kept)}
    grids = [grid for made in by_kind.values() for grid in made]
    tables = [_kind_table(kind, made) for kind, made in by_kind.items() if made]
    if tables:
        tables.append(_recent(kept, recipe_settings))
    lines = _claim_lines(grids)
    if num_smoke:
        lines.append(
            f"{num_smoke:,} lines of smoke tests (far shorter than their recipe) are left out; "
            "--smoke-tests keeps them"
        )
    return Summary(tuple(tables), tuple(lines), tuple(grids), tuple(kept))


def paper_tables(summary: Summary, which: str, recipe_settings: RecipeSettings) -> list[Table]:
    """Return the tables for papers, published figures in brackets.

    One per kind, data set and network, and per source of out-of-distribution images.
    """
    recipe_settings = cache(recipe_settings)
    tables = []
    for grid in summary.grids:
        for source in dict.fromkeys(row.source for row in grid.rows if row.is_measured):
            place = (grid.data, grid.network, source)
            results = [result for result in summary.results if place_of(result) == place]
            tables.append(table(results, grid.kind, which=which, recipe_settings=recipe_settings))
    return tables


def comparison_table(grids: Sequence[Grid]) -> Table | None:
    """Return the paired comparisons over two or more seeds, if there are any."""
    rows = [
        (
            " - ".join(claim.names),
            grid.place,
            _measure(claim),
            claim.first.length,
            str(claim.comparison.num_seeds),
            f"{claim.comparison.difference:+.2f}",
            claim.comparison.interval(),
            claim.verdict,
        )
        for grid, claim in _shown_claims(grids)
    ]
    columns = ("Difference", "Data", "Measure", "Epochs", "Seeds", "Mean", "95 % interval", "")
    note = "Paired by seed, Student's t, not corrected for the number of comparisons."
    return Table("Comparisons over seeds", columns, tuple(rows), (note,)) if rows else None


def _kind_table(kind: str, grids: Sequence[Grid]) -> Table:
    """One table for all data sets and networks of a kind, measured rows only."""
    measures = list(dict.fromkeys(m for grid in grids for m in grid.measures))[:MAX_MEASURES]
    measured = [(grid, row) for grid in grids for row in grid.rows if row.is_measured]
    shared = shared_variant(row for _, row in measured)
    # One data set and network is in the title.
    places = list(dict.fromkeys(grid.place for grid, _ in measured))
    shown = measured[:MAX_ROWS]
    is_last = all(ACCURACIES["last"] in grid.note for grid in grids)  # a note says it
    hidden = {*shared, *([LAST_EPOCH] if is_last else [])}
    variants = [", ".join(w for w in row.variant if w not in hidden) for _, row in shown]
    letters = _letters(variants)
    rows = []
    for (grid, row), variant in zip(shown, variants, strict=True):
        where = [grid.place] if len(places) > 1 else []
        where += [source_name(row.source)] if row.source else []
        mark = f" [{letters[variant]}]" if variant in letters else f" ({variant})" * bool(variant)
        cells = [_cell(row.cells.get(m), m.digits) for m in measures]
        rows.append((row.name + mark, ": ".join(where), row.length, str(row.num_seeds), *cells))
    heads = ("Method", "Data", "Epochs", "Seeds")
    title = KINDS[kind][0] + ("" if len(places) > 1 else f", {places[0]}")
    names = [f"{m.name() or 'Top-1 error'} ({m.unit()})" for m in measures]
    is_published = any(grid.is_published(m) for grid in grids for m in grid.measures)
    notes = ["In brackets: published."] if is_published else []
    if common := [word for word in shared if word != LAST_EPOCH or not is_last]:
        notes.append(f"Every row: {', '.join(common)}.")
    if grids[0].note:
        notes.append(grids[0].note)
    if len(measured) > MAX_ROWS:
        notes.append(f"{len(measured) - MAX_ROWS} more rows on the page.")
    below = [" ".join(notes)] if notes else []
    below += [f"[{letter}] {variant}" for variant, letter in letters.items()]
    return Table(title, (*heads, *names), tuple(rows), tuple(below), "Data")


def _letters(variants: Sequence[str]) -> dict[str, str]:
    """Give each variant that is too long for a row a letter, which a note explains."""
    long = dict.fromkeys(variant for variant in variants if len(variant) > MAX_VARIANT)
    return dict(zip(long, string.ascii_lowercase, strict=False))


def _cell(cell: Cell | None, digits: int) -> str:
    if cell is None or (ours := cell.spread) is None:
        return ""
    text = number(ours.mean, digits)
    if ours.deviation is not None:  # no line break before the deviation itself
        text += f" \u00b1\u00a0{number(ours.deviation, digits)}"
    return text if cell.published is None else f"{text} ({cell.published:.{digits}f})"


def _recent(results: Sequence[Result], recipe_settings: RecipeSettings) -> Table:
    runs = sorted(runs_of(results, recipe_settings), key=lambda run: run.date, reverse=True)
    rows = [
        (
            run.name,  # data and network are in it
            "" if run.epochs is None else f"{run.epochs:,}",
            "" if run.seed is None else str(run.seed),
            "" if run.top1 is None else number(run.top1, 2),
            run.date[:16].replace("T", " "),
        )
        for run in runs[:NUM_RECENT]
    ]
    title = f"The {len(rows)} most recent of {len(runs)} runs" if len(runs) > len(rows) else "Runs"
    columns = ("Run", "Epochs", "Seed", "Top-1 (%)", "Measured")
    return Table(title, columns, tuple(rows))


def _shown_claims(grids: Sequence[Grid]) -> list[tuple[Grid, Claim]]:
    claims = [(grid, claim) for grid in grids for claim in claims_of(grid)]
    return [(grid, claim) for grid, claim in claims if claim.comparison.num_seeds > 1]


def _claim_lines(grids: Sequence[Grid]) -> list[str]:
    """Say what the seeds show: differences with their intervals, and nothing from one seed."""
    claims = _shown_claims(grids)
    lines = [
        f"{' - '.join(claim.names)}, {grid.place}, {_measure(claim)}: "
        f"{claim.comparison}: {claim.verdict}"
        for grid, claim in claims[:NUM_CLAIMS]
    ]
    if len(claims) > NUM_CLAIMS:
        lines.append(f"{len(claims) - NUM_CLAIMS} more comparisons on the page")
    if not claims and any(len([r for r in grid.rows if r.is_measured]) > 1 for grid in grids):
        lines.append("no two rows share two seeds: none is called better than another")
    return lines


def _measure(claim: Claim) -> str:
    source = source_name(claim.first.source)
    return f"{source} {claim.measure.name() or 'Top-1 error'}".strip()
