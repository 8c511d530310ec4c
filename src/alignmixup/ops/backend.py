"""The choice between a reference in torch and a fused Triton kernel, for every operator.

``"auto"`` takes the kernel on a GPU unless it refuses, and a torch implementation otherwise. A
backend requested by name runs or raises. Each kernel has a function here that returns the reason of
its refusal, or None. Triton is imported when a kernel first runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, ParamSpec

import torch
from torch import Tensor, nn

Backend = Literal["auto", "reference", "triton"]
P = ParamSpec("P")

HALF_TYPES = (torch.bfloat16, torch.float16)
MAX_POSITIONS = 1024  # of a transport problem
MAX_BLOCKS = 256  # of a grid: 16 by 16
MAX_JOINT_BLOCKS = 64  # of a joint assignment, whose labels are all inputs
MAX_INPUTS = 32  # of a joint assignment: the inputs of a block are the bits of an int32
MAX_CHANNELS = 2048  # of norm_relu: its programs have so many slots to synchronize
CHANNEL_STEP = 8  # of norm_relu: 16-byte loads

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _no_cooperation() -> str:
    """Return why the programs of a kernel cannot wait for each other, empty if they can."""
    if torch.version.hip is not None:
        return "its cooperative launch is untested on ROCm"
    try:
        found = version("triton")
    except PackageNotFoundError:  # not installed, or a build of another name
        return ""
    is_new = tuple(map(int, found.split(".")[:2])) >= (3, 3)
    return "" if is_new else f"its cooperative launch needs Triton 3.3 or newer, got {found}"


NO_COOPERATION = _no_cooperation()


def choose_backend(
    backend: str,
    device: torch.device,
    on_cpu: str,
    refusal: Callable[P, str | None],
    *args: P.args,
    **kwargs: P.kwargs,
) -> str:
    """Return the backend that will run.

    ``on_cpu`` is the one of ``"auto"`` on the CPU. ``refusal(*args)`` returns why the kernel cannot
    run; it is not called unless the kernel could be chosen.
    """
    if backend not in ("auto", "reference", "triton", on_cpu):
        known = sorted({"reference", "triton", on_cpu})
        raise ValueError(f"unknown backend {backend!r}; choose from {known} or 'auto'")
    if backend == "auto" and device.type != "cuda":
        return on_cpu if device.type == "cpu" else "reference"
    if backend not in ("auto", "triton"):
        return backend
    reason = refusal(*args, **kwargs)
    if reason and backend == "triton":
        raise ValueError(f"backend 'triton' cannot run here: {reason}; use 'reference'")
    return "reference" if reason else "triton"


def refuse_sinkhorn(device: torch.device, dtype: torch.dtype, size: int) -> str | None:
    """For a transport problem whose larger side has ``size`` positions."""
    if dtype != torch.float32 and dtype not in HALF_TYPES:
        return f"it computes in float32, got {dtype}"
    if size > MAX_POSITIONS:
        return f"it handles at most {MAX_POSITIONS} positions, got {size}"
    return _refuse_device(device)


def refuse_blocks(like: Tensor, num_blocks: int, num_inputs: int | None = None) -> str | None:
    """For a grid cut or an auction; with ``num_inputs`` for a joint assignment."""
    if like.dtype != torch.float32:
        return f"it computes in float32, got {like.dtype}"
    most = MAX_BLOCKS if num_inputs is None else MAX_JOINT_BLOCKS
    if num_blocks > most:
        return f"it handles at most {most} blocks, got {num_blocks}"
    if num_inputs is not None and num_inputs > MAX_INPUTS:
        return f"it handles at most {MAX_INPUTS} inputs, got {num_inputs}"
    return _refuse_device(like.device)


def refuse_norm_relu(norm: nn.Module, x: Tensor) -> str | None:
    """For ReLU after ``norm``: the kernel has the default settings, in training, channels_last."""
    if type(norm) is not nn.BatchNorm2d or not norm.training or has_hooks(norm):
        return "it replaces an nn.BatchNorm2d in training mode without hooks"
    if not norm.affine or not norm.track_running_stats or norm.momentum is None:
        return "it needs affine weights, running statistics and a momentum"
    c = x.shape[1]
    if c > MAX_CHANNELS or c % CHANNEL_STEP or x.numel() <= c:
        return f"it handles a multiple of {CHANNEL_STEP} channels up to {MAX_CHANNELS}, got {c}"
    if x.dtype != torch.float32 and x.dtype not in HALF_TYPES:
        return f"it computes in float32, got {x.dtype}"
    if not x.is_contiguous(memory_format=torch.channels_last):
        return "it needs channels_last"
    return NO_COOPERATION or _refuse_device(x.device)


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook reads the output of ``module``, which a fused kernel never forms."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _refuse_device(device: torch.device) -> str | None:
    if not _HAS_TRITON:
        return "triton is not installed"
    if device.type == "cuda":
        return None
    from alignmixup.ops.triton.common import INTERPRETED

    if INTERPRETED:
        return None
    return f"it needs a CUDA device, or TRITON_INTERPRET=1 set before the start, got {device}"
