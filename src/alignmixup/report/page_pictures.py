"""Parts of the page that show pictures of runs, from the artifacts in their folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from alignmixup.report.artifacts import Artifact

_ABOUT = {
    "interpolations": "Features of two images, mixed with the share \u03bb of the first and "
    "decoded. Move the slider, or use the arrow keys on it.",
    "transport": "Point at a position of the first image, or move over it with the arrow keys: the "
    "second image shows where the mass of that position goes in the transport plan.",
    "localization": "Solid orange: the box found from the class activation map. Dashed blue: the "
    "true box.",
    "confusion": "Rows are true classes, columns predictions; the darker, the more images. Below: "
    "the mistakes made with the most confidence.",
}
_NO_FOLDER = "no run folder was given"
_NO_FILE = "the run folders hold none; 'alignmixup report RUN --out DIR' makes them from the data"


class Pictures:
    """The pictures of all runs by kind, and why some are missing."""

    def __init__(self, artifacts: Mapping[str, Sequence[Artifact]], *, has_folders: bool) -> None:
        self._all = artifacts
        self._has_folders = has_folders

    def data(self) -> dict[str, Any]:
        """Return what the page's script draws."""
        return {kind: self._shown(kind) for kind in self._all}

    def html(self, kind: str) -> str:
        """Return the place of the pictures of one kind; empty where there are none."""
        if not (shown := self._shown(kind)):
            return ""
        blocks = "".join(
            f'<div class="pictures" data-kind="{kind}" data-index="{i}"></div>'
            for i in range(len(shown))
        )
        return f"<p>{escape(_ABOUT[kind])}</p>{blocks}"

    def left_out(self) -> str:
        """Say which pictures are missing, and why."""
        kinds: dict[str, dict[str, None]] = {}  # sets in order
        for kind, found in self._all.items():
            reasons = [f"{a.get('run', 'run')}: {a['left_out']}" for a in found if "left_out" in a]
            if not found:
                reasons = [_NO_FILE if self._has_folders else _NO_FOLDER]
            for why in reasons:
                kinds.setdefault(why, {})[kind] = None
        lines = [f"No pictures of {', '.join(of)} ({why})." for why, of in kinds.items()]
        return f'<p class="note">{escape(" ".join(lines))}</p>' if lines else ""

    def _shown(self, kind: str) -> list[Artifact]:
        return [artifact for artifact in self._all[kind] if "left_out" not in artifact]
