"""Time of a training step of each method, CIFAR R-18 at batch 128, over that of the baseline.

    PYTHONPATH=src python benchmarks/competitors.py [--out benchmarks/competitors.csv]
        [--methods puzzlemix comixup] [--profile comixup] [--solvers] [--sweep]

The step is the engine's own, compiled and captured as a CUDA graph (``alignmixup bench`` times the
same); a method's time is the mean of its cases by probability. ``--solvers`` times the solvers of
PuzzleMix and Co-Mixup alone, kernels and reference, from replays of a graph; ``--profile`` prints
the kernels of one method's steps. A method that fails says so, and the others go on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from alignmixup.contracts import Draw
from alignmixup.experiments import bench
from alignmixup.experiments.bench import CaseTime, MethodTime, write_rows
from alignmixup.mixers.comixup import CoMixup
from alignmixup.mixers.puzzlemix import PuzzleMix
from alignmixup.ops.gridcut import cut_ordered
from alignmixup.ops.puzzle import puzzle_energy, transport
from alignmixup.recipes.catalog import find_recipe

# The ones with kernels of their own come last: after a fault on the device nothing else would run.
METHODS = (
    "baseline",
    "input",
    "cutout",
    "cutmix",
    "manifold",
    "saliencymix",
    "stylemix",
    "stylecutmix",
    "alignmixup",
    "alignmixup-ae",
    "puzzlemix",
    "comixup",
)
BATCH, SIDE = 128, 32


def time_methods(methods: list[str], data: str, repeats: int, out: Path | None) -> None:
    """Time each method, print its ratio to the baseline, and append its rows at once."""
    base: float | None = None
    print(f"{'method':16}{'ms a step':>12}{'p20':>9}{'p80':>9}{'x baseline':>12}  cases")
    for method in methods:
        begin = time.perf_counter()
        try:
            timed = bench.time_recipe(find_recipe(f"{data}-r18-{method}"), repeats)
        except Exception:
            traceback.print_exc(limit=-3)
            print(f"{method:16}{'failed':>12}", flush=True)
            continue
        if out is not None:
            write_rows(out, [timed])
        base = timed.mean() if method == "baseline" else base
        ratio = f"{timed.mean() / base:.3f}" if base else "-"
        cases = " ".join(f"{c.case}:{c.p50:.3f}" for c in timed.cases)
        print(
            f"{method:16}{timed.mean():12.3f}{timed.mean('p20'):9.3f}{timed.mean('p80'):9.3f}"
            f"{ratio:>12}  {cases}  [{timed.step_path}; {time.perf_counter() - begin:.0f} s]",
            flush=True,
        )
        torch.cuda.empty_cache()


def profile(method: str, data: str, num_kernels: int = 25, num_steps: int = 10) -> None:
    """Print the kernels that take most of a step's time, case by case."""

    def print_kernels(step: Any, rows: Tensor, draw: Draw, *_: object) -> list[float]:
        for _ in range(bench.WARM_UP_STEPS + 5):
            step((rows,), draw)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as trace:
            for _ in range(num_steps):
                step((rows,), draw)
            torch.cuda.synchronize()
        events = [e for e in trace.key_averages() if e.self_device_time_total > 0]
        total = sum(e.self_device_time_total for e in events) / num_steps
        launches = sum(e.count for e in events) // num_steps
        print(f"{method}, case {draw.case}: {total:.0f} us in {launches} kernels a step")
        for e in sorted(events, key=lambda e: -e.self_device_time_total)[:num_kernels]:
            each = e.self_device_time_total / num_steps
            print(f"  {each:8.1f} us {e.count / num_steps:7.1f} x  {e.key[:100]}")
        return [0.0, 0.0]

    original, bench._time_case = bench._time_case, print_kernels
    try:
        bench.time_recipe(find_recipe(f"{data}-r18-{method}"), 1)
    finally:
        bench._time_case = original


# ---- the solvers alone ---------------------------------------------------------------------------


