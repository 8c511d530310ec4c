"""The device of a run, and how it computes there: precision, memory layout, compilation, capture.

A setting of "auto" is decided here and nowhere else, by what the device is good at. bf16 is fast
only where it is native (on a CPU a training step takes 14 times as long as in float32), and a
compiled step pays only where kernel launches are the cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from alignmixup.training.settings import Switch, TrainSettings

__all__ = ["Compute", "changes", "compute_for", "pick_device"]


@dataclass(frozen=True)
class Compute:
    """How a device computes the steps of a run: the settings with every "auto" decided."""

    device: str
    precision: str
    channels_last: bool
    compile: bool
    capture: bool

    def __str__(self) -> str:
        parts = [self.precision]
        parts += ["channels_last"] if self.channels_last else []
        parts += ["compiled (the first steps take a while)" if self.compile else "not compiled"]
        parts += ["CUDA graphs"] if self.capture else []
        return f"{self.device}: {', '.join(parts)}"


def compute_for(settings: TrainSettings, device: torch.device, num_processes: int = 1) -> Compute:
    """Decide how ``device`` computes.

    A precision and a compilation that are asked for are kept on every device. Channels_last and
    capture exist on CUDA alone: convolutions of narrow channels_last networks crash on a CPU (torch
    2.13). What passes between processes is not captured.
    """
    is_cuda = device.type == "cuda"
    major = torch.cuda.get_device_capability(device)[0] if is_cuda else 0
    precision = settings.precision
    if precision == "auto":
        precision = "bf16" if major >= 8 else "float32"
    return Compute(
        device=device.type,
        precision=precision,
        channels_last=is_cuda and _chosen(settings.channels_last, True),
        compile=_chosen(settings.compile, major >= 7 and find_spec("triton") is not None),
        capture=is_cuda and num_processes == 1 and _chosen(settings.capture, True),
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


def pick_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"there is no device {name!r}; use cpu, cuda, cuda:1 or auto") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but torch sees no GPU; use cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device {name!r} was asked for; the GPUs are cuda:0 to cuda:{count - 1}")
    return device
