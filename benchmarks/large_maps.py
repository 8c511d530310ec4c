"""Launch settings of align_mix beyond 64 positions on a GPU: which are fastest, and are they right.

    PYTHONPATH=src python benchmarks/large_maps.py OUT.csv [--seconds 170]

For each size: the present kernels, then those of ``ops/size_classes.py`` with candidates for the
iterations, then for the cost, then for the interpolation, each with the fastest of the stages
before. A candidate counts only if output, plan and gradient agree with the float32 reference to
``TOLERANCES``, twice with the same bits. Times are medians of replays of a CUDA graph, forward and
forward + backward; memory is the peak beyond the input, the output included.

Kernels are compiled by several processes first. A worker process runs the candidates: one that
fails prints its error in one line, one that hangs is ended after ``PATIENCE`` seconds, and the next
candidate has a new worker. With TRITON_INTERPRET=1 the script tests itself on a CPU, in a tiny
size and with few candidates.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

IS_SMOKE = os.environ.get("TRITON_INTERPRET") == "1"
EPS, NUM_ITERS = 0.1, 2 if IS_SMOKE else 100
# Relative errors in the norm, bf16 features against the reference in float32. The output and the
# gradient are rounded to bf16 (1.7e-3); the plan is off by the rounding of the costs.
TOLERANCES = {"output": 3e-3, "plan": 1e-3, "gradient": 3e-3}
if IS_SMOKE:  # the interpreter rounds bf16 towards zero
    TOLERANCES = {name: 3 * value for name, value in TOLERANCES.items()}
PATIENCE = 200.0 if IS_SMOKE else 30.0
MAX_COMPILE = 75.0


@dataclass(frozen=True)
class Size:
    batch: int
    positions: int
    channels: int
    aim_us: float

    def __str__(self) -> str:
        return f"b{self.batch} r{self.positions} c{self.channels}"


SIZES = [
    Size(128, 100, 96, 200),
    Size(128, 100, 1000, 200),
    Size(64, 196, 384, 400),
    Size(16, 784, 768, 3000),
]
SMOKE_SIZES = [Size(2, 66, 8, 1e9)]

# The fields of HeldTiling, and of RowTiling up to 256 positions and beyond.
HELD = [(4, 8, True), (4, 16), (4, 16, True), (8, 16), (8, 16, True), (8, 32), (8, 32, True)]
SHARED = [(4, 0, 4, 3, 2, 64), (2, 0, 8, 3, 1, 64)]
STREAMED = [(8, 4, 4, 3), (8, 4, 4, 4), (8, 8, 8, 3), (8, 8, 8, 1), (8, 16, 16, 1)]
# tile, channels, warps, stages, partial sums
COSTS = [
    (128, 32, 8, 3, 1),
    (128, 32, 8, 3, 2),
    (128, 32, 8, 3, 4),
    (128, 64, 8, 2, 1),
    (128, 64, 8, 2, 2),
    (64, 64, 4, 3, 1),
    (64, 64, 4, 3, 2),
    (64, 32, 4, 3, 1),
    (64, 128, 4, 2, 1),
]
# rows, inner, channels, warps, stages; three stages can be wrong, see ops/triton/product.py
MIXES = [
    (64, 32, 128, 4, 2),
    (64, 32, 64, 4, 2),
    (64, 64, 64, 4, 2),
    (64, 64, 128, 4, 2),
    (128, 32, 128, 8, 2),
    (128, 64, 128, 8, 2),
    (64, 32, 256, 8, 2),
]


@dataclass(frozen=True)
class Result:
    size: str
    stage: str
    candidate: str
    forward_us: float = math.nan
    p20_us: float = math.nan
    p80_us: float = math.nan
    both_us: float = math.nan
    memory: float = math.nan
    output_error: float = math.nan
    plan_error: float = math.nan
    gradient_error: float = math.nan
    registers: int = 0
    spills: int = 0
    failure: str = ""

    def __str__(self) -> str:
        head = f"{self.size:17} {self.stage:7} {self.candidate:32}"
        if self.failure:
            return f"{head} FAILED {self.failure}"
        return (
            f"{head} forward {self.forward_us:8.1f} us, + backward {self.both_us:8.1f} us, memory "
            f"{self.memory:4.2f}, errors {self.output_error:.1e} {self.plan_error:.1e} "
            f"{self.gradient_error:.1e}, registers {self.registers} spills {self.spills}"
        )


Job = tuple[Size, str, Any]  # size, stage, entry of the size classes; None for the present kernels


# ---- candidates ----------------------------------------------------------------------------------


def default_entry(size: Size) -> Any:
    from alignmixup.ops.size_classes import SIZE_CLASSES

    for entry in SIZE_CLASSES:
        if size.positions <= entry.max_positions:
            return replace(entry, is_on=True)
    raise ValueError(f"no size class has {size.positions} positions")


def candidates(size: Size, stage: str, best: Any) -> list[Any]:
    """Return entries that differ from ``best`` in one stage."""
    from alignmixup.ops.size_classes import HeldTiling, RowTiling, Tiling, num_parts

    if stage == "rows":
        tilings = [RowTiling(*each) for each in STREAMED]
        if size.positions <= 256:
            tilings = [HeldTiling(*each) for each in HELD] + [RowTiling(*each) for each in SHARED]
        return [replace(best, rows=tiling) for tiling in tilings]
    if stage == "mix":
        return [replace(best, mix=Tiling(*values)) for values in MIXES]
    import torch

    entries = [
        replace(best, cost=Tiling(tile, tile, channels, warps, stages), cost_parts=parts)
        for tile, channels, warps, stages, parts in COSTS
    ]
    n, c = size.positions, size.channels
    return [e for e in entries if num_parts(e, n, c, torch.bfloat16) == e.cost_parts]


def label(stage: str, entry: Any) -> str:
    if entry is None:
        return "present"
    tile = getattr(entry, stage)
    if stage == "rows":
        return " ".join(f"{k.removeprefix('num_')} {v}" for k, v in asdict(tile).items())
    parts = f" parts {entry.cost_parts}" if stage == "cost" else ""
    sizes = f"{tile.rows}x{tile.inner}x{tile.channels}"
    return f"{sizes} w{tile.num_warps} s{tile.num_stages}{parts}"


def switch(entry: Any) -> None:
    """Run all sizes beyond 64 positions by ``entry``; None: by the present kernels."""
    from alignmixup.ops import size_classes

    size_classes.SIZE_CLASSES = () if entry is None else (replace(entry, max_positions=1024),)


# ---- compilation ---------------------------------------------------------------------------------


class _Compiled:
    """A kernel that is compiled and not launched, so that nothing can hang."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **options: self.kernel.warmup(*args, grid=grid, **options)


