"""Stochastic depth of timm's models: nothing at zero, the branch in expectation, and resuming."""

import dataclasses
import os
import signal

import pytest
import torch

from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.mixers.nomix import NoMix
from alignmixup.models.zoo import NetSpec, build
from alignmixup.training import TrainSettings, fit
from alignmixup.training.checkpoint import CHECKPOINT, load_checkpoint
from alignmixup.training.signals import Stopped

HALF = (0.5, 0.5, 0.5)
VIT = NetSpec("timm:vit_tiny_patch16_224")
SMALL = NetSpec("timm:resnet10t", drop_path=0.5)


def make(spec, **options):
    return build(dataclasses.replace(spec, **options), 10, HALF, HALF, 32)


def test_without_it_and_in_evaluation_nothing_changes(timm):
    x = torch.rand(3, 3, 32, 32)
    plain, zero, dropping = make(VIT), make(VIT, drop_path=0.0), make(VIT, drop_path=0.5)
    names = [name for name, _ in plain.named_modules()]
    assert names == [name for name, _ in zero.named_modules()]
    assert torch.equal(zero.train()(x), plain.train()(x))  # no dropout at all
    assert torch.equal(dropping.eval()(x), plain.eval()(x))  # the same weights, too
    assert not torch.equal(dropping.train()(x), plain.train()(x))


def test_a_sample_skips_a_branch_or_has_it_scaled(timm):
    """0 with probability p and 1 / (1 - p) of the branch otherwise: the branch in expectation."""
    net = make(VIT, drop_path=0.4).train()
    drops = {n: m for n, m in net.named_modules() if type(m).__name__ == "DropPath"}
    blocks = sorted({int(name.split(".")[2]) for name in drops})
    assert blocks == list(range(1, 12))  # linearly from 0 in the first block
    for name, module in drops.items():
        assert module.drop_prob == pytest.approx(0.4 * int(name.split(".")[2]) / 11)
    last = drops["model.blocks.11.drop_path2"]
    torch.manual_seed(0)
    branch = torch.rand(4000, 1, 2) + 0.5
    factors = last(branch) / branch
    torch.testing.assert_close(factors[..., 0], factors[..., 1])  # one coin per sample
    kept = factors[:, 0, 0]
    is_skipped = kept == 0
    torch.testing.assert_close(kept[~is_skipped], torch.full_like(kept[~is_skipped], 1 / 0.6))
    assert abs(float(is_skipped.float().mean()) - 0.4) < 5 * (0.24 / 4000) ** 0.5


@pytest.mark.slow
def test_a_resumed_run_repeats_its_coins(timm, tmp_path):
    settings = TrainSettings(epochs=2, batch_size=8, milestones=(), lr=0.01, device="cpu", seed=5)
    calls = []

    def stopping(net):
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"top1": 10.0}

    def run(out, evaluate=lambda net: {"top1": 10.0}):
        loader = DeviceLoader(shapes("train", 16), 8, 5)
        return fit(make(SMALL), NoMix(), loader, evaluate, settings, out, quiet=True)

    assert run(tmp_path / "whole").is_complete
    with pytest.raises(Stopped):
        run(tmp_path / "parts", stopping)
    assert run(tmp_path / "parts").is_complete
    whole, parts = (load_checkpoint(tmp_path / n / CHECKPOINT).tensors for n in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize(
    ("build_it", "message"),
    [
        (lambda: NetSpec("timm:resnet10t", drop_path=1.0), "drop_path must be from 0 to below 1"),
        (lambda: make(NetSpec("preact_resnet18", drop_path=0.1)), "drop_path=0.1 does not apply"),
        (lambda: make(NetSpec("torchvision:resnet18", drop_path=0.1)), "does not apply to torchv"),
        (lambda: make(NetSpec("timm:vgg11", drop_path=0.1)), "timm:vgg11 has no stochastic depth"),
    ],
)
def test_where_it_cannot_be_it_is_an_error(build_it, message, timm):
    with pytest.raises(ValueError, match=message):
        build_it()
