"""Where the runs of a sweep are executed: on this machine, as jobs of Slurm, or as tasks of Ray.

    local    one process a run                                    no options
    slurm    one job a run, by submitit (the extra ``slurm``)     options of its ``AutoExecutor``
    ray      one task a run, by Ray Core (the extra ``ray``)      options of ``ray.remote``

A launcher starts a call and returns a handle of it, with the methods of a process. It keeps no
state: what a run has done is in its folder, which all machines must see under the same path. A job
that is requeued, or a task that is retried, makes the same call again, and the run resumes.

A scheduler's process is not ours to handle signals in. So the call runs in a child of it, which
gets SIGTERM, saves and ends when the job is preempted or canceled, or when its parent has died.
Slurm sends its signals to all processes of a job, to the child too.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

# Settings of the machine that a run needs elsewhere, too.
ENVIRONMENT = "ALIGNMIXUP_"

# Seconds that a retried run waits for the one before it, which may be saving still.
PATIENCE = 60.0

# How the states of Slurm begin in which a job was asked to end.
STOPPED = ("CANCELLED", "PREEMPTED", "TIMEOUT")

# The states in which a job of Slurm has not ended.
LIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"}


class Handle(Protocol):
    """A call that has been started; ``exitcode`` as a process has it, None while it runs."""

    @property
    def exitcode(self) -> int | None: ...

    def is_alive(self) -> bool: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def join(self) -> None: ...


@dataclass(frozen=True)
class Call:
    """A function, as "module:name", and its arguments; made in a process of its own.

    Only that process imports the module: a scheduler's loads no torch.
    """

    function: str
    args: tuple[Any, ...]

    def start(self) -> SpawnProcess:
        """Make the call in a child process."""
        # Not a fork: CUDA does not survive one.
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=self, daemon=False)
        process.start()
        return process

    def __call__(self) -> None:
        """Make the call here."""
        module, _, name = self.function.partition(":")
        getattr(importlib.import_module(module), name)(*self.args)


class Launcher(Protocol):
    """Starts calls.

    ``patience`` are the seconds that a run waits where another process has its folder,
    ``poll_seconds`` those between two questions whether a call has ended.
    """

    patience: float
    poll_seconds: float

    def start(self, call: Call) -> Handle: ...


def make_launcher(name: str, options: Mapping[str, object], out: Path) -> Launcher:
    """Return the launcher of that name; ``out`` is the folder of the sweep.

    Raises:
        ValueError: There is none of that name, or it has no such options.
        ImportError: Its extra is not installed.
    """
    if name not in LAUNCHERS:
        raise ValueError(f"unknown launcher {name!r}; choose from {', '.join(LAUNCHERS)}")
    try:
        return LAUNCHERS[name](dict(options), out)
    except (TypeError, NameError, AssertionError) as error:
        raise ValueError(f"launcher {name}: {' '.join(str(error).split())}") from None


class Local:
    """Processes on this machine."""

    patience = 0.0
    poll_seconds = 0.2

    def __init__(self, options: dict[str, Any], out: Path) -> None:
        if options:
            raise ValueError(f"the local launcher has no options, got {options}")

    def start(self, call: Call) -> Handle:
        # Ctrl-C on the terminal would end their imports with a trace.
        with _blocked("SIGINT"):
            return call.start()


@contextmanager
def _blocked(*names: str) -> Iterator[None]:
    """Start processes in this block that receive these signals only once they unblock them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # which a first process starts, and which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in names])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_sigint() -> None:
    """Receive Ctrl-C from here on; one that has come meanwhile raises KeyboardInterrupt."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


class Slurm:
    """Jobs of Slurm, by submitit; its files are in ``OUT/.submitit``.

    The option ``cluster=local`` makes them processes of this machine instead, to try it out. At
    the time limit, as when preempted, a job saves and is requeued.
    """

    patience = PATIENCE
    poll_seconds = 2.0  # a question is for the file system of the cluster

    def __init__(self, options: dict[str, Any], out: Path) -> None:
        submitit = _imported("submitit", "slurm")
        cluster = options.pop("cluster", "slurm")
        limits = {"slurm_max_num_timeout": 1000}  # a run is requeued until it is done
        try:
            self.executor = submitit.AutoExecutor(out / ".submitit", cluster=cluster, **limits)
        except RuntimeError as error:
            raise ValueError(f"launcher slurm: {error}; or set --launch cluster=local") from None
        self.executor.update_parameters(
            **{"name": "alignmixup", "timeout_min": 240, "gpus_per_node": 1, **options}
        )

    def start(self, call: Call) -> Handle:
        job = self.executor.submit(Supervised.here(call))
        return _SlurmHandle(job, has_controller=self.executor.cluster == "slurm")


class Ray:
    """Tasks of Ray: of the cluster at ``address``, else at RAY_ADDRESS, else of this machine.

    Ray retries a task whose machine is lost, by default three times (``max_retries``).
    """

    patience = PATIENCE
    poll_seconds = 0.5

    def __init__(self, options: dict[str, Any], out: Path) -> None:
        self.ray = _imported("ray", "ray")
        address = options.pop("address", None)  # not an option of ray.remote
        if not self.ray.is_initialized():
            self.ray.init(address=address, log_to_driver=False)
        num_gpus = 1 if self.ray.cluster_resources().get("GPU") else 0
        self.task = self.ray.remote(**{"num_cpus": 1, "num_gpus": num_gpus, **options})(_run)

    def start(self, call: Call) -> Handle:
        return _RayHandle(self.ray, self.task.remote(Supervised.here(call)))


LAUNCHERS: dict[str, Callable[[dict[str, Any], Path], Launcher]] = {
    "local": Local,
    "slurm": Slurm,
    "ray": Ray,
}


@dataclass
class Supervised:
    """A call made in a child process; asked to stop, it stops the child and waits for it."""

    call: Call
    folder: str
    environment: dict[str, str]
    _child: SpawnProcess | None = field(default=None, init=False)

    @classmethod
    def here(cls, call: Call) -> Supervised:
        """The call as it would be made in this folder, with the settings of this machine."""
        settings = {k: v for k, v in os.environ.items() if k.startswith(ENVIRONMENT)}
        return cls(call, os.getcwd(), settings)

    def __call__(self) -> int:
        """Make the call and return its exit code."""
        # The warning of a job that is nearly over is for this process; it would kill the child.
        with _blocked("SIGUSR1", "SIGUSR2"):
            self._child = Call(
                f"{__name__}:_watched", (self.call, self.folder, self.environment)
            ).start()
        try:
            while self._child.is_alive():
                self._child.join(0.5)  # Ray's interrupt of a task wakes no system call
        finally:
            self._stop()
        if _is_requeued():
            raise SystemExit(1)  # without a result, which would be the job's last
        return self._child.exitcode or 0

    def _stop(self) -> None:
        if self._child is not None:
            self._child.terminate()  # nothing where it has ended
            self._child.join()

    def checkpoint(self) -> Any:
        """Called by submitit before it requeues the job: save, and make the same call again."""
        self._stop()
        submitit = _imported("submitit", "slurm")
        return submitit.helpers.DelayedSubmission(
            Supervised(self.call, self.folder, self.environment)
        )


def _is_requeued() -> bool:
    """Whether this is a job of submitit that Slurm starts again, at once where it was preempted.

    Within its grace time a preempted job is not yet to be started again, and would not be if it
    ended by itself. A canceled one is neither.
    """
    if os.environ.get("SUBMITIT_EXECUTOR") != "slurm":  # a Ray may run within a job of the user
        return False
    job, restarts = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
    try:
        facts = _facts(job)
        if facts["JobState"] == "RUNNING" and facts["PreemptTime"] != "None":
            _scontrol("requeue", job)
            return True
        return int(facts["Restarts"]) > int(restarts)
    except (OSError, subprocess.SubprocessError, KeyError, ValueError):
        return False


def _facts(job: str) -> dict[str, str]:
    """What Slurm's controller says of a job, by name: JobState, Restarts, ..."""
    return dict(word.partition("=")[::2] for word in _scontrol("show", "job", job).split())


