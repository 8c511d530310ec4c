"""The engine: killed and resumed runs repeat the uninterrupted one, and bad runs end clearly."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from alignmixup.contracts import ImageSet
from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.evaluation.forward import Forward, PixelBatches
from alignmixup.evaluation.tasks.accuracy import count_hits
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.training import NonFiniteLoss, Stopped, TrainSettings, fit, summarize
from alignmixup.training.checkpoint import CHECKPOINT, Checkpoint, CheckpointWriter, load_checkpoint
from alignmixup.training.ledger import LEDGER, read_ledger
from alignmixup.training.losses import CHECK_EVERY, Losses
from alignmixup.training.optim import make_optimizer
from alignmixup.training.resume import past_compute
from alignmixup.training.signals import stop_signals
from alignmixup.training.steps import PlainStep

SETTINGS = TrainSettings(
    epochs=3,
    batch_size=16,
    lr=0.05,
    schedule="cosine",
    milestones=(),
    nesterov=True,
    device="cpu",
    seed=5,
)


class Net(nn.Module):
    """Small, with BN buffers and dropout, so that all state matters."""

    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(3, 6, 3, 4, 1), nn.BatchNorm2d(6), nn.ReLU())
        self.layer4 = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1), nn.Dropout(0.2))
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, x):
        return self.head(self.layer4(self.layer1(x)).flatten(1))


def make(num_images=80):
    torch.manual_seed(0)
    net = Net()
    loader = DeviceLoader(shapes("train", num_images), SETTINGS.batch_size, SETTINGS.seed)
    return net, loader


def constant(net):
    return {"top1": 10.0}


def run(out, settings=SETTINGS, mixer=None, evaluate=constant, **make_options):
    net, loader = make(**make_options)
    mixer = mixer or AlignMixup("layer4", num_iters=10)
    return fit(net, mixer, loader, evaluate, settings, out, quiet=True)


def weights(out):
    return load_checkpoint(out / CHECKPOINT).tensors


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def lines(out):
    events = read_ledger(out / LEDGER)
    return [{k: v for k, v in e.items() if k not in ("seconds", "wall_seconds")} for e in events]


def test_convolutions_are_tried_while_training_and_not_after_it(tmp_path):
    during = []

    def looking(net):
        during.append(torch.backends.cudnn.benchmark)
        return constant(net)

    assert not torch.backends.cudnn.benchmark
    run(tmp_path, evaluate=looking)
    assert during
    assert all(during)
    assert not torch.backends.cudnn.benchmark

    def failing(net):
        raise OSError("no test images")

    with pytest.raises(OSError, match="no test images"):
        run(tmp_path / "failed", evaluate=failing)
    assert not torch.backends.cudnn.benchmark


def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        run(tmp_path / name, dataclasses.replace(SETTINGS, seed=seed))
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_dropout_follows_the_seed_and_the_callers_generator_is_left_alone(tmp_path):
    """Torch's own generator begins elsewhere in each process."""
    for name in "ab":
        net, loader = make()
        torch.seed()
        before = torch.get_rng_state()
        fit(net, NoMix(), loader, constant, SETTINGS, tmp_path / name, quiet=True)
        assert torch.equal(torch.get_rng_state(), before)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_the_mode_in_which_a_network_comes_or_is_scored_does_not_matter(tmp_path):
    def scored(net):
        net.eval()  # and never back
        return {"top1": 10.0}

    for is_training in (True, False):
        net, loader = make()
        evaluate = constant if is_training else scored
        out = tmp_path / str(is_training)
        fit(net.train(is_training), NoMix(), loader, evaluate, SETTINGS, out, quiet=True)
    assert same(weights(tmp_path / "True"), weights(tmp_path / "False"))


def test_a_step_is_sgd_by_hand(tmp_path):
    """One step with momentum 0 against the gradient written out."""
    net, loader = make()
    settings = dataclasses.replace(SETTINGS, momentum=0.0, nesterov=False, weight_decay=0.01)
    net.eval()  # no dropout, no batch statistics
    before = {k: v.clone() for k, v in net.named_parameters()}
    x, y = next(loader.epoch(0))
    grads = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    step = PlainStep(net, NoMix(), make_optimizer(net, settings), settings, loader.gather)
    step((loader.rows(0)[:16],), NoMix().draw(16, torch.Generator()))
    for (name, parameter), grad in zip(net.named_parameters(), grads, strict=True):
        expected = before[name] - 0.05 * (grad + 0.01 * before[name])
        torch.testing.assert_close(parameter, expected, atol=1e-6, rtol=1e-5)


