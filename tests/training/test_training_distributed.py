"""Several processes train as one: the same weights, one ledger, and nobody left waiting."""

import json
import signal
import time

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.evaluation.shares import share_of
from alignmixup.experiments.run import Sets, train
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.schema import changed
from alignmixup.training.checkpoint import load_checkpoint
from alignmixup.training.distributed import Team
from alignmixup.training.steps import Batches
from forked import finish, start_team
from picture_folder import make_pictures

LINEAR = """
import sys
from pathlib import Path
import torch
from torch import nn
from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.training import Stopped, TrainSettings, fit, join_team, summarize

torch.set_num_threads(1)
out, epochs = Path(sys.argv[1]), int(sys.argv[2])
team, device = join_team(torch.device("cpu"))
torch.manual_seed(7 + team.rank)  # other first weights: those of rank 0 count
net = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 10))
if team.size == 1:
    torch.manual_seed(7)
    net = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 10))


class Pairs(InputMixup):
    # Partners of the whole batch as they are within the halves of it.
    def draw(self, batch_size, rng, progress=0.0):
        draw = super().draw(8, rng, progress)
        copies = [draw.perm + start for start in range(0, batch_size, 8)]
        return draw.with_tensors({"perm": torch.cat(copies)})


loader = DeviceLoader(shapes("train", 64), 16, 0, device, drop_last=True)
settings = TrainSettings(epochs=epochs, batch_size=16, lr=0.5, milestones=(), eval_every=1)
print("ready", flush=True)
half = lambda net: {"top1": 50.0}
try:
    fit(net, Pairs(), loader, half, settings, out, quiet=True, team=team)
except Stopped:
    pass
summary = summarize(out)
print(summary.epochs, summary.is_complete, float(net[2].weight.double().norm()), flush=True)
"""

RECIPE = """
import sys
import torch
from pathlib import Path
from alignmixup.datasets import shapes
from alignmixup.recipes.catalog import find_recipe
from alignmixup.experiments.run import Sets, train
from alignmixup.recipes.schema import changed

torch.set_num_threads(1)
recipe = find_recipe("cifar10-r18-alignmixup-ae-fast").shrunk()
recipe = changed(recipe, {"train.epochs": 2, "train.batch_size": 8, "train.lr": 0.01})
sets = Sets(shapes("train", 80), shapes("test", 20))
summary = train(recipe, sys.argv[1], sets=sets, quiet=True).summary
print(summary.epochs, summary.is_complete, flush=True)
"""


TWICE = """
import sys
from pathlib import Path
import torch
from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.models.zoo import NetSpec, build
from alignmixup.recipes.catalog import find_recipe
from alignmixup.training import TrainSettings, fit, join_team

torch.set_num_threads(1)
team, device = join_team(torch.device("cpu"))
images = shapes("train", 32)
net = build(NetSpec("preact_resnet18", width=4), 10, images.mean, images.std, 32, seed=0)
mixer = find_recipe("cifar10-r18-comixup-fast").mixer
loader = DeviceLoader(images, 16, 0, device, drop_last=True)
settings = TrainSettings(epochs=1, batch_size=16, lr=0.05, milestones=())
first = [p.detach().clone() for p in net.parameters()]
half = lambda net: {"top1": 50.0}
fit(net, mixer, loader, half, settings, Path(sys.argv[1]), quiet=True, team=team)
assert not any(torch.equal(a, b) for a, b in zip(first, net.parameters()) if a.ndim == 4)
print([float(p.double().norm()) for p in net.parameters()], flush=True)
"""


EVALUATION = """
import torch
from alignmixup.datasets import shapes
from alignmixup.experiments.accuracies import Evaluator
from alignmixup.models.zoo import NetSpec, build
from alignmixup.recipes.catalog import find_recipe
from alignmixup.training import Team, join_team
from alignmixup.training.distributed import leave_team

torch.set_num_threads(1)
team, device = join_team(torch.device("cpu"))
recipe = find_recipe("cifar10-r18-baseline-fast")
for count in (1, 2, 20, 21):
    images = shapes("test", count)
    net = build(NetSpec("preact_resnet18", width=4), 10, images.mean, images.std, 32, seed=0)
    found = Evaluator(recipe, images, device, team)(net)
    expected = Evaluator(recipe, images, device)(net)
    assert found == expected, (count, found, expected)
    assert set(expected) == {"top1", "top5"}
wrapped = team.wrap(net, uses_all=True)
leave_team()
assert torch.distributed.is_initialized()  # the wrapped network needs its group
del wrapped
leave_team()
print("equal", torch.distributed.is_initialized(), flush=True)
"""


