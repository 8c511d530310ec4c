"""Full float32 for the matrix products that determine a plan, under autocast and tf32 as well.

An error of 0.1 in a cost is a factor of e in exp(-C / 0.1), too much for bf16 or tf32. The settings
are process-wide, so they are changed for these products only and then restored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# Looked up here: torch.compile of torch 2.11 cannot trace the question, and would split the graph.
# A device of another name, which a package adds later, is asked for when it is used.
_NAMES = ("cpu", "cuda", "meta", "mps", "xpu", "xla", "hpu", "mtia")
_WITH_AUTOCAST = frozenset(name for name in _NAMES if torch.amp.is_autocast_available(name))

# The settings from before, once for each block that any thread has open: the last one restores.
_lock = threading.Lock()
_open: list[list[tuple[Any, str, object]]] = []


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Run matrix products on ``device`` in IEEE float32: no autocast, no tf32, no bf16."""
    with _lock:
        switches = [(owner, name, getattr(owner, name)) for owner, name, _ in _switches()]
        _open.append(_open[0] if _open else switches)
        for owner, name, value in _switches():
            setattr(owner, name, value)
    try:
        with no_autocast(device):
            yield
    finally:
        with _lock:
            switches = _open.pop()
            for owner, name, value in [] if _open else switches:
                setattr(owner, name, value)


def no_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a block in which operators on ``device`` keep their types."""
    name = device.type
    if name in _WITH_AUTOCAST or (name not in _NAMES and torch.amp.is_autocast_available(name)):
        return torch.autocast(name, enabled=False)
    return nullcontext()


def autocasts_to_bf16(device: torch.device) -> bool:
    """Whether autocast computes matrix products on ``device`` in bf16."""
    name = device.type
    return (
        name in _WITH_AUTOCAST
        and torch.is_autocast_enabled(name)
        and torch.get_autocast_dtype(name) == torch.bfloat16
    )


class _OnePrecision:
    """What ``torch.set_float32_matmul_precision`` sets: the only switch of torch before 2.9."""

    @property
    def precision(self) -> str:
        return torch.get_float32_matmul_precision()

    @precision.setter
    def precision(self, value: str) -> None:
        torch.set_float32_matmul_precision(value)


def _switches() -> list[tuple[Any, str, object]]:
    backends = [torch.backends.cuda.matmul, torch.backends.mkldnn]
    if hasattr(torch.backends.mkldnn, "matmul"):
        backends[1] = torch.backends.mkldnn.matmul
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        return [(backend, "fp32_precision", "ieee") for backend in backends]
    return [(_OnePrecision(), "precision", "highest")]
