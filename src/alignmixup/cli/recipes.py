"""The command ``recipes``: what can be trained, by the table of the paper it belongs to.

The pages fit a terminal of 80 columns: names of recipes are up to 52 characters long. On a narrower
one the numbers are below the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from tyro.conf import Positional

from alignmixup.cli.parsing import WHOLE_WORDS, page_width, wrapped

if TYPE_CHECKING:
    from alignmixup.recipes.schema import Recipe

HEADS = "epochs  batch  published"
HOW_TO_MEASURE = (
    "First 'alignmixup train RECIPE', which records the accuracy; then 'alignmixup' and the "
    "command beside the number. RUN is runs/RECIPE-seed0."
)
OTHERS = "Not in the paper: short schedules (-fast), and other settings of its recipes"


@dataclass
class Recipes:
    """List the recipes with the published number beside each.

    Without arguments it lists the tables of the paper and how many recipes each
    needs. A pattern or --all lists recipes; --table shows how to measure a table."""

    pattern: Positional[str] = ""
    """Part of a name, e.g. cifar10-r18, or a pattern such as 'cifar10-*-fast'."""
    table: str | None = None
    """A table of the paper, e.g. adv: its published numbers with the commands that measure them."""
    all: bool = False
    """List every recipe."""

    def __call__(self) -> None:
        from alignmixup.recipes.catalog import matching_recipes, recipe_names
        from alignmixup.report import paper
        from alignmixup.report.reproduce import table_of_recipes

        if self.table is not None:
            _print_table(self.table, self.pattern or "*")
            return
        if self.pattern or self.all:
            _print_recipes(matching_recipes(self.pattern or "*"), table_of_recipes())
            return
        names = recipe_names()
        about = "tables of the paper and how many recipes each needs:"
        _print_wrapped("", f"{len(names)} recipes; {about}")
        print()
        for table, title in paper.TABLES.items():
            num = len(_needed(table, names))
            if num:
                _print_wrapped(f"  {table:<18}{num:>4}  ", title)
        num = len(set(names) - table_of_recipes().keys())
        _print_wrapped(f"  {'':<18}{num:>4}  ", OTHERS)
        print()
        _print_wrapped("alignmixup recipes cifar10-r18     ", "those with this in their name")
        _print_wrapped("alignmixup recipes --all           ", "all of them")
        _print_wrapped("alignmixup recipes --table adv     ", "how to measure a table")


def _needed(table: str, names: Sequence[str]) -> set[str]:
    """Return the recipes that the printed cells of a table are measured with."""
    from alignmixup.report import paper
    from alignmixup.report.reproduce import steps_of

    cells = [cell for cell in paper.find(table) if cell.value is not None]
    return {steps_of(cell).recipe for cell in cells} & set(names)


def _print_wrapped(start: str, text: str) -> None:
    print("\n".join(wrapped(start, text, **WHOLE_WORDS)))


def _print_row(name: str, width: int, facts: str) -> None:
    """Print a name and, beside it or on a narrow page below it, its facts."""
    is_narrow = width + len(f"    {HEADS}") > page_width() + 1
    print(f"  {name}\n    {facts}" if is_narrow else f"  {name:<{width}}  {facts}")


def _print_recipes(names: Sequence[str], tables: Mapping[str, str]) -> None:
    """Print recipes by table, in the order of the paper, those of none last."""
    from alignmixup.recipes.catalog import find_recipe
    from alignmixup.report import others, paper

    sources: dict[str, None] = {}
    order = [*paper.TABLES, ""]
    chosen = sorted(names, key=lambda name: order.index(tables.get(name, "")))
    for table, group in groupby(chosen, lambda name: tables.get(name, "")):
        rows = [*group]
        width = max(map(len, rows))
        _print_wrapped("", f"{table}: {paper.TABLES[table]}" if table else OTHERS)
        _print_row("recipe", width, HEADS)
        for name in rows:
            recipe = find_recipe(name)
            facts = f"{recipe.train.epochs:>6}  {recipe.train.batch_size:>5}"
            _print_row(name, width, f"{facts}  {_published(recipe)}".rstrip())
            if figures := [] if table else others.quoted_beside(recipe.key):
                _print_wrapped(" " * 6, f"elsewhere {others.quotation(figures)}")
                sources |= dict.fromkeys(figure.source for figure in figures)
        print()
    _print_wrapped("", "published: top-1 error (%), unless named, on the schedule of the paper")
    for source in map(others.SOURCES.__getitem__, sources):
        _print_wrapped("", f"elsewhere, {source.name}: {source.where}; {source.protocol}")


def _published(recipe: Recipe) -> str:
    from alignmixup.report import paper

    cell, located = (paper.cell_beside(recipe.key, m) for m in ("top1_error", "top1_loc"))
    if cell is not None:
        return f"{cell.top1_error:.2f}"
    return "" if located is None else f"{located.printed} ({located.metric})"


def _print_table(name: str, pattern: str) -> None:
    """Print the published numbers of a table by recipe, each with the command that measures it."""
    from alignmixup.recipes.catalog import recipe_names
    from alignmixup.report import paper
    from alignmixup.report.reproduce import steps_of
    from alignmixup.report.runs import source_name

    names = set(recipe_names(pattern))
    rows: dict[str, list[tuple[str, str]]] = {}
    for cell in paper.find(name):
        steps = steps_of(cell)
        if cell.value is None or steps.recipe not in names:
            continue
        run = f"runs/{steps.recipe}-seed0"
        command = " ".join({run: "RUN", steps.recipe: "RECIPE"}.get(w, w) for w in steps.command)
        source = source_name(cell.source)
        what = " ".join(filter(None, [source, paper.METRICS[cell.metric].name]))
        rows.setdefault(steps.recipe, []).append((f" {cell.printed:>7}  {what:<25}  ", command))
    if not rows:
        raise ValueError(f"no recipe of table {name!r} matches {pattern!r}")
    _print_wrapped("", f"{name}: {paper.TABLES[name]}")
    for recipe, lines in rows.items():
        print(f"\n{recipe}")
        for line in lines:
            _print_wrapped(*line)
    print()
    _print_wrapped("", HOW_TO_MEASURE)
