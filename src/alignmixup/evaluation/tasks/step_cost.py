"""The cost of a model and a method: parameters, milliseconds per batch, peak memory.

A forward step is one pass in eval mode without gradients. A training step, for a mixer that is
passed in, is mixing, forward, backward and an SGD update with momentum; its learning rate is zero
and the state of the model is restored afterwards. The cases of a mixer differ in cost: each is
timed separately, and the method is their mean, weighted by probability.

Steps are timed one by one, by CUDA events on a GPU and by the clock elsewhere; the result is the
median, with p20 and p80 in the settings. Peak memory, in MiB, is known only on CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixer, Result
from alignmixup.device import peak_memory_mb, reset_peak_memory, time_calls
from alignmixup.evaluation.forward import (
    Batches,
    Forward,
    Normalization,
    amp_name,
    autocast,
    labeled_pixels,
    model_device,
    model_dtype,
)
from alignmixup.hooks import evaluating, keeping_modes
from alignmixup.registry import register_task

BATCH = 128  # the paper's


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of each timed step, in order, and the peak memory if it is known."""

    ms: tuple[float, ...]
    peak_memory_mb: float | None

    def percentile(self, percent: float) -> float:
        """Return a percentile of the steps, interpolated between the two nearest."""
        steps = torch.tensor(self.ms, dtype=torch.float64, device="cpu")
        return float(torch.quantile(steps, percent / 100))


@register_task(
    "cost",
    about="parameters, time and peak memory of a training step",
    units={"params": "million", "ms_": "ms", "peak_memory": "MiB"},
    check=lambda o: _check(o["num_steps"], o["num_warmup"]),
)
def cost_on(
    model: nn.Module,
    batches: Batches,
    *,
    mixer: Mixer | None = None,
    num_steps: int = 10,
    num_warmup: int = 3,
    seed: int = 0,
    normalized_by: Normalization | None = None,
    amp_dtype: torch.dtype | None = None,
) -> list[Result]:
    """Return ``step_cost`` on the first batch, of at most 128 images."""
    pixels, y = next(labeled_pixels(batches, normalized_by, model_device(model)))
    x = Forward(model, normalized_by).prepared(pixels[:BATCH])
    how = {"mixer": mixer, "seed": seed, "amp_dtype": amp_dtype}
    return step_cost(model, x, y[:BATCH], num_steps=num_steps, num_warmup=num_warmup, **how)  # type: ignore[arg-type]


