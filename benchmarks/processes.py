"""Training steps of several processes, and a model of their time on N GPUs.

    PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/processes.py [--out FILE.csv]
    PYTHONPATH=src python benchmarks/processes.py --model

The first times the step of the trainer (AlignMixup, PreActResNet-18, one thread a process) and an
all-reduce of as many bytes as the gradients have. The second prints the model's table for H200s.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.models.zoo import NetSpec, build
from alignmixup.training import TrainSettings, join_team
from alignmixup.training.optim import make_optimizer
from alignmixup.training.steps import Batches, PlainStep

SHARE = 16  # images of a process


@dataclass(frozen=True)
class Row:
    """One measurement; times in milliseconds."""

    processes: int
    share: int
    parameters: int
    step_p20: float
    step_p50: float
    step_p80: float
    all_reduce_p50: float
    images_per_second: float
    cores: int
    torch: str
    date: str


@dataclass(frozen=True)
class Network:
    """What the model knows of a training step on one GPU."""

    name: str
    step_ms: float
    parameters: int


# Medians of captured steps of AlignMixup at batch 128, bf16 (docs/speed.md).
NETWORKS = [
    Network("PreActResNet-18, 32 px", 2.17, 11_171_274),
    Network("ResNet-50, 224 px", 19.31, 25_557_032),
]


def predict_ms(net: Network, size: int, gigabytes_per_second: float, latency_us: float) -> float:
    """Step time of ``size`` GPUs at the same batch each.

    t = t_forward + max(t_backward, t_reduce) + t_last,  t_forward = t_step / 3

    t_reduce = 2 (N - 1) / N * bytes / bandwidth + 2 (N - 1) * latency is a ring all-reduce of
    float32 gradients, overlapped with the backward pass. The last bucket (at most 25 MiB) is ready
    only when that ends, so its share of t_reduce, t_last, is not hidden where the rest is.
    """
    if size == 1:
        return net.step_ms
    num_bytes = 4 * net.parameters
    reduce = 2 * (size - 1) / size * num_bytes / (gigabytes_per_second * 1e6)
    reduce += 2 * (size - 1) * latency_us / 1e3
    last = reduce * min(1.0, 25 * 2**20 / num_bytes)
    forward, backward = net.step_ms / 3, net.step_ms * 2 / 3
    return forward + max(backward, reduce - last) + last


def print_model() -> None:
    """Print the step times and efficiencies for NVLink and for one 400 Gb/s port a GPU."""
    links = {"NVLink": (350.0, 3.0), "InfiniBand": (45.0, 5.0)}
    for net in NETWORKS:
        for link, (bandwidth, latency) in links.items():
            for size in (2, 4, 8, 16, 32, 64):
                if link == "NVLink" and size > 8:
                    continue
                predicted = predict_ms(net, size, bandwidth, latency)
                share = 100 * net.step_ms / predicted
                print(f"{net.name} | {link} | {size} | {predicted:.2f} ms | {share:.0f} %")


def measure(num_steps: int) -> Row:
    """Time steps and all-reduces in this process, with all others at work."""
    torch.set_num_threads(1)
    team, device = join_team(torch.device("cpu"))
    batch_size = SHARE * team.size
    images = shapes("train", 2 * batch_size)
    net = build(NetSpec("preact_resnet18", width=16), 10, images.mean, images.std, 32, seed=0)
    settings, mixer = TrainSettings(batch_size=batch_size, milestones=()), AlignMixup()
    loader = DeviceLoader(images, batch_size, 0, device, drop_last=True)
    batches, rng = Batches(loader, team), torch.Generator().manual_seed(0)
    module = team.wrap(net, uses_all=True)
    step = PlainStep(
        module, mixer, make_optimizer(net, settings), settings, loader.gather, team=team
    )
    batch = next(batches.of(0, 0))
    steps = _times(lambda: step(batch, mixer.draw(SHARE, rng)), num_steps)
    parameters = sum(p.numel() for p in net.parameters())
    flat = torch.zeros(parameters)
    reduces = _times(lambda: dist.all_reduce(flat) if team.size > 1 else None, num_steps)
    p20, p50, p80 = (statistics.quantiles(steps, n=10)[i] for i in (1, 4, 7))
    return Row(
        processes=team.size,
        share=SHARE,
        parameters=parameters,
        step_p20=round(p20, 2),
        step_p50=round(p50, 2),
        step_p80=round(p80, 2),
        all_reduce_p50=round(statistics.median(reduces), 3) if team.size > 1 else 0.0,
        images_per_second=round(1e3 * batch_size / p50, 1),
        cores=os.cpu_count() or 0,
        torch=f"{torch.__version__}, {platform.machine()}",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _times(call: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each call, after three that are not counted."""
    times = []
    for number in range(count + 3):
        begin = time.perf_counter()
        call()
        if number >= 3:
            times.append(1e3 * (time.perf_counter() - begin))
    return times


def main() -> None:
    """Measure, or print the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", action="store_true")
    args = parser.parse_args()
    if args.model:
        print_model()
        return
    row = measure(args.steps)
    if dist.is_initialized() and dist.get_rank():
        return
    print(row)
    if args.out is not None:
        is_new = not args.out.exists()
        with args.out.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*asdict(row)])
            if is_new:
                writer.writeheader()
            writer.writerow(asdict(row))


if __name__ == "__main__":
    main()