def test_the_classifier_may_have_its_own_rate_and_gradients_are_clipped():
    net, loader = make()
    optimizer = make_optimizer(net, dataclasses.replace(SETTINGS, classifier_lr=0.5))
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.5]
    assert len(optimizer.param_groups[1]["params"]) == 2
    with pytest.raises(ValueError, match=r"'fc\.'.*\['head', 'layer1', 'layer4'\]"):
        make_optimizer(net, dataclasses.replace(SETTINGS, classifier_lr=0.5, classifier="fc."))
    clipped = dataclasses.replace(SETTINGS, clip_norm=1e-3)
    step = PlainStep(net, NoMix(), make_optimizer(net, clipped), clipped, loader.gather)
    step((loader.rows(0)[:16],), NoMix().draw(16, torch.Generator()))
    norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-2)


class Interrupting:
    """An evaluation that sends a signal at its first call."""

    def __init__(self, number):
        self.number = number

    def __call__(self, net):
        os.kill(os.getpid(), self.number)
        return {"top1": 10.0}


@pytest.fixture
def heeded_hangups():
    """SIGHUP has its default action here; tests that run under nohup inherit that it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeded_hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_ends_cleanly_and_the_run_goes_on(tmp_path, number):
    whole = run(tmp_path / "whole")
    with pytest.raises(Stopped, match=r"in epoch 2 of 3, saved in .*part; run again") as stop:
        run(tmp_path / "part", evaluate=Interrupting(number))
    assert stop.value.number == number
    part = summarize(tmp_path / "part")
    assert (part.epochs, part.is_complete) == (1, False)
    assert signal.getsignal(number) is not None
    rest = run(tmp_path / "part")
    assert rest == whole
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "part"))
    assert lines(tmp_path / "whole") == lines(tmp_path / "part")


class Scoring:
    """Scores four batches; sends SIGTERM while the nth of the run is read."""

    def __init__(self, stop_at=0):
        self.stop_at, self.num_read = stop_at, 0

    def batches(self):
        images = shapes("test", 40)
        for x, y in zip(images.images.split(10), images.labels.split(10), strict=True):
            self.num_read += 1
            torch.rand(1)  # an evaluation may draw from torch's generator
            if self.num_read == self.stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            yield x / 255, y

    def __call__(self, net):
        return {"top1": count_hits(Forward(net), PixelBatches(self.batches)).percentages()["top1"]}


@pytest.mark.parametrize("epoch", [2, 3])
def test_a_signal_during_an_evaluation_ends_it_and_the_resumed_run_repeats_it(tmp_path, epoch):
    settings = dataclasses.replace(SETTINGS, warmup_epochs=1, ema=0.9)
    whole = run(tmp_path / "whole", settings, evaluate=Scoring())
    scoring = Scoring(stop_at=8 * epoch - 2)  # the network itself; its average is scored first
    with pytest.raises(Stopped, match=rf"in epoch {epoch} of 3, saved in .*part; run again"):
        run(tmp_path / "part", settings, evaluate=scoring)
    assert scoring.num_read == scoring.stop_at
    assert summarize(tmp_path / "part").epochs == epoch - 1
    facts = load_checkpoint(tmp_path / "part" / CHECKPOINT).facts
    assert (facts["epoch"], facts["step"]) == (epoch - 1, 5)
    assert run(tmp_path / "part", settings, evaluate=Scoring()) == whole
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "part"))
    assert lines(tmp_path / "whole") == lines(tmp_path / "part")


class SignalMixer(AlignMixup):
    """Sends SIGTERM while drawing its nth step: a signal in the middle of an epoch."""

    countdown = 7

    def draw(self, batch_size, rng, progress=0.0):
        type(self).countdown -= 1
        if type(self).countdown == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().draw(batch_size, rng, progress)


def test_a_signal_in_the_middle_of_an_epoch_loses_nothing(tmp_path):
    run(tmp_path / "whole")
    begin = time.perf_counter()
    with pytest.raises(Stopped, match="stopped by SIGTERM in epoch 2 of 3"):
        run(tmp_path / "part", mixer=SignalMixer("layer4", num_iters=10))
    facts = load_checkpoint(tmp_path / "part" / CHECKPOINT).facts
    assert (facts["epoch"], facts["step"]) == (1, 2)
    run(tmp_path / "part")
    epochs = [e for e in read_ledger(tmp_path / "part" / LEDGER) if e["event"] == "epoch"]
    assert all(e["seconds"] > 0 for e in epochs)
    assert sum(e["seconds"] for e in epochs) < time.perf_counter() - begin
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "part"))
    assert lines(tmp_path / "whole") == lines(tmp_path / "part")


class Failing(AlignMixup):
    """Fails at its seventh step, as with a compiler that Ctrl-C has ended."""

    signals = ()

    def apply(self, model, x, y, draw):
        type(self).countdown -= 1
        if type(self).countdown == 0:
            for number in self.signals:
                os.kill(os.getpid(), number)
            raise RuntimeError("C++ compile error\nand many lines")
        return super().apply(model, x, y, draw)


def test_a_step_that_fails_by_ctrl_c_is_a_stop_and_any_other_an_error(tmp_path):
    run(tmp_path / "whole")
    Failing.countdown, Failing.signals = 7, (signal.SIGINT,)
    said = r"by Ctrl-C .*\(RuntimeError: C\+\+ compile error\); run again"
    with pytest.raises(Stopped, match=said) as stop:
        run(tmp_path / "part", mixer=Failing("layer4", num_iters=10))
    assert stop.value.number == signal.SIGINT
    run(tmp_path / "part")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "part"))
    assert lines(tmp_path / "whole") == lines(tmp_path / "part")
    Failing.countdown, Failing.signals = 7, ()
    with pytest.raises(RuntimeError, match=r"\+\+ compile error"):
        run(tmp_path / "failed", mixer=Failing("layer4", num_iters=10))


# It trains to the end in a fork, then again and again in forks that are killed. A process that has
# imported and never computed can be forked; threads of torch would not survive it.
CHILD = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path[:0] = {paths!r}
import seeds
seeds.move_seeds()
import test_training_trainer as t

def fork(out, seconds=None):
    child = os.fork()
    if child == 0:
        t.run(Path(out), num_images=400)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

begin = time.perf_counter()
statuses = [fork(sys.argv[1])]
length = time.perf_counter() - begin
for share in (0.6, 0.3, 0.8, 0.1):
    statuses.append(fork(sys.argv[2], share * length))
statuses.append(fork(sys.argv[2]))
print(*statuses)
"""


