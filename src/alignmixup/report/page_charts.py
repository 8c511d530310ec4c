"""The charts of the page: Vega-Lite specifications made with Altair, data inside.

Fields have fixed names, so that a name from a result is only ever a value. The colors are those of
Okabe and Ito without black and yellow, which vanish on a dark or a light page; after seven series
they repeat with a dashed line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from alignmixup.report import paper
from alignmixup.report.curves import Curve
from alignmixup.report.runs import RunInfo, place_name, short_labels

if TYPE_CHECKING:
    import altair as alt

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])
GRAY = "#8a8a8a"
ATTACKS = {"fgsm": "FGSM", "pgd": "PGD", "strong_attack": "strong attack"}
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class ChartBlock:
    """A chart with its caption; a small one stands beside others."""

    caption: str
    spec: Mapping[str, Any]
    place: str
    is_smoke: bool = False
    is_small: bool = False


def curve_charts(curves: Sequence[Curve]) -> list[ChartBlock]:
    """Test accuracy by epoch, one chart per data set and network; the authors' log is thin."""
    import altair as alt

    blocks = []
    for data, network in dict.fromkeys((c.data, c.network) for c in curves):
        own = [c for c in curves if (c.data, c.network) == (data, network)]
        rows = [
            {"epoch": epoch, "top1": top1, "series": c.label, "published": c.is_published}
            for c in own
            for epoch, top1 in c.points
        ]
        ours = list(dict.fromkeys(c.label for c in own if not c.is_published))
        theirs = list(dict.fromkeys(c.label for c in own if c.is_published))
        base = alt.Chart(alt.InlineData(values=rows)).encode(
            x=alt.X("epoch:Q", title="epoch", axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("top1:Q", title="test top-1 (%)", scale=alt.Scale(zero=False)),
            color=_color([*ours, *theirs], [*_cycle(len(ours)), *[GRAY] * len(theirs)]),
            tooltip=[
                alt.Tooltip("series:N", title="run"),
                alt.Tooltip("epoch:Q"),
                alt.Tooltip("top1:Q", title="top-1 (%)", format=".2f"),
            ],
        )
        chosen = _by_legend(alt)
        own_lines = base.transform_filter("!datum.published").mark_line(strokeWidth=1.8)
        log_lines = base.transform_filter("datum.published").mark_line(strokeWidth=1)
        chart = alt.layer(_faded(own_lines, chosen), log_lines).add_params(chosen)
        place = place_name(data, network)
        what = " The thin gray line is the authors' published log." if theirs else ""
        blocks.append(_block(chart, f"{place}: test accuracy by epoch.{what}", place))
    return blocks


def reliability_charts(runs: Sequence[RunInfo]) -> list[ChartBlock]:
    """Accuracy by confidence, one small diagram per run that was scored for calibration."""
    import altair as alt

    blocks = []
    for place, group in _places(runs).items():
        labels = short_labels(group)
        for run, label in zip(group, labels, strict=True):
            found = [
                r
                for r in run.results
                if (r.task, r.metric) == ("calibration", "ece") and "reliability" in r.settings
            ]
            if not found:
                continue
            newest = max(found, key=lambda r: r.date)
            rows = _bins(newest.settings["reliability"])
            base = alt.Chart(alt.InlineData(values=rows))
            unit = alt.Scale(domain=[0, 100])
            x = alt.X("left:Q", title="confidence (%)", scale=unit)
            bars = base.mark_bar(color=COLORS[0], opacity=0.85, stroke=None).encode(
                x=x,
                x2="right:Q",
                y=alt.Y("accuracy:Q", title="accuracy (%)", scale=unit),
                tooltip=[
                    alt.Tooltip("confidence:Q", title="mean confidence (%)", format=".1f"),
                    alt.Tooltip("accuracy:Q", title="accuracy (%)", format=".1f"),
                    alt.Tooltip("count:Q", title="images"),
                ],
            )
            gaps = base.mark_rule(color=COLORS[1], strokeWidth=2).encode(
                x=alt.X("middle:Q", scale=unit), y="accuracy:Q", y2="confidence:Q"
            )
            ideal = (
                alt.Chart(alt.InlineData(values=[{"at": 0}, {"at": 100}]))
                .mark_line(color=GRAY, strokeDash=[3, 3], strokeWidth=1)
                .encode(x="at:Q", y="at:Q")
            )
            caption = f"{label}: ECE {newest.value:.2f} %"
            chart = alt.layer(bars, gaps, ideal)
            blocks.append(_block(chart, caption, place, run.is_smoke, is_small=True))
    return blocks


def _bins(recorded: Any) -> Rows:
    """The bins of a reliability diagram that have images, in percent."""
    edges = recorded["edges"]
    rows = []
    for left, right, count, confidence, accuracy in zip(
        edges[:-1],
        edges[1:],
        recorded["counts"],
        recorded["confidence"],
        recorded["accuracy"],
        strict=True,
    ):
        if count:
            rows.append(
                {
                    "left": round(100 * left, 2),
                    "right": round(100 * right, 2),
                    "middle": round(50 * (left + right), 2),
                    "count": count,
                    "confidence": round(100 * confidence, 2),
                    "accuracy": round(100 * accuracy, 2),
                }
            )
    return rows


def ood_charts(runs: Sequence[RunInfo]) -> list[ChartBlock]:
    """Histograms of the scores of both sets where they are recorded, and AuROC by source."""
    import altair as alt

    blocks = []
    for place, group in _places(runs).items():
        scored = [run for run in group if run.value("ood", "auroc") is not None]
        labels = short_labels(scored)
        rows = []
        for run, label in zip(scored, labels, strict=True):
            newest = {
                str(r.settings.get("source")): r
                for r in sorted(run.results, key=lambda r: r.date)
                if (r.task, r.metric) == ("ood", "auroc")
            }
            for source, result in newest.items():
                name = paper.SOURCES.get(source, source)
                rows.append({"source": name, "auroc": round(result.value, 2), "series": label})
                if "histogram" in result.settings:
                    caption = f"{label}, {name}: AuROC {result.value:.1f} %"
                    chart = _histogram(alt, result.settings["histogram"])
                    blocks.append(_block(chart, caption, place, run.is_smoke, is_small=True))
        if rows:
            chart = (
                alt.Chart(alt.InlineData(values=rows))
                .mark_point(size=70, filled=True, opacity=0.9)
                .encode(
                    y=alt.Y("source:N", title=None, axis=alt.Axis(labelLimit=140)),
                    x=alt.X("auroc:Q", title="AuROC (%)", scale=alt.Scale(zero=False)),
                    yOffset="series:N",
                    color=_color(list(dict.fromkeys(labels))),
                    tooltip=["series:N", "source:N", "auroc:Q"],
                )
            )
            caption = f"{place}: AuROC by source of the images, higher is better."
            blocks.insert(0, _block(chart, caption, place))
    return blocks


def _histogram(alt: Any, recorded: Any) -> Any:
    rows = [
        {
            "left": left,
            "right": right,
            "share": round(100 * count / max(1, sum(recorded[name])), 3),
            "set": label,
        }
        for name, label in (("id", "test images"), ("ood", "out of distribution"))
        for left, right, count in zip(
            recorded["edges"][:-1], recorded["edges"][1:], recorded[name], strict=True
        )
    ]
    return (
        alt.Chart(alt.InlineData(values=rows))
        .mark_bar(opacity=0.55, binSpacing=0)
        .encode(
            x=alt.X("left:Q", title="score"),
            x2="right:Q",
            y=alt.Y("share:Q", title="share (%)", stack=None),
            color=_color(["test images", "out of distribution"]),
            tooltip=["set:N", "left:Q", "right:Q", "share:Q"],
        )
    )


def attack_charts(runs: Sequence[RunInfo]) -> list[ChartBlock]:
    """Accuracy by the strength of an attack, and by its steps."""
    import altair as alt

    blocks = []
    for place, group in _places(runs).items():
        attacked = [r for r in group if any(r.value(task, "top1_error") for task in ATTACKS)]
        labels = short_labels(attacked)
        strength, steps = [], []
        for run, label in zip(attacked, labels, strict=True):
            for result in run.results:
                eps = result.settings.get("eps")
                if result.task not in ATTACKS or not isinstance(eps, int | float):
                    continue
                row = {"series": label, "attack": ATTACKS[result.task], "smoke": run.is_smoke}
                is_clean = result.metric == "clean_error"
                at = 0.0 if is_clean else round(255 * eps, 2)
                strength.append({**row, "eps": at, "top1": round(100 - result.value, 2)})
                by_step = result.settings.get("errors_by_step")
                if not is_clean and isinstance(by_step, list) and len(by_step) > 1:
                    row["attack"] = f"{row['attack']}, {255 * eps:g}/255"
                    steps += [
                        {**row, "step": number, "top1": round(100 - error, 2)}
                        for number, error in enumerate(by_step, start=1)
                    ]
        names = list(dict.fromkeys(labels))
        if strength:
            caption = f"{place}: accuracy under attack by its strength; 0 is the clean image."
            x = alt.X("eps:Q", title="strength (of 255)")
            blocks.append(_block(_attack_chart(alt, strength, x, names), caption, place))
        if steps:
            caption = f"{place}: accuracy after each step of an attack."
            x = alt.X("step:Q", title="step", scale=alt.Scale(type="log"))
            blocks.append(_block(_attack_chart(alt, steps, x, names), caption, place))
    return blocks


def _attack_chart(alt: Any, rows: Rows, x: alt.X, names: Sequence[str]) -> Any:
    chosen = _by_legend(alt)
    base = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_line(point=len(rows) < 100, strokeWidth=1.8)
        .encode(
            x=x,
            y=alt.Y("top1:Q", title="top-1 (%)", scale=alt.Scale(domainMin=0)),
            color=_color(names),
            strokeDash=alt.StrokeDash("attack:N", title=None),
            tooltip=["series:N", "attack:N", x.shorthand, alt.Tooltip("top1:Q", title="top-1 (%)")],
        )
    )
    return _faded(base, chosen).add_params(chosen)


