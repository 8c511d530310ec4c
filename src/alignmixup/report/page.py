"""One self-contained HTML page of results: no server, no network, nothing to install for readers.

    alignmixup report runs/* --out report          writes report/report.html

Names in results, of runs, classes and settings, are not trusted: they are escaped in HTML and in
the JSON that the page's script reads, and the page's content security policy runs only the scripts
written here, by their hash. ``Section`` is the exception: its HTML is inserted as it is.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from alignmixup.contracts import Result
from alignmixup.report.artifacts import read_artifacts
from alignmixup.report.curves import read_curves, run_folders
from alignmixup.report.folding import RecipeSettings
from alignmixup.report.grids import Grid, make_grids
from alignmixup.report.measures import KINDS, kinds_in
from alignmixup.report.page_charts import (
    ChartBlock,
    attack_charts,
    cost_charts,
    curve_charts,
    ood_charts,
    reliability_charts,
)
from alignmixup.report.page_pictures import picture_sections
from alignmixup.report.page_tables import comparisons_html, grid_html, runs_html
from alignmixup.report.runs import RunInfo, place_name, runs_of

__all__ = ["Section", "write_page"]

PAGE = "report.html"
TITLE = "alignmixup report"
# A blend of two squares.
_ICON = (
    "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>"
    "<rect width='11' height='11' rx='2' fill='#0072b2'/>"
    "<rect x='5' y='5' width='11' height='11' rx='2' fill='#e69f00' opacity='.8'/></svg>"
)


@dataclass(frozen=True)
class Section:
    """A part of the page of your own.

    Args:
        title: Its heading; escaped.
        html: Its content. Trusted: inserted as it is. Pictures must be data URIs; scripts in it do
            not run.
    """

    title: str
    html: str


def write_page(
    results: Sequence[Result],
    runs: Sequence[Path],
    out: Path,
    *,
    title: str = TITLE,
    sections: Sequence[Section] = (),
    which: str = "median10",
    recipe_settings: RecipeSettings = lambda key: None,
) -> Path:
    """Write results and runs as one HTML file that works offline.

    Args:
        results: Result lines, as ``read_results`` returns them.
        runs: Folders of runs, or folders that hold them: their learning curves and pictures.
        out: Folder of the page, which is then named ``report.html``; or a path ending in ``.html``.
        title: Title of the page.
        sections: Parts of your own, shown before the tables.
        which: The accuracy of the tables: best, last or median10.
        recipe_settings: The settings that the recipe of a key trains with; rows name what differs.

    Returns:
        The path of the page.

    Raises:
        ValueError: If a result has no recipe key, or an artifact of a run is damaged.

    Example:
        ```python
        from pathlib import Path

        from alignmixup.report.page import Section, write_page

        result = am.Result("accuracy", "top1_last", 96.0, key=am.RecipeKey("pets", "r18", "input"))
        hello = Section("About", "<p>One run.</p>")
        page = write_page([result], [], Path("report"), title="Pets", sections=[hello])
        assert page == Path("report", "report.html")
        ```
    """
    path = out if out.suffix == ".html" else out / PAGE
    made = _Page(title)
    for section in sections:
        made.section(section.title, section.html)
    _add_results(made, results, runs, which, cache(recipe_settings))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(made.html(), encoding="utf-8")
    return path


def _add_results(
    page: _Page,
    results: Sequence[Result],
    paths: Sequence[Path],
    which: str,
    recipe_settings: RecipeSettings,
) -> None:
    runs = runs_of(results, recipe_settings)
    page.lede = _lede(results, runs)
    page.places = list(dict.fromkeys(place_name(run.key.data, run.key.network) for run in runs))
    page.num_smoke = sum(run.is_smoke for run in runs)
    grids: list[Grid] = []
    for kind in kinds_in(results):
        made = make_grids(results, kind, which, recipe_settings)
        grids += made
        page.section(KINDS[kind][0], "".join(grid_html(grid) for grid in made))
    if grids:
        page.section("Comparisons over seeds", comparisons_html(grids))
    page.charts("Learning curves", curve_charts(read_curves(paths, results)))
    page.charts("Reliability", reliability_charts(runs), _RELIABILITY)
    page.charts("Out-of-distribution scores", ood_charts(runs), _ood_note(results))
    page.charts("Accuracy under attack", attack_charts(runs))
    page.charts("Cost against accuracy", cost_charts(runs))
    folders = run_folders(paths)
    for name, html, data in picture_sections(read_artifacts(folders), folders):
        page.section(name, html)
        page.data.update(data)
    if runs:
        page.section("What differs between two runs", _difference_html(runs))
        page.data["runs"] = [_settings(run) for run in runs]
        page.section("Runs", runs_html(runs) + _left_out(results))


_RELIABILITY = (
    "Bars are the accuracy of the images in a bin of confidence; the orange line is its distance "
    "from the mean confidence, which is zero for a calibrated network (dashed)."
)


def _ood_note(results: Sequence[Result]) -> str:
    scored = [r for r in results if (r.task, r.metric) == ("ood", "auroc")]
    missing = sum("histogram" not in r.settings for r in scored)
    if not missing:
        return ""
    return (
        f"{missing} of {len(scored)} scores were measured before histograms were recorded: "
        "'alignmixup evaluate RUN --tasks ood' adds them."
    )


def _lede(results: Sequence[Result], runs: Sequence[RunInfo]) -> str:
    """Say in a sentence what the page is made of."""
    dates = sorted(r.date[:10] for r in results if r.date)
    when = f", measured {dates[0]} to {dates[-1]}" if dates else ""
    if dates and dates[0] == dates[-1]:
        when = f", measured {dates[0]}"
    num_runs = "one run" if len(runs) == 1 else f"{len(runs):,} runs"
    num_lines = "one measurement" if len(results) == 1 else f"{len(results):,} measurements"
    return f"{num_lines} of {num_runs}{when}."


def _left_out(results: Sequence[Result]) -> str:
    """Say which measurements no table of the page shows."""
    shown = {measure.task for _, measures in KINDS.values() for measure in measures}
    others = Counter(r.task for r in results if r.task not in shown)
    if not others:
        return ""
    listed = ", ".join(f"{task} ({count:,})" for task, count in sorted(others.items()))
    return f'<p class="note">Measured but in no table of this page: {escape(listed)}.</p>'


def _difference_html(runs: Sequence[RunInfo]) -> str:
    options = "".join(f"<option value='{i}'>{escape(r.title)}</option>" for i, r in enumerate(runs))
    selects = "".join(
        f'<label>{name} <select id="run-{name.lower()}">{options}</select></label>'
        for name in ("First", "Second")
    )
    return (
        f'<div class="pickers">{selects}</div><div id="difference" aria-live="polite"></div>'
        '<p class="note">Settings that a run does not record have their default.</p>'
    )


def _settings(run: RunInfo) -> dict[str, Any]:
    own = {k: json.dumps(v).strip('"') for k, v in run.trained.items() if k != "style_weights"}
    facts = {"epochs": run.epochs, "seed": run.seed}
    key = {"data": run.key.data, "network": run.key.network, "method": run.key.method}
    named = {**key, "variant": run.key.variant, **facts}
    return {"title": run.title, "settings": {**{k: str(v) for k, v in named.items()}, **own}}


class _Page:
    """The page while it is put together."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.lede = ""
        self.places: list[str] = []
        self.num_smoke = 0
        self.data: dict[str, Any] = {"charts": []}
        self._sections: list[tuple[str, str]] = []

    def section(self, title: str, html: str) -> None:
        self._sections.append((title, html))

    def charts(self, title: str, blocks: Sequence[ChartBlock], note: str = "") -> None:
        """Add a section of charts, if there are any."""
        if not blocks:
            return
        large = "".join(self._chart(block) for block in blocks if not block.is_small)
        small = "".join(self._chart(block) for block in blocks if block.is_small)
        panels = f'<div class="panels">{small}</div>' if small else ""
        below = f'<p class="note">{escape(note)}</p>' if note else ""
        self.section(title, below + large + panels)

    def _chart(self, block: ChartBlock) -> str:
        self.data["charts"].append(block.spec)
        smoke = " data-smoke" if block.is_smoke else ""
        return (
            f'<figure class="chart" data-place="{escape(block.place)}"{smoke}>'
            f'<div data-chart="{len(self.data["charts"]) - 1}" role="img" '
            f'aria-label="{escape(block.caption)}"></div>'
            f"<figcaption>{escape(block.caption)}</figcaption></figure>"
        )

    def html(self) -> str:
        scripts = [*([_vega()] if self.data["charts"] else []), _static("page.js")]
        hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
        policy = (
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
            "img-src data: blob:; base-uri 'none'; form-action 'none'"
        )
        icon = base64.b64encode(_ICON.encode()).decode()
        parts = [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(self.title)}</title>",
            f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">',
            f"<style>{_static('page.css')}</style></head><body>",
            self._body(),
            f'<script type="application/json" id="page-data">{script_json(self.data)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
        return "\n".join(parts)

    def _body(self) -> str:
        links = "".join(
            f'<li><a href="#s{i}">{escape(title)}</a></li>'
            for i, (title, _) in enumerate(self._sections)
        )
        content = "".join(
            f'<section id="s{i}"><h2>{escape(title)}</h2>{html}</section>'
            for i, (title, html) in enumerate(self._sections)
        )
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        return (
            '<a class="skip" href="#main">Skip to the results</a>'
            f'<header><h1>{escape(self.title)}</h1><p class="lede">{escape(self.lede)}</p></header>'
            f'<nav aria-label="Sections"><ul>{links}</ul></nav>{self._controls()}'
            f'<main id="main">{content}</main>'
            f"<footer><p>Written {now} by <code>alignmixup report</code>.</p></footer>"
        )

    def _controls(self) -> str:
        options = "".join(f"<option>{escape(place)}</option>" for place in self.places)
        smoke = (
            f'<label class="check"><input type="checkbox" id="smoke"> Smoke tests '
            f"({self.num_smoke})</label>"
            if self.num_smoke
            else ""
        )
        return (
            '<form class="controls" role="search" aria-label="Filter">'
            '<input type="search" id="filter" placeholder="Filter: method, variant, source" '
            'aria-label="Filter rows by text">'
            f'<select id="place" aria-label="Data and network"><option value="">All data'
            f"</option>{options}</select>{smoke}"
            '<label class="check"><input type="checkbox" id="published" checked> Paper only'
            "</label></form>"
        )


def script_json(data: object) -> str:
    """Return JSON that is safe inside a script element: no ``<``, ``>`` or ``&`` is left in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def _static(name: str) -> str:
    return files("alignmixup.report").joinpath("static", name).read_text(encoding="utf-8")


@cache
def _vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, of the version that Altair writes for."""
    import vl_convert

    version = ".".join(_vega_lite_version().split(".")[:2])
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
    return bundle.replace("</script", r"<\/script")


def _vega_lite_version() -> str:
    import altair as alt

    return str(alt.SCHEMA_VERSION).lstrip("v")
