"""Time of align_mix and sinkhorn on a GPU, against the float64 reference first and peers after.

    PYTHONPATH=src python benchmarks/kernels.py [--quick] [--sweep] [--out benchmarks/kernels.csv]

Each shape is checked (relative error of output and gradient), then timed: calls on several sets of
inputs are captured in one CUDA graph, its replays are timed by events, and a row holds p20, p50 and
p80 of the time of one call. The peers, which wait for the device, are timed as they are. Kernels
are compiled by several processes before; the times hold no compilation.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import multiprocessing
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from alignmixup.ops import align
from alignmixup.ops.sinkhorn import sinkhorn
from alignmixup.ops.size_classes import Tiling
from alignmixup.ops.triton import (
    common as _triton_common,
    cost as _triton_cost,
    product as _triton_product,
    sinkhorn_large as _triton_large,
    sinkhorn_small as _triton_small,
)

BATCH, EPS, NUM_ITERS = 128, 0.1, 100
SHAPES = [(512, 4, 4), (512, 8, 8), (2048, 7, 7), (2048, 14, 14)]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LIMIT = 20e9  # bytes a peer may take


@dataclass(frozen=True)
class Row:
    name: str
    shape: str
    dtype: str
    batch: int
    iters: int
    p20_ms: float
    p50_ms: float
    p80_ms: float
    note: str = ""
    hardware: str = ""
    torch: str = torch.__version__
    triton: str = triton.__version__
    commit: str = ""
    date: str = ""


@dataclass(frozen=True)
class Inputs:
    """One batch as positions x channels, its draw, and a gradient of its output."""

    x: Tensor
    perm: Tensor
    lam: Tensor
    grad: Tensor


def setup(shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> Inputs:
    """Features as after a ReLU, about as far apart as in a trained network, channels last."""
    c, h, w = shape
    rng = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(BATCH, h * w, c, generator=rng, device="cuda").relu() * math.sqrt(256 / c)
    return Inputs(
        x=x.to(dtype),
        perm=torch.randperm(BATCH, generator=rng, device="cuda"),
        lam=torch.rand(BATCH, generator=rng, device="cuda"),
        grad=torch.randn(x.shape, generator=rng, device="cuda").to(dtype),
    )


def forward(i: Inputs, backend: str = "triton") -> tuple[Tensor, Tensor]:
    lam = i.lam.to(torch.promote_types(i.x.dtype, torch.float32))
    return align._align_mix(i.x, i.perm, lam, False, EPS, NUM_ITERS, 0.0, "columns", backend)


def backward(i: Inputs, plan: Tensor, backend: str = "triton") -> Tensor:
    lam = i.lam.to(torch.promote_types(i.grad.dtype, torch.float32))
    return align._align_mix_backward(i.grad, i.perm, lam, plan, False, backend)


def released(i: Inputs) -> Tensor:
    """The published algorithm as it is known: b r r c differences, and a host test a step."""
    A, B = i.x.float(), i.x[i.perm].float()
    cost = (A[:, :, None] - B[:, None]).square().sum(-1)
    r = cost.shape[1]
    share = math.log(1 / r + 1e-8)
    u, v = torch.zeros_like(cost[:, :, 0]), torch.zeros_like(cost[:, 0])

    def scaled(u: Tensor, v: Tensor) -> Tensor:
        return (-cost + u[:, :, None] + v[:, None]) / EPS

    for _ in range(NUM_ITERS):
        old = u
        u = EPS * (share - torch.logsumexp(scaled(u, v), -1)) + u
        v = EPS * (share - torch.logsumexp(scaled(u, v), -2)) + v
        if (u - old).abs().sum(-1).mean().item() < 0.1:
            break
    w = i.lam[:, None, None]
    return w * A + (1 - w) * r * (scaled(u, v).exp() @ B)


# ---- timing --------------------------------------------------------------------------------------


def replay_times(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Milliseconds of one call, from replays of a graph that holds all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return [t / len(calls) for t in event_times(graph.replay, repeats)]


def event_times(call: Callable[[], Any], repeats: int) -> list[float]:
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def row(name: str, shape: str, dtype: str, times: list[float], note: str = "") -> Row:
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    p20, p50, p80 = (round(cuts[k], 5) for k in (1, 4, 7))
    return Row(name, shape, dtype, BATCH, NUM_ITERS, p20, p50, p80, note)


def relative_error(one: Tensor, other: Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def check(shape: tuple[int, int, int], dtype: torch.dtype) -> str:
    """Relative errors of output, gradient and plan against float64, on inputs of their own."""
    i = setup(shape, dtype, seed=99)
    exact_i = replace(i, x=i.x.double(), grad=i.grad.double())
    out, plan = forward(i)
    exact, exact_plan = forward(exact_i, "reference")
    errors = [relative_error(out, exact), relative_error(plan, exact_plan)]
    errors.append(relative_error(backward(i, plan), backward(exact_i, exact_plan, "reference")))
    assert all(math.isfinite(e) and e < 1e-2 for e in errors), errors
    return "error out {:.1e} plan {:.1e} grad {:.1e}".format(*errors)


def extra_memory(i: Inputs) -> str:
    """Peak beyond inputs, output and plan, in feature tensors."""
    forward(i)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, plan = forward(i)
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes - plan.nbytes
    return f"extra memory {extra / i.x.nbytes:.2f} x features"


def measure(shape: tuple[int, int, int], name: str, quick: bool) -> Iterator[Row]:
    dtype = DTYPES[name]
    label = "x".join(map(str, shape))
    note = check(shape, dtype)
    sets = [setup(shape, dtype, seed) for seed in range(2 if shape[0] * shape[1] > 16000 else 6)]
    plans = [forward(i)[1] for i in sets]
    repeats = 20 if quick else 60
    note = f"{note}; {extra_memory(sets[0])}"
    times = replay_times([lambda i=i: forward(i) for i in sets], repeats)
    yield row("align_mix forward", label, name, times, note)
    calls = [lambda i=i, p=p: backward(i, p) for i, p in zip(sets, plans, strict=True)]
    yield row("align_mix backward", label, name, replay_times(calls, repeats))
    if name == "bf16":
        costs = [torch.cdist(i.x.float(), i.x[i.perm].float()).square() for i in sets]
        calls = [lambda c=c: sinkhorn(c, eps=EPS, num_iters=NUM_ITERS) for c in costs]
        yield row("sinkhorn alone", label, "fp32", replay_times(calls, repeats))
        yield from peers(sets[0], label, quick)


def peers(i: Inputs, label: str, quick: bool) -> Iterator[Row]:
    repeats = 3 if quick else 10
    yield row(
        "reference loop", label, "bf16", event_times(lambda: forward(i, "reference"), repeats)
    )
    b, r, c = i.x.shape
    if b * r * r * c * 8 > LIMIT:  # the differences and their squares
        return
    yield row("released algorithm", label, "bf16", event_times(lambda: released(i), repeats))


# ---- compilation ---------------------------------------------------------------------------------


def compile_shape(shape: tuple[int, int, int], name: str) -> None:
    """Fill Triton's cache on disk: what a process of its own is asked to do."""
    i = setup(shape, DTYPES[name], seed=0)
    backward(i, forward(i)[1])
    if name == "bf16":
        sinkhorn(torch.rand(BATCH, shape[1] * shape[2], shape[1] * shape[2], device="cuda"))
    torch.cuda.synchronize()


