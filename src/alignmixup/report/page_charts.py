"""Charts with one line or point per run: learning curves, attacks, cost against accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from alignmixup.contracts import Result
from alignmixup.report.charting import (
    ChartBlock,
    Palette,
    Rows,
    block,
    by_place,
    choosable,
    data,
    one_length,
    quiet_legend,
    row_of,
    shape_by,
)
from alignmixup.report.curves import Curve
from alignmixup.report.runs import RunInfo, method_name, place_name, short_labels

if TYPE_CHECKING:
    import altair as alt

ATTACKS = {"fgsm": "FGSM", "pgd": "PGD", "strong_attack": "strong attack"}
# Curves that differ more in length are shown over the logarithm of the epoch.
RATIO = 5
# A curve of fewer points has them marked: one point alone makes no line.
SHORT = 12
# More curves than these look alike in spite of dashes.
MAX_DASHED = 6


def curve_charts(curves: Sequence[Curve], palette: Palette) -> list[ChartBlock]:
    """Test accuracy by epoch, one chart per data set and network; the authors' log is thin."""
    import altair as alt

    blocks = []
    for data_name, network in dict.fromkeys((c.data, c.network) for c in curves):
        own = [c for c in curves if (c.data, c.network) == (data_name, network)]
        theirs = list(dict.fromkeys(c.label for c in own if c.is_published))
        rows: Rows = [
            {
                "epoch": epoch,
                "top1": top1,
                "series": c.label,
                "method": c.label if c.is_published else method_name(c.method),
                "published": c.is_published,
                "few": len(c.points) < SHORT,
            }
            for c in own
            for epoch, top1 in c.points
        ]
        lengths = [c.points[-1][0] for c in own]
        is_log = max(lengths) > RATIO * min(lengths)
        axis = alt.X(
            "epoch:Q",
            title="epoch, logarithmic" if is_log else "epoch",
            scale=alt.Scale(type="log" if is_log else "linear", nice=False),
            axis=alt.Axis(tickMinStep=1, format=",d", grid=not is_log),
        )
        base = data(rows).encode(
            x=axis,
            y=alt.Y("top1:Q", title="test top-1 (%)", scale=alt.Scale(zero=False)),
            color=palette.color(rows, more=theirs, symbol="stroke"),
            detail="series:N",
            strokeDash=_dashes(own),
            tooltip=[
                alt.Tooltip("series:N", title="run"),
                alt.Tooltip("epoch:Q"),
                alt.Tooltip("top1:Q", title="top-1 (%)", format=".2f"),
            ],
        )
        # Behind ours, and as fine as a line can be.
        log = base.transform_filter("datum.published").mark_line(strokeWidth=1)
        is_crowded = _is_crowded(own)
        width = 0.9 if is_crowded else 1.8
        ours = base.transform_filter("!datum.published").mark_line(strokeWidth=width)
        layers = [*([log] if theirs else []), choosable(ours)]
        if any(row["few"] for row in rows):
            layers.append(base.transform_filter("datum.few").mark_circle(size=30, opacity=1))
        chart = alt.layer(*layers)
        place = place_name(data_name, network)
        what = " The thin gray line is the authors' published log." if theirs else ""
        what += " Point at a curve to see which run it is of." if is_crowded else ""
        blocks.append(block(chart, f"{place}: test accuracy by epoch.{what}", place))
    return blocks


def _is_crowded(curves: Sequence[Curve]) -> bool:
    """Return whether some share a color, and too many to be told apart by dashes."""
    ours = {(curve.label, curve.method) for curve in curves if not curve.is_published}
    return len(ours) > max(MAX_DASHED, len({method for _, method in ours}))


def _dashes(curves: Sequence[Curve]) -> Any:
    """Tell curves of one method apart by their dashes; nothing where each method has one curve."""
    import altair as alt

    ours = [curve for curve in curves if not curve.is_published]
    labels = list(dict.fromkeys(curve.label for curve in ours))
    if len(labels) == len({curve.method for curve in ours}) or _is_crowded(curves):
        return alt.Undefined
    styles = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 6], [1, 4]][: len(labels)]
    theirs = [curve.label for curve in curves if curve.is_published]
    scale = alt.Scale(domain=[*labels, *theirs], range=[*styles, *[[1, 0]] * len(theirs)])
    return alt.StrokeDash("series:N", scale=scale, legend=quiet_legend(labels, "stroke"))


def attack_charts(runs: Sequence[RunInfo], palette: Palette) -> list[ChartBlock]:
    """Accuracy by the strength of an attack, and by its steps."""
    import altair as alt

    blocks = []
    for place, group in by_place(runs).items():
        strength, steps = _attacked(group)
        scale = alt.Scale(type="log", nice=False)
        if strength:
            shape = alt.Shape("attack:N", legend=quiet_legend())
            axis = alt.X(
                "eps:Q", title="strength of the attack (of 255)", axis=alt.Axis(tickMinStep=1)
            )
            chart = _lines(strength, axis, palette, point=True).encode(shape=shape)
            caption = (
                f"{place}: accuracy by the strength of an attack; 0 is the clean image."
                f"{one_length(strength)}"
            )
            blocks.append(block(chart, caption, place, group))
        for attack in dict.fromkeys(row["attack"] for row in steps):
            rows = [row for row in steps if row["attack"] == attack]
            axis = alt.X("step:Q", title="steps of the attack", scale=scale)
            chart = _lines(rows, axis, palette)
            caption = f"{place}, {attack}: accuracy after each step.{one_length(rows)}"
            blocks.append(block(chart, caption, place, group))
    return blocks


