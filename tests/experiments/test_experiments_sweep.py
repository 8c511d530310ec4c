"""A sweep: runs side by side, each in its folder, failures apart, and going on after a stop."""

import json
import multiprocessing
import os
import signal
import threading
import time

import pytest

from alignmixup.contracts import Result
from alignmixup.evaluation.evaluate import Scores
from alignmixup.experiments import sweep as sweeps
from alignmixup.experiments.launchers import Local
from alignmixup.experiments.run import train
from alignmixup.experiments.sweep import recipes_of, sweep
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.schema import changed, on_data
from alignmixup.training import Stopped, summarize
from picture_folder import make_pictures

# A narrow network; spawned processes are told by settings, not by patches.
SMALL = {
    "net.width": 4,
    "train.epochs": 1,
    "train.batch_size": 8,
    "train.device": "cpu",
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def pictures(tmp_path):
    return make_pictures(tmp_path / "pictures")


def folder_of(dataset, rest):
    """The folder of a run of a recipe on these data."""
    data = on_data(find_recipe("cifar10-r18-baseline-fast"), dataset).name.split("-r18-")[0]
    return f"{data}-r18-{rest}"


def test_a_recipe_is_trained_and_scored_and_then_skipped(tmp_path, pictures, monkeypatch):
    name = "cifar10-r18-alignmixup-fast"
    options = {"changes": SMALL, "dataset": pictures, "tasks": ["accuracy"]}
    (job,) = sweep([name], tmp_path, **options)
    assert job.state == "done"
    lines = (job.folder / "results.jsonl").read_text().splitlines()
    assert {"top1_last", "top1"} <= {json.loads(line)["metric"] for line in lines}
    # Again: a job of a GPU, or the decoding of a data set, would find nothing to do.
    started = []
    monkeypatch.setattr(Local, "start", lambda self, call: started.append(call) or Ended())
    seen = []
    (again,) = sweep([name], tmp_path, **options, on_change=seen.append)
    assert (again.state, [each.state for each in seen], started) == ("done", ["done"], [])
    # With anything left to do, or other settings, a process decides.
    sweep([name], tmp_path, **{**options, "tasks": ["accuracy", "calibration"]})
    sweep([name], tmp_path, **{**options, "changes": {**SMALL, "train.lr": 0.5}})
    assert len(started) == 2
    # Nor is a folder with the same name in place of one that is gone taken for it unseen.
    (tmp_path / "pictures").rename(tmp_path / "old")
    make_pictures(tmp_path / "new" / "pictures")
    sweep([name], tmp_path, **{**options, "dataset": f"folder:{tmp_path}/new/pictures@32"})
    assert len(started) == 3


def test_a_run_that_was_extended_is_scored_again(tmp_path, pictures):
    name, options = "cifar10-r18-baseline-fast", {"dataset": pictures, "tasks": ["calibration"]}
    (job,) = sweep([name], tmp_path, changes=SMALL, **options)
    longer = {**SMALL, "train.epochs": 2}
    train(changed(job.recipe, longer), job.folder, extend=True, quiet=True)
    (again,) = sweep([name], tmp_path, changes=longer, **options)
    assert (again.state, again.folder) == ("done", job.folder)
    lines = map(json.loads, (job.folder / "results.jsonl").read_text().splitlines())
    assert {line["epoch"] for line in lines if line["task"] == "calibration"} == {1, 2}


class Ended:
    """A process that has ended without doing anything."""

    exitcode = 0

    def is_alive(self):
        return False


@pytest.mark.slow
def test_every_recipe_is_trained_and_scored_and_a_failure_stops_nobody(tmp_path, pictures):
    names = ["cifar10-r18-baseline-fast", "cifar10-r18-alignmixup-fast"]
    out = tmp_path / "out"
    taken = out / folder_of(pictures, "baseline-fast-seed0")
    taken.mkdir(parents=True)
    (taken / "mine.txt").write_text("not a run")
    seen = []
    jobs = sweep(
        names,
        out,
        changes=SMALL,
        dataset=pictures,
        tasks=["accuracy", "calibration"],
        workers=2,
        on_change=lambda job: seen.append((job.recipe.mixer.__class__.__name__, job.state)),
    )
    failed, done = jobs
    assert failed.state.startswith("failed:")
    assert "is not empty and holds no run" in failed.state
    assert done.state == "done"
    assert ("AlignMixup", "running") in seen
    lines = (done.folder / "results.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["metric"] for line in lines]
    assert {"top1_last", "top1", "ece"} <= set(metrics)
    assert set(json.loads((done.folder / "scored.json").read_text())) == {
        "accuracy",
        "calibration",
    }
    # Again: what is finished is left alone.
    before = (done.folder / "results.jsonl").read_bytes()
    again = sweep(
        names[1:], out, changes=SMALL, dataset=pictures, tasks=["accuracy", "calibration"]
    )
    assert [job.state for job in again] == ["done"]
    assert (done.folder / "results.jsonl").read_bytes() == before


def stopped_when(is_time, *args, **options):
    """Sweep until ``is_time()``, then send this process a signal."""

    def interrupt():
        deadline = time.monotonic() + 100
        while not is_time() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    jobs = {}
    with pytest.raises(Stopped, match=r"0 of 1 done in .*, run again to resume") as stop:
        sweep(*args, **options, on_change=lambda job: jobs.update({job.folder: job}))
    watcher.join()
    assert stop.value.number == signal.SIGTERM
    return [*jobs.values()]


@pytest.mark.slow
def test_a_signal_stops_the_runs_which_save_and_go_on(tmp_path, pictures):
    folder = tmp_path / "out" / folder_of(pictures, "baseline-fast-seed3")
    order = ["cifar10-r18-baseline-fast"], tmp_path / "out"
    options = {"changes": {**SMALL, "train.epochs": 9999}, "dataset": pictures, "seeds": [3]}

    def epochs():
        return summarize(folder).epochs if (folder / "checkpoint.safetensors").exists() else 0

    (job,) = stopped_when(lambda: epochs() > 0, *order, **options)
    assert (job.state, job.folder) == ("stopped", folder)
    reached = epochs()
    assert reached >= 1
    (later,) = stopped_when(lambda: epochs() > reached, *order, **options)
    assert later.state == "stopped"
    assert epochs() > reached


def test_a_second_ctrl_c_ends_the_runs_at_once(tmp_path, capsys, monkeypatch):
    """The first one waits for each run to save; this one does not."""

    def start_one_that_never_ends(crew, number):
        process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1000,))
        process.start()
        os.kill(process.pid, signal.SIGSTOP)  # deaf to SIGTERM
        crew.running[number] = process
        crew._change(number, "running")

    def twice():
        for _ in range(2):
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sweeps._Crew, "_start", start_one_that_never_ends)
    watcher = threading.Thread(target=twice)
    with pytest.raises(KeyboardInterrupt) as stop:
        sweep(["cifar10-r18-baseline-fast"], tmp_path, on_change=lambda job: watcher.start())
    watcher.join()
    assert not isinstance(stop.value, Stopped)
    assert multiprocessing.active_children() == []
    assert "press Ctrl-C again to quit now" in capsys.readouterr().err


