"""One self-contained HTML page of results: no server, no network, nothing to install for readers.

    alignmixup report runs/* --out report          writes report/report.html

Names in results, of runs, classes and settings, are not trusted: they are escaped in HTML and in
the JSON that the page's script reads, and the page's content security policy runs only the scripts
written here, by their hash. ``Section`` is the exception: its HTML is inserted as it is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from alignmixup.contracts import Result
from alignmixup.files import make_folder, write_text
from alignmixup.report.artifacts import read_artifacts
from alignmixup.report.charting import Palette
from alignmixup.report.curves import read_curves, run_folders
from alignmixup.report.folding import RecipeSettings
from alignmixup.report.grids import Grid, make_grids
from alignmixup.report.measures import KINDS, kinds_in
from alignmixup.report.page_charts import attack_charts, cost_charts, curve_charts
from alignmixup.report.page_html import PageBuilder
from alignmixup.report.page_panels import ood_charts, reliability_charts
from alignmixup.report.page_pictures import Pictures
from alignmixup.report.page_tables import comparisons_html, grid_html, runs_html
from alignmixup.report.runs import RunInfo, place_name, runs_of

__all__ = ["Section", "write_page"]

PAGE = "report.html"
# Charts and pictures, with the kind of table beside which they usually are; the others stand alone.
PARTS = {
    "interpolations": "",
    "transport": "",
    "curves": "accuracy",
    "confusion": "accuracy",
    "reliability": "calibration",
    "ood": "ood",
    "attack": "robustness",
    "localization": "localization",
    "cost": "cost",
}
TITLE = "alignmixup report"


@dataclass(frozen=True)
class Section:
    """A part of the page of your own.

    Args:
        title: Its heading; escaped.
        html: Its content. Trusted: inserted as it is. Pictures must be data URIs; scripts in it do
            not run.
        parts: Charts and pictures to show below it, by their names in ``PARTS``, in place of where
            they usually are. Without data for any of them the section is left out.
    """

    title: str
    html: str
    parts: Sequence[str] = ()

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(
                    f"unknown part {part!r} of the page; choose from {', '.join(PARTS)}"
                )


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
    made = PageBuilder(title)
    known = cache(recipe_settings)
    measured = runs_of(results, known)
    parts = _parts(made, results, measured, runs)
    for section in sections:
        shown = "".join(parts.pop(part, "") for part in section.parts)
        if shown or not section.parts:
            made.section(section.title, section.html + shown)
    _add_results(made, results, measured, parts, which, known)
    make_folder(path.parent)
    write_text(path, made.html())
    return path


def _parts(
    page: PageBuilder, results: Sequence[Result], runs: Sequence[RunInfo], paths: Sequence[Path]
) -> dict[str, str]:
    """Make the charts and pictures by their names; empty where there are no data."""
    folders = run_folders(paths)
    pictures = Pictures(read_artifacts(folders), has_folders=bool(folders))
    page.data.update(pictures.data())
    page.missing = pictures.left_out()
    curves = read_curves(paths, results)
    measured = [run.key.method for run in sorted(runs, key=lambda run: run.is_smoke)]
    palette = Palette([*measured, *(curve.method for curve in curves)])
    return {
        "interpolations": pictures.html("interpolations"),
        "transport": pictures.html("transport"),
        "curves": page.charts(curve_charts(curves, palette)),
        "confusion": pictures.html("confusion"),
        "reliability": page.charts(reliability_charts(runs), _RELIABILITY),
        "ood": page.charts(ood_charts(runs, palette), _ood_note(results)),
        "attack": page.charts(attack_charts(runs, palette)),
        "localization": pictures.html("localization"),
        "cost": page.charts(cost_charts(runs, palette)),
    }


def _add_results(
    page: PageBuilder,
    results: Sequence[Result],
    runs: Sequence[RunInfo],
    parts: Mapping[str, str],
    which: str,
    recipe_settings: RecipeSettings,
) -> None:
    page.lede = _lede(results, runs)
    page.places = list(dict.fromkeys(place_name(run.key.data, run.key.network) for run in runs))
    page.num_smoke = sum(run.is_smoke for run in runs)
    page.is_all_smoke = bool(runs) and page.num_smoke == len(runs)
    page.section("Decoded interpolations", parts.get("interpolations", ""))
    page.section("Where the mass goes", parts.get("transport", ""))
    grids: list[Grid] = []
    there = set(kinds_in(results))
    for kind in KINDS:
        made = make_grids(results, kind, which, recipe_settings) if kind in there else []
        grids += made
        tables = "".join(grid_html(grid) for grid in made)
        beside = "".join(parts.get(name, "") for name, of in PARTS.items() if of == kind)
        page.section(KINDS[kind][0], tables + beside)
    if grids:
        page.section("Comparisons over seeds", comparisons_html(grids))
    if runs:
        page.section("Settings of two runs", _difference_html(runs))
        page.data["runs"] = [_settings(run) for run in runs]
        page.section("Runs", runs_html(runs) + _left_out(results) + page.missing)


_RELIABILITY = (
    "Blue: the accuracy of the images in a bin of confidence. Orange: how far it is from their "
    "mean confidence; in a calibrated network both are on the dashed line."
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
    ends = dict.fromkeys([*dates[:1], *dates[-1:]])
    when = f", measured {' to '.join(ends)}" if dates else ""
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
    texts = {k: json.dumps(v, ensure_ascii=False) for k, v in run.trained.items()}
    own = {k: text.strip('"') for k, text in texts.items() if k != "style_weights"}
    facts = {"epochs": run.epochs, "seed": run.seed}
    key = {"data": run.key.data, "network": run.key.network, "method": run.key.method}
    named = {**key, "variant": run.key.variant, **facts}
    return {"title": run.title, "settings": {**{k: str(v) for k, v in named.items()}, **own}}
