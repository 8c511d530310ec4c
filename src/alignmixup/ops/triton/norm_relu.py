# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""ReLU(BN(x)) over rows of channels, and its gradients, each in one launch.

    y = max(0, w (x - mu) r + b),   r = 1 / sqrt(var + eps)
    dx = w r (g - mean(g) - h mean(g h)),   h = (x - mu) r,   g = dy where y > 0

Both need sums over all rows before they write the first. One launch does both phases: its programs
synchronize in between, and the second phase reads in reverse order, from the cache, what the first
has read. The launch is cooperative: the driver runs it only if all programs are resident together.
Under CUDA MPS it would wait for the kernels of other processes, so there the phases are two
launches, as they are with ``phases=1``.
"""

import ctypes
import functools
import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

BOTH = 3
SLICE = 64  # channels of a program: 128 bytes of a row in bf16
MAX_SLICES = 32
BLOCK_ROWS = 256
NUM_WARPS = 8
# Barriers for the programs of a launch, used in turn: launches that run side by side must not share
# one.
NUM_BARRIERS = 4096
MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED


@triton.jit
def _synchronize(barrier, num_programs, rank):
    """A barrier over all programs: their earlier stores are visible afterwards.

    A round adds 2^31 in all, so it flips the highest bit and leaves the others zero for the next.
    """
    tl.debug_barrier()
    share = tl.where(rank == 0, 2147483647 - (num_programs - 2), 1)
    before = tl.atomic_add(barrier, share, sem="release")
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred is_waiting;
        POLL:
        ld.acquire.gpu.global.b32 $0, [$1];
        xor.b32 $0, $0, $2;
        setp.ge.s32 is_waiting, $0, 0;
        @is_waiting bra POLL;
        }
        """,
        "=&r,l,r", [barrier, before], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def _folded(x, FOLD: tl.constexpr):
    """Sums of ``FOLD`` rows each, all held by one thread: no communication."""
    rows: tl.constexpr = x.shape[0] // FOLD
    return tl.sum(tl.reshape(x, [FOLD, rows, x.shape[1]]), axis=0)


@triton.jit
def _store_sums(sums, first, second, index, channels, inside, c):
    """Store the two sums per channel in this program's row of ``sums``."""
    base = sums + index * 2 * c + channels
    tl.store(base, tl.sum(first, axis=0), mask=inside)
    tl.store(base + c, tl.sum(second, axis=0), mask=inside)


@triton.jit
def _all_sums(sums, channels, inside, c, num_groups, GROUPS: tl.constexpr):
    """The two sums over all programs, in a fixed order."""
    groups = tl.arange(0, GROUPS)[:, None]
    base = sums + groups * 2 * c + channels[None, :]
    is_real = (groups < num_groups) & inside[None, :]
    first = tl.load(base, mask=is_real, other=0.0, cache_modifier=".cg")
    second = tl.load(base + c, mask=is_real, other=0.0, cache_modifier=".cg")
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def _block(first, num_rows, channels, inside, c, ROWS: tl.constexpr):
    """Offsets and mask of the rows from ``first`` on."""
    rows = first + tl.arange(0, ROWS)
    is_real = (rows < num_rows)[:, None] & inside[None, :]
    return rows.to(tl.int64)[:, None] * c + channels[None, :], is_real


@triton.jit
def _read(base, at, is_real):
    return tl.load(base + at, mask=is_real, other=0.0)