def test_after_the_minutes_given_everybody_is_stopped(tmp_path, pictures):
    changes = {**SMALL, "train.epochs": 500}
    names = ["cifar10-r18-baseline-fast", "cifar10-r18-input-fast"]
    jobs = sweep(names, tmp_path / "out", changes=changes, dataset=pictures, minutes=0.0)
    assert [job.state for job in jobs] == ["stopped", "waiting"]  # one at a time


def test_bad_orders_are_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps._Crew, "_start", lambda self, number: pytest.fail("started"))
    with pytest.raises(ValueError, match="at least one recipe"):
        sweep([], tmp_path)
    with pytest.raises(ValueError, match="unknown recipe 'cifar10-r18-nothing'"):
        sweep(["cifar10-r18-nothing"], tmp_path)
    with pytest.raises(ValueError, match="unknown task 'beauty'"):
        sweep(["cifar10-r18-baseline"], tmp_path, tasks=["beauty"])
    for minutes in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"minutes must be 0 or more.*, got {minutes}"):
            sweep(["cifar10-r18-baseline"], tmp_path, minutes=minutes)
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        sweep(["cifar10-r18-baseline"], tmp_path, workers=0)
    with pytest.raises(ValueError, match="at least one seed"):
        sweep(["cifar10-r18-baseline"], tmp_path, seeds=[])
    with pytest.raises(ValueError, match="no task is named"):
        sweep(["cifar10-r18-baseline"], tmp_path, tasks=[])
    with pytest.raises(ValueError, match=r"train\.epochs must be int, got 1\.5"):
        sweep(["cifar10-r18-baseline"], tmp_path, changes={"train.epochs": 1.5})
    with pytest.raises(ValueError, match="takes its seeds from seeds="):
        sweep(["cifar10-r18-baseline"], tmp_path, changes={"train.seed": 3})
    with pytest.raises(ValueError, match=r"would train in .*shapes-r18-baseline-seed0"):
        sweep(["cifar10-r18-baseline", "cifar100-r18-baseline"], tmp_path, dataset="shapes")
    with monkeypatch.context() as torchrun:
        torchrun.setenv("WORLD_SIZE", "2")  # each process would train all of them
        with pytest.raises(ValueError, match="is one of 2 processes of torchrun"):
            sweep(["cifar10-r18-baseline"], tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="file"):
        sweep(["cifar10-r18-baseline"], tmp_path / "file")


