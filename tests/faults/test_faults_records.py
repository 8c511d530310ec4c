"""Damaged run.json, ledger, results and notes of a sweep: one sentence with the file, or no harm.

They are text without checksums: a digit that has become another one is not found. What is not JSON,
not of the right type or cut short is.
"""

import json
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
from mutations import damaged

import alignmixup as am
from alignmixup.cli.program import main
from alignmixup.datasets import shapes
from alignmixup.experiments import sweep as sweeps
from alignmixup.experiments.accuracies import record_accuracy
from alignmixup.experiments.run_folder import RESULTS, RUN, append_results, read_run
from alignmixup.report.reading import read_results
from alignmixup.training.checkpoint import CHECKPOINT, previous
from alignmixup.training.ledger import LEDGER, read_ledger
from alignmixup.training.resume import check_resumed, past_compute
from alignmixup.training.summary import summarize

NAME = "cifar10-r18-baseline-fast"
SMALL = {"net.width": 4, "train.epochs": 1, "train.batch_size": 16, "train.device": "cpu"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    sets = am.Sets(shapes("train", 32), shapes("test", 16))
    am.train(NAME, folder, sets=sets, changes=SMALL, quiet=True)
    return folder


def tolerant(read, *args):
    """Call it; an error for users is fine, any other one fails the test."""
    with warnings.catch_warnings(), suppress(ValueError, OSError):
        warnings.simplefilter("ignore")
        read(*args)


def cases(data, *more):
    """At least 50 mutations of the bytes, and values of other types in their places."""
    mutations = [changed for _, changed in damaged(data)]
    assert len(mutations) >= 50
    return [
        *mutations,
        *more,
        b"",
        b"\n",
        b"null\n",
        b"[]\n",
        b"3\n",
        b"{}\n",
        b'"a"\n',
        b"\0" * 99,
    ]


def replaced(record):
    """The record with each of its values in turn replaced by one of another type, or deleted."""
    for name in record:
        for value in (None, [], {}, "x", -1, [[]], True):
            yield json.dumps({**record, name: value}).encode() + b"\n"
        yield json.dumps({k: v for k, v in record.items() if k != name}).encode() + b"\n"


def test_a_damaged_record_of_a_run_is_named(run, tmp_path):
    data = (run / RUN).read_bytes()
    record = json.loads(data)
    more = [
        text
        for part in ("data", "train", "net", "mixer", "images")
        for text in (
            json.dumps({**record, part: json.loads(t)}).encode() for t in replaced(record[part])
        )
    ]
    for changed in cases(data, *replaced(record), *more):
        (tmp_path / RUN).write_bytes(changed)
        tolerant(read_run, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_size", "16"),
        ("mean", [0.5, 0.5]),
        ("class_names", "ab"),
        ("class_names", list(range(10))),
    ],
)
def test_images_of_another_type_in_the_record_of_a_run_are_named(run, tmp_path, name, value):
    shutil.copytree(run, tmp_path / "run")
    record = json.loads((run / RUN).read_text())
    record["images"][name] = value
    (tmp_path / "run" / RUN).write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"run/run\.json: images\.{name} must be "):
        am.load_run(tmp_path / "run")


@pytest.mark.parametrize(("part", "value"), [("train", {"epochs": "x"}), ("mixer", {"kind": "x"})])
def test_a_setting_of_a_run_that_is_none_is_named_with_its_file(run, tmp_path, part, value):
    record = json.loads((run / RUN).read_text())
    (tmp_path / RUN).write_text(json.dumps({**record, part: value}))
    with pytest.raises(ValueError, match=r"run\.json: .*'x'"):
        read_run(tmp_path)


