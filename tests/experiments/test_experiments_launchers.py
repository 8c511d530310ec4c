"""Launchers of a sweep: jobs of submitit and tasks of Ray, preempted, retried, and two sweeps."""

import errno
import fcntl
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from alignmixup.cli.program import main
from alignmixup.experiments import launchers
from alignmixup.experiments.launchers import Call, Supervised, make_launcher
from alignmixup.experiments.run_folder import FolderInUse, alone_in
from alignmixup.experiments.sweep import sweep
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.schema import on_data
from alignmixup.report.reading import read_results
from picture_folder import make_pictures

NAME = "cifar10-r18-baseline-fast"
SMALL = {"net.width": 4, "train.epochs": 1, "train.batch_size": 8, "train.device": "cpu"}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def pictures(tmp_path):
    return make_pictures(tmp_path / "pictures")


def call(path, *seconds):
    return Call("launched:sleep_and_write", (path, *seconds))


def wait_for(is_true, seconds=120):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lines(path):
    return path.read_text().split() if path.exists() else []


@pytest.fixture
def importable(monkeypatch):
    """Other processes import what this one does."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture
def slurm(tmp_path, importable):
    return make_launcher("slurm", {"cluster": "local", "gpus_per_node": 0}, tmp_path)


def children(process):
    return [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the task by /proc")
def test_preempted_job_saves_is_requeued_and_makes_the_same_call(tmp_path, slurm):
    path = tmp_path / "said"
    handle = slurm.start(call(path, 600.0, 0.0))
    wait_for(lambda: lines(path) == ["began"])
    (task,) = children(int(handle.job.job_id))
    for process in (*children(task), task):  # Slurm sends what submitit asks for to all
        os.kill(process, signal.SIGUSR2)
    wait_for(lambda: not handle.is_alive())
    assert handle.exitcode == 0
    assert lines(path) == ["began", "saved", "began", "done"]


@pytest.mark.slow
def test_canceled_job_saves(tmp_path, slurm):
    path = tmp_path / "said"
    handle = slurm.start(call(path, 600.0))
    wait_for(lambda: lines(path) == ["began"])
    assert handle.is_alive()
    assert handle.exitcode is None
    handle.terminate()
    wait_for(lambda: not handle.is_alive())
    wait_for(lambda: lines(path) == ["began", "saved"])
    assert handle.exitcode in (0, -signal.SIGTERM)


def test_run_saves_when_its_supervisor_is_killed(tmp_path):
    path = tmp_path / "said"
    supervisor = Call(f"{launchers.__name__}:_run", (Supervised.here(call(path, 600.0)),)).start()
    wait_for(lambda: lines(path) == ["began"])
    supervisor.kill()
    supervisor.join()
    wait_for(lambda: lines(path) == ["began", "saved"])


def test_supervisor_returns_the_exit_code_of_its_child():
    assert Supervised.here(Call("sys:exit", (3,)))() == 3


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ("JobState=RUNNING Restarts=0 PreemptTime=None", 3),
        ("JobState=COMPLETING Restarts=1 PreemptTime=None", 3),  # canceled
        ("JobState=COMPLETING Restarts=2 PreemptTime=None", "requeued"),
        ("JobState=RUNNING Restarts=1 PreemptTime=2026-01-01T00:00:00", "asked to requeue"),
        ("slurm_load_jobs error: Invalid job id specified", 3),
    ],
)
def test_a_job_that_slurm_starts_again_ends_without_a_result(tmp_path, monkeypatch, facts, code):
    """A result would tell the sweep that the job is over."""
    said = tmp_path / "said"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {said}\necho "{facts}"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    supervised = Supervised.here(Call("sys:exit", (3,)))
    if code == 3:
        assert supervised() == 3
    else:
        with pytest.raises(SystemExit):
            supervised()
    asked = ["show job 7", "requeue 7"] if code == "asked to requeue" else ["show job 7"]
    assert said.read_text().splitlines() == asked
    monkeypatch.delenv("SUBMITIT_EXECUTOR")  # as a task of a Ray in the user's own job
    assert supervised() == 3
    assert said.read_text().splitlines() == asked


@pytest.fixture
def job_of_slurm(tmp_path, monkeypatch):
    """A submitted job, and what to call for Slurm's accounting and its controller to say."""
    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr(submitit.SlurmJob, "watcher", type(submitit.SlurmJob.watcher)())
    programs = {
        "srun": "true",
        "sbatch": "echo Submitted batch job 7",
        "sacct": f"cat {tmp_path}/accounting",
        "scontrol": f"cat {tmp_path}/controller",
        "scancel": "true",
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def say(accounting, controller):
        (tmp_path / "accounting").write_text(f"JobID|State|NodeList\n7|{accounting}|node1\n")
        (tmp_path / "controller").unlink(missing_ok=True)  # it fails: no such job
        if controller is not None:
            (tmp_path / "controller").write_text(f"JobId=7 JobState={controller} Restarts=1\n")

    say("RUNNING", "RUNNING")
    return make_launcher("slurm", {"gpus_per_node": 0}, tmp_path).start(call(tmp_path / "x")), say


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING", "RUNNING"])
def test_job_of_a_lost_node_is_alive_where_slurm_requeues_it(job_of_slurm, state):
    """Slurm's accounting learns of the failure before it learns of the requeue."""
    handle, say = job_of_slurm
    say("NODE_FAIL", state)
    assert handle.is_alive()
    assert handle.exitcode is None
    say("CANCELLED by 0", "COMPLETING")  # later, and submitit asks again
    assert handle.exitcode == -signal.SIGTERM
    assert not handle.is_alive()


@pytest.mark.parametrize("state", ["NODE_FAIL", None])
def test_job_of_a_lost_node_has_ended_where_slurm_does_not_requeue_it(job_of_slurm, state):
    handle, say = job_of_slurm
    say("NODE_FAIL", state)
    assert not handle.is_alive()
    assert handle.exitcode == -signal.SIGKILL


def test_preempted_job_has_ended_where_slurm_does_not_requeue_it(job_of_slurm):
    """PreemptMode=CANCEL, and it was killed before it had saved."""
    handle, say = job_of_slurm
    say("PREEMPTED", "COMPLETING")
    assert handle.is_alive()
    say("PREEMPTED", "PREEMPTED")
    assert not handle.is_alive()
    assert handle.exitcode == -signal.SIGTERM


def test_job_that_is_asked_to_stop_is_not_waited_for(job_of_slurm):
    handle, say = job_of_slurm
    handle.terminate()
    say("NODE_FAIL", "PENDING")
    assert handle.exitcode == -signal.SIGTERM


def test_ctrl_c_reaches_a_local_run_once_it_has_imported_its_module(tmp_path, monkeypatch):
    """The terminal sends it to all processes, and an import would end with a trace."""
    (tmp_path / "interrupted.py").write_text(
        "import os, signal\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "from alignmixup.experiments.launchers import unblock_sigint\n"
        "def receive():\n"
        "    try:\n"
        "        unblock_sigint()\n"
        "    except KeyboardInterrupt:\n"
        "        raise SystemExit(7)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    process = make_launcher("local", {}, tmp_path).start(Call("interrupted:receive", ()))
    process.join()
    assert process.exitcode == 7
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


@pytest.mark.slow
def test_a_second_sweep_leaves_alone_what_the_first_works_on(tmp_path, pictures, capsys):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    words = ["sweep", NAME, "--dataset", pictures, "--out", str(tmp_path), *words]
    folder = tmp_path / on_data(find_recipe(NAME), pictures).folder
    log = folder.with_name(f"{folder.name}.log")
    log.touch()
    with alone_in(folder, log):
        assert main([*words, "--tasks", "accuracy"]) == 1
    said = capsys.readouterr()
    assert f"in use: another process is training in {folder}" in said.out
    assert "another process trains some of the runs" in said.err
    assert not folder.exists()
    assert log.read_text() == ""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the task by /proc")
def test_preempted_training_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, pictures):
    options = {"changes": {**SMALL, "train.epochs": 30}, "dataset": pictures, "tasks": ["accuracy"]}
    slurm = {"launcher": "slurm", "launch": {"cluster": "local", "gpus_per_node": 0}}

    def preempt():
        wait_for(lambda: list(tmp_path.glob("jobs/*/checkpoint.safetensors")))
        (pickled,) = tmp_path.glob("jobs/.submitit/*_submitted.pkl")
        (task,) = children(int(pickled.name.partition("_")[0]))
        os.kill(task, signal.SIGUSR2)

    watcher = threading.Thread(target=preempt)
    watcher.start()
    (job,) = sweep([NAME], tmp_path / "jobs", **options, **slurm)
    watcher.join()
    (whole,) = sweep([NAME], tmp_path / "whole", **options)
    assert (job.state, whole.state) == ("done", "done")
    assert "stopping after this step" in job.folder.with_name(f"{job.folder.name}.log").read_text()
    ours, theirs = (load_file(j.folder / "checkpoint.safetensors") for j in (job, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    figures = [
        [(r.metric, r.value) for r in read_results([j.folder / "results.jsonl"])]
        for j in (job, whole)
    ]
    assert figures[0] == figures[1]


def test_folder_is_locked_where_a_lock_needs_a_file_open_for_writing(tmp_path, monkeypatch):
    """So it is over NFS, between machines."""
    (tmp_path / "run.json").write_text("{}")
    flock = fcntl.flock

    def flock_over_nfs(file, operation):
        if not file.writable():
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_over_nfs)
    with alone_in(tmp_path), pytest.raises(FolderInUse), alone_in(tmp_path, patience=0.3):
        pass


def test_launcher_that_cannot_be_made_is_refused_with_the_remedy(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="unknown launcher 'pbs'; choose from local, slurm, ray"):
        make_launcher("pbs", {}, tmp_path)
    with pytest.raises(ValueError, match="the local launcher has no options"):
        make_launcher("local", {"num_gpus": 1}, tmp_path)
    with pytest.raises(ValueError, match="nonsense"):
        make_launcher("slurm", {"cluster": "local", "nonsense": 1}, tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="or set --launch cluster=local"):
        make_launcher("slurm", {}, tmp_path)
    for name, module in (("slurm", "submitit"), ("ray", "ray")):
        monkeypatch.setitem(sys.modules, module, None)
        message = rf"--launcher {name} needs {module}: pip install 'alignmixup\[{name}\]'"
        with pytest.raises(ImportError, match=message):
            make_launcher(name, {}, tmp_path)


def test_the_address_of_a_ray_that_is_connected_is_no_option_of_its_tasks(tmp_path, monkeypatch):
    """As for a second sweep of one program, and where the program has called ray.init itself."""
    ray = StandInForRay()
    monkeypatch.setattr(launchers, "_imported", lambda module, extra: ray)
    for _ in range(2):
        make_launcher("ray", {"address": "auto", "num_gpus": 0.5}, tmp_path)
    assert ray.addresses == ["auto"]
    assert ray.options == [{"num_cpus": 1, "num_gpus": 0.5}] * 2


class StandInForRay:
    """Records what it is called with."""

    def __init__(self):
        self.addresses, self.options = [], []

    def is_initialized(self):
        return bool(self.addresses)

    def init(self, address, log_to_driver):
        self.addresses.append(address)

    def cluster_resources(self):
        return {"GPU": 1.0}

    def remote(self, **options):
        self.options.append(options)
        return lambda function: function


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray_trains_and_a_killed_or_canceled_task_saves(tmp_path, importable, pictures):
    ray = pytest.importorskip("ray")
    path = tmp_path / "said"
    try:
        launcher = make_launcher("ray", {}, tmp_path)
        handle = launcher.start(call(path, 600.0, 600.0))
        wait_for(lambda: lines(path) == ["began"])
        assert handle.exitcode is None
        os.kill(int(path.with_suffix(".parent").read_text()), signal.SIGKILL)  # Ray's worker
        wait_for(lambda: lines(path) == ["began", "saved", "began"])  # Ray has tried again
        handle.terminate()
        wait_for(lambda: not handle.is_alive())
        wait_for(lambda: lines(path) == ["began", "saved", "began", "saved"])
        assert handle.exitcode in (0, -signal.SIGTERM)
        options = {"changes": SMALL, "dataset": pictures, "tasks": ["accuracy"]}
        (job,) = sweep([NAME], tmp_path / "out", **options, launcher="ray")
        assert job.state == "done"
    finally:
        ray.shutdown()