def kernel_report() -> list[str]:
    """Registers, spills and shared memory of every kernel that was compiled here."""
    lines = []
    for module in (_triton_small, _triton_cost, _triton_product, _triton_large):
        for name, function in vars(module).items():
            caches = getattr(function, "device_caches", None)
            if not name.endswith("_kernel") or not caches:
                continue
            for compiled in caches[torch.cuda.current_device()][0].values():
                meta = compiled.metadata
                lines.append(
                    f"{name:20} warps {meta.num_warps} stages {meta.num_stages} registers "
                    f"{compiled.n_regs} spills {compiled.n_spills} shared {meta.shared}"
                )
    return lines


# ---- launch settings -----------------------------------------------------------------------------


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


def sweep() -> Iterator[str]:
    """Times of other launch settings than the ones in the code, bf16."""

    def timed(i: Inputs, plan: Tensor | None = None) -> str:
        call = (lambda: forward(i)) if plan is None else (lambda: backward(i, plan))
        try:
            return f"{statistics.median(replay_times([call] * 4, 15)) * 1e3:9.1f} us"
        except Exception as error:  # out of resources: not a setting for this shape
            return type(error).__name__

    for shape in SHAPES[:3]:
        i = setup(shape, torch.bfloat16, 0)
        plan = forward(i)[1]
        N = _triton_common.padded(shape[1] * shape[2])
        if N == 64:
            with changed(_triton_small, "MAX_FUSED", 64):
                yield f"forward {shape} in one launch: {timed(i)}"
            for w in (2, 4, 8):
                with changed(_triton_small, "TILINGS", {N: Tiling(N, N, 64, w)}):
                    yield f"forward {shape} iterations by {w} warps: {timed(i)}"
            for c, w, stages in [(32, 4, 3), (64, 4, 3), (64, 4, 2), (64, 8, 3), (128, 8, 3)]:
                tile = Tiling(64, 64, c, w, stages)
                with changed(_triton_cost, "cost_tiling", lambda *_, t=tile: t):
                    yield f"forward {shape} cost {tile}: {timed(i)}"
        else:
            sizes = [(c, w, s) for w in (1, 2) for c in (32, 64, 128) for s in (2, 3)]
            for tile in [Tiling(N, N, *size) for size in sizes]:
                with changed(_triton_small, "TILINGS", {N: tile}):
                    yield f"forward {shape} {tile}: {timed(i)}"
        for w, c in [(1, 64), (2, 64), (2, 128), (4, 64), (4, 128)]:
            tile = Tiling(N, N, c, w, 1)
            with changed(_triton_product, "tiling", lambda *_, t=tile: t):
                yield f"backward {shape} {tile}: {timed(i, plan)}"
    i = setup(SHAPES[3], torch.bfloat16, 0)
    for block, w, s in [(4096, 4, 3), (8192, 8, 2), (8192, 8, 4), (16384, 16, 2), (8192, 16, 3)]:
        with (
            changed(_triton_large, "BLOCK", block),
            changed(_triton_large, "NUM_WARPS", w),
            changed(_triton_large, "NUM_STAGES", s),
        ):
            yield f"forward {SHAPES[3]} block {block} warps {w} stages {s}: {timed(i)}"
    for t, c, w in [(64, 64, 4), (64, 32, 4), (128, 64, 8)]:
        with changed(_triton_cost, "cost_tiling", lambda *_, t=t, c=c, w=w: Tiling(t, t, c, w)):
            yield f"forward {SHAPES[3]} cost tile {t} channels {c}: {timed(i)}"
    for tile in [Tiling(64, 64, 64, 4), Tiling(64, 64, 128, 4), Tiling(128, 32, 128, 8)]:
        with changed(_triton_product, "tiling", lambda *_, t=tile: t):
            yield f"forward {SHAPES[3]} {tile}: {timed(i)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="bf16 alone, fewer repeats")
    parser.add_argument("--sweep", action="store_true", help="also try other launch settings")
    parser.add_argument("--out", type=Path, help="append rows to this CSV file")
    args = parser.parse_args()
    jobs = [(s, d) for d in DTYPES for s in SHAPES if d == "bf16" or not args.quick]
    with ProcessPoolExecutor(8, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_shape, *zip(*jobs, strict=True)))
    commit = (
        os.environ.get("ALIGNMIXUP_COMMIT")
        or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    )
    stamp = {
        "hardware": torch.cuda.get_device_name(),
        "commit": commit.strip()[:12],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    rows = [replace(r, **stamp) for job in jobs for r in measure(*job, args.quick)]
    if args.out:
        is_new = not args.out.exists()
        with args.out.open("a", newline="") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow([f.name for f in fields(Row)])
            writer.writerows(astuple(r) for r in rows)
    for line in [*kernel_report(), *(sweep() if args.sweep else [])]:
        print(line, flush=True)
    print(f"\n{stamp['hardware']}, torch {torch.__version__}, batch {BATCH}; milliseconds")
    for r in rows:
        times = f"{r.p20_ms:9.4f} {r.p50_ms:9.4f} {r.p80_ms:9.4f}"
        print(f"{r.name:20} {r.shape:12} {r.dtype:5} {times}  {r.note}")


if __name__ == "__main__":
    main()