@pytest.mark.slow
def test_killed_at_any_instant_and_started_again_gives_the_same_weights(tmp_path):
    folder = os.path.dirname(__file__)
    code = CHILD.format(paths=[folder, os.path.dirname(folder)])
    runs = [str(tmp_path / "whole"), str(tmp_path / "killed")]
    child = subprocess.run([sys.executable, "-c", code, *runs], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    whole, *killed, last = map(int, child.stdout.split())
    assert whole == last == 0
    assert killed.count(-signal.SIGKILL) >= 2, "the child was never killed in the middle"
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    assert lines(tmp_path / "whole") == lines(tmp_path / "killed")


def test_a_diverging_run_names_step_case_and_checkpoint(tmp_path):
    wild = dataclasses.replace(SETTINGS, schedule="step", milestones=(1,), decay=1e31, epochs=2)
    with pytest.raises(NonFiniteLoss) as caught:
        run(tmp_path, wild)
    text = str(caught.value)
    assert "epoch 2" in text
    assert "checkpoint.safetensors (epoch 1)" in text
    assert any(f"case {case!r}" in text for case in ("input", "feat", "feat'"))
    assert load_checkpoint(tmp_path / CHECKPOINT).facts["epoch"] == 1


def test_a_case_that_is_not_among_the_cases_is_named(tmp_path):
    class Unnamed(NoMix):
        def draw(self, batch_size, rng, progress=0.0):
            return dataclasses.replace(super().draw(batch_size, rng, progress), case="mixed")

    with pytest.raises(ValueError, match=r"^Unnamed\.draw returned the case 'mixed', .* 'clean': "):
        run(tmp_path, mixer=Unnamed())


def test_going_on_with_another_network_is_refused(tmp_path):
    run(tmp_path, dataclasses.replace(SETTINGS, epochs=1))
    _, loader = make()
    wider = Net()
    wider.head = nn.Linear(8 * 16, 11)
    with pytest.raises(ValueError, match=r"checkpoint.safetensors holds the weights of another"):
        fit(wider, NoMix(), loader, constant, SETTINGS, tmp_path, quiet=True)


def test_going_on_otherwise_is_refused_and_the_difference_named(tmp_path):
    run(tmp_path, dataclasses.replace(SETTINGS, epochs=1))
    longer = dataclasses.replace(SETTINGS, epochs=2, lr=0.5, eval_every=7)
    named = r"\(train.epochs: 1 before, 2 now; train.lr: 0.05 before, 0.5 now\)"
    with pytest.raises(ValueError, match=named):
        run(tmp_path, longer)
    same = dataclasses.replace(SETTINGS, epochs=1)
    with pytest.raises(ValueError, match=r"cases.clean: None before, 1.0 now; cases.feat"):
        run(tmp_path, same, mixer=NoMix())
    with pytest.raises(ValueError, match="steps: 5 before, 6 now"):
        run(tmp_path, same, num_images=96)
    run(tmp_path, dataclasses.replace(same, eval_every=7))  # how often may change


def test_a_loader_without_batches_and_scores_without_top1_are_named(tmp_path):
    net, _ = make()
    empty = []  # nothing is asked of it but its length
    with pytest.raises(ValueError, match="the loader has no batch"):
        fit(net, NoMix(), empty, constant, SETTINGS, tmp_path / "a", quiet=True)
    with pytest.raises(ValueError, match=r"evaluate must return 'top1', .* returned \['loss'\]"):
        run(tmp_path / "b", evaluate=lambda net: {"loss": 1.0})


def test_ctrl_c_is_acknowledged_at_once_and_a_second_one_raises(capsys):
    before = signal.getsignal(signal.SIGINT)
    with stop_signals() as caught:
        os.kill(os.getpid(), signal.SIGINT)
        assert capsys.readouterr().err.strip() == (
            "stopping after this step or batch; press Ctrl-C again to quit now"
        )
        os.kill(os.getpid(), signal.SIGTERM)  # from a sweep that was interrupted as well
        assert caught == [signal.SIGINT, signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # a third one ends the process
    assert signal.getsignal(signal.SIGINT) is before
    assert capsys.readouterr().err == ""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_closed_terminal_is_a_signal_to_stop_unless_it_is_ignored(monkeypatch):
    """Nothing can be printed then, and nohup has it ignored."""
    closed = open(os.devnull)  # noqa: SIM115, not open for writing: OSError
    monkeypatch.setattr(sys, "stderr", closed)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as caught:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not caught
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with stop_signals() as caught:
            os.kill(os.getpid(), signal.SIGHUP)
        assert caught == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)
        closed.close()


def test_a_forked_process_leaves_signals_to_the_one_that_trains(capfd):
    with stop_signals() as caught:
        child = os.fork()
        if not child:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            os._exit(len(caught))
        assert os.waitpid(child, 0)[1] == 0
    assert capfd.readouterr().err == ""


class Impatient(NoMix):
    """Sends Ctrl-C when it is asked for its cases: before the first step."""

    @property
    def cases(self):
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            os.kill(os.getpid(), signal.SIGINT)
        return super().cases


def test_a_signal_before_the_first_step_saves_nothing_and_says_so(tmp_path):
    with pytest.raises(Stopped, match="before the first step; run again to start"):
        run(tmp_path, mixer=Impatient())
    assert not (tmp_path / CHECKPOINT).exists()


def test_a_signal_at_the_very_end_stops_what_comes_behind_the_run(tmp_path):
    once = dataclasses.replace(SETTINGS, epochs=1)
    with pytest.raises(Stopped, match=r"after the last epoch; the run in .* is complete"):
        run(tmp_path, once, evaluate=Interrupting(signal.SIGTERM))
    assert summarize(tmp_path).is_complete


class Spoiling(NoMix):
    """The loss is not a number at one step, and the weights are from there on."""

    def __init__(self, step):
        super().__init__()
        object.__setattr__(self, "step", step)
        object.__setattr__(self, "taken", iter(range(1, 10_000)))

    def apply(self, model, x, y, draw):
        mixed = super().apply(model, x, y, draw)
        factor = torch.nan if next(self.taken) == self.step else 1.0
        return dataclasses.replace(mixed, logits=mixed.logits * factor)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("step", [3, 170, 250])
def test_a_loss_that_is_no_number_is_found_in_its_epoch(tmp_path, step, device):
    settings = dataclasses.replace(
        SETTINGS, epochs=1, batch_size=1, lr=1e-4, device=device, capture=False, compile=False
    )
    torch.manual_seed(0)
    loader = DeviceLoader(shapes("train", 250), 1, 0, device)
    with pytest.raises(NonFiniteLoss, match=f"nan at step {step} of epoch 1"):
        fit(Net().to(device), Spoiling(step), loader, constant, settings, tmp_path, quiet=True)


@pytest.mark.parametrize("signal_at", [None, 4])
def test_a_loss_that_nobody_has_looked_at_is_found_before_anything_is_saved(
    tmp_path, monkeypatch, signal_at
):
    """A GPU is asked about its losses now and then only: at the latest where a state is saved."""
    monkeypatch.setattr(Losses, "is_check_due", lambda self: False)

    class Signalled(Spoiling):
        def draw(self, batch_size, rng, progress=0.0):
            if round(15 * progress) + 1 == signal_at:  # three epochs of five steps
                os.kill(os.getpid(), signal.SIGTERM)
            return super().draw(batch_size, rng, progress)

    with pytest.raises(NonFiniteLoss, match=r"nan at step 3 of epoch 1, .* no checkpoint yet"):
        run(tmp_path, mixer=Signalled(3))
    assert not (tmp_path / CHECKPOINT).exists()


def test_weights_that_the_last_update_has_spoiled_are_not_saved(tmp_path):
    """The gradient of one step is infinite, and its loss is not: no later loss would tell."""
    net, loader = make()
    gradients = iter([1.0] * 9 + [torch.inf])  # five steps an epoch
    net.head.bias.register_hook(lambda gradient: gradient * next(gradients))
    settings = dataclasses.replace(SETTINGS, clip_norm=None)
    named = r"weights are no longer finite after step 5 of epoch 2, case 'clean'; .*\(epoch 1\)"
    with pytest.raises(NonFiniteLoss, match=named):
        fit(net, NoMix(), loader, constant, settings, tmp_path, quiet=True)
    assert load_checkpoint(tmp_path / CHECKPOINT).facts["epoch"] == 1
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path).values())


