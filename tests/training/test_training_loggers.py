"""Loggers: the same values for each, an error before the first step, a warning after it."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import alignmixup as am
from alignmixup.cli import main
from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.experiments.run import Sets
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.recipes.catalog import find_recipe
from alignmixup.registry import LOGGERS, import_plugin
from alignmixup.training import TrainSettings, fit
from alignmixup.training.checkpoint import CHECKPOINT
from alignmixup.training.ledger import LEDGER, read_ledger
from alignmixup.training.loggers import Loggers, make_loggers

SETTINGS = TrainSettings(epochs=3, batch_size=16, lr=0.01, milestones=(), eval_every=2)


class Recorder(am.Logger):
    """Keeps every call; ``fails`` is the method that raises."""

    def __init__(self, fails=None):
        self.fails, self.calls = fails, []

    def _note(self, method, *args):
        self.calls.append((method, *args))
        if method == self.fails:
            raise OSError("no space left")

    def start(self, settings):
        self._note("start", settings)

    def step(self):
        self._note("step")

    def log(self, values, epoch):
        self._note("log", values, epoch)

    def finish(self):
        self._note("finish")

    def of(self, method):
        return [call for call in self.calls if call[0] == method]


def run(out, *loggers, settings=SETTINGS, mixer=None, epochs=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 8, 1), nn.Flatten(), nn.Linear(64, 10))
    loader = DeviceLoader(shapes("train", 64), 16, 0)
    scores = {"top1": 10.0, "top5": 50.0}
    mixer = mixer or InputMixup()
    return fit(net, mixer, loader, lambda _: scores, settings, out, loggers=loggers, epochs=epochs)


def test_a_logger_gets_the_settings_the_steps_and_the_values_of_the_ledger(tmp_path):
    recorder = Recorder()
    run(tmp_path, recorder)
    ((_, settings),) = recorder.of("start")
    start, *epochs = read_ledger(tmp_path / LEDGER)
    assert settings["settings"]["lr"] == start["settings"]["lr"] == 0.01
    assert (settings["steps"], settings["epochs"], settings["position"]) == (4, (0, 3), (0, 0))
    assert len(recorder.of("step")) == 12
    for (_, values, epoch), event in zip(recorder.of("log"), epochs, strict=True):
        assert epoch == event["epoch"]
        assert values == {
            "train/mixed_loss": event["loss"],
            "train/lr": event["lr"],
            "train/seconds": event["seconds"],
            "test/top1": 10.0,
            "test/top5": 50.0,
        }
    assert recorder.calls[-1] == ("finish",)


@pytest.mark.parametrize("are_joined", [False, True])
def test_a_logger_that_cannot_start_is_an_error_before_the_first_step(tmp_path, are_joined):
    first, bad = Recorder(), Recorder(fails="start")
    chosen = [Loggers([first, bad])] if are_joined else [first, bad]
    with pytest.raises(RuntimeError, match=r"^the logger Recorder cannot start: no space left"):
        run(tmp_path, *chosen)
    assert first.of("finish")
    assert not bad.of("finish")
    assert not first.of("step")
    assert read_ledger(tmp_path / LEDGER) == []
    assert not (tmp_path / CHECKPOINT).exists()


@pytest.mark.parametrize("method", ["step", "log", "finish"])
def test_a_logger_that_fails_later_is_switched_off_and_training_continues(tmp_path, method):
    bad, good = Recorder(fails=method), Recorder()
    with pytest.warns(UserWarning, match=r"Recorder failed \(no space left\) and is switched off"):
        assert run(tmp_path, bad, good).is_complete
    assert len(bad.of(method)) == 1
    assert len(good.of("log")) == 3
    assert good.calls[-1] == ("finish",)


def test_a_run_with_phases_starts_each_logger_again_and_only_the_first_start_may_raise(tmp_path):
    recorder = Recorder()
    together = Loggers([recorder], {"recipe": "mine"})
    run(tmp_path, together, epochs=range(1))
    recorder.fails = "start"
    with pytest.warns(UserWarning, match="the logger Recorder cannot start"):
        run(tmp_path, together, epochs=range(1, 3))
    starts = [settings for _, settings in recorder.of("start")]
    assert [s["position"] for s in starts] == [(0, 0), (1, 0)]
    assert all(s["recipe"] == "mine" for s in starts)
    assert [epoch for *_, epoch in recorder.of("log")] == [1]


def test_names_are_looked_up_and_the_console_is_there_unless_quiet(tmp_path, capsys):
    assert {"console", "tensorboard", "trackio", "wandb"} <= set(LOGGERS)
    with pytest.raises(ValueError, match="unknown logger 'tensorbord'; did you mean 'tensorboard'"):
        make_loggers(["tensorbord"], tmp_path)
    with pytest.raises(ValueError, match=r"loggers must be a list of names: write \['console'\]"):
        make_loggers("console", tmp_path)
    run(tmp_path / "a", make_loggers(["console"], tmp_path), mixer=NoMix())
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("epoch")] == ["1/3", "2/3", "3/3"]
    run(tmp_path / "b", make_loggers([], tmp_path, quiet=True))
    assert capsys.readouterr().err == ""


PLUGIN = """
import alignmixup as am


