"""The tables of the page as HTML: grids, paired comparisons, recent runs.

Every name is escaped here; a cell that sorts by a number carries it in ``data-value``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from alignmixup.report.grids import (
    Cell,
    Claim,
    Grid,
    GridRow,
    better_way,
    claims_of,
    shared_variant,
)
from alignmixup.report.measures import Measure, number
from alignmixup.report.runs import RunInfo, latest, place_name, source_name

_ARROWS = {"lower": "\u2193", "higher": "\u2191"}
Head = tuple[str, str]  # the name of a column and the classes of its cell


def table_html(
    caption: str, heads: Sequence[Head], rows: Iterable[str], *, name: str, note: str = ""
) -> str:
    """Return a sortable table with its caption and a button that downloads it as CSV."""
    columns = "".join(
        f'<th scope="col" class="{classes}"><button type="button" class="sort">'
        f"{escape(head)}</button></th>"
        for head, classes in heads
    )
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<figure class="table" data-name="{escape(name)}"><div class="scroll" tabindex="0" '
        f'role="region" aria-label="{escape(caption)}"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{columns}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f'<div class="below">{below}<button type="button" class="csv">CSV</button></div></figure>'
    )


def grid_html(grid: Grid) -> str:
    """Return one of the paper's tables, ours beside the published figures."""
    heads = [("Method", "")]
    heads += [("Source", "")] if grid.has_sources else []
    heads.append(("Epochs", "number"))
    for measure in grid.measures:
        heads.append((_measure_name(measure), "number"))
        heads += [("paper", "number published")] if grid.is_published(measure) else []
    shared = shared_variant(grid.rows)
    heads.append(("Seeds", "number"))
    heads += [("Variant", "variant")] if _has_variants(grid, shared) else []
    rows = [_row_html(grid, row, shared) for row in grid.rows]
    name = f"{grid.kind}-{grid.data}-{grid.network}"
    every = f"Variant of every measured row: {', '.join(shared)}." if shared else ""
    note = " ".join(text for text in (grid.note, every) if text)
    return table_html(grid.place, heads, rows, name=name, note=note)


def _measure_name(measure: Measure) -> str:
    better = better_way(measure)
    arrow = "" if better is None else f"\u00a0{_ARROWS[better]}"
    return f"{measure.name() or 'Top-1 error'} ({measure.unit()}){arrow}"


def _has_variants(grid: Grid, shared: Sequence[str]) -> bool:
    return any(set(row.variant) - set(shared) for row in grid.rows)


def _row_html(grid: Grid, row: GridRow, shared: Sequence[str]) -> str:
    source = source_name(row.source)
    words = [word for word in row.variant if word not in shared]
    chips = "".join(f'<span class="chip">{escape(word)}</span>' for word in words)
    seeds = {0: "", 1: "one"}.get(row.num_seeds, str(row.num_seeds))
    cells = [f'<td class="source">{escape(source)}</td>'] if grid.has_sources else []
    cells.append(_number(escape(row.length), row.epochs or ""))
    for measure in grid.measures:
        both = _value_html(row.cells[measure], measure.digits)
        cells += both if grid.is_published(measure) else both[:1]
    cells.append(_number(seeds, row.num_seeds or ""))
    cells += [f'<td class="variant">{chips}</td>'] if _has_variants(grid, shared) else []
    kind = "" if row.is_measured else ' class="paper"'
    return _tr(row.name, grid.place, row.is_smoke, cells, kind)


def _tr(name: str, place: str, is_smoke: bool, cells: Iterable[str], kind: str = "") -> str:
    where = f'{" data-smoke" if is_smoke else ""} data-place="{escape(place)}"'
    return f'<tr{kind}{where}><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>'


def _number(text: str, value: object) -> str:
    """A cell that sorts by ``value``."""
    return f'<td class="number" data-value="{value}">{text}</td>'