class _Skipped:
    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


@functools.cache
def _kernels() -> dict[tuple[Any, str], tuple[str, Any]]:
    from alignmixup.ops.triton import cost, product, sinkhorn_held, sinkhorn_large, sinkhorn_rows

    names = {
        (cost, "_cost_kernel"): "cost",
        (sinkhorn_held, "_held_kernel"): "rows",
        (sinkhorn_rows, "_shared_kernel"): "rows",
        (sinkhorn_rows, "_streamed_kernel"): "rows",
        (sinkhorn_large, "_stream_kernel"): "present",
        (product, "_mix_kernel"): "mix",
        (product, "_backward_kernel"): "mix",
    }
    return {place: (stage, getattr(*place)) for place, stage in names.items()}


def compile_job(job: Job) -> str:
    """Compile the kernels of one stage into the cache on disk; return an error in one line."""
    size, stage, entry = job
    try:
        for (module, name), (kernel_stage, kernel) in _kernels().items():
            is_wanted = stage in (kernel_stage, "present")
            setattr(module, name, _Compiled(kernel) if is_wanted else _Skipped())
        switch(entry)
        i = setup(size)
        backward(i, forward(i)[1])
    except Exception as error:
        return f"{size} {label(stage, entry)}: {one_line(error)}"
    return ""


def compile_all(sizes: list[Size], seconds: float) -> None:
    jobs: list[Job] = []
    for size in sizes:
        entry = default_entry(size)
        jobs.append((size, "present", None))
        jobs += [(size, "cost", e) for e in candidates(size, "cost", entry)]
        jobs += [(size, "mix", e) for e in candidates(size, "mix", entry)]
        for parts in {e.cost_parts for e in candidates(size, "cost", entry)}:
            of_parts = replace(entry, cost_parts=parts)
            jobs += [(size, "rows", e) for e in candidates(size, "rows", of_parts)]
    jobs.sort(key=lambda job: job[1] != "rows")  # the longest first
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(16, os.cpu_count() or 1), context)
    begin = time.monotonic()
    done, late = wait([pool.submit(compile_job, job) for job in jobs], timeout=seconds)
    for message in {future.result() for future in done if not future.exception()} - {""}:
        print("compile:", message, flush=True)
    print(f"compiled {len(done)} of {len(jobs)} in {time.monotonic() - begin:.0f} s", flush=True)
    pool.shutdown(wait=not late, cancel_futures=True)


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:200]


