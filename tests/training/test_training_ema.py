"""EMA of weights: by hand, evaluated, saved, resumed to the same bits, and loaded from a run."""

import dataclasses

import pytest
import torch
from torch import nn

import alignmixup as am
from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.experiments.data_record import Sets
from alignmixup.experiments.load import load_run
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.training import TrainSettings, fit, summarize
from alignmixup.training.checkpoint import CHECKPOINT, load_checkpoint
from alignmixup.training.ledger import LEDGER, read_ledger
from alignmixup.training.optim import EMA, make_optimizer
from alignmixup.training.steps import CapturedStep, PlainStep

SETTINGS = TrainSettings(
    epochs=2, batch_size=16, lr=0.05, milestones=(), ema=0.8, capture=False, compile=False
)


def make(device="cpu"):
    torch.manual_seed(0)
    body = nn.Conv2d(3, 4, 3, 8, 1), nn.BatchNorm2d(4), nn.Dropout(0.1)
    net = nn.Sequential(*body, nn.Flatten(), nn.Linear(64, 10))
    return net.to(device), DeviceLoader(shapes("train", 64), 16, 0, device)


def weight_sum(net):
    return {"top1": float(net[-1].weight.detach().abs().sum())}


def run(out, settings=SETTINGS, epochs=None):
    net, loader = make()
    fit(net, InputMixup(), loader, weight_sum, settings, out, quiet=True, epochs=epochs)
    return load_checkpoint(out / CHECKPOINT)


def test_the_average_is_the_sum_by_hand():
    net, loader = make()
    ema = EMA(net, 0.8)
    state = {k: v.double() for k, v in net.state_dict().items()}
    settings = dataclasses.replace(SETTINGS, device="cpu")
    step = PlainStep(net, NoMix(), make_optimizer(net, settings), settings, loader.gather, ema)
    for i in range(3):
        step((loader.rows(0)[16 * i : 16 * (i + 1)],), NoMix().draw(16, torch.Generator()))
        for name, value in net.state_dict().items():
            is_count = not value.is_floating_point()
            state[name] = value.double() if is_count else 0.8 * state[name] + 0.2 * value.double()
    for name, value in ema.net.state_dict().items():
        torch.testing.assert_close(value.double(), state[name], atol=1e-6, rtol=1e-5)
    assert not ema.net.training
    assert not any(p.requires_grad for p in ema.net.parameters())


def test_a_network_whose_train_returns_nothing_has_an_average():
    class Quiet(nn.Linear):
        def train(self, mode=True):
            super().train(mode)

    net = Quiet(2, 2)
    ema = EMA(net, 0.5)
    ema.update()
    assert net.training
    assert not ema.net.training
    assert torch.equal(ema.net.weight, net.weight)


def test_both_networks_are_scored_and_the_average_is_what_the_summary_shows(tmp_path):
    checkpoint = run(tmp_path)
    last = read_ledger(tmp_path / LEDGER)[-1]
    for part, name in (("ema", "test"), ("model", "test_raw")):
        expected = float(checkpoint.part(part)["4.weight"].abs().sum())
        assert last[name] == {"top1": pytest.approx(expected, rel=1e-6)}
    assert last["test"] != last["test_raw"]
    assert summarize(tmp_path).last == last["test"]["top1"]


def test_training_itself_is_the_same_with_and_without_an_average(tmp_path):
    averaged = run(tmp_path / "ema")
    plain = run(tmp_path / "plain", dataclasses.replace(SETTINGS, ema=None))
    assert plain.part("ema") == {}
    for name, value in plain.part("model").items():
        assert torch.equal(value, averaged.part("model")[name]), name


def test_a_resumed_run_has_the_same_average(tmp_path):
    whole = run(tmp_path / "whole")
    run(tmp_path / "halves", epochs=range(1))
    halves = run(tmp_path / "halves", epochs=range(1, 2))
    assert whole.tensors.keys() == halves.tensors.keys()
    for name, value in whole.tensors.items():
        assert torch.equal(value, halves.tensors[name]), name


def test_a_run_is_not_resumed_with_an_average_that_it_does_not_have(tmp_path):
    run(tmp_path / "a", dataclasses.replace(SETTINGS, ema=None), epochs=range(1))
    with pytest.raises(ValueError, match=r"has no averaged weights: resume .* without train\.ema"):
        run(tmp_path / "a")
    with pytest.raises(ValueError, match=r"ema must be from 0 to below 1, .* got 1\.0"):
        dataclasses.replace(SETTINGS, ema=1.0)


def test_a_run_is_opened_with_its_average(tmp_path):
    sets = Sets(shapes("train", 32), shapes("test", 16))
    small = {"net.width": 4, "train.epochs": 1, "train.batch_size": 16, "train.ema": 0.5}
    changes = {**small, "train.device": "cpu"}
    am.train("cifar10-r18-baseline-fast", tmp_path, sets=sets, changes=changes, quiet=True)
    checkpoint = load_checkpoint(tmp_path / CHECKPOINT)
    state = load_run(tmp_path, device="cpu").model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in checkpoint.part("ema").items())
    assert any(not torch.equal(state[k], v) for k, v in checkpoint.part("model").items())


@pytest.mark.gpu
def test_a_captured_step_updates_the_average():
    averages = {}
    for kind in ("plain", "captured"):
        net, loader = make("cuda")
        net[2].p = 0.0
        settings = dataclasses.replace(SETTINGS, lr=0.005)
        ema = EMA(net, 0.8)
        plain = PlainStep(net, NoMix(), make_optimizer(net, settings), settings, loader.gather, ema)
        step = plain if kind == "plain" else CapturedStep(plain, torch.device("cuda"))
        for i in range(12):
            rows = loader.rows(i // 4)[16 * (i % 4) : 16 * (i % 4 + 1)]
            step((rows,), NoMix().draw(16, torch.Generator()))
        if kind == "captured":
            assert step.path == "captured"
            assert set(step._graphs) == {"clean"}
        averages[kind] = {k: v.cpu() for k, v in ema.net.state_dict().items()}
    for name, value in averages["plain"].items():
        torch.testing.assert_close(averages["captured"][name], value, atol=1e-3, rtol=1e-2)
