"""Full disks, folders that are read-only or vanish, two writers, and a clock that goes back.

A limit on the size of files (RLIMIT_FSIZE) stands for a full disk: it holds for every file and
library. /dev/full gives the error of a full disk itself.
"""

import errno
import importlib
import io
import json
import multiprocessing
import os
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import alignmixup as am
from alignmixup.cli.program import main
from alignmixup.datasets import shapes
from alignmixup.experiments import sweep as sweeps
from alignmixup.experiments.run_folder import (
    RESULTS,
    RUN,
    alone_in,
    append_results,
    read_recipe,
    write_json,
)
from alignmixup.experiments.styling import make_style_weights
from alignmixup.files import replacing, write_text
from alignmixup.ops.adain import save_adain, small_adain
from alignmixup.report.render import Table, write_tables
from alignmixup.training.checkpoint import (
    CHECKPOINT,
    Checkpoint,
    CheckpointWriter,
    load_checkpoint,
    previous,
)
from alignmixup.training.ledger import LEDGER, Ledger, read_ledger

resource = pytest.importorskip("resource")

NAME = "cifar10-r18-input-fast"
SMALL = {
    "net.width": 4,
    "train.epochs": 2,
    "train.batch_size": 16,
    "train.device": "cpu",
    "train.warmup_epochs": 0.0,
}


@contextmanager
def largest_file(size):
    """Let no file of this process become larger; the error is EFBIG, where a disk has ENOSPC.

    No bytecode is written meanwhile: Python keeps a file that was cut, and every later import of
    the module fails.
    """
    before, writes_none = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes_none


def test_a_module_imported_on_a_full_disk_can_be_imported_again(tmp_path, monkeypatch):
    (tmp_path / "long_module.py").write_text("def number():\n    return 1\n" * 99)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(tmp_path)
    with largest_file(200):
        importlib.import_module("long_module")
    monkeypatch.delitem(sys.modules, "long_module")
    assert importlib.import_module("long_module").number() == 1


def train(out, **options):
    sets = am.Sets(shapes("train", 32), shapes("test", 16))
    return am.train(NAME, out, sets=sets, changes=SMALL, quiet=True, **options)


def tensors(folder):
    return load_checkpoint(folder / CHECKPOINT).tensors


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def lines(folder):
    events = read_ledger(folder / LEDGER)
    return [{k: v for k, v in e.items() if k not in ("seconds", "wall_seconds")} for e in events]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(folder)
    return folder


class FullDisk:
    """Lets a number of files be opened for writing; the next one takes half of what is written."""

    def __init__(self, monkeypatch, room):
        self.room, self.failed, self._open = room, None, Path.open
        monkeypatch.setattr(
            Path, "open", lambda path, *args, **more: self.open(path, *args, **more)
        )

    def open(self, path, mode="r", *args, **options):
        file = self._open(path, mode, *args, **options)
        if set(mode) & set("wa"):
            self.room -= 1
            if self.room < 0 and self.failed is None:
                self.failed = path.name
                return _Half(file)
        return file


class _Half:
    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        self.file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    def truncate(self, size):
        raise OSError(errno.ENOSPC, "No space left on device")


def check_resumed(whole, folder):
    """Train to the end in the folder, and compare with the run that had no fault."""
    assert not list(folder.glob("*.partial")), "a partial file is left"
    train(folder)
    assert same(tensors(whole), tensors(folder))
    assert [e["event"] for e in lines(whole)] == [e["event"] for e in lines(folder)]
    results = (folder / RESULTS).read_text().splitlines()
    assert len(results) == len((whole / RESULTS).read_text().splitlines())


def test_a_run_on_a_full_disk_names_the_file_and_resumes(whole, tmp_path):
    size = (whole / CHECKPOINT).stat().st_size // 2
    with (
        largest_file(size),
        pytest.raises(OSError, match=r"the checkpoint .*: File too large; there is none yet"),
    ):
        train(tmp_path / "run")
    check_resumed(whole, tmp_path / "run")


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_write_loses_nothing(whole, tmp_path, monkeypatch):
    failed = set()
    for room in range(100):
        folder = tmp_path / str(room)
        with monkeypatch.context() as patched:
            disk, reason = FullDisk(patched, room), ""
            try:
                train(folder)
            except OSError as error:
                reason = str(error)
            if disk.failed is None:
                break
        assert "No space left on device" in reason
        assert disk.failed.removesuffix(".partial") in reason
        failed.add(disk.failed)
        check_resumed(whole, folder)
    assert room >= 8
    assert failed == {"run.json.partial", LEDGER, "checkpoint.partial", RESULTS}


