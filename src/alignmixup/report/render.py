"""A table as a record, and its renderings: Markdown, LaTeX, HTML, files."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alignmixup.files import make_folder, write_text


@dataclass(frozen=True, slots=True)
class Table:
    """A table ready to be rendered: the first column names the row.

    ``group`` is the column, if any, by which a terminal groups rows to save its width.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    group: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r} has {len(self.columns)} columns, "
                    f"but row {row[:1]} has {len(row)} cells"
                )


def to_markdown(table: Table) -> str:
    """Render as a heading, a pipe table and the notes."""
    rows = [table.columns, ("---",) * len(table.columns), *table.rows]
    lines = [
        "| " + " | ".join(cell if i == 1 else _markdown(cell) for cell in row) + " |"
        for i, row in enumerate(rows)
    ]
    notes = [f"- {_markdown(note)}" for note in table.notes]
    blocks = [f"### {_markdown(table.title)}", "\n".join(lines), "\n".join(notes)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _markdown(text: str) -> str:
    """Escape what Markdown would read as markup; a line break would end the table."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#~$&" else c for c in " ".join(text.split()))


def to_latex(table: Table) -> str:
    """Render as a table environment with booktabs rules; the notes go into the caption."""
    rows = [" & ".join(_latex(cell) for cell in row) + r" \\" for row in table.rows]
    caption = " ".join(_latex(text) for text in (table.title + ".", *table.notes))
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\begin{{tabular}}{{l{'c' * (len(table.columns) - 1)}}} \toprule",
        " & ".join(_latex(name) for name in table.columns) + r" \\ \midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        rf"\caption{{{caption}}}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


_LATEX = {
    **{c: rf"\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # a row that opens with a bracket would be read as an option of the line break
    "\u00b1": r"$\pm$",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in " ".join(text.split()))


def to_html(table: Table) -> str:
    """Render as a table element with its notes below."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in table.columns)
    lines = ["<table>", f"<caption>{html.escape(table.title)}</caption>"]
    lines += [f"<thead><tr>{head}</tr></thead>", "<tbody>"]
    for first, *rest in table.rows:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{html.escape(first)}</th>{cells}</tr>')
    lines += ["</tbody>", "</table>"]
    if table.notes:
        items = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
        lines.append(f"<ul>{items}</ul>")
    return "\n".join(lines) + "\n"


def write_tables(tables: Sequence[Table], out: Path) -> list[Path]:
    """Write all tables into ``out`` for papers, as tables.md and tables.tex; return the paths."""
    make_folder(out)
    pages = {
        "tables.md": "\n\n".join(to_markdown(table) for table in tables) + "\n",
        "tables.tex": "\n\n".join(to_latex(table) for table in tables) + "\n",
    }
    for name, text in pages.items():
        write_text(out / name, text)
    return [out / name for name in pages]
