"""Tables written to files: one page each of Markdown, LaTeX and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from alignmixup.report.render import Table, to_html, to_latex, to_markdown

__all__ = ["write_tables"]

STYLE = "body{font:16px/1.5 sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:left}"


def write_tables(tables: Sequence[Table], out: Path) -> list[Path]:
    """Write all tables into ``out`` as tables.md, tables.tex and tables.html; return the paths."""
    out.mkdir(parents=True, exist_ok=True)
    body = "".join(to_html(table) for table in tables)
    pages = {
        "tables.md": "\n\n".join(to_markdown(table) for table in tables) + "\n",
        "tables.tex": "\n\n".join(to_latex(table) for table in tables) + "\n",
        "tables.html": f"<!doctype html><meta charset='utf-8'><style>{STYLE}</style>{body}\n",
    }
    for name, text in pages.items():
        (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in pages]