@am.register_logger("text")
class Text(am.Logger):
    def __init__(self, folder):
        self.path = folder / "log.txt"

    def log(self, values, epoch):
        with self.path.open("a") as file:
            file.write(f"{epoch} {values['train/mixed_loss']}\\n")
"""


def test_a_logger_from_outside_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "my_logger.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    import_plugin("my_logger.py")
    flags = "--limit 16 --dataset shapes --train.batch-size 16 --net.width 4 --train.epochs 1"
    words = ["train", "cifar10-r18-baseline-fast", "--out", "run", *flags.split()]
    assert main([*words, "--train.device", "cpu", "--logger", "text"]) == 0
    epochs = [e for e in read_ledger(tmp_path / "run" / LEDGER) if e["event"] == "epoch"]
    written = (tmp_path / "run" / "log.txt").read_text()
    assert written == "".join(f"{e['epoch']} {e['loss']}\n" for e in epochs)


def test_tensorboard_has_every_epoch_once_however_often_it_is_resumed(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for epochs in (range(1), range(1, 3)):
        run(tmp_path, make_loggers(["tensorboard"], tmp_path, quiet=True), epochs=epochs)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/mixed_loss")] == [1, 2, 3]
    assert [event.value for event in events.Scalars("test/top5")] == [50.0] * 3


class Tracker:
    """Stands for the modules trackio and wandb, which have the same three functions."""

    def __init__(self):
        self.runs, self.logged, self.finished = [], [], 0

    def init(self, **options):
        self.runs.append(options)
        return self

    def log(self, values, step):
        self.logged.append((step, values["train/mixed_loss"]))

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_tracker_gets_one_run_with_its_settings_also_when_it_is_resumed(
    tmp_path, monkeypatch, name
):
    tracker = Tracker()
    functions = {n: getattr(tracker, n) for n in ("init", "log", "finish")}
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for epochs in (range(1), range(1, 3)):
        loggers = make_loggers([name], tmp_path, quiet=True, about={"recipe": {"name": "mine"}})
        run(tmp_path, loggers, epochs=epochs)
    losses = [(e["epoch"], e["loss"]) for e in read_ledger(tmp_path / LEDGER) if "loss" in e]
    assert tracker.logged == losses
    assert tracker.finished == 2
    one, two = tracker.runs
    assert (one["project"], one["resume"]) == ("alignmixup", "allow")
    assert one["config"]["settings"]["epochs"] == 3
    assert one["config"]["recipe"] == {"name": "mine"}
    assert {k: v for k, v in one.items() if k != "config"} == {
        k: v for k, v in two.items() if k != "config"
    }


@pytest.mark.parametrize(("name", "extra"), [("trackio", "trackio"), ("wandb", "wandb")])
def test_a_logger_whose_package_is_missing_names_the_extra(tmp_path, monkeypatch, name, extra):
    monkeypatch.setitem(sys.modules, name, None)
    recipe = find_recipe("cifar10-r18-baseline-fast").shrunk()
    sets = Sets(shapes("train", 16), shapes("test", 8))
    with pytest.raises(ImportError, match=rf"pip install 'alignmixup\[{extra}\]'"):
        am.train(recipe, tmp_path / "run", sets=sets, loggers=[name], quiet=True)
    assert not (tmp_path / "run").exists()