# ---- one candidate -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    x: Any
    perm: Any
    lam: Any
    grad: Any


@functools.cache
def setup(size: Size, seed: int = 0) -> Inputs:
    """Features as after a ReLU, about as far apart as in a trained network, channels last."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = torch.Generator(device).manual_seed(seed)
    shape = (size.batch, size.positions, size.channels)
    x = torch.randn(shape, generator=rng, device=device).relu() * math.sqrt(256 / size.channels)
    return Inputs(
        x=x.to(torch.bfloat16),
        perm=torch.randperm(size.batch, generator=rng, device=device),
        lam=torch.rand(size.batch, generator=rng, device=device),
        grad=torch.randn(shape, generator=rng, device=device).to(torch.bfloat16),
    )


def forward(i: Inputs, backend: str = "triton") -> tuple[Any, Any]:
    from alignmixup.ops import align

    return align._align_mix(i.x, i.perm, i.lam, False, EPS, NUM_ITERS, 0.0, "columns", backend)


def backward(i: Inputs, plan: Any, backend: str = "triton") -> Any:
    from alignmixup.ops import align

    return align._align_mix_backward(i.grad, i.perm, i.lam, plan, False, backend)


def both(i: Inputs) -> Any:
    return backward(i, forward(i)[1])


@functools.cache
def reference(size: Size) -> tuple[Any, Any, Any]:
    i = setup(size)
    wide = Inputs(i.x.float(), i.perm, i.lam, i.grad.float())
    out, plan = forward(wide, "reference")
    return out, plan, backward(wide, plan, "reference")


def relative_error(value: Any, expected: Any) -> float:
    error = (value.double() - expected.double()).norm() / expected.double().norm()
    return float(error.nan_to_num(nan=math.inf))


def times(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Microseconds of one call, from replays of a graph that holds all of them."""
    import torch

    if not torch.cuda.is_available():
        begin = time.perf_counter()
        calls[0]()
        return [1e6 * (time.perf_counter() - begin)] * 2
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    results = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        results.append(1e3 * begin.elapsed_time(end) / len(calls))
    return results


def peak_memory(i: Inputs) -> float:
    """Peak bytes of a forward pass beyond the input, in feature tensors."""
    import torch

    if not torch.cuda.is_available():
        return math.nan
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward(i)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / i.x.nbytes


def registers(entry: Any) -> tuple[int, int]:
    """Registers and spilled bytes of the kernel of the iterations that ran last."""
    from alignmixup.ops.size_classes import HeldTiling
    from alignmixup.ops.triton import sinkhorn_held, sinkhorn_large, sinkhorn_rows

    kernel = sinkhorn_large._stream_kernel
    if entry is not None and isinstance(entry.rows, HeldTiling):
        kernel = sinkhorn_held._held_kernel
    elif entry is not None:
        is_streamed = entry.rows.block > 0
        kernel = sinkhorn_rows._streamed_kernel if is_streamed else sinkhorn_rows._shared_kernel
    try:
        compiled = list(kernel.device_caches[0][0].values())[-1]
        return int(compiled.n_regs), int(compiled.n_spills)
    except (AttributeError, IndexError, KeyError):  # interpreted, or another version of Triton
        return 0, 0


def measure(job: Job) -> Result:
    """Check one candidate, then time it."""
    import torch

    size, stage, entry = job
    switch(entry)
    i = setup(size)
    out, plan = forward(i)
    gradient = backward(i, plan)
    results = {"output": out, "plan": plan, "gradient": gradient}
    expected = dict(zip(results, reference(size), strict=True))
    errors = {name: relative_error(results[name], expected[name]) for name in results}
    result = Result(
        str(size),
        stage,
        label(stage, entry),
        output_error=errors["output"],
        plan_error=errors["plan"],
        gradient_error=errors["gradient"],
    )
    wrong = [f"{name} is off by {e:.1e}" for name, e in errors.items() if not e < TOLERANCES[name]]
    if any(not torch.equal(forward(i)[1], plan) for _ in range(3)):
        wrong.append("the plan has other bits each time")
    if wrong:
        return replace(result, failure=", ".join(wrong))
    memory = peak_memory(i)
    sets = [i, setup(size, 1), setup(size, 2)]
    forwards = times([functools.partial(forward, s) for s in sets], 20)
    boths = times([functools.partial(both, s) for s in sets], 20)
    cuts = statistics.quantiles(forwards, n=5)
    used, spills = registers(entry)
    return replace(
        result,
        forward_us=statistics.median(forwards),
        p20_us=cuts[0],
        p80_us=cuts[-1],
        both_us=statistics.median(boths),
        memory=memory,
        registers=used,
        spills=spills,
    )


