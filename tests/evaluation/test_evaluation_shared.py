"""Evaluation by several processes is that of one: each has its share, rank 0 writes and prints."""

import json
import signal
import time

import pytest

from alignmixup.cli import main
from alignmixup.experiments.run import train
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.schema import on_data
from forked import finish, start_team
from picture_folder import make_pictures

# Metrics from logits differ by the rounding of batches of other sizes; counts do not. The maps of
# ``Painted`` are exact in batches of any size: that of class k is channel k % 3 of the image.
TASKS = """
import dataclasses
import torch
from torch import nn
import alignmixup as am
from alignmixup.datasets import shapes
from alignmixup.training import join_team

torch.set_num_threads(1)
team, device = join_team(torch.device("cpu"))
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 7 * 7, 10))
names = ["accuracy", "calibration", "temperature", "fgsm", "pgd", "strong_attack", "ood", "cost"]
options = {
    "pgd": {"num_steps": 3, "chunk": 4},
    "strong_attack": {"num_steps": 2, "restarts": 2, "chunk": 5},
    "cost": {"num_steps": 1, "num_warmup": 0},
}
sources = ["uniform", "gaussian", "gaussian-added"]


def numbers(scores):
    keys = ((r.task, r.metric, r.settings.get("source")) for r in scores.results)
    return dict(zip(keys, [(r.value, r.settings.get("num_images")) for r in scores.results]))


for count, tasks in ((23, names), (2, ["accuracy", "fgsm"]), (1, ["accuracy", "calibration"])):
    images = shapes("test", count)
    how = {"tasks": tasks, "device": "cpu", "batch_size": 10}
    how["options"] = {name: options[name] for name in tasks if name in options}
    how["ood"] = sources if "ood" in tasks else ["all"]
    found = numbers(am.evaluate(net, images, team=team, **how))
    expected = numbers(am.evaluate(net, images, **how))
    assert list(found) == list(expected)
    for key, (value, num_images) in expected.items():
        if key[1] in ("ms_forward", "ms_per_batch"):
            continue
        is_count = key[0] in ("accuracy", "fgsm", "pgd", "strong_attack")
        tolerance = 0 if is_count else 1e-5 * max(abs(value), 1)
        assert abs(found[key][0] - value) <= tolerance, (key, found[key], value)
        assert found[key][1] == num_images, key


class Painted(nn.Module):
    def __init__(self):
        super().__init__()
        self.map, self.classify, self.num_seen = nn.Identity(), nn.Linear(3, 10), 0
        with torch.no_grad():
            self.classify.weight.copy_(torch.eye(3).repeat(4, 1)[:10])
            self.classify.bias.copy_(torch.arange(10) / 50)

    def forward(self, x):
        self.num_seen += len(x)
        return self.classify(self.map(x).mean(dim=(2, 3)))


for count, first in ((23, 0), (23, 1), (23, 22), (2, 0), (2, 1), (1, 0)):
    images = shapes("test", count)  # those before ``first``, and every fifth, have no box
    kept = [b if i >= first and (i - first) % 5 < 4 else b[:0] for i, b in enumerate(images.boxes)]
    images = dataclasses.replace(images, boxes=tuple(kept))
    how = {"tasks": ["localization", "accuracy"], "device": "cpu", "batch_size": 3}
    for model in (Painted(), net):
        found = am.evaluate(model, images, team=team, **how)
        if model is not net:  # its share for each task, and one image to find the layers
            assert model.num_seen <= 2 * len(range(count)[team.rows]) + 1
        expected = am.evaluate(model, images, **how)
        get = lambda scores: [(r.metric, r.value, r.settings) for r in scores.results]
        assert get(found) == get(expected), (get(found), get(expected))
        assert found.left_out == expected.left_out and not found.failed
        assert ("localization" in found.left_out) == (model is net)
print("equal", flush=True)
"""

