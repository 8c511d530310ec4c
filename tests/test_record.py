"""Recording a finished run: its lines once, its curve whole, and no folder of the machine."""

import csv
import importlib.util
import json
from pathlib import Path

import pytest

import alignmixup as am
from alignmixup.datasets import shapes
from alignmixup.report.reading import read_results

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "record.py"
spec = importlib.util.spec_from_file_location("record", SCRIPT)
record = importlib.util.module_from_spec(spec)
spec.loader.exec_module(record)


def test_a_run_is_recorded_once(tmp_path):
    sets = am.Sets(shapes("train", 16), shapes("test", 16))
    small = {"net.width": 2, "train.epochs": 2, "train.batch_size": 8}
    folder, results = tmp_path / "runs" / "trial", tmp_path / "results"
    am.train("cifar10-r18-input-fast", folder, sets=sets, changes=small, quiet=True)
    results.mkdir()
    expected = read_results([folder])
    assert record.record(folder, results) == len(expected) > 0
    assert record.record(folder, results) == 0
    found = read_results([results])
    assert [(r.task, r.metric, r.value, r.key) for r in found] == [
        (r.task, r.metric, r.value, r.key) for r in expected
    ]
    assert str(tmp_path) not in "".join(r.command for r in found)
    with (results / "curves" / "trial.csv").open() as file:
        rows = [*csv.DictReader(file)]
    ledger = map(json.loads, (folder / "ledger.jsonl").read_text().splitlines())
    epochs = [event for event in ledger if event["event"] == "epoch"]
    assert [int(row["epoch"]) for row in rows] == [event["epoch"] for event in epochs] == [1, 2]
    assert float(rows[-1]["top1"]) == pytest.approx(epochs[-1]["test"]["top1"])


def test_where_a_run_and_its_data_lay_is_left_out(tmp_path):
    run, results = tmp_path / "runs" / "trial", tmp_path / "results"
    run.mkdir(parents=True)
    (run / "ledger.jsonl").touch()
    results.mkdir()
    line = {"key": {"data": "shapes"}}
    line["command"] = f"alignmixup evaluate {run} --data '/my data' --dataset shapes --data=/x"
    (run / "results.jsonl").write_text(json.dumps(line) + "\n")
    record.record(run, results)
    (recorded,) = map(json.loads, (results / "shapes.jsonl").read_text().splitlines())
    assert recorded["command"] == "alignmixup evaluate runs/trial --dataset shapes"


def test_a_run_without_results_is_refused(tmp_path):
    with pytest.raises(ValueError, match="train it to its end"):
        record.record(tmp_path, tmp_path)
