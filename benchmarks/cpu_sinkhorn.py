"""Time of the solvers on a processor, beside POT's batched log-domain one, at equal accuracy.

    PYTHONPATH=src python benchmarks/cpu_sinkhorn.py [--threads 1] [--out FILE.csv]

Solvers take turns, so that a busy machine is busy for all of them; a row holds p20, p50 and p80 of
the time, the least, and the largest error of n P against the float64 reference.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import ot as pot
import torch
from torch import Tensor

from alignmixup.ops import _absorbed, _reference
from alignmixup.ops.cost import pairwise_cost

BATCH, EPS, NUM_ITERS, CHANNELS = 128, 0.1, 100, 512
SIZES = [16, 49, 64, 196]
COLUMNS = "name,r,batch,iters,p20_ms,p50_ms,p80_ms,min_ms,error,hardware,torch,threads,commit,date"


def setup(r: int) -> Tensor:
    """Costs between features as after a ReLU, about as far apart as in a trained network."""
    rng = torch.Generator().manual_seed(r)
    a, b = torch.randn(2, BATCH, CHANNELS, r, generator=rng).relu() * math.sqrt(256 / CHANNELS)
    return pairwise_cost(a, b)


def solve_by_pot(cost: Tensor) -> Tensor:
    b, n, m = cost.shape
    rows, columns = cost.new_full((b, n), 1 / n), cost.new_full((b, m), 1 / m)
    # A negative tolerance is never met: all iterations are done.
    result = pot.batch.bregman_log_projection_batch(
        -cost / EPS, rows, columns, max_iter=NUM_ITERS, tol=-1.0, grad="detach"
    )
    plan: Tensor = result["T"]
    return plan


SOLVERS: dict[str, Callable[[Tensor], Tensor]] = {
    "absorbed": lambda cost: _absorbed.solve(cost, EPS, NUM_ITERS, None, "columns")[0],
    "reference": lambda cost: _reference.solve(cost, EPS, NUM_ITERS, None, "columns")[0],
    "POT log-domain": solve_by_pot,
}


def measure(r: int, budget: float) -> dict[str, list[float]]:
    """Milliseconds of each solver, in turns, for about ``budget`` seconds but thrice at least."""
    cost = setup(r)
    times: dict[str, list[float]] = {name: [] for name in SOLVERS}
    start = time.perf_counter()
    while len(times["absorbed"]) < 3 or time.perf_counter() - start < budget:
        for name, solve in SOLVERS.items():
            begin = time.perf_counter()
            solve(cost)
            times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds a size")
    parser.add_argument("--out", type=Path, help="append rows to this CSV file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    commit = os.environ.get("ALIGNMIXUP_COMMIT", "")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    rows = []
    for r in SIZES:
        exact, _ = _reference.solve(setup(r).double(), EPS, NUM_ITERS, None, "columns")
        for name, times in measure(r, args.budget).items():
            error = (r * (SOLVERS[name](setup(r)) - exact)).abs().max().item()
            cuts = statistics.quantiles(times, n=10, method="inclusive")
            values = [round(x, 3) for x in (cuts[1], cuts[4], cuts[7], min(times))]
            where = [processor(), torch.__version__, args.threads, commit, date]
            rows.append([name, r, BATCH, NUM_ITERS, *values, f"{error:.1e}", *where])
            print(name, r, *values, f"error {error:.1e}", flush=True)
    if args.out:
        is_new = not args.out.exists()
        with args.out.open("a", newline="") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(COLUMNS.split(","))
            writer.writerows(rows)


if __name__ == "__main__":
    main()