# Tasks of a user that fail, outside of ``team.agreed()`` unless they say so, and the error of all.
FAILURES = """
import re
import time
import torch
from torch import nn
import alignmixup as am
from alignmixup.datasets import shapes
from alignmixup.evaluation import Skipped
from alignmixup.training import join_team

torch.set_num_threads(1)
team, device = join_team(torch.device("cpu"))
net, images = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 10)), shapes("test", 9)
expected = {}


@am.register_task("alone")
def alone(model, batches):
    return [am.Result("alone", "images", sum(len(x) for x, _ in batches), {"rank": team.rank})]


def fails(text):
    def register(task):
        am.register_task(task.__name__)(task)
        expected[task.__name__] = text
    return register


@fails("OSError: rank 1: no such disk")
def in_an_agreed_block(model, batches, *, team):
    with team.agreed():
        if team.rank == 1:
            raise OSError("no such disk")
    return []


@fails("OSError: rank 1: no such disk")
def before_a_collective(model, batches, *, team):
    if team.rank == 1:
        raise OSError("no such disk")
    team.total([1], device)


@fails("ValueError: rank 0: no number")
def before_an_agreed_block(model, batches, *, team):
    if team.rank == 0:
        raise ValueError("no number")
    with team.agreed():
        team.join_rows(torch.rand(2, 3))


@fails("OSError: rank 0: no such disk")
def in_rank_0_before_the_others(model, batches, *, team):
    with team.rank_zero_first():
        if team.rank == 0:
            raise OSError("no such disk")


@fails("RuntimeError: rank 1: ZeroDivisionError: division by zero (<program>:N)")
def after_the_last_collective(model, batches, *, team):
    team.wait()
    team.rank == 1 and 1 / 0
    return []


@fails("OSError: rank 1: no such disk")
def while_another_works(model, batches, *, team):
    if team.rank == 1:
        raise OSError("no such disk")
    while True:
        list(batches)


@fails("OSError: rank 1: no such disk")
def while_another_catches_all(model, batches, *, team):
    if team.rank == 1:
        raise OSError("no such disk")
    for _ in range(3):
        try:
            team.from_rank_zero(1)
        except Exception:
            pass
    return []


@fails("ValueError: rank 1: rank 0 has returned, while rank 1 waits in total of 1 numbers: all "
       "ranks must call the same methods of the team")
def by_an_early_return(model, batches, *, team):
    return team.total([1], device) if team.rank else []


@fails("ValueError: rank 0 calls total of 1 numbers, rank 1 calls any: all ranks must call the "
       "same methods of the team")
def by_another_call(model, batches, *, team):
    return team.any(True, device) if team.rank else team.total([1], device)


@fails("ValueError: rank 0 calls any, rank 1 calls agreed: all ranks must call the same methods "
       "of the team")
def by_a_block_of_one(model, batches, *, team):
    if team.rank == 0:
        team.any(True, device)
    with team.agreed():
        return []


@fails("ValueError: the ranks have [2, 4] rows: pass those that Team.rows chooses")
def by_rows_of_no_share(model, batches, *, team):
    team.join_rows(torch.rand(2 + 2 * team.rank, 3))


@fails("ValueError: both")
def everywhere(model, batches, *, team):
    raise ValueError("both")


@fails("ValueError: rank 0: alone")
def in_rank_0_alone(model, batches):
    raise ValueError("alone")


class Local:
    def __reduce__(self):
        raise ValueError("it cannot be sent")


@fails("ValueError: rank 0: it cannot be sent")
def by_its_result(model, batches, *, team):
    return [am.Result("by_its_result", "local", 0, {"local": Local()})]


@am.register_task("skipped")
def skipped(model, batches, *, team):
    if team.rank == 1:
        raise Skipped("no such images")
    team.join_rows(torch.rand(2, 3))


names, began = ["alone", *expected, "skipped", "accuracy"], time.monotonic()
scores = am.evaluate(net, images, tasks=names, device="cpu", team=team)
assert time.monotonic() - began < 20
assert [r.value for r in scores.results][0] == 9 and scores.results[0].settings["rank"] == 0
failed = {name: re.sub("[0-9]+[)]", "N)", text) for name, text in scores.failed.items()}
assert failed == expected, failed
assert scores.left_out == {"skipped": "no such images"}
assert {r.task for r in scores.results} == {"alone", "accuracy"}
try:
    am.evaluate(net, images, tasks=["before_a_collective"], device="cpu", team=team)
except OSError as error:
    assert str(error) == "rank 1: no such disk"
after = am.evaluate(net, images, device="cpu", team=team)
assert after.value("accuracy", "top1") == scores.value("accuracy", "top1")
try:
    am.evaluate(net, [(torch.rand(4, 3, 32, 32), torch.zeros(4).long())], device="cpu", team=team)
except ValueError as error:
    print(error, flush=True)
"""