class Late:
    """A CUDA event that is reached when the device is: many steps after the host."""

    reached = 0
    recorded = 0

    def record(self):
        Late.recorded += 1
        self.number = Late.recorded

    def query(self):
        return self.number <= Late.reached


def test_a_device_far_behind_is_asked_about_every_loss(monkeypatch):
    """The answer to a look comes two looks later, when others have been asked."""
    monkeypatch.setattr(torch.cuda, "Event", Late)
    monkeypatch.setattr(Late, "recorded", 0)
    losses = Losses(torch.device("cuda"))
    for look in range(6):
        values = [float("nan") if look == 1 else 1.0, *[1.0] * (CHECK_EVERY - 1)]
        for value in values:
            losses.add(torch.tensor(value), "clean")
        monkeypatch.setattr(Late, "reached", look - 2)
        found = losses.find_non_finite()
        if look == 4:
            assert found == CHECK_EVERY
            return
        assert found is None


@pytest.mark.parametrize(("device", "every"), [("cpu", 1), ("mps", CHECK_EVERY)])
def test_losses_are_looked_at_in_each_step_of_a_cpu_and_in_each_hundredth_elsewhere(device, every):
    losses = Losses(torch.device(device))
    for number in range(1, 2 * CHECK_EVERY + 1):
        value = float("nan") if number == 31 else 1.0
        losses.add(torch.tensor(value), "a" if number % 4 else "b")
        assert losses.is_check_due() == (number % every == 0)
        if losses.is_check_due():  # what was found before has ended the training
            is_there = number == 31 if device == "cpu" else True
            assert losses.find_non_finite() == (30 if is_there else None)
    assert losses.count_cases() == {"a": 1.5 * CHECK_EVERY, "b": CHECK_EVERY / 2}
    assert type(losses.count_cases()) is dict