def step_cost(
    model: nn.Module,
    x: Float[Tensor, "b c h w"],
    y: Tensor | None = None,
    *,
    mixer: Mixer | None = None,
    num_steps: int = 50,
    num_warmup: int = 10,
    seed: int = 0,
    amp_dtype: torch.dtype | None = None,
) -> list[Result]:
    """Return ``params`` (millions), ``ms_forward`` and, for a mixer, ``ms_per_batch`` of training.

    On CUDA also ``peak_memory_forward_mb`` and ``peak_memory_mb`` of training. ``num_steps`` and
    ``num_warmup`` apply to each case of the mixer. The images are as the model expects them; they
    are moved to its device and dtype.
    """
    if not len(x):
        raise ValueError("x holds no image: there is nothing to time")
    if mixer is not None and (y is None or len(y) != len(x)):
        given = "none" if y is None else len(y)
        raise ValueError(f"a training step needs labels y for {len(x)} images, got {given}")
    total, trainable = count_parameters(model)
    device = model_device(model) or x.device
    x = x.to(device, model_dtype(model) or x.dtype)
    shared: dict[str, object] = {
        "batch_size": len(x),
        "image": list(x.shape[1:]),
        "device": device.type,
        "amp_dtype": amp_name(amp_dtype),
        "num_steps": num_steps,
        "num_warmup": num_warmup,
    }
    results = [Result("cost", "params", total / 1e6, {"trainable": trainable / 1e6})]

    def forward_step() -> None:
        with torch.no_grad(), autocast(x, amp_dtype):
            model(x)

    with evaluating(model):
        forward = {"eval": time_steps(forward_step, device, num_steps, num_warmup)}
    results += _summed("ms_forward", "peak_memory_forward_mb", {"eval": 1.0}, forward, shared)
    if mixer is not None and y is not None:
        training = {}
        mixer = mixer.attach(model, x)
        for draw in draw_each_case(mixer, len(x), seed):
            with _training_step(model, x, y.to(device), mixer, draw, amp_dtype) as step:
                training[draw.case] = time_steps(step, device, num_steps, num_warmup)
        shared["mixer"] = type(mixer).__name__
        results += _summed("ms_per_batch", "peak_memory_mb", mixer.cases, training, shared)
    return results


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters, and of trainable ones; a shared one counts once."""
    total = sum(p.numel() for p in model.parameters())
    return total, sum(p.numel() for p in model.parameters() if p.requires_grad)


def _check(num_steps: int, num_warmup: int) -> None:
    if num_steps < 1 or num_warmup < 0:
        raise ValueError(
            f"num_steps must be at least 1 and num_warmup 0, got {num_steps} and {num_warmup}"
        )


def time_steps(
    step: Callable[[], None], device: torch.device, num_steps: int = 50, num_warmup: int = 10
) -> Timing:
    """Time ``step`` by itself ``num_steps`` times, after ``num_warmup`` untimed ones."""
    _check(num_steps, num_warmup)
    for _ in range(num_warmup):
        step()
    reset_peak_memory(device)
    ms = time_calls(step, device, num_steps)
    return Timing(tuple(ms), peak_memory_mb(device))


def _summed(
    time_metric: str,
    memory_metric: str,
    shares: Mapping[str, float],
    timings: Mapping[str, Timing],
    shared: dict[str, object],
) -> list[Result]:
    """Return the mean over cases, weighted by their shares, and the largest memory."""

    def mean(percent: float) -> float:
        return sum(shares[case] * timings[case].percentile(percent) for case in timings)

    spread: dict[str, object] = {"p20": mean(20), "p80": mean(80)}
    if len(timings) > 1:
        spread["p50_by_case"] = {case: t.percentile(50) for case, t in timings.items()}
    results = [Result("cost", time_metric, mean(50), {**shared, **spread})]
    peaks = [t.peak_memory_mb for t in timings.values() if t.peak_memory_mb is not None]
    if peaks:
        results.append(Result("cost", memory_metric, max(peaks), dict(shared)))
    return results


def draw_each_case(mixer: Mixer, batch_size: int, seed: int) -> Iterator[Draw]:
    """Yield the first draw of each case that has a positive share."""
    rng = torch.Generator().manual_seed(seed)
    wanted = {case for case, share in mixer.cases.items() if share > 0}
    for _ in range(100_000):
        if not wanted:
            return
        draw = mixer.draw(batch_size, rng)
        if draw.case in wanted:
            wanted.remove(draw.case)
            yield draw
    raise ValueError(f"draw() of {type(mixer).__name__} never returns the cases {sorted(wanted)}")


@contextlib.contextmanager
def _training_step(
    model: nn.Module, x: Tensor, y: Tensor, mixer: Mixer, draw: Draw, amp_dtype: torch.dtype | None
) -> Iterator[Callable[[], None]]:
    own = [] if mixer.module is None else [p for p in mixer.module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([*model.parameters(), *own], lr=0.0, momentum=0.9)
    draw = draw.to(x.device)

    def step() -> None:
        with autocast(x, amp_dtype):
            loss = mixer.apply(model, x, y, draw).loss()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    with _restoring(model):
        optimizer.zero_grad()
        model.train()
        yield step


@contextlib.contextmanager
def _restoring(model: nn.Module) -> Iterator[None]:
    """Restore the weights, statistics, gradients and modes of the model afterwards."""
    tensors = [*model.parameters(), *model.buffers()]
    kept = [t.detach().to("cpu", copy=True) for t in tensors]  # not on the device that is measured
    gradients = [p.grad for p in model.parameters()]
    with keeping_modes(model):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, kept, strict=True):
                    tensor.copy_(value)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