def _scontrol(*words: str) -> str:
    run = subprocess.run(
        ["scontrol", *words], capture_output=True, text=True, check=True, timeout=60
    )
    return run.stdout


def _watched(call: Call, folder: str, environment: Mapping[str, str]) -> None:
    """Make the call in this child; if the parent dies, stop as if it had asked for it."""
    os.environ.update(environment)
    os.chdir(folder)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    call()


def _run(supervised: Supervised) -> int:
    return supervised()


class _SlurmHandle:
    """A job of submitit with the methods of a process.

    submitit asks Slurm's accounting, where a job whose node is lost has failed until that learns of
    its requeue, and believes it for good; and it believes that a preempted job is always requeued.
    The controller decides on the end and the requeue at once, so it is asked too.
    """

    def __init__(self, job: Any, has_controller: bool) -> None:
        self.job, self.has_controller, self.is_asked_to_stop = job, has_controller, False

    @property
    def exitcode(self) -> int | None:
        if self.is_alive():
            return None
        if self._has_result() and self.job.exception() is None:
            return int(self.job.result())
        is_stopped = self.is_asked_to_stop or self.job.state.startswith(STOPPED)
        return -(signal.SIGTERM if is_stopped else signal.SIGKILL)

    def is_alive(self) -> bool:
        if not self.job.done() and not self.job.state.startswith("PREEMPTED"):
            return True
        if not self._is_requeued():
            return False
        self.job.watcher.clear()  # which would not ask again
        return True

    def _is_requeued(self) -> bool:
        """Whether a job that has ended is to run again, or does already."""
        if not self.has_controller or self.is_asked_to_stop or self._has_result():
            return False
        if self.job.state.startswith("CANCELLED"):
            return False
        try:
            return _facts(self.job.job_id)["JobState"] in LIVE
        except (OSError, subprocess.SubprocessError, KeyError):
            return False

    def _has_result(self) -> bool:
        return bool(self.job.paths.result_pickle.exists())

    def terminate(self) -> None:
        self.is_asked_to_stop = True
        self.job.cancel(check=False)

    kill = terminate  # Slurm kills what does not end

    def join(self) -> None:
        """Slurm ends it."""


class _RayHandle:
    """A task of Ray with the methods of a process."""

    def __init__(self, ray: Any, task: Any) -> None:
        self.ray, self.task = ray, task

    @property
    def exitcode(self) -> int | None:
        if self.is_alive():
            return None
        try:
            return int(self.ray.get(self.task))
        except self.ray.exceptions.TaskCancelledError:
            return -signal.SIGTERM
        except self.ray.exceptions.RayError:  # its machine is lost, and so were those after it
            return -signal.SIGKILL

    def is_alive(self) -> bool:
        return not self.ray.wait([self.task], timeout=0)[0]

    def terminate(self) -> None:
        self.ray.cancel(self.task)

    def kill(self) -> None:
        self.ray.cancel(self.task, force=True)

    def join(self) -> None:
        """Ray ends it."""


def _imported(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(
            f"--launcher {extra} needs {module}: pip install 'alignmixup[{extra}]'"
        ) from None