def test_the_mean_of_narrow_losses_is_wide():
    losses = Losses(torch.device("cpu"))
    for value in (1.0, 1 + 2**-7, 1 + 2**-7):  # neighbors in bf16
        losses.add(torch.tensor(value, dtype=torch.bfloat16), "a")
    assert float(losses.mean()) == pytest.approx(1 + 2**-7 * 2 / 3)


class Scores:
    def __init__(self, values):
        self.values = iter(values)

    def __call__(self, net):
        return {"top1": next(self.values)}


def test_best_last_and_median_are_those_of_the_epochs(tmp_path):
    settings = dataclasses.replace(SETTINGS, epochs=30, eval_every=7, batch_size=80)
    scores = [50, 99, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70]
    net, _ = make()
    loader = DeviceLoader(shapes("train", 80), 80, 0)
    summary = fit(net, NoMix(), loader, Scores(scores), settings, tmp_path, quiet=True)
    evaluated = [e["epoch"] for e in read_ledger(tmp_path / LEDGER) if "test" in e]
    assert evaluated == [7, 14, *range(21, 31)]  # every seventh one, and each of the last ten
    assert (summary.best, summary.best_epoch) == (99, 14)
    assert summary.last == 70
    assert summary.median10 == 65.5
    assert summary.is_complete
    assert summarize(tmp_path) == summary
    assert "median of the last ten 65.50" in str(summary)


