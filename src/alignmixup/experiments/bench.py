"""What each method costs: ms a training step, parameters, peak memory (the paper's Table 2).

A step is the engine's own, from the rows of the loader to the updated weights, on made-up images.
Each case of a mixer is timed by itself; a method's time is their mean by probability.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from alignmixup import datasets
from alignmixup.contracts import Draw, ImageSet, Mixer
from alignmixup.experiments.networks import build_net
from alignmixup.experiments.provenance import provenance
from alignmixup.mixers.stylecutmix import StyleCutMix
from alignmixup.mixers.stylemix import StyleMix
from alignmixup.ops.adain import save_adain, small_adain
from alignmixup.recipes.catalogue import find_recipe
from alignmixup.recipes.schema import Recipe, changed
from alignmixup.training.device import compute_for, pick_device
from alignmixup.training.steps import (
    WARM_UP_STEPS,
    PlainStep,
    Step,
    make_optimizer,
    make_step,
    prepared,
    trying_convolutions,
)

__all__ = ["SHAPES", "CaseTime", "MethodTime", "bench", "check_rows", "write_rows"]

# Image side and number of classes.
SHAPES = {
    "cifar10": (32, 10),
    "cifar100": (32, 100),
    "tiny": (64, 200),
    "imagenet": (224, 1000),
    "cub200": (224, 200),
}
REPEATS = 50


@dataclass(frozen=True)
class CaseTime:
    """Milliseconds of one case: the 20th, 50th and 80th percentile."""

    case: str
    probability: float
    p20: float
    p50: float
    p80: float


@dataclass(frozen=True)
class MethodTime:
    """What one method costs."""

    recipe: str
    cases: tuple[CaseTime, ...]
    num_parameters: int
    peak_memory_mb: float | None
    step_path: str

    def mean(self, percentile: Literal["p20", "p50", "p80"] = "p50") -> float:
        """Milliseconds a step, the cases weighted by their probabilities."""
        return float(sum(c.probability * getattr(c, percentile) for c in self.cases))


def bench(
    names: Iterable[str],
    *,
    changes: dict[str, object] | None = None,
    repeats: int = REPEATS,
) -> Iterator[MethodTime]:
    """Time one training step of each recipe named."""
    for name in names:
        yield time_recipe(changed(find_recipe(name), changes or {}), repeats)


def time_recipe(recipe: Recipe, repeats: int) -> MethodTime:
    """Time every case of one recipe on made-up images of its data's size."""
    mixer = recipe.mixer
    if isinstance(mixer, StyleMix | StyleCutMix) and not mixer.weights:
        # Untrained weights take the same time.
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "style.safetensors")
            style = small_adain(rng=torch.Generator().manual_seed(0))
            num_classes = SHAPES[recipe.data.name][1]
            style.class_distances = torch.ones(num_classes, num_classes)
            save_adain(style, path)
            styled = dataclasses.replace(mixer, weights=path)
            return time_recipe(dataclasses.replace(recipe, mixer=styled), repeats)
    side, num_classes = SHAPES[recipe.data.name]
    device = pick_device(recipe.train.device)
    images = _made_up(recipe.data.name, side, num_classes, 2 * recipe.train.batch_size)
    net = build_net(recipe, images, device).train()
    # Streams, events and memory are those of the current device, which must be the network's.
    with torch.cuda.device_of(next(net.parameters())), trying_convolutions():  # type: ignore[no-untyped-call]
        return _time_net(recipe, net, images, device, repeats)


def _time_net(
    recipe: Recipe, net: nn.Module, images: ImageSet, device: torch.device, repeats: int
) -> MethodTime:
    settings, is_cuda = recipe.train, device.type == "cuda"
    is_last = compute_for(settings, device).channels_last
    b = settings.batch_size
    loader = datasets.DeviceLoader(images, b, 0, device, drop_last=True, channels_last=is_last)
    optimizer = make_optimizer(net, settings)
    plain = PlainStep(prepared(net, settings), recipe.mixer, optimizer, settings, loader.gather)
    step = make_step(plain, device)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    rows = loader.rows(0)[:b]
    cases = tuple(
        CaseTime(case, share, *_percentiles(_time_case(step, rows, draw, device, repeats)))
        for case, share, draw in _draws(recipe.mixer, b)
    )
    peak = torch.cuda.max_memory_allocated() / 2**20 if is_cuda else None
    return MethodTime(recipe.name, cases, _count(net), peak, step.path)


def check_rows(path: Path) -> None:
    """Raise where ``write_rows`` could not append to the file: better before hours of timing."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder of {path} does not exist: make it, or other --out")
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        there = next(csv.reader(file), [])
    if there != _header():
        raise ValueError(f"{path} has other columns ({', '.join(there)}): choose another --out")


def _header() -> list[str]:
    times = [field.name for field in dataclasses.fields(CaseTime)]
    return ["recipe", *times, "num_parameters", "peak_memory_mb", "step_path", *provenance()]


def write_rows(path: Path, measured: Iterable[MethodTime]) -> None:
    """Append one row a case to a CSV file, with where it was measured."""
    check_rows(path)
    is_new = not path.exists()
    where = {k: str(v) for k, v in provenance().items()}
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(_header())
        for method in measured:
            peak = "" if method.peak_memory_mb is None else f"{method.peak_memory_mb:.0f}"
            for c in method.cases:
                times = [f"{t:.4f}" for t in (c.p20, c.p50, c.p80)]
                tail = (method.num_parameters, peak, method.step_path, *where.values())
                writer.writerow((method.recipe, c.case, f"{c.probability:.4f}", *times, *tail))


def _draws(mixer: Mixer, batch_size: int) -> Iterator[tuple[str, float, Draw]]:
    """One draw of each case."""
    rng = torch.Generator().manual_seed(0)
    for case, share in mixer.cases.items():
        draw = mixer.draw(batch_size, rng)
        while draw.case != case:
            draw = mixer.draw(batch_size, rng)
        yield case, share, draw


def _time_case(
    step: Step, rows: torch.Tensor, draw: Draw, device: torch.device, repeats: int
) -> list[float]:
    for _ in range(WARM_UP_STEPS + 5):
        step((rows,), draw)
    if device.type != "cuda":
        return [_wall(step, rows, draw) for _ in range(repeats)]
    # Ten steps an interval: the clock is finer than one step, and the queue never runs dry.
    marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(10):
            step((rows,), draw)
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 10 for a, b in itertools.pairwise(marks)]


def _wall(step: Step, rows: torch.Tensor, draw: Draw) -> float:
    begin = time.perf_counter()
    step((rows,), draw)
    return 1e3 * (time.perf_counter() - begin)


def _percentiles(times: list[float]) -> tuple[float, float, float]:
    p20, p50, p80 = torch.tensor(times).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return p20, p50, p80


def _made_up(name: str, side: int, num_classes: int, count: int) -> ImageSet:
    rng = torch.Generator().manual_seed(0)
    return ImageSet(
        name,
        "train",
        torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=rng),
        torch.randint(num_classes, (count,), generator=rng),
        tuple(str(i) for i in range(num_classes)),
        (0.5, 0.5, 0.5),
        (0.25, 0.25, 0.25),
    )


def _count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())
