"""A process that dies ends the others, which name its rank and its reason."""

import signal
import time

import pytest

from forked import start_team

PROGRAM = """
import sys
from pathlib import Path
import torch
from torch import nn
from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.mixers.nomix import NoMix
from alignmixup.training import TrainSettings, fit, join_team, watch

watch.PERIOD, watch.LIMIT, watch.GRACE = 0.5, 10.0, 2.0  # seconds
torch.set_num_threads(1)
team, device = join_team(torch.device("cpu"))
net = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 10))
loader = DeviceLoader(shapes("train", 24), 12, 0, device, drop_last=True)
settings = TrainSettings(epochs=10**6, batch_size=12, milestones=())


def evaluate(net):
    print("ready", flush=True)
    if sys.argv[2] == "raises" and team.rank == 1:
        raise ValueError("no test images on this machine")
    return {"top1": 50.0}


fit(net, NoMix(), loader, evaluate, settings, Path(sys.argv[1]), quiet=True, team=team)
"""


@pytest.mark.slow
def test_a_killed_process_ends_the_others_with_its_rank(tmp_path):
    others = ended_by(signal.SIGKILL, tmp_path)
    for code, errors in others:
        assert code == 1
        assert "rank 1 (pid " in errors
        assert "has ended: killed, or unreachable" in errors


@pytest.mark.slow
def test_the_end_of_rank_0_ends_the_others_too(tmp_path):
    """Without torchrun it has the store that the others would read its reason in."""
    for code, errors in ended_by(signal.SIGKILL, tmp_path, victim=0):
        assert code == 1
        assert "rank 0" in errors.splitlines()[-1]
        assert "has ended" in errors.splitlines()[-1]


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_others_with_its_rank(tmp_path):
    """As a machine that has lost its network: no collective fails, the others wait for it."""
    for code, errors in ended_by(signal.SIGSTOP, tmp_path):
        assert code == 1
        assert "rank 1 (pid " in errors
        assert "has ended: killed, or unreachable for 10 s" in errors


@pytest.mark.slow
def test_an_unreachable_store_ends_the_others(tmp_path):
    """Its calls never return if the machine of rank 0 has lost its network or power."""
    for code, errors in ended_by(signal.SIGSTOP, tmp_path, victim=0):
        assert code == 1
        assert "which has the store of the processes, is unreachable for 10 s" in errors


@pytest.mark.slow
def test_processes_that_are_all_stopped_for_a_while_go_on(tmp_path):
    """By Ctrl-Z, a suspended machine or a debugger."""
    processes = start_team(PROGRAM, tmp_path, "-", size=3)
    for process in processes:
        process.wait_for("ready")
        process.send_signal(signal.SIGSTOP)
    time.sleep(12)  # seconds; the limit is 10
    for process in processes:
        process.send_signal(signal.SIGCONT)
    time.sleep(6)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for _, errors in [process.fail() for process in processes]:
        assert "signals.Stopped" in errors  # the message is in that of rank 0


@pytest.mark.slow
def test_a_process_that_fails_gives_the_others_its_reason(tmp_path):
    processes = start_team(PROGRAM, tmp_path, "raises", size=3)
    first, second, third = (process.fail() for process in processes)
    assert "ValueError: no test images on this machine" in second[1]
    for code, errors in (first, third):
        assert code == 1
        assert "rank 1 failed: ValueError: no test images on this machine" in errors


def ended_by(number, folder, victim=1):
    """Send the signal to one rank of 3; return exit codes and errors of the others."""
    processes = start_team(PROGRAM, folder, "-", size=3)
    for process in processes:
        process.wait_for("ready")
    began = time.monotonic()
    processes[victim].send_signal(number)
    ended = [processes[rank].fail() for rank in range(3) if rank != victim]
    assert time.monotonic() - began < 60
    processes[victim].fail(0)
    return ended
