"""What "auto" chooses on each device, and how long a run will take."""

import dataclasses

import pytest
import torch
from torch import nn

from alignmixup.mixers.nomix import NoMix
from alignmixup.training import device as module
from alignmixup.training.device import Compute, compute_for
from alignmixup.training.progress import Estimate, duration
from alignmixup.training.settings import TrainSettings
from alignmixup.training.steps import PlainStep, make_optimizer, make_step, prepared

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
    assert not compute_for(AUTO, CUDA, num_processes=2).capture
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


def test_the_estimate_leaves_the_first_steps_out_and_waits_for_the_device(monkeypatch):
    clock = iter([100.0, 103.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    waits = []
    estimate = Estimate(skipped=2, measured=3, wait=lambda: waits.append(1))
    said = [estimate.step(remaining) for remaining in range(99, 89, -1)]
    assert [bool(text) for text in said] == [False] * 4 + [True] + [False] * 5
    assert said[4].startswith("about 1 min 35 s to go: 95 steps of 1e+03 ms")
    assert len(waits) == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59, "59 s"),
        (61, "1 min 1 s"),
        (3_725, "1 h 2 min"),
        (100_000, "27 h 46 min"),
        (200_000, "2 d 7 h"),
    ],
)
def test_a_duration_has_two_units(seconds, text):
    assert duration(seconds) == text
