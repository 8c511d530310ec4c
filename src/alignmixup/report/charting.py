"""What the charts of the page share: their record, colors by method, legends.

Specifications are Vega-Lite, made with Altair, with their data inside. Fields have fixed names, so
that a name from a result is only ever a value. A method has one color in all charts: those of Okabe
and Ito without black and yellow, which vanish on a dark or a light page; more than seven methods
share them. Lengths of training differ in dash or shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from alignmixup.report.runs import RunInfo, method_name, place_name

if TYPE_CHECKING:
    import altair as alt

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a")
BLUE, ORANGE, GRAY = "#0072b2", "#d55e00", "#8a8a8a"
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class ChartBlock:
    """A chart with its caption; small ones stand side by side."""

    caption: str
    spec: Mapping[str, Any]
    place: str
    is_smoke: bool = False
    is_small: bool = False


def block(
    chart: Any, caption: str, place: str, runs: Sequence[RunInfo] = (), *, is_small: bool = False
) -> ChartBlock:
    """Finish a chart; one of smoke tests alone is hidden with them."""
    height = 170 if is_small else 300
    spec = chart.properties(width="container", height=height).to_dict()
    # The page sets fonts and colors; the schema's address is never fetched, and not needed.
    del spec["config"], spec["$schema"]
    is_smoke = bool(runs) and all(run.is_smoke for run in runs)
    return ChartBlock(caption, spec, place, is_smoke, is_small)


def data(rows: Rows) -> alt.Chart:
    """Start a chart with its data inside."""
    import altair as alt

    return alt.Chart(alt.InlineData(values=rows))


def by_place(runs: Sequence[RunInfo]) -> dict[str, list[RunInfo]]:
    """Sort runs by data set and network; smoke tests only where there is nothing else."""
    places: dict[str, list[RunInfo]] = {}
    for run in runs:
        places.setdefault(place_name(run.key.data, run.key.network), []).append(run)
    return {
        place: [run for run in group if not run.is_smoke] or group
        for place, group in places.items()
    }


def length_of(run: RunInfo) -> str:
    """Return how long a run was trained, as legends name it."""
    return run.length or "length unknown"


def row_of(run: RunInfo, label: str) -> dict[str, Any]:
    """Return the fields that every row about a run has."""
    return {"series": label, "method": method_name(run.key.method), "length": length_of(run)}


def long_label(run: RunInfo, label: str) -> str:
    """Return a label of a run that states its length."""
    return label if length_of(run) in label else f"{label}, {length_of(run)}"


def one_length(rows: Rows) -> str:
    """Say how long all runs of a chart were trained; a legend says it where they differ."""
    lengths = {row["length"] for row in rows}
    return f" All: {lengths.pop()}." if len(lengths) == 1 else ""


class Palette:
    """The color of each method, the same in all charts of a page."""

    def __init__(self, methods: Sequence[str]) -> None:
        names = list(dict.fromkeys(method_name(method) for method in methods))
        self._colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}

    def color(self, rows: Rows, *, more: Sequence[str] = (), symbol: str = "") -> alt.Color:
        """Encode the field ``method`` by color; ``more`` names are gray."""
        import altair as alt

        there = {row["method"] for row in rows}
        names = [name for name in self._colors if name in there]
        colors = [*(self._colors[name] for name in names), *[GRAY] * len(more)]
        scale = alt.Scale(domain=[*names, *more], range=colors)
        return alt.Color("method:N", scale=scale, legend=quiet_legend(symbol=symbol))


def quiet_legend(values: Sequence[str] = (), symbol: str = "") -> alt.Legend:
    """Return a legend below the chart without a title, of these values or of all."""
    import altair as alt

    legend = alt.Legend(orient="bottom", title=None, direction="horizontal")
    if values:  # chosen ones have long names: one below the other
        legend.values, legend.columns = list(values), 1
    if symbol:
        legend.symbolType = symbol
    return legend


def choosable(chart: Any) -> Any:
    """Have a click on the legend choose one method and fade the others."""
    import altair as alt

    chosen = alt.selection_point(fields=["method"], bind="legend", name="chosen")
    opacity = alt.condition(chosen, alt.value(1), alt.value(0.12))
    return chart.encode(opacity=opacity).add_params(chosen)


def shape_by(rows: Rows, field: str) -> Any:
    """Tell points apart by their shape where they differ in this field."""
    import altair as alt

    is_one = len({row[field] for row in rows}) == 1
    return alt.Undefined if is_one else alt.Shape(f"{field}:N", legend=quiet_legend())
