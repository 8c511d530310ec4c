"""A table as a record, and its renderings: Markdown, LaTeX, HTML, files."""

from __future__ import annotations

import html
import unicodedata
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


_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi mathit{o} pi rho "
    "varsigma sigma tau upsilon phi chi psi omega"
)
_QUOTES_AND_DASHES = ("`", "'", "``", "''", "--", "---")
_LETTERS = "\xc6\xd8\xdf\xe6\xf8\u0141\u0142\u0152\u0153"
_NAMES = ("AE", "O", "ss", "ae", "o", "L", "l", "OE", "oe")
_LATEX = {
    **{c: rf"\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # a row that opens with a bracket would be read as an option of the line break
    **{chr(0x3B1 + i): rf"$\{name}$" for i, name in enumerate(_GREEK.split())},
    **dict(zip("\u2018\u2019\u201c\u201d\u2013\u2014", _QUOTES_AND_DASHES, strict=True)),
    **{c: rf"\{name}{{}}" for c, name in zip(_LETTERS, _NAMES, strict=True)},
    "\u00b1": r"$\pm$",
    "\u00d7": r"$\times$",
    "\u2264": r"$\le$",
    "\u2265": r"$\ge$",
    "\u2192": r"$\to$",
    "\u2212": "$-$",
    "\u2026": r"\dots{}",
}
# From grave and acute to caron and cedilla.
_MARKS = "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327"
_ACCENTS = dict(zip(_MARKS, "`'^~=u.\"rHvc", strict=True))


def _latex(text: str) -> str:
    letters = unicodedata.normalize("NFC", " ".join(text.split()))
    return "".join(_LATEX.get(c) or _accented(c) for c in letters)


def _accented(letter: str) -> str:
    """Return a letter by its accents, one that pdflatex does not know by its code point."""
    base, *marks = list(unicodedata.normalize("NFD", letter))
    if not (base.isascii() and base.isprintable() and _ACCENTS.keys() >= set(marks)):
        return f"{{[}}U+{ord(letter):04X}]"
    for mark in marks:
        base = rf"\{_ACCENTS[mark]}{{{base}}}"
    return base


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
