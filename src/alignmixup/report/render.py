"""A table as a record, and its renderings: Markdown, LaTeX, HTML, the terminal, files."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable

HEADER_WIDTH = 12  # of a column on the terminal: longer names are wrapped
ROW_NAME_WIDTH = 64  # likewise, of the names of the rows


@dataclass(frozen=True, slots=True)
class Table:
    """A table ready to be rendered: the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

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


def in_width(table: Table, width: int) -> list[Table]:
    """Split a table that is wider than the terminal into tables of fewer columns.

    Each has the names of the rows; the last has the notes. A column that is too wide by itself is
    wrapped.
    """
    names, *widths = [wide + 3 for wide in _widths(table)]  # with the rule and a space each side
    pieces: list[list[int]] = [[]]
    for i, wide in enumerate(widths):
        if pieces[-1] and names + sum(widths[k] for k in pieces[-1]) + wide + 1 > width:
            pieces.append([])
        pieces[-1].append(i)
    if len(pieces) == 1:
        return [table]
    return [
        Table(
            f"{table.title} ({number} of {len(pieces)})",
            _pick(table.columns, piece),
            tuple(_pick(row, piece) for row in table.rows),
            table.notes if number == len(pieces) else (),
        )
        for number, piece in enumerate(pieces, start=1)
    ]


def _widths(table: Table) -> list[int]:
    names, *cells = [
        max([min(len(name), HEADER_WIDTH), *(len(row[i]) for row in table.rows)])
        for i, name in enumerate(table.columns)
    ]
    return [min(names, ROW_NAME_WIDTH), *cells]


def _pick(cells: tuple[str, ...], piece: Sequence[int]) -> tuple[str, ...]:
    return (cells[0], *(cells[i + 1] for i in piece))


def to_rich(table: Table) -> RichTable:
    """Render for the terminal; names are not interpreted as rich markup."""
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(title=Text(table.title), caption=Text("\n".join(table.notes)))
    for i, (name, wide) in enumerate(zip(table.columns, _widths(table), strict=True)):
        shown.add_column(Text(name), justify="right" if i else "left", max_width=wide)
    for row in table.rows:
        shown.add_row(*[Text(cell) for cell in row])
    return shown


def write_tables(tables: Sequence[Table], out: Path) -> list[Path]:
    """Write all tables into ``out`` for papers, as tables.md and tables.tex; return the paths."""
    out.mkdir(parents=True, exist_ok=True)
    pages = {
        "tables.md": "\n\n".join(to_markdown(table) for table in tables) + "\n",
        "tables.tex": "\n\n".join(to_latex(table) for table in tables) + "\n",
    }
    for name, text in pages.items():
        (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in pages]