# Dropout draws from the generators of each process.
RESUMED = """
import os
import signal
import sys
import time
from pathlib import Path
import torch
from torch import nn
from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.evaluation.forward import Forward, PixelBatches
from alignmixup.evaluation.shares import share_of
from alignmixup.evaluation.tasks.accuracy import count_hits
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.training import Stopped, TrainSettings, fit, join_team

torch.set_num_threads(1)
out, stop_at, accumulate = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
team, device = join_team(torch.device("cpu"))
torch.manual_seed(7)
dropout = nn.Dropout(0.5 if sys.argv[4] == "dropout" else 0.0)
net = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), dropout, nn.Linear(48, 10))
calls = []


def batches():
    images = share_of(shapes("test", 101), team)
    for x, y in zip(images.images.split(1), images.labels.split(1)):
        calls.append(1)
        if len(calls) == stop_at and team.rank == team.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if stop_at and len(calls) > stop_at:
            time.sleep(0.1)  # the other rank has not finished its share when this one stops
        yield x / 255, y


def evaluate(net):
    return count_hits(Forward(net), PixelBatches(batches), team).percentages()


loader = DeviceLoader(shapes("train", 64), 16, 0, device, drop_last=True)
settings = TrainSettings(
    epochs=3, batch_size=16, lr=0.5, milestones=(), accumulate=accumulate, partners=sys.argv[5]
)
try:
    fit(net, InputMixup(), loader, evaluate, settings, out, quiet=True, team=team)
except Stopped:
    pass
print(float(net[3].weight.detach().double().norm()), flush=True)
"""


IN_SECOND = 60  # a batch of the second evaluation, in rank 1


def test_two_processes_train_as_one_does_and_one_of_them_keeps_the_book(tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    one, two = start_team(LINEAR, alone, 3, size=1), start_team(LINEAR, together, 3)
    finish(one)
    first, second = finish(two)
    assert first == second  # the same epochs and the same weights on both
    expected = load_checkpoint(alone / "checkpoint.safetensors")
    found = load_checkpoint(together / "checkpoint.safetensors")
    torch.testing.assert_close(found.part("model"), expected.part("model"), rtol=1e-5, atol=1e-6)
    events = [json.loads(line) for line in (together / "ledger.jsonl").read_text().splitlines()]
    epochs = [e for e in events if e["event"] == "epoch"]
    assert [e["epoch"] for e in epochs] == [1, 2, 3]
    alone_events = [json.loads(x) for x in (alone / "ledger.jsonl").read_text().splitlines()]
    losses = [e["loss"] for e in alone_events if e["event"] == "epoch"]
    assert [e["loss"] for e in epochs] == pytest.approx(losses, rel=1e-4)


def test_a_smaller_last_batch_has_no_equal_shares_and_is_refused():
    """Of 6 of 8 images rank 0 would take four, and rank 1 two, with another draw."""
    images = shapes("train", 22)
    for rank in range(2):
        with pytest.raises(ValueError, match=r"a last batch of 6 .* 2 processes: .*drop_last=True"):
            Batches(DeviceLoader(images, 8, 0), Team(rank, 2)).of(0, 0)
        loader = DeviceLoader(images, 8, 0, drop_last=True)
        assert [len(rows) for (rows,) in Batches(loader, Team(rank, 2)).of(0, 0)] == [4, 4]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_them_all_and_the_run_goes_on(tmp_path):
    processes = start_team(LINEAR, tmp_path, 100_000)
    for process in processes:
        process.wait_for("ready")
    deadline = time.monotonic() + 60
    while not (tmp_path / "checkpoint.safetensors").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)  # not rank 0
    first, second = finish(processes)
    assert first == second
    reached = int(first.split()[0])
    assert 0 < reached < 100_000
    assert load_checkpoint(tmp_path / "checkpoint.safetensors").facts["epoch"] == reached


def test_evaluation_by_two_processes_is_that_of_one_and_the_group_ends_after_the_networks():
    assert finish(start_team(EVALUATION)) == ["equal False"] * 2


RESTARTED = """
import os
import time
import torch
from alignmixup.training import join_team

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
time.sleep(0.3 * attempt * int(os.environ["RANK"]))
team, device = join_team(torch.device("cpu"))
try:
    with team.agreed():
        if not attempt:
            raise ValueError("no memory")
        team.wait()
    print("agreed", flush=True)
except ValueError as error:
    print(error, flush=True)
"""


