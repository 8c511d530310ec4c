"""Several recipes trained side by side and scored: a table of the paper by one command.

OUT/NAME-seedN/              the folder of each run; in it
OUT/NAME-seedN/scored.json   which tasks have been done, or why not
OUT/NAME-seedN.log           what it said; the process that trains or scores the run holds its lock

Each run has a process of its own, on this machine or on another one (``launchers``). A sweep that
is started again resumes stopped runs and skips finished ones; a second sweep leaves alone what the
first one is working on. Where a network leaves a GPU idle at times, runs side by side take less
than one after another under CUDA MPS.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from alignmixup.checking import check_kind
from alignmixup.experiments.launchers import (
    Call,
    Handle,
    Launcher,
    make_launcher,
    unblock_sigint,
)
from alignmixup.experiments.plugins import open_recipe, plugins_of
from alignmixup.experiments.run import train
from alignmixup.experiments.run_folder import (
    SCORED,
    FolderInUse,
    alone_in,
    check_folder,
    read_recipe,
    write_json,
)
from alignmixup.experiments.scoring import evaluate, task_names
from alignmixup.files import make_folder, writing
from alignmixup.recipes.catalog import matching_recipes
from alignmixup.recipes.schema import Recipe, changed, on_data
from alignmixup.registry import import_plugin
from alignmixup.training.distributed import num_launched
from alignmixup.training.ledger import LEDGER
from alignmixup.training.signals import Stopped, stop_signals
from alignmixup.training.summary import summarize

IN_USE = 75  # the exit code of a run whose folder another process has
STOPPING = "stopping each run after its step; press Ctrl-C again to quit now"


@dataclass(frozen=True)
class Job:
    """One run of a sweep: what to train, where, and what became of it."""

    recipe: Recipe
    folder: Path
    state: str = "waiting"  # waiting, running, done, stopped, in use, or why it failed

    def __str__(self) -> str:
        return f"{self.folder.name}: {self.state}"


@dataclass(frozen=True)
class _Shared:
    """What all runs of a sweep share."""

    data_root: Path | None
    tasks: tuple[str, ...]
    patience: float = 0.0


def sweep(
    names: Sequence[str],
    out: Path | str,
    *,
    changes: Mapping[str, object] | None = None,
    seeds: Sequence[int] = (0,),
    dataset: str | None = None,
    tasks: Sequence[str] = ("all",),
    data_root: Path | str | None = None,
    workers: int = 1,
    minutes: float | None = None,
    launcher: str = "local",
    launch: Mapping[str, object] | None = None,
    on_change: Callable[[Job], None] | None = None,
) -> list[Job]:
    """Train and score each recipe with each seed, ``workers`` at a time; return what became of all.

    After ``minutes`` those that run are stopped: they save, and the next sweep resumes them. A run
    that fails does not stop the others; its log has the reason. ``launcher`` is "local", "slurm" or
    "ray", ``launch`` its options (see ``launchers``).

    Raises:
        Stopped: Ctrl-C or SIGTERM; the runs have saved. A second Ctrl-C kills them.
    """
    _check(names, seeds, workers, minutes)
    chosen_tasks = tuple(task_names(tasks))
    recipes = [open_recipe(name) for name in names]
    if dataset is not None:
        recipes = [on_data(recipe, dataset) for recipe in recipes]
    changes = changes or {}
    if "train.seed" in changes:
        raise ValueError("a sweep takes its seeds from seeds= (--seeds), not from train.seed")
    chosen = [
        changed(recipe, {**changes, "train.seed": seed})
        for seed in dict.fromkeys(seeds)  # two runs in one folder would undo each other
        for recipe in recipes  # all of a seed first: a sweep cut short has a whole table
    ]
    jobs = [Job(r, Path(out) / r.folder) for r in chosen]
    _check_folders(names, jobs)
    make_folder(Path(out))
    starter = make_launcher(launcher, launch or {}, Path(out))
    root = None if data_root is None else Path(data_root)
    shared = _Shared(root, chosen_tasks, starter.patience)
    deadline = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    report = on_change or (lambda job: None)
    with stop_signals(STOPPING) as caught:
        crew = _Crew(jobs, shared, workers, starter, report)
        try:
            while crew.poll():
                if caught or time.monotonic() > deadline:
                    crew.stop()
                time.sleep(starter.poll_seconds)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):  # the second Ctrl-C
                crew.kill()
            crew.stop()
            crew.wait()
            raise
    if caught:
        done = sum(job.state == "done" for job in crew.jobs)
        raise Stopped(
            caught[0], f"stopped; {done} of {len(jobs)} done in {out}, run again to resume"
        )
    return crew.jobs


def recipes_of(patterns: Sequence[str]) -> list[str]:
    """The names that patterns stand for, each once; one that stands for nothing is an error."""
    names: dict[str, None] = {}
    for pattern in patterns:
        is_pattern = any(sign in pattern for sign in "*?[")
        if not is_pattern:
            open_recipe(pattern)  # or an error with the nearest names
        names.update(dict.fromkeys(matching_recipes(pattern) if is_pattern else [pattern]))
    return list(names)


def _check(names: Sequence[str], seeds: Sequence[int], workers: int, minutes: float | None) -> None:
    if not names:
        raise ValueError("a sweep needs at least one recipe; 'alignmixup recipes' lists them")
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if minutes is not None and not minutes >= 0:  # or NaN
        raise ValueError(f"minutes must be 0 or more, or None for no limit, got {minutes}")
    if not seeds:
        raise ValueError("a sweep needs at least one seed; pass seeds=[0] (--seeds 0)")
    if (size := num_launched()) > 1:
        raise ValueError(
            f"this is one of {size} processes of torchrun, and each would train all runs: start "
            "the sweep without torchrun, or train one recipe with it"
        )


def _check_folders(names: Sequence[str], jobs: Sequence[Job]) -> None:
    """On one data set, recipes that were made for several may have become one name."""
    folders = [job.folder for job in jobs]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ValueError(
                f"several of the recipes {list(names)} would train in {folder}, because they "
                "differ only in their data: choose one of them"
            )


@dataclass
class _Crew:
    """The jobs of a sweep and their processes."""

    jobs: list[Job]
    shared: _Shared
    workers: int
    launcher: Launcher
    report: Callable[[Job], None]
    running: dict[int, Handle] = field(default_factory=dict)
    is_stopping: bool = False

    def poll(self) -> bool:
        """Collect finished jobs, start waiting ones; return False when none is left."""
        for number, process in list(self.running.items()):
            if not process.is_alive():
                self.running.pop(number)
                self._change(number, _outcome(self.jobs[number], self.shared, process.exitcode))
        for number, job in enumerate(self.jobs):
            if self.is_stopping or len(self.running) >= self.workers:
                break
            if job.state == "waiting":
                self._start(number)
        return bool(self.running)

    def _start(self, number: int) -> None:
        job = self.jobs[number]
        if _is_done(job, self.shared):
            self._change(number, "done")
            return
        try:
            with writing(_log(job.folder)):
                _log(job.folder).open("ab").close()
        except OSError as error:
            self._change(number, f"failed: {error}")
            return
        # As plain values: a class of a plugin is known there once the plugin is imported.
        args = (job.recipe.to_json(), job.folder, astuple(self.shared), plugins_of(job.recipe))
        self.running[number] = self.launcher.start(Call(f"{__name__}:{_do.__name__}", args))
        self._change(number, "running")

    def _change(self, number: int, state: str) -> None:
        self.jobs[number] = replace(self.jobs[number], state=state)
        self.report(self.jobs[number])

    def stop(self) -> None:
        """Ask running jobs to save and end, once; start no more."""
        if not self.is_stopping:
            self.is_stopping = True
            for process in self.running.values():
                process.terminate()

    def kill(self) -> None:
        """Kill the running jobs."""
        for process in self.running.values():
            process.kill()
            process.join()
        self.running.clear()

    def wait(self) -> None:
        while self.poll():
            time.sleep(self.launcher.poll_seconds)


def _do(
    recipe: Mapping[str, Any], folder: Path, settings: tuple[Any, ...], plugins: Sequence[str]
) -> None:
    """Train and score one run, in a process of its own; ``settings`` are those of ``_Shared``."""
    path, shared = _log(folder), _Shared(*settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    try:
        unblock_sigint()
        for plugin in plugins:
            import_plugin(plugin)
        job = Job(Recipe.from_json(recipe), folder)
        with alone_in(folder, path, shared.patience):
            summary = train(job.recipe, job.folder, data_root=shared.data_root).summary
            print(summary, flush=True)
            if summary.is_complete:
                _score(job, shared)
    except FolderInUse:
        raise SystemExit(IN_USE) from None
    except KeyboardInterrupt:  # while it was scored, or a second one: what is saved is saved
        raise SystemExit(0) from None
    except Exception as error:
        traceback.print_exc()
        print(f"failed: {' '.join(str(error).split())}", flush=True)  # in one line
        raise SystemExit(1) from None


def _log(folder: Path) -> Path:
    return folder.with_name(folder.name + ".log")


def _score(job: Job, shared: _Shared) -> None:
    """Do the tasks that have not been done, and note each as it is: a kill repeats one at most.

    Raises:
        RuntimeError: Tasks have failed; the others are done.
    """
    failed: dict[str, Exception] = {}
    for task in _unscored(job, shared):
        print(f"{task} ...", flush=True)
        try:
            done = evaluate(job.folder, tasks=[task], data_root=shared.data_root)
        except Exception as error:
            traceback.print_exc()
            failed[task] = error
            continue
        why = "; ".join(f"{name}: {reason}" for name, reason in done.left_out.items())
        state = "done" if done.results else "left out"
        notes = {**_scored(job), task: f"{state}; left out {why}" if why else state}
        write_json(job.folder / SCORED, notes)
    if failed:
        raise RuntimeError("; ".join(f"{task}: {error}" for task, error in failed.items()))


def _unscored(job: Job, shared: _Shared) -> list[str]:
    """The tasks to do: those left out are tried again, as what was missing may have come."""
    there = _scored(job)
    return [task for task in shared.tasks if not there.get(task, "").startswith("done")]


def _scored(job: Job) -> dict[str, str]:
    """What was noted of each task; notes that are damaged are as if there were none."""
    path = job.folder / SCORED
    if not path.exists():
        return {}
    try:
        notes = json.loads(path.read_text(encoding="utf-8"))
        check_kind(SCORED, notes, dict[str, str])
    except ValueError as error:
        warnings.warn(f"{path} is damaged ({error}): the run is scored again", stacklevel=2)
        return {}
    return dict(notes)


def _outcome(job: Job, shared: _Shared, exit_code: int | None) -> str:
    path = _log(job.folder)
    if exit_code == IN_USE:
        return f"in use: another process is training in {job.folder}"
    if exit_code == 1 and path.exists():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        reasons = [line for line in lines if line.startswith("failed: ")]
        if reasons:
            return reasons[-1]
    # A terminal sends Ctrl-C, and SIGHUP (1) when it is closed, to runs that do not train yet, too.
    if exit_code not in (0, -signal.SIGTERM, -signal.SIGINT, -1):
        if exit_code is None or exit_code > 0:
            return f"failed: exit code {exit_code}"
        name = signal.Signals(-exit_code).name
        return f"failed: killed by {name}; look for the reason, memory first, and run again"
    is_scored = set(shared.tasks) <= set(_scored(job))
    return "done" if _is_trained(job) and is_scored else "stopped"


def _is_done(job: Job, shared: _Shared) -> bool:
    """Whether a process would find nothing to do; not where it would find something wrong."""
    recipe = replace(job.recipe, train=job.recipe.train.fitted())
    try:
        there = check_folder(job.folder, recipe).recipe
        is_known = _is_trained(job) and there.data.name == read_recipe(job.folder).data.name
        return is_known and not _unscored(job, shared)
    except (ValueError, OSError):
        return False


def _is_trained(job: Job) -> bool:
    return (job.folder / LEDGER).exists() and summarize(job.folder).is_complete