# Random programs of collectives and nested blocks; some ranks fail, catch or stop at random places.
RANDOM = """
import random
import torch
from torch import nn
import alignmixup as am
from alignmixup.datasets import shapes
from alignmixup.training import join_team

torch.set_num_threads(1)
team, device = join_team(torch.device("cpu"))


def step(plan, own, depth):
    call = plan.randrange(6)
    if own.random() < 0.02:
        raise own.choice([OSError, KeyError, ValueError])(f"at depth {depth}")
    if call == 0:
        assert team.total([1, 2], device) == [team.size, 2 * team.size]
    elif call == 1:
        assert len(team.join_rows(torch.rand(7, 2)[team.rows])) == 7
    elif call == 2:
        assert team.from_rank(team.size - 1, team.rank) == team.size - 1
    elif call == 3 and depth < 3:
        with team.agreed():
            for _ in range(plan.randrange(4)):
                step(plan, own, depth + 1)
    elif call == 4 and depth < 3:
        inner = random.Random(plan.random())
        try:
            with team.agreed():
                for _ in range(3):
                    step(inner, own, depth + 1)
        except (ValueError, OSError):
            pass
    elif call == 5:
        team.wait()


@am.register_task("random")
def random_task(model, batches, *, team, seed):
    plan, own = random.Random(seed), random.Random(f"{seed} {team.rank}")
    for _ in range(8):
        step(plan, own, 0)
        if own.random() < 0.01:
            break
    return []


@am.register_task("first")
def first(model, batches):
    return [am.Result("first", "zero", 0, {})]


num_failed = 0
for seed in range(60):
    tasks = ["first", "random"]
    scores = am.evaluate(
        nn.Flatten(), shapes("test", 4), tasks=tasks, device="cpu", seed=seed, team=team
    )
    texts = [scores.failed.get("random")] * team.size
    with team.agreed():
        found = [team.from_rank(rank, scores.failed.get("random")) for rank in range(team.size)]
    assert found == texts, found
    num_failed += texts[0] is not None
print(10 < num_failed < 50, flush=True)
"""

COMMAND = """
import sys
import torch
from alignmixup.cli import main

torch.set_num_threads(1)
sys.exit(main(["evaluate", *sys.argv[1:]]))
"""

# The command, and how many files this process has decoded.
COUNTED = """
import sys
import torch
from alignmixup.cli import main
from alignmixup.datasets.loading import decode

torch.set_num_threads(1)
decoded, read_rgb = [], decode.read_rgb
decode.read_rgb = lambda path: decoded.append(path) or read_rgb(path)
assert main(["evaluate", *sys.argv[1:]]) == 0
print(len(decoded), flush=True)
"""

# Nothing of ours can stop a process that waits in a collective of torch itself.
PLAIN = """
import torch
import torch.distributed as dist
from torch import nn
import alignmixup as am
from alignmixup.datasets import shapes
from alignmixup.training import join_team, watch

watch.PERIOD, watch.LIMIT, watch.GRACE = 0.2, 2.0, 1.0  # seconds
torch.set_num_threads(1)
team, device = join_team(torch.device("cpu"))


@am.register_task("plain")
def plain(model, batches, *, team):
    if team.rank == 1:
        raise OSError("no such disk")
    dist.all_reduce(torch.ones(3))


am.evaluate(nn.Flatten(), shapes("test", 4), tasks=["plain"], device="cpu", team=team)
"""