@triton.jit
def _read_channels(base, channels, inside):
    return tl.load(base + channels, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _behind_relu(x, g, mean, scale, bias):
    """x less its mean, and the gradient g where the ReLU is active."""
    x = x.to(tl.float32) - mean[None, :]
    return x, tl.where(x * scale[None, :] + bias[None, :] > 0, g.to(tl.float32), 0.0)


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, var_ptr, sums_ptr, barrier_ptr, num_rows, c,
    eps, num_blocks, PHASES: tl.constexpr, IS_KEPT: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, FOLD: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    group, num_groups = tl.program_id(0), tl.num_programs(0)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < c
    begin = group * num_blocks * ROWS
    if IS_KEPT:
        at, is_real = _block(begin, num_rows, channels, inside, c, ROWS)
        x_kept = _read(x_ptr, at, is_real)
    # The variance is computed about the first row: any value near the mean avoids the cancellation
    # of large means.
    center = _read_channels(x_ptr, channels, inside)
    if PHASES & 1:
        total = tl.zeros([ROWS // FOLD, CHANNELS], tl.float32)
        square = tl.zeros([ROWS // FOLD, CHANNELS], tl.float32)
        for k in range(num_blocks):
            at, is_real = _block(begin + k * ROWS, num_rows, channels, inside, c, ROWS)
            x = x_kept if IS_KEPT else _read(x_ptr, at, is_real)
            x = tl.where(is_real, x.to(tl.float32) - center[None, :], 0.0)
            total += _folded(x, FOLD)
            square += _folded(x * x, FOLD)
        _store_sums(sums_ptr, total, square, group, channels, inside, c)
    if PHASES == 3:
        _synchronize(barrier_ptr + tl.program_id(1), num_groups, group)
    if PHASES & 2:
        total, square = _all_sums(sums_ptr, channels, inside, c, num_groups, GROUPS)
        shift = total / num_rows
        var = tl.maximum(square / num_rows - shift * shift, 0.0)
        mean = shift + center
        if group == 0:
            tl.store(mean_ptr + channels, mean, mask=inside)
            tl.store(var_ptr + channels, var, mask=inside)
        scale = _read_channels(weight_ptr, channels, inside) / tl.sqrt_rn(var + eps)
        bias = _read_channels(bias_ptr, channels, inside)
        for k in range(num_blocks):
            last = begin + (num_blocks - 1 - k) * ROWS
            at, is_real = _block(last, num_rows, channels, inside, c, ROWS)
            x = x_kept if IS_KEPT else _read(x_ptr, at, is_real)
            y = (x.to(tl.float32) - mean[None, :]) * scale[None, :] + bias[None, :]
            y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
            tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=is_real)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    sums_ptr, barrier_ptr, num_rows, c, eps, num_blocks, PHASES: tl.constexpr,
    IS_KEPT: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, FOLD: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    group, num_groups = tl.program_id(0), tl.num_programs(0)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < c
    begin = group * num_blocks * ROWS
    if IS_KEPT:
        at, is_real = _block(begin, num_rows, channels, inside, c, ROWS)
        x_kept = _read(x_ptr, at, is_real)
        g_kept = _read(dy_ptr, at, is_real)
    mean = _read_channels(mean_ptr, channels, inside)
    rate = 1 / tl.sqrt_rn(_read_channels(var_ptr, channels, inside) + eps)
    scale = _read_channels(weight_ptr, channels, inside) * rate
    bias = _read_channels(bias_ptr, channels, inside)
    if PHASES & 1:
        total = tl.zeros([ROWS // FOLD, CHANNELS], tl.float32)
        product = tl.zeros([ROWS // FOLD, CHANNELS], tl.float32)
        for k in range(num_blocks):
            at, is_real = _block(begin + k * ROWS, num_rows, channels, inside, c, ROWS)
            x = x_kept if IS_KEPT else _read(x_ptr, at, is_real)
            g = g_kept if IS_KEPT else _read(dy_ptr, at, is_real)
            x, g = _behind_relu(x, g, mean, scale, bias)
            total += _folded(g, FOLD)
            product += _folded(g * x, FOLD)
        _store_sums(sums_ptr, total, product, group, channels, inside, c)
    if PHASES == 3:
        _synchronize(barrier_ptr + tl.program_id(1), num_groups, group)
    if PHASES & 2:
        total, product = _all_sums(sums_ptr, channels, inside, c, num_groups, GROUPS)
        if group == 0:
            tl.store(dbias_ptr + channels, total, mask=inside)
            tl.store(dweight_ptr + channels, product * rate, mask=inside)
        offset = total / num_rows
        slope = product * rate * rate / num_rows
        for k in range(num_blocks):
            last = begin + (num_blocks - 1 - k) * ROWS
            at, is_real = _block(last, num_rows, channels, inside, c, ROWS)
            x = x_kept if IS_KEPT else _read(x_ptr, at, is_real)
            g = g_kept if IS_KEPT else _read(dy_ptr, at, is_real)
            x, g = _behind_relu(x, g, mean, scale, bias)
            dx = (g - offset[None, :] - x * slope[None, :]) * scale[None, :]
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=is_real)


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # interpreted
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _default_phases(device: torch.device) -> int:
    """Both phases in one launch, unless programs are interpreted or other processes run beside."""
    if device.type != "cuda":
        return 1  # interpreted programs run sequentially
    return 1 if _is_shared(device) else BOTH


def _is_shared(device: torch.device) -> bool:
    """Whether kernels of several processes run on the GPU at a time, by CUDA MPS."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # not Linux: there is no MPS
        return False
    is_enabled = ctypes.c_int(0)
    driver.cuDeviceGetAttribute(ctypes.byref(is_enabled), MPS_ENABLED, device.index or 0)
    return bool(is_enabled.value)


@functools.cache
def _barriers(device: torch.device) -> tuple[Tensor, "itertools.cycle[int]"]:
    """Barriers, and the cycle of their indices."""
    zeros = torch.zeros(NUM_BARRIERS, MAX_SLICES, dtype=torch.int32, device=device)
    return zeros, itertools.cycle(range(NUM_BARRIERS))


def _launch(kernel, x: Tensor, tensors: list[Tensor], c: int, eps: float, phases: int) -> None:
    """Run ``kernel`` with as many programs as are resident at once."""
    num_rows = x.numel() // c
    channels = min(SLICE, triton.next_power_of_2(c))
    num_slices = triton.cdiv(c, channels)
    share = max(1, _num_processors(x.device) // num_slices)
    most = 1 << (share.bit_length() - 1)  # a power of two, which divides most numbers of rows
    rows = min(BLOCK_ROWS, triton.next_power_of_2(num_rows))
    num_blocks = triton.cdiv(triton.cdiv(num_rows, most), rows)
    num_groups = triton.cdiv(num_rows, num_blocks * rows)
    sums = torch.empty(num_groups, 2, c, dtype=torch.float32, device=x.device)
    barriers, turns = _barriers(x.device)
    for phase in (BOTH,) if phases == BOTH else (1, 2):
        kernel[(num_groups, num_slices)](
            *tensors, sums, barriers[next(turns)], num_rows, c, eps, num_blocks, PHASES=phase,
            IS_KEPT=num_blocks == 1, GROUPS=triton.next_power_of_2(num_groups), ROWS=rows,
            FOLD=max(1, rows // (4 * NUM_WARPS)), CHANNELS=channels,
            num_warps=NUM_WARPS, launch_cooperative_grid=phase == BOTH and num_groups > 1,
        )  # fmt: skip


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, phases: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ReLU(BN(x)), the mean and the biased variance of a channels_last ``x``."""
    c = x.shape[1]
    out = torch.empty_like(x)
    mean, var = (torch.empty(c, dtype=torch.float32, device=x.device) for _ in range(2))
    phases = phases or _default_phases(x.device)
    _launch(_forward_kernel, x, [x, weight, bias, out, mean, var], c, eps, phases)
    return out, mean, var


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float,
    *, phases: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, weight and bias; ``dy`` and ``x`` are channels_last."""
    c = x.shape[1]
    dx = torch.empty_like(x)
    dweight, dbias = (torch.empty(c, dtype=torch.float32, device=x.device) for _ in range(2))
    phases = phases or _default_phases(x.device)
    tensors = [dy, x, weight, bias, mean, var, dx, dweight, dbias]
    _launch(_backward_kernel, x, tensors, c, eps, phases)
    return dx, dweight, dbias
