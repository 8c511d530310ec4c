"""Tables on a terminal: no line is wider than it, and no number is cut."""

import os
import re

import pytest
from hypothesis import given, settings, strategies as st
from rich.cells import cell_len

from alignmixup.cli import main
from alignmixup.contracts import RecipeKey, Result
from alignmixup.report.render import Table
from alignmixup.report.summary import summarize
from alignmixup.report.terminal import plain, shorten, to_text, wrap

NAMES = st.text(min_size=1, max_size=90)
METRICS = {
    "accuracy": "top1_last",
    "fgsm": "top1_error",
    "pgd": "top1_error",
    "strong_attack": "top1_error",
    "ood": "auroc",
    "calibration": "ece",
    "cost": "ms_per_batch",
}


@st.composite
def any_results(draw):
    """Results of a few methods on a few data sets under any names, with any values."""
    keys = draw(st.lists(st.builds(RecipeKey, NAMES, NAMES, NAMES, NAMES), min_size=1, max_size=3))
    values = st.floats(-1e9, 1e9)
    return [
        Result(task, metric, draw(values), {"source": draw(NAMES)}).stamped(
            key=key, seed=seed, epoch=draw(st.integers(1, 10**7)), trained={draw(NAMES): "x"}
        )
        for key in keys
        for seed in range(2)
        for task, metric in METRICS.items()
    ]


@settings(max_examples=15, deadline=None)
@given(results=any_results(), width=st.sampled_from([40, 80, 120]))
def test_no_line_is_wider_than_the_terminal_for_any_results(results, width):
    made = summarize(results, "last", lambda key: None)
    for table in made.tables:
        lines = to_text(table, width).split("\n")
        assert max(map(cell_len, lines)) <= width
        assert all(line.isprintable() for line in lines)
    for line in made.lines:
        assert max(map(cell_len, wrap(plain(line), width, indent="  "))) <= width


NUMBERS = st.from_regex(r"[0-9]{1,3}\.[0-9]{2}( \\([0-9]{1,2}\.[0-9]{2}\\))?", fullmatch=True)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(NAMES, NUMBERS, NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=4),
    width=st.integers(20, 130),
)
def test_numbers_are_shown_whole_or_their_column_is_named_as_left_out(rows, width):
    columns = ("Method", "first", "second", "third", "fourth")
    # No digits in the names, which may be shortened.
    rows = [(re.sub(r"\d", "x", name), *cells) for name, *cells in rows]
    shown = to_text(Table("t", columns, tuple(rows)), width)
    missing = re.findall(r"\w+", shown.partition("Columns left out:")[2])
    kept = [i for i, column in enumerate(columns) if column not in missing]
    numbers = [n for row in rows for i in kept[1:] for n in re.findall(r"[\d.]+", row[i])]
    assert sorted(re.findall(r"[\d.]*\d[\d.]*", shown)) == sorted(numbers)
    assert max(map(cell_len, shown.split("\n"))) <= width


def test_rows_of_one_group_stand_below_its_name():
    rows = (("a", "here", "1.0"), ("b", "here", "2.0"), ("c", "there", "3.0"))
    shown = to_text(Table("t", ("Method", "Data", "x"), rows, group="Data"), 40)
    assert [line.split() for line in shown.splitlines()][3:] == [
        ["here"],
        ["a", "1.0"],
        ["b", "2.0"],
        ["there"],
        ["c", "3.0"],
    ]


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40), width=st.integers(0, 30))
def test_what_is_shortened_keeps_both_ends(text, width):
    text = plain(text)
    short = shorten(text, width)
    assert cell_len(short) <= width
    assert (short == text) == (cell_len(text) <= width)
    if width >= 5 and short != text:
        start, end = short.split("\u2026", 1) if "\u2026" not in text else (short[0], short[-1])
        assert text.startswith(start.rstrip())
        assert text.endswith(end.lstrip())


def test_a_long_variant_is_a_note_and_a_short_one_is_beside_the_name():
    trained = {f"train.setting{i}": i for i in range(4)}
    lines = [
        Result("accuracy", "top1_last", 90.0, key=RecipeKey("d", "n", "input"), trained=trained),
        Result("accuracy", "top1_last", 91.0, key=RecipeKey("d", "n", "cutmix", "brief")),
    ]
    made, _ = summarize([r.stamped(seed=0, epoch=40) for r in lines], "last", lambda key: {}).tables
    shown = to_text(made, 80)
    assert "Input mixup [a]" in shown
    assert re.search(r"^\[a\] .*train\.setting3=3", shown, re.MULTILINE | re.DOTALL)
    assert "CutMix (brief" in shown


def results_file(folder, key):
    lines = [Result("accuracy", "top1_last", 90.0, key=key, seed=s, epoch=9) for s in range(3)]
    file = folder / "results.jsonl"
    file.write_text("".join(f"{line.to_json()}\n" for line in lines))
    return file


@pytest.mark.parametrize("width", ["80", "50"])
def test_the_command_keeps_to_the_width(tmp_path, monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", width)
    key = RecipeKey("data-" * 30, "network" * 20, "\x1b[31mmethod", "variant " * 40)
    file = results_file(tmp_path, key)
    assert main(["report", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "10.00" in shown
    assert max(map(cell_len, shown.splitlines())) <= int(width)
    assert "\x1b" not in shown


def test_without_a_terminal_it_is_80_columns(tmp_path, monkeypatch, capsys):
    def no_terminal(number):
        raise OSError(25, "Inappropriate ioctl for device")

    monkeypatch.setattr(os, "get_terminal_size", no_terminal)
    monkeypatch.delenv("COLUMNS", raising=False)
    file = results_file(tmp_path, RecipeKey("data-" * 30, "net", "method " * 30))
    assert main(["report", str(file)]) == 0
    assert 70 < max(map(cell_len, capsys.readouterr().out.splitlines())) <= 80


def test_an_accuracy_that_no_run_has_is_one_sentence(tmp_path, capsys):
    key = RecipeKey("data", "net", "input")
    line = Result("accuracy", "top1_last", 90.0, key=key, seed=0, epoch=300)
    (tmp_path / "results.jsonl").write_text(line.to_json() + "\n")
    assert main(["report", str(tmp_path)]) == 1
    assert "no results in" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--accuracy", "last", "--out", str(tmp_path)]) == 0
