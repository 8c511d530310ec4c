"""Sections of the page that show pictures of runs, from the artifacts in their folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from alignmixup.report.artifacts import Artifact

_TITLES = {
    "interpolations": "Decoded interpolations",
    "transport": "Where the mass goes",
    "localization": "Localization examples",
    "confusion": "Confusions and certain mistakes",
}
_ABOUT = {
    "interpolations": "Features of two images mixed with the share lam of the first, and decoded. "
    "Move the slider, or use the arrow keys on it.",
    "transport": "Point at a position of the first image, or move with the arrow keys: the second "
    "image shows where its mass goes in the transport plan between their features.",
    "localization": "Solid, orange: the box found from the class activation map; dashed, blue: the "
    "true box.",
    "confusion": "Rows are true classes, columns predictions; the darker, the more images.",
}


def picture_sections(
    artifacts: Mapping[str, Sequence[Artifact]], folders: Sequence[Path]
) -> list[tuple[str, str, dict[str, Any]]]:
    """Return title, HTML and data of each kind of picture; one sentence where there is none."""
    sections = []
    for kind, title in _TITLES.items():
        made = artifacts[kind]
        shown = [a for a in made if "left_out" not in a]
        reasons = [f"{a.get('run', 'a run')}: {a['left_out']}" for a in made if "left_out" in a]
        if not made:
            reasons = ["no run folder was given" if not folders else _NOTHING]
        lines = [f'<p class="note">Left out for {escape(str(why))}.</p>' for why in reasons]
        if not made:
            lines = [f'<p class="note">Left out: {escape(reasons[0])}.</p>']
        about = f"<p>{escape(_ABOUT[kind])}</p>" if shown else ""
        blocks = "".join(
            f'<div class="pictures" data-kind="{kind}" data-index="{i}"></div>'
            for i in range(len(shown))
        )
        sections.append((title, about + blocks + "".join(lines), {kind: shown}))
    return sections


_NOTHING = "the runs have no pictures; run 'alignmixup report RUN --out DIR' where their data are"
