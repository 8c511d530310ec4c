"""A training step of DistributedDataParallel on NCCL, compiled, and captured as a CUDA graph.

    PYTHONPATH=src torchrun --nproc-per-node 1 benchmarks/nccl.py cifar100-r18-alignmixup-fast \
        --out FILE.csv

With one process there is nothing to average, so its times show what wrapping costs and what capture
saves; with N processes, each with the batch of the recipe, also the communication. The steps of
each kind begin with the same weights and draws: the losses must agree.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from alignmixup import datasets
from alignmixup.device import fast_convolutions, time_calls
from alignmixup.experiments.bench import _random_images
from alignmixup.experiments.networks import build_net
from alignmixup.experiments.provenance import provenance
from alignmixup.recipes.catalog import find_recipe
from alignmixup.training.distributed import Team, wrapped
from alignmixup.training.optim import make_optimizer
from alignmixup.training.steps import CapturedStep, PlainStep, capture_stream, prepared

NUM_STEPS = 60
KINDS = ["captured", "DDP", "DDP, captured"]


def time_kind(name: str, kind: str, team: Team, repeats: int) -> dict[str, object]:
    """Train some steps and time more; return a row."""
    recipe = find_recipe(name)
    device = torch.device("cuda", torch.cuda.current_device())
    entry, settings = datasets.find(recipe.data.name), recipe.train
    b, num_classes = settings.batch_size, entry.num_classes
    assert num_classes is not None
    images = _random_images(recipe.data.name, entry.image_size, num_classes, 2 * b)
    torch.manual_seed(0)
    net = build_net(recipe, images, device).train()
    loader = datasets.DeviceLoader(images, b, team.rank, device, drop_last=True, channels_last=True)
    mixer = recipe.mixer.attach(net, loader.gather(loader.rows(0)[:b])[0])
    optimizer = make_optimizer(net, settings, mixer)
    stream = capture_stream(device) if kind.endswith("captured") else None
    with torch.cuda.stream(stream):
        inner = net if kind == "captured" else wrapped(net, uses_all=mixer.trains_all)
        module = prepared(inner, settings)
    plain = PlainStep(module, mixer, optimizer, settings, loader.gather, team=team)
    take = CapturedStep(plain, device, stream) if stream else plain
    rng = torch.Generator().manual_seed(0)
    draws = [mixer.draw(b, rng) for _ in range(NUM_STEPS)]
    rows = [loader.rows(i)[:b] for i in range(8)]
    losses = torch.stack([take((rows[i % 8],), draw) for i, draw in enumerate(draws)]).cpu()
    last = {draw.case: draw for draw in draws}
    times = {case: _median(lambda: take((rows[0],), draw), repeats) for case, draw in last.items()}  # noqa: B023
    return {
        "recipe": name,
        "processes": team.size,
        "kind": kind,
        "ms": round(sum(share * times[case] for case, share in mixer.cases.items()), 4),
        "first_loss": round(float(losses[:10].mean()), 4),
        "loss": round(float(losses[-10:].mean()), 4),
        "step_path": take.path,
    }


def _median(call: Callable[[], object], repeats: int) -> float:
    times = sorted(time_calls(call, torch.device("cuda"), repeats, gpu_calls=10))
    return float(times[len(times) // 2])


def main() -> None:
    """Time the three kinds of steps and append the rows of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    team = Team(dist.get_rank(), dist.get_world_size())
    with fast_convolutions():
        rows = []
        for name in args.recipes:
            for kind in KINDS:
                rows.append(time_kind(name, kind, team, args.repeats) | provenance())
                print(*rows[-1].values(), flush=True)
    if team.is_rank_zero:
        is_new = not args.out.exists()
        with args.out.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            if is_new:
                writer.writeheader()
            writer.writerows(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