# ---- the worker ----------------------------------------------------------------------------------


def serve(connection: Any) -> None:
    """Measure the jobs that arrive; end after an error, which may leave the GPU unusable."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.init()
    connection.send("ready")
    while True:
        size, stage, entry = job = connection.recv()
        try:
            connection.send(measure(job))
        except Exception as error:
            failure = one_line(error)
            connection.send(Result(str(size), stage, label(stage, entry), failure=failure))
            return


class Worker:
    """A process that measures candidates; replaced after a failure."""

    def __init__(self) -> None:
        self._process: Any = None

    def measure(self, job: Job) -> Result:
        size, stage, entry = job
        if self._process is None:
            self._start()
        try:
            self._connection.send(job)
            if not self._connection.poll(PATIENCE):
                raise TimeoutError(f"no result after {PATIENCE:.0f} s")
            result: Result = self._connection.recv()
        except (EOFError, OSError) as error:  # the process ended, or it hangs
            result = Result(str(size), stage, label(stage, entry), failure=one_line(error))
        if result.failure and math.isnan(result.output_error):  # it has ended, or it hangs
            self.end()
        return result

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other,), daemon=True)
        self._process.start()
        other.close()
        self._connection.recv()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def search(sizes: list[Size], deadline: float) -> Iterator[Result]:
    worker = Worker()
    for number, size in enumerate(sizes):
        # Every size has an equal share of what is left.
        end = time.monotonic() + (deadline - time.monotonic()) / (len(sizes) - number)
        present = worker.measure((size, "present", None))
        yield present
        best, best_result = default_entry(size), None
        for stage in ("rows", "cost", "mix"):
            for entry in candidates(size, stage, best)[: 1 if IS_SMOKE else None]:
                if time.monotonic() > end:
                    print(f"{size}: no time left for {stage} {label(stage, entry)}", flush=True)
                    continue
                result = worker.measure((size, stage, entry))
                yield result
                if result.failure:
                    continue
                if best_result is None or result.forward_us < best_result.forward_us:
                    best, best_result = entry, result
        print_winner(size, present, best, best_result)
    worker.end()


def print_winner(size: Size, present: Result, best: Any, result: Result | None) -> None:
    if result is None:
        print(f"WINNER {size}: the present kernels; no candidate is right", flush=True)
        return
    gain = present.forward_us / result.forward_us
    is_reached = "reached" if result.forward_us <= size.aim_us else "missed"
    print(
        f"WINNER {size}: {result.forward_us:.1f} us, {gain:.2f} times as fast as the present "
        f"{present.forward_us:.1f}; aim {size.aim_us:.0f} us {is_reached}; forward + backward "
        f"{result.both_us:.1f} (present {present.both_us:.1f}); memory {result.memory:.2f} "
        f"(present {present.memory:.2f})\n       {best}",
        flush=True,
    )


def stamp() -> dict[str, str]:
    import torch
    import triton

    is_gpu = torch.cuda.is_available()
    return {
        "hardware": torch.cuda.get_device_name() if is_gpu else "CPU, interpreted",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "num_iters": str(NUM_ITERS),
        "commit": os.environ.get("ALIGNMIXUP_COMMIT", ""),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="append rows to this CSV file")
    parser.add_argument("--seconds", type=float, default=170.0, help="start no candidate after")
    args = parser.parse_args()
    if not IS_SMOKE:
        compile_all(SIZES, min(MAX_COMPILE, args.seconds / 2))
    sizes = SMOKE_SIZES if IS_SMOKE else SIZES
    results = list(_printed(search(sizes, begin + args.seconds)))
    marks = stamp()
    is_new = not args.out.exists()
    with args.out.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Result)] + list(marks))
        if is_new:
            writer.writeheader()
        writer.writerows({**asdict(result), **marks} for result in results)
    print(f"{len(results)} rows in {args.out}, {time.monotonic() - begin:.0f} s")


def _printed(results: Iterator[Result]) -> Iterator[Result]:
    for result in results:
        print(result, flush=True)
        yield result


if __name__ == "__main__":
    main()