def smooth_saliency(seed: int) -> Tensor:
    """Made-up maps with a few bright places, as gradients of a network have them."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(BATCH, 1, 8, 8, generator=rng) ** 3
    maps = F.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear")
    return (maps * torch.rand(BATCH, 1, SIDE, SIDE, generator=rng)).squeeze(1).cuda()


def solvers() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and call of each solver on a batch of its own."""
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(BATCH, 3, SIDE, SIDE, generator=rng).cuda()
    perm, lam = torch.randperm(BATCH, generator=rng).cuda(), torch.tensor(0.6).cuda()
    maps = smooth_saliency(0)
    for n in (2, 4, 8, 16):
        e = puzzle_energy(x, maps, perm, lam, num_blocks=n)
        pair, places = torch.cat([x, x[perm]]), max(n, 8)
        salient = F.avg_pool2d(maps.unsqueeze(1), SIDE // places).squeeze(1)
        salient = torch.cat([salient, salient[perm]])
        salient = salient / salient.sum((1, 2), keepdim=True)
        mask = cut_ordered(e.unary, e.down, e.right, backend="reference").labels > 0
        mask = mask.repeat_interleave(places // n, 1).repeat_interleave(places // n, 2)
        is_shown = torch.cat([mask, ~mask])
        yield (
            f"puzzlemix energy {n}x{n}",
            lambda n=n: puzzle_energy(x, maps, perm, lam, num_blocks=n),
        )
        for backend in ("triton", "reference"):
            yield (
                f"puzzlemix cut {n}x{n} {backend}",
                lambda e=e, b=backend: cut_ordered(e.unary, e.down, e.right, backend=b),
            )
            if n >= 8:
                yield (
                    f"puzzlemix transport {n}x{n} {backend}",
                    lambda p=pair, s=salient, i=is_shown, b=backend: transport(p, s, i, backend=b),
                )
        mixer = PuzzleMix(grids=(n,))
        draw = Draw(str(n), perm, lam)
        yield (
            f"puzzlemix mask {n}x{n}",
            lambda m=mixer, d=draw, n=n: m.mask(x, maps, d, n),
        )
    for backend in ("triton", "reference"):
        mixer = CoMixup(backend=backend)
        draw = mixer.draw(BATCH, rng).to("cuda")
        yield f"comixup shares {backend}", lambda m=mixer, d=draw: m.shares(maps, d)


def time_solvers(out: Path | None) -> None:
    for name, call in solvers():
        try:
            times = replay_times(call)
        except Exception:
            traceback.print_exc(limit=-3)
            print(f"{name:36}{'failed':>12}", flush=True)
            continue
        print(f"{name:36}{1e3 * statistics.median(times):12.1f} us", flush=True)
        if out is not None:
            cuts = statistics.quantiles(times, n=10, method="inclusive")
            case = CaseTime("solver", 1.0, cuts[1], cuts[4], cuts[7])
            write_rows(out, [MethodTime(name, (case,), 0, None, "captured")])


def replay_times(call: Callable[[], Any], calls: int = 4, repeats: int = 20) -> list[float]:
    """Milliseconds of one call, from replays of a graph that holds several."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return times[3:]


def sweep() -> None:
    """Times of the joint assignment with other numbers of warps than the one in the code."""
    from alignmixup.ops.triton import joint as _triton_joint

    chosen = _triton_joint.NUM_WARPS
    mixer, maps = CoMixup(), smooth_saliency(0)
    draw = mixer.draw(BATCH, torch.Generator().manual_seed(0)).to("cuda")
    for warps in (1, 2, 4, 8):
        _triton_joint.NUM_WARPS = warps
        median = statistics.median(replay_times(lambda: mixer.shares(maps, draw)))
        print(f"comixup shares by {warps} warps: {1e3 * median:.1f} us", flush=True)
    _triton_joint.NUM_WARPS = chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", nargs="*", default=METHODS, help="which methods to time")
    parser.add_argument("--data", default="cifar100", choices=["cifar10", "cifar100"])
    parser.add_argument("--repeats", type=int, default=20, help="intervals of ten steps a case")
    parser.add_argument("--solvers", action="store_true", help="time the solvers alone as well")
    parser.add_argument("--sweep", action="store_true", help="also try other launch settings")
    parser.add_argument("--profile", metavar="METHOD", help="print the kernels of this method")
    parser.add_argument("--out", type=Path, help="append rows to this CSV file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device; 'alignmixup bench' times steps on a CPU")
    if args.solvers:
        time_solvers(args.out)
    if args.sweep:
        sweep()
    if args.profile:
        profile(args.profile, args.data)
    time_methods(list(args.methods), args.data, args.repeats, args.out)


if __name__ == "__main__":
    main()