def cost_charts(runs: Sequence[RunInfo]) -> list[ChartBlock]:
    """Accuracy against the time of a training step."""
    import altair as alt

    blocks = []
    for place, group in _places(runs).items():
        both = [
            run
            for run in group
            if run.value("cost", "ms_per_batch") is not None and _top1(run) is not None
        ]
        labels = short_labels(both)
        rows = [
            {
                "series": label,
                "ms": run.value("cost", "ms_per_batch"),
                "top1": _top1(run),
                "hardware": run.results[-1].hardware,
            }
            for run, label in zip(both, labels, strict=True)
        ]
        if not rows:
            continue
        base = alt.Chart(alt.InlineData(values=rows)).encode(
            x=alt.X("ms:Q", title="time of a training step (ms)", scale=alt.Scale(zero=False)),
            y=alt.Y("top1:Q", title="top-1 (%)", scale=alt.Scale(zero=False, padding=14)),
            color=_color(list(dict.fromkeys(labels)), legend=False),
            tooltip=[
                "series:N",
                alt.Tooltip("ms:Q", title="ms", format=".2f"),
                alt.Tooltip("top1:Q", title="top-1 (%)", format=".2f"),
                "hardware:N",
            ],
        )
        points = base.mark_point(size=90, filled=True, opacity=0.9)
        names = base.mark_text(align="left", dx=8, fontSize=11).encode(text="series:N")
        caption = f"{place}: accuracy against the cost of training; up and left is better."
        blocks.append(_block(points + names, caption, place))
    return blocks