ENDLESS = """
import sys
import torch
import alignmixup as am
from alignmixup.experiments.scoring import join_processes
from alignmixup.training import watch

watch.PERIOD, watch.LIMIT, watch.GRACE = 0.5, 10.0, 2.0  # seconds
torch.set_num_threads(1)
team, device = join_processes("cpu")
ready = lambda *where: print("ready", flush=True)
options = {"pgd": {"num_steps": 10**6}}
am.evaluate(
    sys.argv[1], tasks=["pgd"], options=options, device=device, team=team, on_images=ready
)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared") / "run"
    recipe = on_data(find_recipe("cifar10-r18-baseline-fast").shrunk(), "shapes")
    small = {"train.epochs": 1, "train.batch_size": 8, "net.width": 4, "data.limit": 23}
    train(recipe, folder, changes=small, quiet=True)
    return folder


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_task_scores_as_in_one_process(size):
    assert finish(start_team(TASKS, size=size)) == ["equal"] * size


def test_a_failure_of_one_process_is_that_of_all():
    message = "2 processes cannot share batches of a loader: pass an ImageSet, or score in one"
    for line in finish(start_team(FAILURES)):
        assert line.startswith(message)


@pytest.mark.slow
def test_ranks_agree_on_the_failures_of_random_programs():
    assert finish(start_team(RANDOM, size=3)) == ["True"] * 3


@pytest.mark.slow
def test_a_process_that_waits_in_a_collective_of_torch_is_ended_with_the_reason():
    began = time.monotonic()
    for process in start_team(PLAIN):
        code, errors = process.fail()
        assert code == 1
        assert "rank 1: no such disk" in errors
    assert time.monotonic() - began < 60


def test_rank_0_alone_writes_and_prints(run):
    before = (run / "results.jsonl").read_text().splitlines()
    processes = start_team(COMMAND, run, "--tasks", "accuracy", "fgsm")
    first, second = (process.finish() for process in processes)
    assert "accuracy" in "".join(first)
    assert not second
    assert [process.errors.read_text() for process in processes] == ["accuracy ...\nfgsm ...\n", ""]
    added = (run / "results.jsonl").read_text().splitlines()[len(before) :]
    metrics = [json.loads(line)["metric"] for line in added]
    assert metrics == ["top1", "top1_error", "top5", "top1_error", "clean_error"]


def test_rank_zero_decodes_for_all_and_the_numbers_are_those_of_one(tmp_path):
    own, other = (make_pictures(tmp_path / name, num_val=5) for name in ("own", "other"))
    folder = tmp_path / "run"
    recipe = on_data(find_recipe("cifar10-r18-baseline-fast").shrunk(), own)
    small = {"train.epochs": 1, "train.batch_size": 8, "net.width": 4, "data.limit": 9}
    train(recipe, folder, changes=small, quiet=True)
    tasks = ["--tasks", "accuracy", "fgsm", "--device", "cpu"]
    for words in ([], ["--dataset", other]):
        before = results_of(folder)
        assert main(["evaluate", str(folder), *tasks, *words]) == 0
        alone = results_of(folder)[len(before) :]
        assert finish(start_team(COUNTED, folder, *tasks, *words)) == ["10", "0"]
        assert results_of(folder)[len(before) + len(alone) :] == alone


def results_of(folder):
    rows = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return [(row["task"], row["metric"], row["value"], row["settings"]) for row in rows]


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others_with_its_rank(run):
    processes = start_team(ENDLESS, run, size=3)
    for process in processes:
        process.wait_for("ready")
    began = time.monotonic()
    processes[1].send_signal(signal.SIGKILL)
    for rank in (0, 2):
        code, errors = processes[rank].fail()
        assert code == 1
        assert "rank 1 (pid " in errors
    assert time.monotonic() - began < 60
