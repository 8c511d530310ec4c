"""Figures of others: typed a second time, with their sources, and apart from the paper's tables."""

from pathlib import Path

import pytest

from alignmixup.cli import main
from alignmixup.contracts import RecipeKey, Result
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.mixups import METHODS as RECIPES
from alignmixup.report import others, paper
from alignmixup.report.others import QUOTED, quotation, quoted_beside
from alignmixup.report.tables import table

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "index.md"
# Columns of the page: data, network and epochs of OpenMixup's tables.
COLUMNS = [
    ("cifar10", "r18", 200),
    ("cifar10", "r18", 800),
    ("cifar100", "r18", 200),
    ("cifar100", "r18", 800),
    ("tiny", "r18", 400),
    ("imagenet", "r50", 100),
    ("imagenet", "r50", 300),
    ("imagenet", "deit-s", 300),
]


def test_every_figure_has_a_source_and_is_there_once():
    places = [(q.source, q.data, q.network, q.method, q.epochs) for q in QUOTED]
    assert len(set(places)) == len(places)
    assert {q.source for q in QUOTED} == set(others.SOURCES)
    assert all(50 < q.top1 < 100 for q in QUOTED)
    assert {q.method for q in QUOTED} <= {*paper.METHODS, *others.METHODS}
    assert not set(others.METHODS) & set(paper.METHODS)
    assert {(q.source, q.method) for q in QUOTED} >= set(others.NOTES)


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("baseline", [94.87, 95.50, 76.42, 78.04, 61.68, 76.83, 77.35, 75.66]),
        ("resizemix", [96.16, 96.76, 79.56, 80.01, 63.74, 77.42, 78.91, 78.61]),
        ("fmix", [96.17, 96.18, 78.91, 79.69, 63.47, 77.19, 78.51, 77.37]),
        ("smoothmix", [95.29, 96.17, 77.90, 78.69, 66.65, None, None, None]),
        ("gridmix", [95.89, 96.56, 78.23, 78.72, 65.14, 77.04, 78.50, None]),
        ("automix", [96.59, 97.34, 80.12, 82.04, 67.33, 77.91, 79.25, 80.78]),
        ("samix", [96.67, 97.50, 81.21, 82.30, 68.89, 78.14, 79.39, 80.94]),
        ("puzzlemix", [96.42, 97.10, 79.96, 81.13, 65.81, 77.54, 78.86, None]),
        ("saliencymix", [96.05, 96.20, 79.75, 79.12, 64.60, 77.14, 78.46, None]),
        ("tokenmix", [None, None, None, None, None, None, None, 80.80]),
        ("adautomix", [None] * 8),
    ],
)
def test_rows_typed_a_second_time(method, values):
    found = {
        (q.data, q.network, q.epochs): q.top1
        for q in QUOTED
        if (q.source, q.method) == ("openmixup", method)
    }
    assert [found.get(column) for column in COLUMNS] == values


def test_figures_are_of_the_code_that_their_source_names():
    """OpenMixup marks rows that the authors' code made; AdAutoMix is in its authors' tables."""
    marked = {q.method for q in QUOTED if q.source == "openmixup" and "authors" in q.note}
    assert marked == {"comixup", "tokenmix"}
    own = {(q.data, q.network, q.epochs): q for q in QUOTED if q.source == "adautomix"}
    assert {where: q.top1 for where, q in own.items()} == {
        ("cifar100", "r18", 200): 81.55,
        ("cifar100", "r18", 800): 82.32,
        ("tiny", "r18", 400): 69.19,
        ("imagenet", "r50", 100): 78.04,
    }
    assert all("teacher" in q.note for q in own.values())


def test_a_figure_is_never_shown_without_its_source():
    for figure in QUOTED:
        text = quotation([figure])
        assert others.SOURCES[figure.source].name in text
        assert text.startswith(f"{100 - figure.top1:.2f} (")
    key = find_recipe("cifar100-r18-smoothmix-fast").key
    assert quotation(quoted_beside(key)) == (
        "22.10/21.31 (OpenMixup, 200/800 epochs, labels swapped)"
    )
    assert not quoted_beside(RecipeKey("cifar100", "r18", "resizemix", "unaligned"))
    assert not quoted_beside(RecipeKey("cub200", "r18", "resizemix"))


def test_recipes_are_listed_with_them(capsys):
    assert main(["recipes", "cifar10-r18-resizemix"]) == 0
    out = capsys.readouterr().out
    assert "3.84/3.24 (OpenMixup, 200/800 epochs)" in out
    assert "elsewhere, OpenMixup: github.com/" in out
    assert main(["recipes", "cub200-r50-cutmix"]) == 0
    assert "elsewhere" not in capsys.readouterr().out


def test_a_report_has_them_in_a_note_and_not_in_its_cells():
    results = [
        Result(
            "accuracy", "top1_median10", value, key=RecipeKey("cifar100", "r18", method), epoch=300
        )
        for method, value in (("fmix", 80.0), ("input", 79.0))
    ]
    shown = table(results, "accuracy")
    rows = {row[0]: row[1] for row in shown.rows}
    assert rows["FMix"] == "20.00"  # no bracket: the paper has no such row
    assert rows["Input mixup"] == "21.00 (20.21)"  # the paper's own, not OpenMixup's
    (note,) = [note for note in shown.notes if "Published by others" in note]
    assert "FMix, CIFAR-100 R-18: 21.09/20.31 (OpenMixup, 200/800 epochs" in note
    assert "Input" not in note


def test_every_method_with_a_recipe_has_a_name():
    assert {method for method, _ in RECIPES} <= set(others.METHODS)


def test_the_page_of_methods_has_the_same_figures():
    """Every row of the page's table, against the data."""
    names = {name: method for method, name in {**others.METHODS, **paper.METHODS}.items()}
    lines = PAGE.read_text(encoding="utf-8").partition("## Published results")[2].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    shown = {
        (names[name], column): cell
        for name, *cells in rows[2:]
        for column, cell in zip(COLUMNS, cells, strict=True)
        if cell
    }
    expected = {
        (q.method, (q.data, q.network, q.epochs)): f"{q.top1:.2f}"
        for q in QUOTED
        if q.source == "openmixup" and (q.data, q.network, q.epochs) in COLUMNS
    }
    assert shown == expected
