"""The tables of the pages are those that ``benchmarks/readme_tables.py`` makes from results/."""

import csv
import importlib.util
import statistics
import sys
from pathlib import Path

import pytest

from alignmixup.contracts import RecipeKey, Result
from alignmixup.report import paper
from alignmixup.report.authors_logs import LOGS

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location(
    "readme_tables", ROOT / "benchmarks/readme_tables.py"
)
tables = importlib.util.module_from_spec(_spec)
sys.modules["readme_tables"] = tables  # dataclasses look their module up
_spec.loader.exec_module(tables)

COMMAND = "PYTHONPATH=src python benchmarks/readme_tables.py"
MARKS = "before\n<!-- results: t -->\nold\n<!-- end of results -->\nafter\n"


def made(name, text):
    return tables.update(text, ROOT / "results", tables.PAGES[name])


@pytest.mark.parametrize("name", tables.PAGES)
def test_a_page_has_the_tables_of_the_results(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert made(name, text) == text, f"{name} differs: run {COMMAND}"


@pytest.mark.parametrize(
    ("name", "number"), [("README.md", "| 70.49 |"), ("docs/findings.md", "| +0.29 |")]
)
def test_a_changed_number_is_found(name, number):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text.count(number) == 1
    assert made(name, text.replace(number, "| 70.50 |")) == text


@pytest.mark.parametrize("place", LOGS)
def test_the_authors_log_is_the_one_of_the_reports(place):
    data, network = place
    with (ROOT / f"results/curves/authors-{data}-{network}.csv").open() as file:
        log = {int(row["epoch"]): float(row["top1"]) for row in csv.DictReader(file)}
    assert {epoch: log[epoch] for epoch, _ in LOGS[place]} == dict(LOGS[place])
    (published,) = (
        figure.value
        for figure in paper.FIGURES
        if (figure.table, figure.data, figure.network) == ("logs", data, network)
    )
    length = LOGS[place][-1][0]
    assert sorted(log) == [*range(1, length + 1)]
    last_ten = [log[epoch] for epoch in range(length - 9, length + 1)]
    assert statistics.median(last_ten) == pytest.approx(published, abs=0.011)


def line(method, value, seed=0, task="accuracy", metric="top1_median10", **fields):
    key = RecipeKey("cifar100", "r18", method, fields.pop("variant", "300"))
    fields = {"epoch": 300, "hardware": "GPU", "commit": "abc", "date": "1"} | fields
    return Result(task, metric, value, fields.pop("settings", {}), key, seed=seed, **fields)


def page(folder, results, table=None):
    (folder / "results.jsonl").write_text("".join(r.to_json() + "\n" for r in results))
    table = table or tables.Methods("cifar100", "r18", "300", 300)
    return tables.update(MARKS, folder, {"t": table})


def test_seeds_are_averaged_and_newer_results_replace_older(tmp_path):
    results = [line("alignmixup", 80.0, 0), line("alignmixup", 70.0, 1)]
    results += [line("alignmixup", 82.0, 1, date="2"), line("baseline", 75.0, commit="def")]
    results += [line("input", 1.0, epoch=200), line("cutmix", 1.0, variant="fast")]
    results += [line("baseline", 50.0, task="fgsm", metric="top1_error", settings={"eps": 8 / 255})]
    results += [line("baseline", 90.0, task="fgsm", metric="top1_error", settings={"eps": 1 / 255})]
    text = page(tmp_path, results)
    assert "| no mixing | 75.00 | 50.0 | - | - |" in text
    assert "| AlignMixup | 81.00 \u00b1 1.41, n=2 | - | - | - |" in text
    assert "input mixup" not in text
    assert "CutMix" not in text
    assert "old" not in text
    origin = "*300 epochs, seeds 0 and 1, GPU, commits abc and def; "
    assert f"{origin}\u00b1 is the standard deviation over n seeds.*" in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")


def test_a_table_without_results_is_empty(tmp_path):
    empty = page(tmp_path, [line("input", 1.0, epoch=200)])
    assert empty == MARKS.replace("old\n", "")


def test_runs_with_other_settings_are_not_averaged(tmp_path):
    results = [line("input", 80.0, trained={"train.lr": 0.1}), line("input", 70.0, 1)]
    with pytest.raises(ValueError, match="runs of input differ in their settings"):
        page(tmp_path, results)
    narrow = tables.Methods("cifar100", "r18", "300", 300, trained={"train.lr": 0.1})
    assert "| input mixup | 80.00 |" in page(tmp_path, results, narrow)


def test_a_plateau_ends_where_the_curve_does(tmp_path):
    (tmp_path / "curves").mkdir()
    log = "".join(f"{epoch},{epoch}\n" for epoch in range(1, 101))
    (tmp_path / "curves" / "log.csv").write_text("epoch,top1\n" + log)
    for seed, length in ((0, 70), (1, 45)):
        ours = [f"{e},{0.1 if e <= 40 else 0.01},{e + seed}\n" for e in range(1, length + 1)]
        (tmp_path / "curves" / f"a-seed{seed}.csv").write_text("epoch,lr,top1\n" + "".join(ours))
    spans = ((1, 40), (51, 90), (91, 100))
    place = ("cifar100", "r18", "alignmixup", "released")
    ends = [
        line("alignmixup", 1.0, seed, metric="top1_last", epoch=epoch, variant="released")
        for seed, epoch in ((0, 70), (1, 45), (0, 30))
    ]
    text = page(tmp_path, ends, tables.Plateaus("log.csv", "a-seed{seed}.csv", spans, *place))
    assert "| 1 to 40, learning rate 0.1 | 20.50 | 21.00 \u00b1 0.71, n=2 |" in text
    assert "| 51 to 70, learning rate 0.01 | 60.50 | 60.50 |" in text
    assert "91" not in text
    assert "*70 of 100 epochs, seeds 0 and 1, GPU, commit abc; " in text


def test_losses_are_compared_by_the_spread_of_their_epochs(tmp_path):
    (tmp_path / "curves").mkdir()
    for name, values in (("log", [1, 3] * 10), ("ours", [2, 6] * 6)):
        rows = "".join(f"{epoch},{value}\n" for epoch, value in enumerate(values, 1))
        (tmp_path / "curves" / f"{name}.csv").write_text("epoch,loss\n" + rows)
    text = page(tmp_path, [], tables.Losses("log.csv", "ours.csv", ((1, 10), (1, 20), (5, 20))))
    # Variances 10/9 and 40/9 over 10 epochs, 12/11 and 48/11 over 12.
    assert "| 1 to 10 | 2.0000 | 4.0000 | +2.0000 | 0.7454 |" in text
    assert "| 1 to 12 | 2.0000 | 4.0000 | +2.0000 | 0.6742 |" in text
    assert "5 to" not in text


def test_a_study_pairs_seeds_with_those_of_its_base(tmp_path):
    values = {"a": (80.0, 81.0, 70.0), "b": (79.0, 79.5)}
    results = [
        line("alignmixup", value, seed, metric="top1_last", variant=variant)
        for variant, own in values.items()
        for seed, value in enumerate(own)
    ]
    arms = (tables.Arm("first", "r18", "b"), tables.Arm("second", "r18", "a", "b"))
    arms += (tables.Arm("not measured", "r18", "c", "b"),)
    text = page(tmp_path, results, tables.Study("cifar100", "alignmixup", 300, arms))
    assert "| first | 79.25 \u00b1 0.35, n=2 | - | - |" in text
    # Two differences, 1.0 and 1.5: 1.25 with 12.706 * 0.354 / sqrt(2) on each side.
    assert "| second | 77.00 \u00b1 6.08, n=3 | +1.25 | -1.93 to +4.43 |" in text
    assert "not measured" not in text


def test_a_marker_without_a_table_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="a marker or a table is missing"):
        tables.update(MARKS, tmp_path, {})