def test_the_ledger_says_what_ran(tmp_path):
    out = tmp_path / "a" / "new" / "folder"
    run(out)
    start, *epochs = read_ledger(out / LEDGER)
    assert start["settings"]["seed"] == 5
    assert sum(start["cases"].values()) == pytest.approx(1)
    for epoch in epochs:
        assert sum(epoch["cases"].values()) == 5
        assert epoch["step_path"] == "plain"
        assert epoch["loss"] > 0


def test_training_learns(tmp_path):
    """Classes that are plain colors: mixing must not keep a network from telling them apart."""
    colors = torch.randint(256, (10, 3, 1, 1), generator=torch.Generator().manual_seed(1))
    labels = torch.arange(200) % 10
    images = colors[labels].expand(-1, -1, 32, 32).to(torch.uint8).contiguous()
    half = (0.5, 0.5, 0.5)
    plain = ImageSet("colors", "train", images, labels, tuple("0123456789"), half, half)
    net, _ = make()
    loader = DeviceLoader(plain, 16, 0)

    def top1(model):
        model.eval()
        with torch.no_grad():
            right = model(images.float() / 255).argmax(1) == labels
        return {"top1": 100 * float(right.float().mean())}

    settings = dataclasses.replace(SETTINGS, epochs=10, lr=0.02)
    mixer = AlignMixup("layer4", num_iters=20)
    assert fit(net, mixer, loader, top1, settings, tmp_path, quiet=True).last > 80


def test_a_run_prints_how_it_computes_and_how_long_it_will_take(tmp_path, capsys):
    net, loader = make()
    fit(net, NoMix(), loader, constant, SETTINGS, tmp_path)
    first, estimate, *epochs = capsys.readouterr().err.splitlines()
    assert first == "training on cpu: float32, not compiled"
    assert re.fullmatch(r"about \d+ s to go: 10 steps of [\d.]+ ms, evaluation .*", estimate)
    assert [re.match(r"epoch (\d)/3  loss [\d.]+  test top-1 10.00 %", e)[1] for e in epochs] == [
        *"123"
    ]
    net, loader = make()
    mixer = AlignMixup("layer4", num_iters=3)
    fit(net, mixer, loader, constant, SETTINGS, tmp_path / "mixed")
    assert "(mixed)  test top-1" in capsys.readouterr().err


def test_a_finished_run_is_only_read(tmp_path, capsys):
    once = dataclasses.replace(SETTINGS, epochs=1)
    summary = run(tmp_path, once, mixer=NoMix())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    net, loader = make()
    assert fit(net, NoMix(), loader, None, once, tmp_path) == summary  # nothing is evaluated
    assert capsys.readouterr().err == "already finished: 1 of 1 epochs\n"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def bf16_run(out, epochs, evaluate=constant, precision="bf16"):
    settings = dataclasses.replace(SETTINGS, epochs=epochs, precision=precision)
    net, loader = make()
    return fit(net, NoMix(), loader, evaluate, settings, out)


def stopped_in_bf16(out):
    with pytest.raises(Stopped):
        bf16_run(out, 3, Interrupting(signal.SIGTERM))


def computes(out):
    return [e["compute"]["precision"] for e in read_ledger(out / LEDGER) if "compute" in e]


def test_a_resumed_run_keeps_its_precision_where_it_is_auto(tmp_path, capsys):
    stopped_in_bf16(tmp_path)
    bf16_run(tmp_path, 3, precision="auto")  # a CPU, which would choose float32
    assert computes(tmp_path) == ["bf16"]
    printed = capsys.readouterr().err
    assert "training on cpu: bf16, not compiled" in printed
    assert " to go: 5 steps of" in printed  # of the last epoch, after the five of the second one


