"""Damaged checkpoints: the one before is used with a warning, or the file is named.

``tests/training/test_training_checkpoint.py`` has what is written and read without damage.
"""

import errno
import json
import os
import shutil

import pytest
import torch
from mutations import damaged
from safetensors.torch import load_file, save_file
from torch import nn

from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.training import TrainSettings, fit
from alignmixup.training.checkpoint import (
    CHECKPOINT,
    POSITION,
    Checkpoint,
    CheckpointWriter,
    has_checkpoint,
    load_checkpoint,
    previous,
    read_facts,
)

SETTINGS = TrainSettings(
    epochs=3, batch_size=16, lr=0.05, schedule="cosine", milestones=(), device="cpu", seed=5
)
FACTS = {"epoch": 2, "step": 0, "seconds": 0.5, "cases": ["input"], "ledger_length": 0}


def run(out, epochs=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 8, 1), nn.BatchNorm2d(4), nn.Flatten())
    net.append(nn.Linear(64, 10))
    loader = DeviceLoader(shapes("train", 48), 16, 5)
    scores = {"top1": 10.0}
    # An unfinished run is one phase of a longer one.
    return fit(
        net, InputMixup(), loader, lambda _: scores, SETTINGS, out, quiet=True, epochs=epochs
    )


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def write(path, *epochs):
    writer = CheckpointWriter(path)
    for epoch in epochs:
        tensors = {"model.w": torch.full((64,), float(epoch)), "rng.draws": torch.arange(9)}
        writer.save(Checkpoint(tensors, {**FACTS, "epoch": epoch}))
    writer.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three epochs, and a copy of its folder after two."""
    root = tmp_path_factory.mktemp("runs")
    run(root / "two", range(2))
    shutil.copytree(root / "two", root / "whole")
    run(root / "whole", range(2, 3))
    return root


def test_the_previous_checkpoint_is_kept(tmp_path):
    path = tmp_path / CHECKPOINT
    write(path, 1)
    assert not previous(path).exists()
    write(path, 2, 3)
    assert [read_facts(p)["epoch"] for p in (path, previous(path))] == [3, 2]


def test_every_mutation_falls_back_to_the_previous_one_with_a_warning(tmp_path):
    path = tmp_path / CHECKPOINT
    write(path, 1, 2)
    data = path.read_bytes()
    mutations = list(damaged(data))
    assert len(mutations) >= 50
    for what, changed in mutations:
        path.write_bytes(changed)
        with pytest.warns(UserWarning, match=r"checkpoint\.safetensors is damaged.*is used"):
            read = load_checkpoint(path, POSITION)
        assert read.facts["epoch"] == 1, what
        assert read.tensors["model.w"].eq(1).all(), what


def test_without_a_previous_one_every_mutation_is_named(tmp_path):
    path = tmp_path / CHECKPOINT
    write(path, 1)
    for what, changed in damaged(path.read_bytes(), seed=1):
        path.write_bytes(changed)
        for read in (load_checkpoint, read_facts):
            with pytest.raises(ValueError, match=r"checkpoint\.safetensors is damaged"):
                pytest.fail(f"{what}: {read(path)}")


def test_two_damaged_checkpoints_are_both_named(tmp_path):
    path = tmp_path / CHECKPOINT
    write(path, 1, 2)
    for file in (path, previous(path)):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"is damaged.*so is .*checkpoint\.previous\.safetensors"):
        load_checkpoint(path)


def test_a_damaged_checkpoint_never_replaces_the_previous_one(tmp_path):
    """Else a kill before the new file is in place would leave two that are damaged."""
    path = tmp_path / CHECKPOINT
    write(path, 1, 2)
    path.write_bytes(path.read_bytes()[:-1])
    write(path, 3)
    assert [read_facts(p)["epoch"] for p in (path, previous(path))] == [3, 1]


@pytest.mark.parametrize("call", ["unlink", "link", "replace"])
def test_a_kill_between_the_steps_of_a_write_leaves_a_whole_file(tmp_path, monkeypatch, call):
    path = tmp_path / CHECKPOINT
    write(path, 1, 2)

    class Killed(BaseException):
        pass

    def kill(*args, **options):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.unlink" if call == "unlink" else f"os.{call}", kill)
        with pytest.raises(Killed):
            write(path, 3)
    assert load_checkpoint(path).facts["epoch"] == 2
    write(path, 4)
    assert [read_facts(p)["epoch"] for p in (path, previous(path))] == [4, 2]


def test_where_a_file_has_one_name_only_the_previous_one_is_kept_too(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    path = tmp_path / CHECKPOINT
    monkeypatch.setattr(os, "link", refuse)
    write(path, 1, 2)
    assert [read_facts(p)["epoch"] for p in (path, previous(path))] == [2, 1]
    path.unlink()  # as between the two renames
    assert has_checkpoint(path)
    with pytest.warns(UserWarning, match="does not exist.*is used"):
        assert load_checkpoint(path).facts["epoch"] == 1


def test_a_checkpoint_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    """An evaluation beside a training reads whole files, the old or the new one."""
    path = tmp_path / CHECKPOINT
    write(path, 1, 2)
    from alignmixup.training import tensor_file

    checksum, calls = tensor_file._checksum, []

    def slow(file):
        calls.append(file)
        if len(calls) == 1:
            with monkeypatch.context() as patched:
                patched.setattr(tensor_file, "_checksum", checksum)
                write(path, 3)
        return checksum(file)

    monkeypatch.setattr(tensor_file, "_checksum", slow)
    assert load_checkpoint(path).facts["epoch"] == 3
    assert len(calls) == 2


FACT_CHANGES = {
    "not a number": {"epoch": "2"},
    "a boolean": {"epoch": True},
    "negative": {"epoch": -1},
    "half an epoch": {"epoch": 1.5},
    "no list": {"cases": "input"},
    "cases that are no names": {"cases": [1]},
    "no length": {"ledger_length": None},
    "no finite time": {"seconds": float("nan")},
    **{f"no {name}": {name: ...} for name in FACTS},
}


@pytest.mark.parametrize("change", FACT_CHANGES.values(), ids=FACT_CHANGES)
def test_facts_of_another_type_are_named_in_a_file_without_a_checksum(tmp_path, change):
    """As an older version, or the library of the format, writes it."""
    path = tmp_path / CHECKPOINT
    write(path, 1)
    facts = {name: value for name, value in {**FACTS, **change}.items() if value is not ...}
    save_file(load_file(path), path, {"facts": json.dumps(facts)})
    with pytest.raises(ValueError, match=rf"is damaged.*{next(iter(change))}"):
        load_checkpoint(path, POSITION)


@pytest.mark.parametrize("facts", ["[]", "null", "3", "{", '{"epoch": 1e999}'])
def test_facts_that_are_no_facts_are_named(tmp_path, facts):
    path = tmp_path / CHECKPOINT
    save_file({"w": torch.zeros(2)}, path, {"facts": facts})
    with pytest.raises(ValueError, match="is damaged"):
        load_checkpoint(path, {"epoch": int})


def test_a_checkpoint_that_has_lost_its_checksum_is_not_used(tmp_path):
    path = tmp_path / CHECKPOINT
    write(path, 1, 2)
    save_file(load_file(path), path, {"facts": json.dumps({**FACTS, "epoch": 9})})
    with pytest.warns(UserWarning, match="its checksum is missing"):
        assert load_checkpoint(path).facts["epoch"] == 1


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("rng.draws", None),
        ("rng.draws", "rng.draws"),
        ("rng.cpu", None),
        ("rng.cpu", "rng.cpu"),
        ("optimizer.momentum_buffer.0.weight", "optimizer.momentum_buffer.9.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named_in_a_file_without_a_checksum(
    trained, tmp_path, name, changed
):
    shutil.copytree(trained / "two", tmp_path / "run")
    path = tmp_path / "run" / CHECKPOINT
    tensors, facts = load_file(path), read_facts(path)
    value = tensors.pop(name)
    if changed is not None:
        tensors[changed] = value[:3].clone()
    previous(path).unlink()
    save_file(tensors, path, {"facts": json.dumps(facts)})
    with pytest.raises(ValueError, match="is damaged"):
        run(tmp_path / "run")


def resumed_after(trained, folder, changed):
    """Resume the run after two epochs with this checkpoint; return what it warned of."""
    shutil.copytree(trained / "two", folder)
    (folder / CHECKPOINT).write_bytes(changed)
    with pytest.warns(UserWarning, match="is damaged") as warned:
        run(folder)
    whole, again = (load_checkpoint(p / CHECKPOINT) for p in (trained / "whole", folder))
    assert same(whole.tensors, again.tensors)
    return warned


@pytest.mark.parametrize(
    "count", [4, pytest.param(60, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_run_with_a_damaged_checkpoint_ends_with_the_same_weights(trained, tmp_path, count):
    data = (trained / "two" / CHECKPOINT).read_bytes()
    for number, (_, changed) in enumerate(damaged(data, seed=count, count=count)):
        resumed_after(trained, tmp_path / str(number), changed)
