"""What alignment costs against the number of positions, the batch and the iterations.

    PYTHONPATH=src python benchmarks/scaling.py [--out FILE.csv] [--plot FILE.png]
    PYTHONPATH=src python benchmarks/scaling.py --read FILE.csv --plot FILE.png

On a GPU if there is one. ``align_mix`` is cost, iterations and interpolation, ``sinkhorn`` the
iterations alone, by the solver ``auto`` takes; ``plain loop`` is the reference. POT's batched
log-domain solver and geomloss are timed where they are installed; geomloss anneals eps and chooses
the number of its iterations itself, so that its times do not depend on ours.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignmixup import align_mix, pairwise_cost, sinkhorn

EPS, CHANNELS = 0.1, 512
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POSITIONS = [4, 16, 49, 64, 100, 196, 256]
BATCHES = [16, 32, 64, 128, 256, 512]
ITERATIONS = [1, 10, 30, 100, 300, 1000]


@dataclass(frozen=True)
class Row:
    axis: str
    name: str
    r: int
    batch: int
    iters: int
    p20_ms: float
    p50_ms: float
    p80_ms: float
    hardware: str
    torch: str = torch.__version__
    commit: str = os.environ.get("ALIGNMIXUP_COMMIT", "")
    date: str = datetime.datetime.now(datetime.UTC).date().isoformat()


def features(r: int, batch: int) -> Tensor:
    """As after a ReLU, about as far apart as in a trained network."""
    rng = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(batch, CHANNELS, r, generator=rng, device=DEVICE).relu()
    return x * math.sqrt(256 / CHANNELS)


def calls(r: int, batch: int, iters: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    x = features(r, batch)
    perm = torch.arange(batch, device=DEVICE).roll(1)
    lam = torch.tensor(0.4, device=DEVICE)
    tokens = x.transpose(1, 2).to(torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    tokens = tokens.contiguous()
    cost = pairwise_cost(x, x[perm])
    settings: dict[str, Any] = {"eps": EPS, "num_iters": iters}
    yield "align_mix", lambda: align_mix(tokens, perm, lam, **settings)
    yield "sinkhorn", lambda: sinkhorn(cost, **settings)
    yield "plain loop", lambda: sinkhorn(cost, **settings, backend="reference")
    if importlib.util.find_spec("ot"):
        yield "POT", lambda: _by_pot(cost, iters)
    if importlib.util.find_spec("geomloss"):
        yield "geomloss", _by_geomloss(x.transpose(1, 2), x[perm].transpose(1, 2))


def _by_pot(cost: Tensor, iters: int) -> Any:
    import ot as pot

    b, n, m = cost.shape
    rows, columns = cost.new_full((b, n), 1 / n), cost.new_full((b, m), 1 / m)
    return pot.batch.bregman_log_projection_batch(
        -cost / EPS, rows, columns, max_iter=iters, tol=-1.0, grad="detach"
    )


def _by_geomloss(x: Tensor, y: Tensor) -> Callable[[], Any]:
    from geomloss import SamplesLoss

    # Its cost is half the squared distance and its eps the squared blur.
    loss = SamplesLoss(
        "sinkhorn", blur=math.sqrt(EPS / 2), debias=False, potentials=True, backend="tensorized"
    )
    x, y = x.contiguous(), y.contiguous()
    return lambda: loss(x, y)


def points() -> Iterator[tuple[str, int, int, int]]:
    yield from (("positions", r, 128, 100) for r in POSITIONS)
    yield from (("batch", 16, b, 100) for b in BATCHES)
    yield from (("iterations", 16, 128, i) for i in ITERATIONS)


def measure(budget: float) -> Iterator[Row]:
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or "CPU"
    for axis, r, batch, iters in points():
        for name, call in calls(r, batch, iters):
            times = timed(call, budget)
            cuts = statistics.quantiles(times, n=10, method="inclusive")
            yield Row(axis, name, r, batch, iters, *(round(cuts[k], 5) for k in (1, 4, 7)), where)


def timed(call: Callable[[], Any], budget: float) -> list[float]:
    """Milliseconds of a call, as often as ``budget`` seconds allow but thrice at least.

    By the clock, since the plain loops are many launches: launch costs are part of what they cost.
    """
    call()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < budget:
        _wait()
        begin = time.perf_counter()
        call()
        _wait()
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def plot(rows: list[Row], path: Path) -> None:
    """Draw a panel an axis; lines differ by color and by marker."""
    from alignmixup.figures.style import PALETTE, new_figure, save, use_style

    axes = {
        "positions": ("r", "positions r"),
        "batch": ("batch", "batch b (r = 16)"),
        "iterations": ("iters", "iterations (r = 16, b = 128)"),
    }
    with use_style("screen", (path.suffix.removeprefix("."),)):
        figure = new_figure(10.5, 3.8)
        panels = figure.subplots(1, 3, sharey=True)
        for panel, (axis, (field, label)) in zip(panels, axes.items(), strict=True):
            for k, name in enumerate(dict.fromkeys(r.name for r in rows)):
                line = [r for r in rows if r.axis == axis and r.name == name]
                xs, ys = [getattr(r, field) for r in line], [r.p50_ms for r in line]
                how = {"color": PALETTE[k], "marker": "os^Dv"[k % 5], "markersize": 5}
                panel.loglog(xs, ys, label=name, **how)
            ticks = sorted({getattr(r, field) for r in rows if r.axis == axis})
            # Neighbors whose numbers would touch share one.
            kept = [
                t for t, after in zip(ticks, [*ticks[1:], 10**9], strict=True) if after > 1.4 * t
            ]
            panel.set_xticks(kept, [f"{t:,}" for t in kept])
            panel.minorticks_off()
            panel.set_xlabel(label)
            panel.grid()
        panels[0].set_ylabel(f"ms, {rows[0].hardware}")
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=5)
        save(figure, path.with_suffix(""))


def read(path: Path) -> list[Row]:
    kinds = {f.name: {"int": int, "float": float}.get(str(f.type), str) for f in fields(Row)}
    with path.open(newline="") as file:
        return [Row(**{k: kinds[k](v) for k, v in row.items()}) for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write rows to this CSV file")
    parser.add_argument("--read", type=Path, help="take the rows from here, measure nothing")
    parser.add_argument("--plot", type=Path, help="draw them into this file")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds a point")
    args = parser.parse_args()
    rows = read(args.read) if args.read else list(measure(args.budget))
    if args.out:
        with args.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([f.name for f in fields(Row)])
            writer.writerows(astuple(row) for row in rows)
    for row in rows:
        print(f"{row.axis:10} {row.name:10} r {row.r:4} b {row.batch:4} i {row.iters:5} ", end="")
        print(f"{row.p50_ms:10.4f} ms")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