def test_processes_that_torchrun_restarts_read_nothing_of_those_before_them(monkeypatch):
    """Its store lives on, with their addresses and errors in it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for attempt, said in enumerate(["no memory", "agreed"]):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        assert finish(start_team(RESTARTED, port=store.port)) == [said] * 2


@pytest.mark.slow
def test_two_processes_resume_as_if_nothing_had_stopped_them(tmp_path):
    whole = start_team(RESUMED, tmp_path / "whole", 0, 1, "dropout", "share")
    finish(start_team(RESUMED, tmp_path / "resumed", IN_SECOND, 1, "dropout", "share"))
    facts = load_checkpoint(tmp_path / "resumed" / "checkpoint.safetensors").facts
    assert (facts["epoch"], facts["step"]) == (1, 4)  # the evaluation was not finished
    finish(start_team(RESUMED, tmp_path / "resumed", 0, 1, "dropout", "share"))
    finish(whole)
    assert difference(tmp_path / "whole", tmp_path / "resumed") == 0
    for expected, found in zip(
        events_of(tmp_path / "whole"), events_of(tmp_path / "resumed"), strict=True
    ):
        assert found.pop("loss", 0) == pytest.approx(expected.pop("loss", 0), rel=1e-6)
        for event in (expected, found):  # times differ
            event.pop("seconds", None), event.pop("wall_seconds", None)
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partners", "parts"), [("share", 2), pytest.param("batch", 1, marks=pytest.mark.slow)]
)
def test_another_number_of_processes_resumes_to_the_same_weights(tmp_path, partners, parts):
    """Two processes, then one, which takes two parts where partners are of the share."""
    whole = start_team(RESUMED, tmp_path / "whole", 0, parts, "none", partners, size=1)
    finish(start_team(RESUMED, tmp_path / "resumed", IN_SECOND, 1, "none", partners))
    finish(start_team(RESUMED, tmp_path / "resumed", 0, parts, "none", partners, size=1))
    finish(whole)
    assert difference(tmp_path / "whole", tmp_path / "resumed") < 1e-6
    (event,) = (e for e in events_of(tmp_path / "resumed") if e["event"] == "resume")
    assert (event["compute"]["processes"], event["compute"]["accumulate"]) == (1, parts)
    assert (event["epoch"], event["step"]) == (1, 4)


def events_of(folder):
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def difference(one, other):
    """The largest difference of the weights of two runs."""
    first, second = (
        load_checkpoint(folder / "checkpoint.safetensors").part("model") for folder in (one, other)
    )
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.slow
def test_a_recipe_whose_cases_leave_parameters_out(tmp_path):
    """The clean case trains no classifier, the others no decoder: nobody waits for gradients."""
    assert finish(start_team(RECIPE, tmp_path / "run")) == ["2 True", "2 True"]
    lines = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    assert [json.loads(x)["metric"] for x in lines] == ["top1_last", "top1_best"]


@pytest.mark.slow
def test_a_method_of_two_passes_a_step_ends_with_the_same_weights_everywhere(tmp_path):
    first, second = finish(start_team(TWICE, tmp_path))
    assert first == second


def test_a_wrapped_network_times_its_first_ten_passes_alone(process_group):
    """A later pass may be one that is captured."""
    wrapped = Team(0, 2).wrap(nn.Linear(2, 2), uses_all=True)
    for _ in range(101):  # by default the hundredth is timed, which the next one reports
        wrapped(torch.ones(1, 2)).sum().backward()
    assert wrapped._get_ddp_logging_data()["iteration"] == 10


def test_shares_make_up_the_batch_and_an_uneven_batch_is_refused():
    rows = torch.arange(12)
    parts = [rows[Team(rank, 3).share(12)] for rank in range(3)]
    assert torch.equal(torch.cat(parts), rows)
    with pytest.raises(ValueError, match="a batch of 10 cannot be split over 4 processes"):
        Team(1, 4).share(10)
    with pytest.raises(ValueError, match="8 cannot be split over 2 processes in 3 equal parts"):
        Team(1, 2).share(8, 3)
    with pytest.raises(ValueError, match="8 cannot be split in 3 equal parts: choose"):
        Team().share(8, 3)


def test_every_test_image_is_in_one_share():
    images = shapes("test", 7)
    shares = [share_of(images, Team(rank, 3)) for rank in range(3)]
    assert [len(share) for share in shares] == [3, 2, 2]
    together = torch.cat([share.images for share in shares])
    assert sorted(map(pixels_of, together)) == sorted(map(pixels_of, images.images))


def pixels_of(image):
    return image.numpy().tobytes()


SHARED_SETS = """
import sys
import torch
from alignmixup import datasets
from alignmixup.experiments.data_record import Sets, checksum, load_sets
from alignmixup.recipes.schema import DataSpec
from alignmixup.training import join_team
from alignmixup.training import distributed

team, device = join_team(torch.device("cpu"))
distributed.PART_BYTES = 10_000  # several parts, the last one smaller
spec = DataSpec(sys.argv[1])
expected = Sets(*(datasets.load(spec.name, split) for split in ("train", "test")))
num_loaded, load = [], datasets.load
datasets.load = lambda *args: num_loaded.append(args) or load(*args)
found = load_sets(spec, None, team, device)
for ours, theirs in ((found.train, expected.train), (found.test, expected.test)):
    assert checksum(ours) == checksum(theirs)
    assert ours.name == theirs.name and ours.class_names == theirs.class_names
print(len(num_loaded), flush=True)
"""


def test_rank_zero_decodes_a_folder_for_all(tmp_path):
    assert finish(start_team(SHARED_SETS, make_pictures(tmp_path / "pictures"))) == ["2", "0"]


def test_too_few_images_to_share_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "alignmixup.experiments.run.join_team", lambda device: (_Pretended(), device)
    )
    sets = Sets(shapes("train", 6), shapes("test", 4))
    recipe = changed(find_recipe("cifar10-r18-baseline-fast").shrunk(), {"train.batch_size": 8})
    with pytest.raises(ValueError, match="6 training images make no full batch of 8"):
        train(recipe, tmp_path / "run", sets=sets, quiet=True)


class _Pretended(Team):
    def __init__(self):
        super().__init__(0, 2)

    def wait(self):
        pass