def _top1(run: RunInfo) -> float | None:
    return run.value("accuracy", "top1_median10", "top1_last", "top1")


def _places(runs: Sequence[RunInfo]) -> dict[str, list[RunInfo]]:
    """Sort runs by data set and network; smoke tests only where there is nothing else."""
    places: dict[str, list[RunInfo]] = {}
    for run in runs:
        places.setdefault(place_name(run.key.data, run.key.network), []).append(run)
    return {
        place: [run for run in group if not run.is_smoke] or group
        for place, group in places.items()
    }


def _cycle(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


def _color(names: Sequence[str], colors: Sequence[str] = (), legend: bool = True) -> alt.Color:
    import altair as alt

    scale = alt.Scale(domain=list(names), range=list(colors) or _cycle(len(names)))
    if not legend:
        return alt.Color("series:N", scale=scale, legend=None)
    shown = alt.Legend(orient="bottom", columns=1, title=None, labelLimit=420)
    field = "set:N" if names[:1] == ["test images"] else "series:N"
    return alt.Color(field, scale=scale, legend=shown)


def _by_legend(alt: Any) -> Any:
    return alt.selection_point(fields=["series"], bind="legend", name="chosen")


def _faded(chart: Any, chosen: Any) -> Any:
    """Fade what is not chosen in the legend."""
    import altair as alt

    return chart.encode(opacity=alt.condition(chosen, alt.value(1), alt.value(0.15)))


def _block(
    chart: Any, caption: str, place: str, is_smoke: bool = False, *, is_small: bool = False
) -> ChartBlock:
    height = 170 if is_small else 300
    spec = chart.properties(width="container", height=height).to_dict()
    # The page sets fonts and colors; the schema's address is never fetched, and not needed.
    del spec["config"], spec["$schema"]
    return ChartBlock(caption, spec, place, is_smoke, is_small)
