"""What "auto" chooses on each device; generators are forked, seeded and restored."""

import dataclasses

import pytest
import torch
from torch import nn

from alignmixup import device as module
from alignmixup.device import (
    Compute,
    compute_for,
    fork_rng,
    peak_memory_mb,
    pick_device,
    rng_state,
    set_rng_state,
    time_calls,
)
from alignmixup.mixers.nomix import NoMix
from alignmixup.training.optim import make_optimizer
from alignmixup.training.settings import TrainSettings
from alignmixup.training.steps import PlainStep, make_step, prepared

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
AUTO = TrainSettings()
ALL = TrainSettings(precision="bf16", channels_last=True, compile=True, capture=True)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a given generation, with Triton or without."""

    def pretend(major, has_triton=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        monkeypatch.setattr(module, "find_spec", lambda name: has_triton or None)

    return pretend


def test_a_cpu_computes_in_float32_and_compiles_nothing():
    assert compute_for(AUTO, CPU) == Compute("cpu", "float32", False, False, False)


def test_a_gpu_computes_in_bf16_compiles_and_captures(gpu):
    gpu(9)
    assert compute_for(AUTO, CUDA) == Compute("cuda", "bf16", True, True, True)
    assert not compute_for(AUTO, CUDA, world_size=2).capture  # measured with one process alone
    assert compute_for(ALL, CUDA, world_size=2).capture
    joined = dataclasses.replace(ALL, partners="batch", compile=False)
    assert not compute_for(joined, CUDA, world_size=2).capture
    gpu(7)  # bf16 is emulated there
    assert compute_for(AUTO, CUDA) == Compute("cuda", "float32", True, True, True)
    gpu(9, has_triton=False)
    assert not compute_for(AUTO, CUDA).compile


def test_what_is_asked_for_is_kept_where_the_device_has_it(gpu):
    gpu(9)
    off = dataclasses.replace(
        AUTO, precision="float32", channels_last=False, compile=False, capture=False
    )
    assert compute_for(off, CUDA) == Compute("cuda", "float32", False, False, False)
    assert compute_for(ALL, CUDA) == Compute("cuda", "bf16", True, True, True)
    assert compute_for(ALL, CPU) == Compute("cpu", "bf16", False, True, False)


def test_a_step_on_a_cpu_is_plain_float32_by_default():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    seen = []
    net[1].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    plain = PlainStep(
        prepared(net, AUTO), NoMix(), make_optimizer(net, AUTO), AUTO, lambda x, y: (x, y)
    )
    assert plain.net is net  # not compiled
    assert make_step(plain, CPU) is plain  # not captured
    batch = torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 2, 0])
    plain(batch, NoMix().draw(4, torch.Generator()))
    assert seen == [torch.float32]


def test_a_forked_generator_starts_from_its_seed_and_is_restored():
    before = rng_state(CPU)
    drawn = []
    for _ in range(2):
        with fork_rng(CPU, seed=3):
            drawn.append(torch.rand(4))
    assert torch.equal(*drawn)
    assert torch.equal(rng_state(CPU)["cpu"], before["cpu"])
    first = torch.rand(4)
    set_rng_state(CPU, before)
    assert torch.equal(torch.rand(4), first)


def test_calls_are_timed_one_by_one_on_a_cpu():
    calls = []
    times = time_calls(lambda: calls.append(1), CPU, 5, gpu_calls=10)
    assert len(times) == len(calls) == 5
    assert min(times) >= 0
    assert peak_memory_mb(CPU) is None


@pytest.mark.parametrize("name", ["gpu", "cuda", "cuda:9"])
def test_a_device_that_is_not_there_is_named(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: name == "cuda:9")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=f"'{name}'"):
        pick_device(name)
    assert pick_device("cpu") == CPU
