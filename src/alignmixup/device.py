"""The one file that knows devices: which there are, what each can do, and how it is waited for.

It stands below every package and imports torch alone. Elsewhere a device is a ``torch.device``
that is passed on; kernels, which exist for a GPU alone, may test ``tensor.is_cuda``.

A setting of "auto" is decided here, by what the device is good at. bf16 is fast only where it is
native (on a CPU a training step takes 14 times as long as in float32), and a compiled step pays
only where kernel launches are the cost.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

Switch = bool | Literal["auto"]
P = ParamSpec("P")
R = TypeVar("R")


def pick_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"there is no device {name!r}; use cpu, cuda, cuda:1 or auto") from None
    if is_gpu(device) and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but torch sees no GPU; use cpu or auto")
    if is_gpu(device) and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device is {name!r}; the GPUs are cuda:0 to cuda:{count - 1}")
    return device


def is_gpu(device: torch.device) -> bool:
    """Whether this is a CUDA device: streams, graphs, pinned memory and kernels exist there."""
    return device.type == "cuda"


def own_gpu(device: torch.device) -> torch.device:
    """Return the device of this process among those that torchrun started, and make it current."""
    if not is_gpu(device):
        return device
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` current: streams, events, captures and memory counters belong to it."""
    return torch.cuda.device(device) if is_gpu(device) else nullcontext()


def tensors_on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function that makes tensors on the CPU and then moves them where they belong.

    ``torch.set_default_device`` may have named another device. Elsewhere no context is entered: it
    would be traced with compiled steps.
    """

    @functools.wraps(function)
    def on_cpu(*args: P.args, **kwargs: P.kwargs) -> R:
        is_cpu = torch.get_default_device().type == "cpu"
        with nullcontext() if is_cpu else torch.device("cpu"):
            return function(*args, **kwargs)

    return on_cpu


def hardware(device: torch.device | None = None) -> str:
    """Return the name of ``device``; by default that of a GPU where there is one."""
    if torch.cuda.is_available() if device is None else is_gpu(device):
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees: its name, compute capability and memory."""

    name: str
    capability: str
    memory_gib: float


def list_gpus() -> list[Gpu]:
    """Return the GPUs that torch sees."""
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [Gpu(g.name, f"{g.major}.{g.minor}", round(g.total_memory / 2**30, 1)) for g in found]


class ComputeSettings(Protocol):
    """The settings that decide how a device computes."""

    @property
    def precision(self) -> str: ...
    @property
    def channels_last(self) -> Switch: ...
    @property
    def compile(self) -> Switch: ...
    @property
    def capture(self) -> Switch: ...
    @property
    def accumulate(self) -> int: ...
    @property
    def partners(self) -> str: ...


@dataclass(frozen=True)
class Compute:
    """How a device computes the steps of a run: the settings with every "auto" decided."""

    device: str
    precision: str
    channels_last: bool
    compile: bool
    capture: bool
    processes: int = 1
    accumulate: int = 1

    def __str__(self) -> str:
        parts = [self.precision]
        parts += [f"{self.processes} processes"] if self.processes > 1 else []
        parts += [f"batches in {self.accumulate} parts"] if self.accumulate > 1 else []
        parts += ["channels_last"] if self.channels_last else []
        parts += ["compiled (the first steps take a while)" if self.compile else "not compiled"]
        parts += ["CUDA graphs"] if self.capture else []
        return f"{self.device}: {', '.join(parts)}"


def compute_for(settings: ComputeSettings, device: torch.device, world_size: int = 1) -> Compute:
    """Decide how ``device`` computes.

    An explicit precision or compilation is kept on every device. Channels_last and capture exist
    on CUDA alone: convolutions of narrow channels_last networks crash on a CPU (torch 2.13).
    Several processes capture their communication only where the setting is True: it is measured
    with a single one alone. Partners of the whole batch are exchanged within the network, which is
    neither compiled nor captured then.
    """
    major = torch.cuda.get_device_capability(device)[0] if is_gpu(device) else 0
    precision = settings.precision
    if precision == "auto":
        precision = "bf16" if major >= 8 else "float32"
    is_alone = world_size == 1
    can_compile = major >= 7 and find_spec("triton") is not None and settings.partners == "share"
    can_capture = is_gpu(device) and (is_alone or settings.partners == "share")
    return Compute(
        device=device.type,
        precision=precision,
        channels_last=is_gpu(device) and _chosen(settings.channels_last, True),
        compile=_chosen(settings.compile, can_compile),
        capture=can_capture and _chosen(settings.capture, is_alone),
        processes=world_size,
        accumulate=settings.accumulate,
    )


def _chosen(setting: Switch, best: bool) -> bool:
    return best if setting == "auto" else setting


def changes(before: Mapping[str, object], now: Compute) -> list[str]:
    """List what a resumed run computes differently."""
    return [
        f"{name} {before[name]} -> {value}"
        for name, value in dataclasses.asdict(now).items()
        if before.get(name, value) != value
    ]


@contextmanager
def fork_rng(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Restore torch's own generators, of the CPU and of ``device``, at the end of the block.

    With ``seed`` both start from it.
    """
    with torch.random.fork_rng(devices=[device] if is_gpu(device) else []):
        if seed is not None:
            seed_rng(device, seed)
        yield


def seed_rng(device: torch.device, seed: int) -> None:
    """Seed torch's own generators, of the CPU and of ``device``."""
    torch.default_generator.manual_seed(seed)
    with current_device(device):
        if is_gpu(device):
            torch.cuda.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's own generators, by device type."""
    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if is_gpu(device) else state


def set_rng_state(device: torch.device, state: Mapping[str, Tensor]) -> None:
    """Restore what ``rng_state`` returned; a device that it does not have keeps its state."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if is_gpu(device) and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, from a GPU into pinned memory and without waiting for it."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given; a CPU is never behind."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def fast_convolutions() -> Iterator[None]:
    """Let cuDNN try all its convolutions once for each shape, and keep the fastest.

    Training has one shape for all its steps. What follows may have many (an attack continues with
    the images that are left), and each would be tried anew: the settings are restored.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, 0
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


def time_calls(
    call: Callable[[], object], device: torch.device, count: int, gpu_calls: int = 1
) -> list[float]:
    """Return the milliseconds of ``count`` calls.

    On a GPU each is the mean of ``gpu_calls``: the clock is coarser than one short step. There is
    one wait, at the end: a wait for each call would be measured as well.
    """
    if not is_gpu(device):
        times = [time.perf_counter()]
        for _ in range(count):
            call()
            times.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    with current_device(device):
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            for _ in range(gpu_calls):
                call()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / gpu_calls for a, b in itertools.pairwise(marks)]


def reset_peak_memory(device: torch.device) -> None:
    """Start counting for ``peak_memory_mb``."""
    if is_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mb(device: torch.device) -> float | None:
    """Return the largest memory in use since the reset; None on a CPU, which does not count it."""
    return torch.cuda.max_memory_allocated(device) / 2**20 if is_gpu(device) else None
