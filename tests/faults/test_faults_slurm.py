"""A training on a real Slurm cluster: preempted, requeued, canceled, its node lost.

    bash tests/faults/one_machine_slurm.sh      # as root, in a container: two nodes on this machine
    python -m pytest -m slow tests/faults/test_faults_slurm.py

Skipped where there is no cluster. Each run ends with the weights of one without a fault.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from picture_folder import make_pictures

RECIPE = "cifar10-r18-baseline-fast"
SETTINGS = ["--train.epochs=120", "--train.batch-size=8", "--net.width=4", "--train.device=cpu"]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster():
    command = ["sinfo", "-h", "-o", "%P"]
    if shutil.which("sinfo"):
        partitions = subprocess.run(command, capture_output=True, text=True).stdout.split()
        if {"low*", "high"} <= set(partitions):
            return
    pytest.skip("needs the Slurm of one_machine_slurm.sh")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


def command(pictures, out, *words):
    words = [sys.executable, "-m", "alignmixup", "sweep", RECIPE, "--dataset", pictures, *words]
    return [*words, "--out", str(out), "--tasks", "accuracy", *SETTINGS]


@pytest.fixture(scope="module")
def expected(pictures, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    subprocess.run(command(pictures, out), check=True, capture_output=True)
    return weights(out)


def weights(out):
    (file,) = out.glob("*/checkpoint.safetensors")
    return load_file(file)


def slurm(*words):
    run = subprocess.run([*map(str, words)], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def wait_for(is_true, seconds=120):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def state(job):
    return slurm("squeue", "-h", "-a", "-j", job, "-o", "%T %N")


def num_epochs(out):
    ledgers = out.glob("*/ledger.jsonl")
    return max([path.read_text().count('"event": "epoch"') for path in ledgers], default=0)


def run_again(job):
    """Let a requeued job begin at once; Slurm would wait for two minutes."""
    wait_for(lambda: state(job).startswith("PENDING"))
    time.sleep(3)  # its node cleans up
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for(lambda: state(job).startswith("RUNNING"))


def preempt(grace):
    slurm("scontrol", "update", "partition=low", f"gracetime={grace}")
    slurm("sbatch", "-p", "high", "-n", 4, "-N", 2, "--wrap", "sleep 1", "-o", "/dev/null")


class Sweep:
    """A sweep that waits for its job."""

    def __init__(self, pictures, out):
        launch = ["--launcher", "slurm", "--launch", "gpus_per_node=0", "slurm_partition=low"]
        self.out = out
        self.start(command(pictures, out, *launch))
        wait_for(lambda: num_epochs(out) > 5)
        (pickled,) = out.glob(".submitit/*_submitted.pkl")
        self.job = pickled.name.partition("_")[0]

    def start(self, words):
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    def ends_as(self, expected, status=0):
        said, _ = self.process.communicate(timeout=300)
        assert self.process.returncode == status, said
        ours = weights(self.out)
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[name], expected[name]) for name in ours)


@pytest.fixture
def running(pictures, tmp_path):
    sweep = Sweep(pictures, tmp_path / "runs")
    yield sweep
    sweep.process.kill()
    sweep.process.communicate()
    subprocess.run(["scancel", sweep.job], capture_output=True)


@pytest.mark.parametrize("grace", [0, 30])
def test_preempted(running, expected, grace):
    before = num_epochs(running.out)
    preempt(grace)
    run_again(running.job)
    assert before <= num_epochs(running.out) < 120
    running.ends_as(expected)


def test_requeued_by_hand(running, expected):
    slurm("scontrol", "requeue", running.job)
    run_again(running.job)
    running.ends_as(expected)


def test_warned_before_its_time_limit(running, expected):
    slurm("scancel", "--signal=USR2", running.job)  # as Slurm does: to all processes of the step
    run_again(running.job)
    log = running.out.glob("*.log")
    assert "stopping after this step" in next(log).read_text()
    running.ends_as(expected)


def test_canceled(pictures, running, expected):
    slurm("scancel", running.job)
    said, _ = running.process.communicate(timeout=120)
    assert running.process.returncode == 75, said
    assert "stopped" in said
    running.start(command(pictures, running.out))
    running.ends_as(expected)


@pytest.fixture
def lose_node(running):
    """Kill all that the node of the job runs, and tell Slurm that it is down."""
    node = state(running.job).split()[1]

    def lose():
        listed = slurm("ps", "-eo", "pid,args").splitlines()
        daemons = (f"slurmd -N {node}", f"slurmstepd: [{running.job}.")
        pids = [line.split()[0] for line in listed if any(word in line for word in daemons)]
        for pid in (*pids, *processes(running.job)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    yield lose
    slurm("slurmd", "-N", node)


def processes(job):
    """Those that the job started, by their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"SLURM_JOB_ID={job}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


def test_node_is_lost(running, expected, lose_node):
    lose_node()
    run_again(running.job)
    running.ends_as(expected)


def test_node_is_lost_and_slurm_does_not_requeue(pictures, running, expected, lose_node):
    slurm("scontrol", "update", f"JobId={running.job}", "Requeue=0")
    lose_node()
    said, _ = running.process.communicate(timeout=60)
    assert running.process.returncode == 1, said
    assert "failed: killed by SIGKILL" in said
    running.start(command(pictures, running.out))
    running.ends_as(expected)


@pytest.mark.parametrize("grace", [0, 30])
def test_two_nodes_warned_and_preempted(pictures, tmp_path, grace):
    """The example's job; each node has one process."""
    example = Path(__file__).parents[2] / "examples" / "many_nodes.sh"
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    settings = {"PATH": folders, "OMP_NUM_THREADS": "1", "PROCESSES": "1"}

    def submit(out):
        env = {**os.environ, **settings, "ENDPOINT": "127.0.0.1:29500"}  # not the nodes' names
        words = ["sbatch", "--parsable", "-N", "2", "-o", str(tmp_path / "said"), str(example)]
        words += [RECIPE, "--dataset", pictures, "--out", str(out), *SETTINGS]
        run = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
        return run.stdout.strip()

    def finish(job):
        wait_for(
            lambda: not slurm("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").startswith("R")
        )

    whole = submit(tmp_path / "whole" / "run")
    wait_for(lambda: num_epochs(tmp_path / "whole") >= 120)
    finish(whole)
    out = tmp_path / "runs"
    job = submit(out / "run")
    wait_for(lambda: num_epochs(out) > 5)
    slurm("scancel", "--batch", "--signal=USR1", job)  # what the job asks for before its end
    run_again(job)
    before = num_epochs(out)
    wait_for(lambda: num_epochs(out) > before + 5)
    preempt(grace)
    run_again(job)
    wait_for(lambda: num_epochs(out) >= 120)
    finish(job)
    ours, theirs = weights(out), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
