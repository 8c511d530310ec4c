"""Charts of distributions: reliability diagrams, scores of out-of-distribution images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alignmixup.contracts import Result
from alignmixup.report.charting import (
    BLUE,
    GRAY,
    ORANGE,
    ChartBlock,
    Palette,
    Rows,
    block,
    by_place,
    data,
    long_label,
    one_length,
    quiet_legend,
    row_of,
    shape_by,
)
from alignmixup.report.measures import number
from alignmixup.report.runs import RunInfo, latest, short_labels, source_name


def reliability_charts(runs: Sequence[RunInfo]) -> list[ChartBlock]:
    """Accuracy by confidence, one small diagram per run that was scored for calibration."""
    blocks = []
    for place, group in by_place(runs).items():
        diagrams = [(run, found) for run in group if (found := _diagram(run)) is not None]
        labels = short_labels([run for run, _ in diagrams])
        for (run, found), label in zip(diagrams, labels, strict=True):
            caption = f"{long_label(run, label)}: ECE\u00a0{number(found.value, 2)}\u00a0%"
            chart = _reliability(_bins(found.settings["reliability"]))
            blocks.append(block(chart, caption, place, [run], is_small=True))
    return blocks


def _diagram(run: RunInfo) -> Result | None:
    """The newest measurement of ECE with its bins."""
    found = [r for r in run.of("calibration", "ece") if "reliability" in r.settings]
    return latest(found) if found else None


def _bins(recorded: Any) -> Rows:
    """The bins of a reliability diagram that have images, in percent."""
    edges = recorded["edges"]
    columns = (recorded[name] for name in ("counts", "confidence", "accuracy"))
    return [
        {
            "left": round(100 * left, 2),
            "right": round(100 * right, 2),
            "middle": round(50 * (left + right), 2),
            "zero": 0,
            "count": count,
            "confidence": round(100 * confidence, 2),
            "accuracy": round(100 * accuracy, 2),
        }
        for left, right, count, confidence, accuracy in zip(
            edges[:-1], edges[1:], *columns, strict=True
        )
        if count
    ]


def _reliability(rows: Rows) -> Any:
    import altair as alt

    percent = alt.Scale(domain=[0, 100])
    base = data(rows)
    bars = base.mark_rect(color=BLUE, opacity=0.75).encode(
        x=alt.X("left:Q", title="confidence (%)", scale=percent),
        x2="right:Q",
        y=alt.Y("zero:Q", title="accuracy (%)", scale=percent),
        y2="accuracy:Q",
        tooltip=[
            alt.Tooltip("confidence:Q", title="mean confidence (%)", format=".1f"),
            alt.Tooltip("accuracy:Q", title="accuracy (%)", format=".1f"),
            alt.Tooltip("count:Q", title="images"),
        ],
    )
    gaps = base.mark_rule(color=ORANGE, strokeWidth=2).encode(
        x="middle:Q", y="accuracy:Q", y2="confidence:Q"
    )
    ideal = data([{"at": 0}, {"at": 100}]).mark_line(color=GRAY, strokeDash=[3, 3], strokeWidth=1)
    return alt.layer(bars, gaps, ideal.encode(x="at:Q", y="at:Q"))


def ood_charts(runs: Sequence[RunInfo], palette: Palette) -> list[ChartBlock]:
    """AuROC by source, and histograms of the scores of both sets where they are recorded."""
    large, small = [], []
    for place, group in by_place(runs).items():
        scored = [run for run in group if run.value("ood", "auroc") is not None]
        rows: Rows = []
        for run, label in zip(scored, short_labels(scored), strict=True):
            for source, result in _by_source(run).items():
                auroc = round(result.value, 2)
                rows.append({**row_of(run, label), "source": source, "auroc": auroc})
                if "histogram" in result.settings:
                    shown = f"AuROC\u00a0{number(result.value, 1)}\u00a0%"
                    caption = f"{long_label(run, label)}, {source}: {shown}"
                    chart = _histogram(result.settings["histogram"])
                    small.append(block(chart, caption, place, [run], is_small=True))
        if rows:
            caption = (
                f"{place}: AuROC by the source of the images; higher is better.{one_length(rows)}"
            )
            large.append(block(_auroc(rows, palette), caption, place, scored))
    return large + small


def _by_source(run: RunInfo) -> dict[str, Result]:
    """The newest AuROC for each source of images, by the paper's name of the source."""
    return {
        source_name(str(r.settings.get("source"))): r
        for r in sorted(run.of("ood", "auroc"), key=lambda r: r.date)
    }


def _auroc(rows: Rows, palette: Palette) -> Any:
    import altair as alt

    return (
        data(rows)
        .mark_point(size=55, strokeWidth=2, opacity=1)
        .encode(
            y=alt.Y("source:N", title=None, axis=alt.Axis(labelLimit=140, grid=True)),
            x=alt.X("auroc:Q", title="AuROC (%)", scale=alt.Scale(zero=False)),
            yOffset="series:N",
            color=palette.color(rows),
            shape=shape_by(rows, "length"),
            tooltip=[
                alt.Tooltip("series:N", title="run"),
                alt.Tooltip("source:N"),
                alt.Tooltip("auroc:Q", title="AuROC (%)"),
            ],
        )
    )


def _histogram(recorded: Any) -> Any:
    import altair as alt

    sets = {"id": "test images", "ood": "out of distribution"}
    edges = recorded["edges"]
    rows: Rows = [
        {
            "left": left,
            "right": right,
            "zero": 0,
            "share": round(100 * count / max(1, sum(recorded[name])), 3),
            "set": label,
        }
        for name, label in sets.items()
        for left, right, count in zip(edges[:-1], edges[1:], recorded[name], strict=True)
    ]
    scale = alt.Scale(domain=list(sets.values()), range=[BLUE, ORANGE])
    return (
        data(rows)
        .mark_rect(opacity=0.55)
        .encode(
            x=alt.X("left:Q", title="score"),
            x2="right:Q",
            y=alt.Y("zero:Q", title="share (%)"),
            y2="share:Q",
            color=alt.Color("set:N", scale=scale, legend=quiet_legend()),
            tooltip=[alt.Tooltip("set:N"), alt.Tooltip("left:Q", title="score from")],
        )
    )
