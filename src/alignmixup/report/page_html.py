"""The frame of the page: head, navigation, filters, sections, scripts and their hashes."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from alignmixup.report.charting import ChartBlock

# Two squares that overlap.
_ICON = (
    "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>"
    "<rect width='11' height='11' rx='2' fill='#0072b2'/>"
    "<rect x='5' y='5' width='11' height='11' rx='2' fill='#e69f00' opacity='.8'/></svg>"
)


class PageBuilder:
    """A page while it is put together: sections of HTML, and the data that its script reads."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.lede = ""
        self.places: list[str] = []
        self.num_smoke = 0
        self.is_all_smoke = False
        self.missing = ""
        self.data: dict[str, Any] = {"charts": []}
        self._sections: list[tuple[str, str]] = []

    def section(self, title: str, html: str) -> None:
        """Add a section, unless it is empty."""
        if html:
            self._sections.append((title, html))

    def charts(self, blocks: Sequence[ChartBlock], note: str = "") -> str:
        """Return charts as HTML, large ones first; their specifications go into the page's data."""
        if not blocks:
            return ""
        large = "".join(self._chart(block) for block in blocks if not block.is_small)
        small = [block for block in blocks if block.is_small]
        places = list(dict.fromkeys(block.place for block in small))
        for place in places:
            panels = "".join(self._chart(block) for block in small if block.place == place)
            heading = f"<h3>{escape(place)}</h3>" if len(places) > 1 else ""
            large += f'<div class="group">{heading}<div class="panels">{panels}</div></div>'
        return (f'<p class="note">{escape(note)}</p>' if note else "") + large

    def _chart(self, block: ChartBlock) -> str:
        self.data["charts"].append(block.spec)
        smoke = " data-smoke" if block.is_smoke else ""
        size = " small" if block.is_small else ""
        return (
            f'<figure class="chart{size}" data-place="{escape(block.place)}"{smoke}>'
            f'<div data-chart="{len(self.data["charts"]) - 1}" role="img" '
            f'aria-label="{escape(block.caption)}"></div>'
            f"<figcaption>{escape(block.caption)}</figcaption></figure>"
        )

    def html(self) -> str:
        """Return the page as one self-contained file."""
        own = [_static("page.js"), _static("pictures.js")]
        scripts = [*([_vega()] if self.data["charts"] else []), *own]
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
            f'<label class="check"><input type="checkbox" id="smoke"'
            f"{' checked' if self.is_all_smoke else ''}> Smoke tests ({self.num_smoke})</label>"
            if self.num_smoke
            else ""
        )
        return (
            '<form class="controls" role="search" aria-label="Filter">'
            '<input type="search" id="filter" placeholder="Filter by method, variant, source" '
            'aria-label="Filter rows by text">'
            '<select id="place" aria-label="Data and network"><option value="">All data</option>'
            f"{options}</select>{smoke}"
            '<label class="check"><input type="checkbox" id="published" checked> '
            "Rows that only the paper has</label></form>"
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
    import altair
    import vl_convert

    version = ".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
    return bundle.replace("</script", r"<\/script")