def _value_html(cell: Cell, digits: int) -> list[str]:
    ours, theirs = cell.spread, cell.published
    text, value = "", ""
    if ours is not None:
        text, value = number(ours.mean, digits), repr(ours.mean)
        if ours.deviation is not None:
            text += f' <span class="spread">\u00b1 {number(ours.deviation, digits)}</span>'
    printed = "" if theirs is None else f"{theirs:.{digits}f}"
    theirs_html = f'<td class="number published" data-value="{printed}">{printed}</td>'
    return [_number(text, value), theirs_html]


def comparisons_html(grids: Sequence[Grid]) -> str:
    """Return the paired comparisons of all grids, or a sentence where there are none."""
    claims = [(grid, claim) for grid in grids for claim in claims_of(grid)]
    shown = [(grid, claim) for grid, claim in claims if claim.comparison.num_seeds > 1]
    lines = []
    if num := len(claims) - len(shown):
        what = "pair of rows has" if num == 1 else "pairs of rows have"
        lines.append(
            f"{num:,} {what} one seed in common: a difference, but no interval, so nothing is "
            "claimed."
        )
    if not claims:
        lines.append("No two rows that can be compared have a common seed: nothing to compare.")
    if shown:
        lines.append(
            "Difference of the means over the seeds that both have, first minus second, with its "
            "95 % interval (Student's t, paired by seed, not corrected for the number of pairs). "
            "One is called better only where the interval excludes zero."
        )
    text = "".join(f"<p>{escape(line)}</p>" for line in lines)
    heads = [(name, "") for name in ("First", "Second", "Data and network", "Measure")]
    heads += [(name, "number") for name in ("Epochs", "Seeds", "Difference", "95 % interval")]
    heads.append(("Conclusion", ""))
    rows = [_claim_html(grid, claim) for grid, claim in shown]
    caption = "Paired comparisons over seeds"
    return text + (table_html(caption, heads, rows, name="comparisons") if rows else "")


def _claim_html(grid: Grid, claim: Claim) -> str:
    made, digits = claim.comparison, max(claim.measure.digits, 2)
    source = source_name(claim.first.source)
    measure = f"{source} {claim.measure.name() or 'Top-1 error'} ({claim.measure.unit()})".strip()
    cells = (
        *(f"<td>{escape(text)}</td>" for text in (claim.names[1], grid.place, measure)),
        _number(escape(claim.first.length), claim.first.epochs or ""),
        _number(str(made.num_seeds), made.num_seeds),
        _number(f"{made.difference:+.{digits}f}", made.difference),
        _number(made.interval(digits), made.low if math.isfinite(made.low) else ""),
        f"<td>{escape(claim.verdict)}</td>",
    )
    return _tr(claim.names[0], grid.place, claim.first.is_smoke, cells)


def runs_html(runs: Sequence[RunInfo]) -> str:
    """Return every run, the most recent first."""
    heads = [("Run", ""), ("Data and network", "")]
    heads += [(name, "number") for name in ("Epochs", "Seed", "Top-1 (%) \u2191")]
    heads += [(name, "") for name in ("Measured", "Hardware", "Commit")]
    rows = []
    for run in sorted(runs, key=lambda run: run.date, reverse=True):
        place = place_name(run.key.data, run.key.network)
        top1 = run.top1
        last = latest(run.results)
        cells = (
            f"<td>{escape(place)}</td>",
            _number("", "") if run.epochs is None else _number(f"{run.epochs:,}", run.epochs),
            f'<td class="number">{"" if run.seed is None else run.seed}</td>',
            f'<td class="number">{"" if top1 is None else number(top1, 2)}</td>',
            f'<td class="date">{escape(run.date[:16].replace("T", " "))}</td>',
            f"<td>{escape(last.hardware)}</td><td>{escape(last.commit)}</td>",
        )
        rows.append(_tr(run.name, place, run.is_smoke, cells))
    note = "Top-1: the median of the last ten epochs where there is one, else the last epoch."
    return table_html("Runs, the most recent first", heads, rows, name="runs", note=note)