def _attacked(runs: Sequence[RunInfo]) -> tuple[Rows, Rows]:
    """Return the accuracy of attacked runs by strength and by step."""
    strength: Rows = []
    steps: Rows = []
    attacked = [run for run in runs if any(r.task in ATTACKS for r in run.results)]
    for run, label in zip(attacked, short_labels(attacked), strict=True):
        for (_, _, eps), result in _newest_attacks(run).items():
            by_step = result.settings.get("errors_by_step")
            is_clean = result.metric == "clean_error"
            row = {**row_of(run, label), "attack": ATTACKS[result.task]}
            at = 0.0 if is_clean else round(255 * eps, 2)
            strength.append({**row, "eps": at, "top1": round(100 - result.value, 2)})
            if not is_clean and isinstance(by_step, list) and len(by_step) > 1:
                row["attack"] += f" at {255 * eps:g}/255"
                errors = enumerate(by_step, start=1)
                steps += [{**row, "step": n, "top1": round(100 - e, 2)} for n, e in errors]
    return strength, steps


def _newest_attacks(run: RunInfo) -> dict[tuple[str, str, float], Result]:
    """The newest result of each attack, measure and strength: a line has one value at a place."""
    measured = [
        r
        for task in ATTACKS
        for metric in ("clean_error", "top1_error")
        for r in sorted(run.of(task, metric), key=lambda r: r.date)
    ]
    strengths = ((r, r.settings.get("eps")) for r in measured)
    return {(r.task, r.metric, e): r for r, e in strengths if isinstance(e, int | float)}


def _lines(rows: Rows, axis: alt.X, palette: Palette, *, point: bool = False) -> Any:
    import altair as alt

    lengths = sorted({row["length"] for row in rows}, key=_number, reverse=True)
    dash = alt.StrokeDash("length:N", sort=lengths, legend=quiet_legend())
    lines = (
        data(rows)
        .mark_line(point={"size": 45} if point else False, strokeWidth=1.8)
        .encode(
            x=axis,
            y=alt.Y("top1:Q", title="top-1 (%)", scale=alt.Scale(domainMin=0)),
            color=palette.color(rows),
            strokeDash=dash if len(lengths) > 1 else alt.Undefined,
            detail=["series:N", "attack:N"],
            tooltip=[
                alt.Tooltip("series:N", title="run"),
                alt.Tooltip("attack:N"),
                alt.Tooltip("top1:Q", title="top-1 (%)"),
            ],
        )
    )
    return choosable(lines)


def _number(length: str) -> int:
    digits = "".join(letter for letter in length if letter.isdigit())
    return int(digits or 0)


def cost_charts(runs: Sequence[RunInfo], palette: Palette) -> list[ChartBlock]:
    """Accuracy against the time of a training step."""
    import altair as alt

    blocks = []
    for place, group in by_place(runs).items():
        both = [
            (run, cost)
            for run in group
            if (cost := run.newest("cost", "ms_per_batch")) is not None and run.top1 is not None
        ]
        if not both:
            continue
        labels = short_labels([run for run, _ in both])
        rows: Rows = [
            {**row_of(run, label), "ms": cost.value, "top1": run.top1, "hardware": cost.hardware}
            for (run, cost), label in zip(both, labels, strict=True)
        ]
        times = [row["ms"] for row in rows]
        # Space for the names to the right of the points.
        margin = 0.35 * (max(times) - min(times)) or max(times)
        scale = alt.Scale(domain=[0.9 * min(times), max(times) + margin], nice=False)
        base = data(rows).encode(
            x=alt.X("ms:Q", title="time of a training step (ms)", scale=scale),
            y=alt.Y("top1:Q", title="top-1 (%)", scale=alt.Scale(zero=False, padding=14)),
            tooltip=[
                alt.Tooltip("series:N", title="run"),
                alt.Tooltip("ms:Q", title="ms", format=".2f"),
                alt.Tooltip("top1:Q", title="top-1 (%)", format=".2f"),
                "hardware:N",
            ],
        )
        points = base.mark_point(size=90, filled=True, opacity=1).encode(
            color=palette.color(rows), shape=shape_by(rows, "hardware")
        )
        # On a phone names would lie over each other: there, the legend has to do.
        names = base.mark_text(align="left", dx=9, fontSize=12)
        names = names.transform_calculate(shown="width >= 500 ? datum.series : ''")
        machines = ", ".join(sorted({row["hardware"] for row in rows} - {""}))
        caption = (
            f"{place}: accuracy against the cost of training; up and left is better. "
            f"Timed on {machines or 'unknown hardware'}."
        )
        chart = alt.layer(points, names.encode(text="shown:N"))
        blocks.append(block(chart, caption, place, [run for run, _ in both]))
    return blocks