def test_a_damaged_ledger_is_named(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run"
    data = (run / LEDGER).read_bytes()
    events = [json.loads(line) for line in data.splitlines()]
    record = {**events[0], "cases": {}, "steps": 2}
    for changed in cases(data, *(text for event in events for text in replaced(event))):
        (folder / LEDGER).write_bytes(changed)
        tolerant(read_ledger, folder / LEDGER)
        tolerant(summarize, folder)
        tolerant(past_compute, folder)
        tolerant(check_resumed, folder, record)


@pytest.mark.slow
def test_damaged_results_are_named_and_nothing_is_appended_to_half_a_line(run, tmp_path):
    data = (run / RESULTS).read_bytes()
    recipe = read_run(run).recipe
    for name in (RUN, LEDGER):  # for record_accuracy
        shutil.copy(run / name, tmp_path / name)
    lines = [json.loads(line) for line in data.splitlines()]
    new = read_results([run / RESULTS])[:1]
    for changed in cases(data, *(text for line in lines for text in replaced(line))):
        (tmp_path / RESULTS).write_bytes(changed)
        tolerant(read_results, [tmp_path / RESULTS])
        tolerant(record_accuracy, recipe, tmp_path)
        tolerant(append_results, tmp_path, new)
        assert json.loads((tmp_path / RESULTS).read_bytes().splitlines()[-1])


@pytest.mark.parametrize("line", ["garbage", "[]", '{"metric": [1]}'])
def test_a_finished_run_names_a_damaged_line_of_its_results(run, tmp_path, line):
    for name in (RUN, LEDGER):  # for record_accuracy
        shutil.copy(run / name, tmp_path / name)
    (tmp_path / RESULTS).write_text(line + "\n" + (run / RESULTS).read_text())
    with pytest.raises(ValueError, match=r"results\.jsonl:1: not a result line"):
        record_accuracy(read_run(run).recipe, tmp_path)


def test_damaged_notes_of_a_sweep_score_the_run_again(run, tmp_path):
    job = sweeps.Job(read_run(run).recipe, tmp_path)
    shared = sweeps._Shared(None, ("accuracy", "pgd"))
    notes = json.dumps({"accuracy": "done", "pgd": "left out; left out pgd: no data"}, indent=2)
    for changed in cases(notes.encode(), b'{"accuracy": 3}'):
        (tmp_path / sweeps.SCORED).write_bytes(changed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert {*sweeps._unscored(job, shared)} <= {"accuracy", "pgd"}
    (tmp_path / sweeps.SCORED).write_text("{")
    with pytest.warns(UserWarning, match=r"scored\.json is damaged.*again"):
        assert sweeps._unscored(job, shared) == ["accuracy", "pgd"]


@pytest.mark.parametrize("command", [["evaluate", "--dataset", "shapes"], ["export"], ["predict"]])
def test_one_flipped_bit_of_the_weights_is_never_used(run, tmp_path, capsys, command):
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / CHECKPOINT
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    name, *flags = command
    more = {"evaluate": [], "export": [str(tmp_path / "w.safetensors")], "predict": ["a.png"]}
    assert main([name, str(tmp_path / "run"), *more[name], *flags]) == 1
    error = capsys.readouterr().err
    assert "checkpoint.safetensors is damaged" in error
    assert "checksum" in error
    assert not (tmp_path / "w.safetensors").exists()
    # With one before it, that is used, and its epoch recorded.
    shutil.copy(run / CHECKPOINT, previous(path))
    with pytest.warns(UserWarning, match=r"checkpoint\.previous\.safetensors"):
        assert am.load_run(tmp_path / "run").epoch == 1


@pytest.mark.parametrize("name", [RUN, LEDGER, CHECKPOINT])
def test_every_command_says_what_is_damaged_in_one_line(run, tmp_path, capsys, name):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(b'{"half of')
    out = Path(tmp_path / "weights.safetensors")
    for command in (["export", str(tmp_path / "run"), str(out)], ["report", str(tmp_path / "run")]):
        status = main(command)
        text = capsys.readouterr().err
        assert "Traceback" not in text
        assert status in (0, 1)
        assert text.count("\n") <= 1
    assert out.exists() == (name == LEDGER)
