"""Kills and signals at random instants: a run that is started again repeats the whole one.

The quick tests of the same laws are ``test_training_trainer.py`` (four kills, both signals),
``test_training_distributed.py`` (a signal to one of two processes) and
``test_experiments_sweep.py`` (a sweep that is stopped, Ctrl-C twice).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import killing
import pytest
import torch

from alignmixup.report.reading import read_results
from alignmixup.training.checkpoint import CHECKPOINT, load_checkpoint
from alignmixup.training.ledger import LEDGER, read_ledger

pytestmark = pytest.mark.slow

KILLS = {"train": 20, "sweep": 5, "torchrun": 5}


def folders(root):
    """The folders of runs below ``root``, by name."""
    return {
        path.parent.name if path.parent != root else "": path.parent
        for path in sorted(root.rglob(CHECKPOINT))
    }


def ledger(folder):
    left_out = ("seconds", "wall_seconds", "date")
    events = read_ledger(folder / LEDGER)
    return [
        {k: v for k, v in e.items() if k not in left_out}
        for e in events
        if e["event"] != "provenance"  # has the command, with the name of the folder
    ]


def assert_same(whole, other):
    a, b = (load_checkpoint(folder / CHECKPOINT).tensors for folder in (whole, other))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert ledger(whole) == ledger(other)
    figures = [
        {(r.task, r.metric, r.value) for r in read_results([folder])} for folder in (whole, other)
    ]
    assert figures[0] == figures[1]


@pytest.mark.parametrize("kind", KILLS)
def test_killed_at_random_instants_it_ends_as_if_nothing_had_happened(tmp_path, kind):
    args = [killing.__file__, kind, str(tmp_path), str(KILLS[kind]), "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, env=environment, check=False
    )
    said = done.stderr + (tmp_path / "killed.err").read_text()
    assert done.returncode == 0, said
    outcome = json.loads(done.stdout)
    print(kind, outcome)
    assert (outcome["first"], outcome["last"]) == (0, 0), said
    assert outcome["killed"] >= KILLS[kind] // 2, outcome
    assert "Traceback" not in said
    whole, killed = folders(tmp_path / "whole"), folders(tmp_path / "killed")
    assert whole.keys() == killed.keys()
    assert len(whole) == (2 if kind == "sweep" else 1)
    for name in whole:
        assert_same(whole[name], killed[name])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_on_the_command_line_saves_and_the_same_command_resumes(tmp_path, number):
    command = [sys.executable, "-m", "alignmixup", *killing.command("train", tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + 600
    while not (tmp_path / "run" / CHECKPOINT).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(number)
    said = child.communicate(timeout=300)[1]
    assert child.returncode == 128 + number
    assert "run again to resume" in said
    assert "Traceback" not in said
    whole = [*command[:3], *killing.command("train", tmp_path / "whole")]
    for again in (command, whole):
        subprocess.run(again, env=environment, check=True, capture_output=True)
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_a_sweep_whose_head_alone_is_killed_never_trains_a_run_twice(tmp_path):
    """Its runs live on; a second sweep finds their folders locked, or the runs finished."""
    (tmp_path / "out").mkdir()
    head = killing.start("sweep", tmp_path / "out")
    deadline = time.monotonic() + 600
    while not list((tmp_path / "out").rglob(LEDGER)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(head, signal.SIGKILL)
    os.waitpid(head, 0)
    while killing.run("sweep", tmp_path / "out"):
        said = Path(tmp_path / "out.err").read_text()
        assert "another process is training" in said or "Traceback" not in said
        assert time.monotonic() < deadline
        time.sleep(1)
    killing.run("sweep", tmp_path / "whole")
    for name, folder in folders(tmp_path / "whole").items():
        assert_same(folder, folders(tmp_path / "out")[name])