def test_a_resumed_run_may_change_its_precision_and_records_it(tmp_path, capsys):
    stopped_in_bf16(tmp_path)
    capsys.readouterr()
    bf16_run(tmp_path, 3, precision="float32")
    assert computes(tmp_path) == ["bf16", "float32"]
    (event,) = [e for e in read_ledger(tmp_path / LEDGER) if e["event"] == "resume"]
    assert (event["epoch"], event["step"]) == (1, 0)
    assert "resumed with changes: precision bf16 -> float32" in capsys.readouterr().err
    assert past_compute(tmp_path)["precision"] == "float32"


def test_a_run_of_an_older_version_is_resumed_in_its_precision(tmp_path):
    """Without the record of how it computes, and with switches that were plain booleans."""
    stopped_in_bf16(tmp_path)
    ledger = tmp_path / LEDGER
    start, *rest = [json.loads(line) for line in ledger.read_text().splitlines()]
    del start["compute"]
    start["settings"] |= {"compile": False, "capture": True, "channels_last": True}
    ledger.write_text("".join(json.dumps(event) + "\n" for event in (start, *rest)))
    there = load_checkpoint(tmp_path / CHECKPOINT)
    facts = {k: v for k, v in there.facts.items() if k != "compute"}
    writer = CheckpointWriter(tmp_path / CHECKPOINT)
    writer.save(Checkpoint(there.tensors, {**facts, "ledger_length": ledger.stat().st_size}))
    writer.close()
    assert past_compute(tmp_path) == {"precision": "bf16"}
    assert bf16_run(tmp_path, 3, precision="auto").is_complete
    assert past_compute(tmp_path)["precision"] == "bf16"


@pytest.mark.parametrize("compute", ["bf16", {"device": "cpu"}, {"precision": 16}])
def test_a_record_of_another_form_of_how_a_run_computes_is_named(tmp_path, compute):
    run(tmp_path, dataclasses.replace(SETTINGS, epochs=1), mixer=NoMix())
    there = load_checkpoint(tmp_path / CHECKPOINT)
    writer = CheckpointWriter(tmp_path / CHECKPOINT)
    writer.save(Checkpoint(there.tensors, {**there.facts, "compute": compute}))
    writer.close()
    with pytest.raises(ValueError, match=rf"is damaged: its compute is {re.escape(repr(compute))}"):
        past_compute(tmp_path)


def test_a_warm_up_longer_than_the_run_is_trained_as_half_of_it(tmp_path):
    """And resumed so, although the settings that are asked for have the longer one."""
    settings = dataclasses.replace(SETTINGS, epochs=2, warmup_epochs=5.0, schedule="step")
    with pytest.raises(Stopped):
        run(tmp_path, settings, mixer=NoMix(), evaluate=Interrupting(signal.SIGTERM))
    run(tmp_path, settings, mixer=NoMix())
    start, *epochs = read_ledger(tmp_path / LEDGER)
    assert start["settings"]["warmup_epochs"] == 1.0
    assert [e["lr"] for e in epochs] == pytest.approx([0.05 * 4 / 5, 0.05])  # of the last steps


class Outputs(Net):
    def forward(self, x):
        return {"logits": super().forward(x)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"net": Outputs()}, "must return logits .* got dict"),
        ({"net": nn.Flatten()}, r"net \(Flatten\) has no parameters:"),
        ({"net": Net().requires_grad_(False)}, "has no parameters that require a gradient"),
        ({"net": Net}, "net must be of type Module, got the class Net"),
        ({"mixer": "alignmixup"}, "mixer must be of type Mixer, got 'alignmixup'"),
        ({"mixer": NoMix}, "mixer must be of type Mixer, got the class NoMix"),
        ({"settings": {"epochs": 1}}, "settings must be of type TrainSettings, got {'epochs': 1}"),
    ],
)
def test_other_arguments_than_the_trainer_takes_are_named(tmp_path, change, named):
    net, loader = make()
    arguments = {"net": net, "mixer": NoMix(), "settings": SETTINGS, **change}
    with pytest.raises(ValueError, match=named):
        fit(loader=loader, evaluate=constant, out=tmp_path, quiet=True, **arguments)
