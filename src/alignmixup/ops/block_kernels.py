"""The fused kernels of the block solvers as operators, and which solver runs where.

The operators are opaque to torch.compile, which need not look inside; Triton is loaded when the
first of them runs. Nothing in them waits for the device, so a step with them can be captured.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["Backend", "auction", "choose_backend", "cut_ordered", "joint_assignment"]

Backend = Literal["auto", "reference", "triton"]

MAX_SITES = 256  # blocks of a grid: 16 by 16
MAX_JOINT_SITES = 64  # where every block has as many labels as there are inputs
MAX_INPUTS = 32  # the inputs a block shows are the bits of one number


def choose_backend(
    backend: str, like: Tensor, num_sites: int, num_inputs: int | None = None
) -> str:
    """Return the solver that will run; one asked for by name runs or is an error.

    "auto" takes the kernels on a GPU where they can run, and the reference everywhere else.
    ``num_inputs`` is for the joint assignment.
    """
    if backend not in ("auto", "reference", "triton"):
        raise ValueError(f"unknown backend {backend!r}; choose 'reference', 'triton' or 'auto'")
    if backend == "reference" or (backend == "auto" and like.device.type != "cuda"):
        return "reference"
    reason = _refusal(like, num_sites, num_inputs)
    if reason and backend == "triton":
        raise ValueError(f"backend 'triton' cannot run here: {reason}")
    return "reference" if reason else "triton"


def _refusal(like: Tensor, num_sites: int, num_inputs: int | None) -> str | None:
    if like.dtype != torch.float32:
        return f"it computes in float32, got {like.dtype}"
    most = MAX_SITES if num_inputs is None else MAX_JOINT_SITES
    if num_sites > most:
        return f"it handles {most} blocks at most, got {num_sites}"
    if num_inputs is not None and num_inputs > MAX_INPUTS:
        return f"it handles {MAX_INPUTS} inputs at most, got {num_inputs}"
    try:
        from alignmixup.ops.triton.common import INTERPRETED
    except ImportError:
        return "triton is not installed"
    if like.device.type != "cuda" and not INTERPRETED:
        return f"it needs a CUDA device, or TRITON_INTERPRET=1 set at the start, got {like.device}"
    return None


@torch.library.custom_op("alignmixup::cut_ordered", mutates_args=())
def cut_ordered(
    unary: Tensor,
    down: Tensor,
    right: Tensor,
    num_relaxations: int,
    num_sweeps: int,
    num_roundings: int,
) -> tuple[Tensor, Tensor]:
    """``gridcut.cut_ordered``: labels [b, n, m] and energies [b]."""
    from alignmixup.ops.triton import gridcut as _triton_gridcut

    with torch.cuda.device_of(unary):  # type: ignore[no-untyped-call]
        return _triton_gridcut.cut(
            unary.contiguous(),
            down.contiguous(),
            right.contiguous(),
            num_relaxations,
            num_sweeps,
            num_roundings,
        )


@cut_ordered.register_fake
def _(unary, down, right, num_relaxations, num_sweeps, num_roundings):  # type: ignore[no-untyped-def]
    b, _, n, m = unary.shape
    return unary.new_empty(b, n, m, dtype=torch.int64), unary.new_empty(b)


@torch.library.custom_op("alignmixup::auction", mutates_args=())
def auction(salient: Tensor, is_shown: Tensor, t_eps: float) -> Tensor:
    """The auction of ``puzzle_blocks.transport``: which block each place gets [b, n * n]."""
    from alignmixup.ops.triton import auction as _triton_auction

    with torch.cuda.device_of(salient):  # type: ignore[no-untyped-call]
        return _triton_auction.auction(salient.contiguous(), is_shown.contiguous(), t_eps)


@auction.register_fake
def _(salient, is_shown, t_eps):  # type: ignore[no-untyped-def]
    return salient.new_empty(len(salient), salient[0].numel(), dtype=torch.int64)


@torch.library.custom_op("alignmixup::joint_assignment", mutates_args=())
def joint_assignment(
    unary: Tensor,
    compatibility: Tensor,
    is_real: Tensor,
    start: Tensor,
    beta: float,
    gamma: float,
    tau: float,
    is_soft: bool,
    num_iters: int,
    num_sweeps: int,
    half_labels: bool,
    resolve_ties: bool,
) -> Tensor:
    """``joint_blocks.assign_blocks``: the shares [p, N, s, N] of the best restart."""
    from alignmixup.ops.triton import joint as _triton_joint

    with torch.cuda.device_of(unary):  # type: ignore[no-untyped-call]
        return _triton_joint.assign(
            unary.contiguous(),
            compatibility.contiguous(),
            is_real.contiguous(),
            start.contiguous(),
            beta,
            gamma,
            tau,
            is_soft,
            num_iters,
            num_sweeps,
            half_labels,
            resolve_ties,
        )


@joint_assignment.register_fake
def _(unary, compatibility, is_real, start, *settings):  # type: ignore[no-untyped-def]
    p, num, sites = unary.shape
    return unary.new_empty(p, num, sites, num)