def test_a_seed_named_twice_is_one_run(tmp_path, monkeypatch):
    """Two processes in one folder would undo each other's work."""
    monkeypatch.setattr(sweeps._Crew, "poll", lambda self: False)
    jobs = sweep(["cifar10-r18-baseline"], tmp_path, seeds=[3, 1, 3])
    assert [job.recipe.train.seed for job in jobs] == [3, 1]


def test_all_recipes_of_a_seed_come_before_the_next_seed(tmp_path, monkeypatch):
    """A sweep that is cut short has a whole table of the first seeds."""
    monkeypatch.setattr(sweeps._Crew, "poll", lambda self: False)
    jobs = sweep(["cifar10-r18-baseline", "cifar10-r18-input"], tmp_path, seeds=[1, 0])
    order = [(job.recipe.train.seed, job.recipe.key.method) for job in jobs]
    assert order == [(1, "baseline"), (1, "input"), (0, "baseline"), (0, "input")]


def test_patterns_and_names_stand_for_recipes_each_once():
    names = recipes_of(["cifar10-r18-input-fast", "cifar10-r18-i*-fast", "cifar10-r18-cutmix"])
    assert names == ["cifar10-r18-input-fast", "cifar10-r18-cutmix"]
    with pytest.raises(ValueError, match=r"no recipe matches 'mnist-\*'"):
        recipes_of(["mnist-*"])
    with pytest.raises(ValueError, match="unknown recipe 'cifar10-r18-inputs'; did you mean"):
        recipes_of(["cifar10-r18-inputs"])


def test_what_was_left_out_is_tried_again_and_what_was_done_is_not(tmp_path):
    job = sweeps.Job(find_recipe("cifar10-r18-baseline-fast"), tmp_path)
    order = sweeps._Shared(None, ("accuracy", "ood", "localization", "pgd"))
    notes = {
        "accuracy": "done",
        "ood": "done; left out ood isun: no folder",
        "localization": "left out; left out localization: no boxes",
    }
    (tmp_path / "scored.json").write_text(json.dumps(notes))
    assert sweeps._unscored(job, order) == ["localization", "pgd"]


def test_a_task_that_fails_leaves_the_others_to_be_done(tmp_path, monkeypatch):
    def score(folder, *, tasks, data_root):
        if tasks == ["ood"]:
            raise RuntimeError("no folder of textures")
        return Scores([Result(tasks[0], "top1", 1.0)])

    monkeypatch.setattr(sweeps, "evaluate", score)
    job = sweeps.Job(find_recipe("cifar10-r18-baseline-fast"), tmp_path)
    shared = sweeps._Shared(None, ("accuracy", "ood", "pgd"))
    with pytest.raises(RuntimeError, match=r"^ood: no folder of textures$"):
        sweeps._score(job, shared)
    assert json.loads((tmp_path / "scored.json").read_text()) == {"accuracy": "done", "pgd": "done"}
    assert sweeps._unscored(job, shared) == ["ood"]


def test_a_failure_of_many_lines_is_told_in_one(tmp_path):
    folder = tmp_path / "run"
    job = sweeps.Job(find_recipe("cifar10-r18-baseline-fast"), folder)
    sweeps._log(job.folder).write_text("Traceback\nfailed: no compiler: set CXX\nand more of it\n")
    order = sweeps._Shared(None, ("accuracy",))
    assert sweeps._outcome(job, order, 1) == "failed: no compiler: set CXX"
    assert sweeps._outcome(job, order, -signal.SIGINT) == "stopped"
    sweeps._log(job.folder).unlink()
    assert sweeps._outcome(job, order, 1) == "failed: exit code 1"
    killed = sweeps._outcome(job, order, -signal.SIGKILL)
    assert killed == "failed: killed by SIGKILL; look for the reason, memory first, and run again"