def table():
    return Table(title="t", columns=("Method", "a"), rows=(("x", "1"),), notes=())


WRITERS = {
    "run.json": lambda path: write_json(path, {"a": [0] * 2000}),
    "scored.json": lambda path: write_json(path, {"a": [0] * 2000}),
    "results.jsonl": lambda path: append_results(path.parent, [_result()] * 100),
    "text": lambda path: write_text(path, "x" * 10_000),
    "weights.safetensors": lambda path: save_adain(
        small_adain(4, torch.Generator().manual_seed(0)), path
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_cannot_be_written_is_named_and_the_old_one_kept(tmp_path, name):
    path = tmp_path / name
    path.write_text("before\n")
    with largest_file(3000), pytest.raises(OSError, match=f"cannot write .*{name}: "):
        WRITERS[name](path)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert path.read_bytes().startswith(b"before\n")
    WRITERS[name](path)
    assert path.stat().st_size > 3000


@pytest.mark.parametrize(
    "format", ["safetensors", pytest.param("torch-export", marks=pytest.mark.slow), "hub"]
)
def test_an_export_to_a_full_disk_is_said_in_one_line(whole, tmp_path, capsys, format):
    if format == "hub":
        pytest.importorskip("huggingface_hub")
    name = {"safetensors": "w.safetensors", "torch-export": "w.pt2", "hub": "w"}[format]
    with largest_file(2000):
        status = main(["export", str(whole), str(tmp_path / name), "--format", format])
    error = capsys.readouterr().err
    assert status == 1
    assert error.startswith("alignmixup: cannot write")
    assert error.count("\n") == 1
    assert format == "hub" or not list(tmp_path.iterdir())


def test_tables_and_figures_on_a_full_disk_are_named(tmp_path):
    from alignmixup.figures.style import new_figure, save

    with largest_file(10):
        with pytest.raises(OSError, match=r"cannot write .*tables\.md: "):
            write_tables([table()], tmp_path)
        with pytest.raises(OSError, match=r"cannot write .*a\.png: "):
            save(new_figure(1, 1), tmp_path / "a")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", [LEDGER, "run.json.partial"])
def test_the_error_of_a_full_disk_names_the_file(tmp_path, name):
    (tmp_path / name).symlink_to("/dev/full")
    calls = {
        LEDGER: lambda: _opened(tmp_path / LEDGER).append("epoch", {"epoch": 1}),
        "run.json.partial": lambda: write_json(tmp_path / RUN, {}),
    }
    with pytest.raises(OSError, match=r"cannot write .*No space left on device") as caught:
        calls[name]()
    assert name.removesuffix(".partial") in str(caught.value)


def _opened(path):
    ledger = Ledger(path, writes=False)
    ledger._writes = True  # not from the start: nothing of /dev/full can be cut
    return ledger


def _result():
    from alignmixup.contracts import Result

    return Result("accuracy", "top1_last", 1.0)


def test_a_folder_that_vanishes_in_training_is_named(whole, tmp_path, monkeypatch):
    from alignmixup.experiments import accuracies

    def vanish(self, net):
        shutil.rmtree(tmp_path / "run")
        return {"top1": 1.0}

    monkeypatch.setattr(accuracies.Evaluator, "__call__", vanish)
    with pytest.raises(OSError, match=r"cannot write .*run.*No such file"):
        train(tmp_path / "run")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.filterwarnings("default:the logger")
def test_a_log_on_a_full_disk_does_not_end_the_training(tmp_path, monkeypatch):
    words = ["train", NAME, "--dataset", "shapes", "--limit", "32", "--out", str(tmp_path / "run")]
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(full, write_through=True))
        assert main([*words, *settings]) == 0
    assert read_ledger(tmp_path / "run" / LEDGER)[-1]["epoch"] == 2


def make_read_only(folder, monkeypatch):
    """Root may write everywhere, so the errors are simulated where files are opened or deleted."""
    is_open, unlink = Path.open, Path.unlink

    def refuse(path):
        if folder in path.parents:
            raise OSError(errno.EROFS, "Read-only file system", str(path))

    def open_file(self, mode="r", *args, **options):
        if set(mode) & set("wa+"):
            refuse(self)
        return is_open(self, mode, *args, **options)

    def unlink_file(self, *args, **options):
        refuse(self)
        unlink(self, *args, **options)

    monkeypatch.setattr(Path, "open", open_file)
    monkeypatch.setattr(Path, "unlink", unlink_file)


def test_a_checkpoint_in_a_read_only_folder_is_named(tmp_path, monkeypatch):
    make_read_only(tmp_path, monkeypatch)
    writer = CheckpointWriter(tmp_path / CHECKPOINT)
    writer.save(Checkpoint({"model.a": torch.zeros(2)}, {}))
    with pytest.raises(OSError, match=r"cannot write the checkpoint .*: Read-only file system"):
        writer.close()


def test_a_run_in_a_read_only_folder_is_not_scored_in_vain(whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    make_read_only(folder, monkeypatch)
    scored = []
    with pytest.raises(OSError, match=r"cannot write .*results.jsonl: Read-only file system"):
        am.evaluate(folder, shapes("test", 8), on_task=scored.append)
    assert not scored


def test_a_style_network_is_not_trained_for_a_read_only_folder(tmp_path, monkeypatch):
    make_read_only(tmp_path, monkeypatch)
    steps = []
    size = {"steps": 2, "num_images": 10, "width": 2}
    with pytest.raises(OSError, match=r"cannot write .*a.safetensors: Read-only file system"):
        make_style_weights(
            "shapes", tmp_path / "a.safetensors", **size, on_step=lambda *step: steps.append(step)
        )
    assert not steps


def test_a_sweep_in_a_read_only_folder_starts_nothing_and_names_the_log(tmp_path, monkeypatch):
    make_read_only(tmp_path, monkeypatch)
    monkeypatch.setattr(sweeps.Call, "start", None)
    (job,) = sweeps.sweep([NAME], tmp_path, changes=SMALL, tasks=["accuracy"])
    assert job.state.startswith(f"failed: cannot write {tmp_path}")
    assert job.state.endswith(".log: Read-only file system")


def test_a_folder_that_becomes_read_only_is_named(whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    make_read_only(folder, monkeypatch)
    load = am.load_run(folder)  # reading needs no right to write
    assert load.epoch == 2
    os.remove(folder / CHECKPOINT)
    with pytest.raises(OSError, match=r"cannot write .*: Read-only file system"):
        train(folder)


def test_a_partial_file_is_deleted_when_the_writer_is_interrupted(tmp_path):
    def interrupted():
        with replacing(tmp_path / "a") as partial:
            partial.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_a_second_writer_is_refused_and_changes_nothing(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / CHECKPOINT).unlink()  # there is something left to train
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    with alone_in(folder), pytest.raises(ValueError, match="another process is training"):
        train(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before


def _append(folder, number):
    append_results(folder, [_result()] * number)


@pytest.mark.slow
def test_many_that_append_results_at_once_lose_no_line(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append, args=(tmp_path, 50)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    written = (tmp_path / RESULTS).read_text().splitlines()
    assert len([json.loads(line) for line in written]) == 200


def test_a_clock_that_goes_back_changes_nothing(whole, tmp_path, monkeypatch):
    """Times are differences of a clock that never goes back; dates are only recorded."""
    now = [2e9]

    def earlier():
        now[0] -= 3600
        return now[0]

    monkeypatch.setattr(time, "time", earlier)
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for path in folder.iterdir():
        os.utime(path, (4e9, 4e9))  # files of the future
    os.replace(previous(folder / CHECKPOINT), folder / CHECKPOINT)
    train(folder)
    assert same(tensors(whole), tensors(folder))
    events = read_ledger(folder / LEDGER)
    assert all(e["wall_seconds"] >= 0 for e in events if e["event"] == "epoch")


def test_a_sweep_that_cannot_write_its_notes_says_so(whole, tmp_path, capfd):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    job = sweeps.Job(read_recipe(folder), folder)
    with largest_file(5), pytest.raises(OSError, match="cannot write"):
        write_json(job.folder / sweeps.SCORED, {"accuracy": "done"})
    assert not (folder / sweeps.SCORED).exists()
