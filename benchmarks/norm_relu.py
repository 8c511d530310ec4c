"""Batch norm and ReLU in training: our kernel against compiled torch, forward and backward.

    PYTHONPATH=src python benchmarks/norm_relu.py [--out FILE.csv]

Needs a CUDA device. Microseconds of one call, bf16, channels_last, medians of replays of a graph
that holds ten calls; torch's backward is what both take together less its forward.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from alignmixup.ops.triton import norm_relu as kernel

EPS = 1e-5
# The four stages of PreActResNet-18 at 32 pixels, the first at 64, and one of ResNet-50 at 224.
SHAPES = [
    (128, 64, 32, 32),
    (128, 128, 16, 16),
    (128, 256, 8, 8),
    (128, 512, 4, 4),
    (128, 64, 64, 64),
    (128, 256, 56, 56),
]


@dataclass(frozen=True)
class Row:
    shape: str
    by: str
    forward_us: float
    backward_us: float
    hardware: str
    torch: str = torch.__version__
    commit: str = os.environ.get("ALIGNMIXUP_COMMIT", "")
    date: str = datetime.datetime.now(datetime.UTC).date().isoformat()


def timed(call: Callable[[], Any], calls: int = 10, replays: int = 30) -> float:
    """Microseconds of a call, within a graph: no launch cost of the host's."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / calls)
    return round(statistics.median(times), 2)


@torch.compile(dynamic=False)  # or the second shape would be compiled for any
def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS))


def measure() -> Iterator[Row]:
    where = torch.cuda.get_device_name()
    for shape in SHAPES:
        torch.compiler.reset()  # past eight versions torch stops compiling, and says so in passing
        x, dy = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        x, dy = (t.to(memory_format=torch.channels_last) for t in (x, dy))
        weight, bias = (torch.randn(shape[1], device="cuda") for _ in range(2))
        _, mean, var = kernel.forward(x, weight, bias, EPS)
        size = "x".join(str(n) for n in shape)
        given = x, weight, bias
        saved = dy, x, weight, bias, mean, var
        for by, phases in (("kernel", kernel.BOTH), ("two launches", 1)):
            forward = timed(lambda g=given, p=phases: kernel.forward(*g, EPS, phases=p))
            backward = timed(lambda s=saved, p=phases: kernel.backward(*s, EPS, phases=p))
            yield Row(size, by, forward, backward, where)
        leaves = [t.clone().requires_grad_() for t in given]
        with torch.no_grad():
            forward = timed(lambda given=given: plain(*given))
        both = timed(lambda leaves=leaves, dy=dy: torch.autograd.grad(plain(*leaves), leaves, dy))
        yield Row(size, "torch", forward, round(both - forward, 2), where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="append rows to this CSV file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("the kernel runs on a CUDA device, and there is none")
    rows = []
    for row in measure():
        print(f"{row.shape:16} {row.by:13} {row.forward_us:8.2f} {row.backward_us:8.2f} us")
        rows.append(row)
    if args.out:
        is_new = not args.out.exists()
        with args.out.open("a", newline="") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow([f.name for f in fields(Row)])
            writer.writerows(astuple(row) for row in rows)


if __name__ == "__main__":
    main()
