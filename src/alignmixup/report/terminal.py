"""A table as plain text for a terminal: no line is wider than the terminal, no number is cut.

Names are wrapped, and shortened in the middle where they are still too long. Cells are wrapped
between their words. Columns that do not fit even so are left out, the last ones first, and named
below the table. Widths are those of the characters on the screen, which may take two columns each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, zip_longest

from rich.cells import cell_len, set_cell_size

from alignmixup.report.render import Table

GAP = 2  # between two columns
NAME_WIDTH = 16  # of the names of the rows, at least, before a column is left out
NAME_WANTED = 28  # likewise, before cells are wrapped
NAME_LINES = 3
HEAD_WIDTH = 16  # of the name of a column, beyond which it is wrapped


def to_text(table: Table, width: int) -> str:
    """Render a table with its title above and its notes below, at most ``width`` columns wide.

    Rows that have the same value in the column ``group``, one after the other, stand below it.
    """
    groups, columns, rows = _grouped(table)
    columns = [plain(name) for name in columns]
    rows = [[plain(cell) for cell in row] for row in rows]
    indent = "  " if any(groups) else ""
    widths = _widths(columns, rows, width - len(indent))
    heads = [wrap(name, size) for name, size in zip(columns, widths, strict=False)]
    most = max(map(len, heads))
    lines = _joined([[""] * (most - len(head)) + head for head in heads], widths, indent)
    lines.append("\u2500" * (len(indent) + sum(widths) + GAP * (len(widths) - 1)))
    body = [_joined(_cells(row, widths), widths, indent) for row in rows]
    for name, members in groupby(range(len(rows)), lambda i: groups[i] if groups else ""):
        lines += [shorten(plain(name), width)] if name else []
        lines += [line for i in members for line in body[i]]
    notes = list(table.notes)
    if len(widths) < len(columns):
        notes.append(f"Columns left out: {', '.join(columns[len(widths) :])}.")
    below = [line for note in notes for line in wrap(plain(note), width)]
    text = "\n".join([*wrap(plain(table.title), width), *lines, *below])
    return text.replace("\u00a0", " ") + "\n"  # it has kept words together


def _grouped(table: Table) -> tuple[list[str], Sequence[str], Sequence[Sequence[str]]]:
    """Take the column that groups rows out of a table."""
    if table.group not in table.columns:
        return [], table.columns, table.rows
    at = table.columns.index(table.group)
    rest = [(*row[:at], *row[at + 1 :]) for row in table.rows]
    return [row[at] for row in table.rows], (*table.columns[:at], *table.columns[at + 1 :]), rest


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Choose the widths of the columns that fit; names take what the cells leave."""
    heads = [max(1, min(cell_len(name), HEAD_WIDTH)) for name in columns]
    words = [min(_longest([name]), HEAD_WIDTH) for name in columns]
    cells = [[row[i] for row in rows] for i in range(len(columns))]
    whole = [max([1, *map(cell_len, of)]) for of in cells]
    # From wide to narrow: names of columns on one line, cells on one line, cells word by word.
    natural = [max(of) for of in zip(heads, whole, strict=True)]
    unwrapped = [max(of) for of in zip(words, whole, strict=True)]
    least = [max(word, _longest(of)) for word, of in zip(words, cells, strict=True)]
    name, count = natural[0], len(columns)
    while count > 1 and min(name, NAME_WIDTH) + sum(least[1:count]) + GAP * (count - 1) > width:
        count -= 1
    widths = natural[:count]
    for narrow in (unwrapped, least):
        while min(name, NAME_WANTED) + sum(widths[1:]) + GAP * (count - 1) > width:
            wide = [i for i in range(1, count) if widths[i] > narrow[i]]
            if not wide:
                break
            widths[max(wide, key=lambda i: widths[i])] -= 1
    widths[0] = max(1, min(name, width - sum(widths[1:]) - GAP * (count - 1)))
    return widths


def _longest(texts: Sequence[str]) -> int:
    return max((cell_len(word) for text in texts for word in text.split(" ")), default=0)


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[list[str]]:
    """Wrap the cells of a row; its name has few lines."""
    name = row[0]
    length = NAME_LINES * widths[0]
    while len(lines := wrap(name, widths[0])) > NAME_LINES and length > 0:
        name = shorten(row[0], length)
        length -= 1
    return [lines, *(wrap(cell, size) for cell, size in zip(row[1:], widths[1:], strict=False))]


def _joined(cells: Sequence[Sequence[str]], widths: Sequence[int], indent: str) -> list[str]:
    """Put the lines of cells side by side: names to the left, all else to the right."""
    lines = []
    for parts in zip_longest(*cells, fillvalue=""):
        name, *rest = [
            part + " " * (size - cell_len(part)) if i == 0 else " " * (size - cell_len(part)) + part
            for i, (part, size) in enumerate(zip(parts, widths, strict=True))
        ]
        lines.append((indent + (" " * GAP).join([name, *rest])).rstrip())
    return lines


def plain(text: str) -> str:
    """Return text on one line without what steers a terminal."""
    line = re.sub(r"[ \t\r\n]+", " ", text).strip()
    return "".join(c if c.isprintable() or c == "\u00a0" else "\ufffd" for c in line)


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Break text between words into lines; a word that is too long is shortened in the middle."""
    lines = [""]
    for word in text.split(" "):
        start = indent if len(lines) > 1 else ""
        if lines[-1] in ("", indent) or cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            sep = "" if lines[-1] in ("", indent) else " "
            lines[-1] += sep + shorten(word, width - cell_len(start))
        else:
            lines.append(indent + shorten(word, width - cell_len(indent)))
    return lines


def shorten(text: str, width: int) -> str:
    """Return text of at most ``width`` columns, with an ellipsis in its middle."""
    if cell_len(text) <= width:
        return text
    if width < 2:
        return "\u2026"[:width]
    tail = (width - 1) // 2
    start = set_cell_size(text, width - 1 - tail)
    end = set_cell_size(text[::-1], tail)[::-1]
    return f"{start}\u2026{end}"
