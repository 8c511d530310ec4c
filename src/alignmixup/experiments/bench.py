"""The cost of each method: ms per training step, parameters, peak memory (the paper's Table 2).

A step is the trainer's, from the rows of the loader to the updated weights, on random images. Each
case of a mixer is timed by itself; the time of a method is their mean, weighted by probability.
"""

from __future__ import annotations

import csv
import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from alignmixup import datasets
from alignmixup.contracts import Draw, ImageSet
from alignmixup.device import (
    compute_for,
    current_device,
    fast_convolutions,
    is_gpu,
    peak_memory_mb,
    pick_device,
    reset_peak_memory,
    time_calls,
)
from alignmixup.evaluation.tasks.step_cost import count_parameters, draw_each_case
from alignmixup.experiments.networks import build_net
from alignmixup.experiments.provenance import provenance
from alignmixup.files import writing
from alignmixup.mixers.stylemix import StyleMixer
from alignmixup.ops.adain import save_adain, small_adain
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.schema import Recipe, changed
from alignmixup.training.optim import make_optimizer
from alignmixup.training.progress import duration
from alignmixup.training.steps import WARM_UP_STEPS, PlainStep, Step, make_step, prepared

REPEATS = 50
# Steps per interval on a GPU: its queue never runs dry.
GPU_CALLS = 10


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
    """The cost of one method."""

    recipe: str
    cases: tuple[CaseTime, ...]
    num_parameters: int
    peak_memory_mb: float | None
    step_path: str

    def mean(self, percentile: Literal["p20", "p50", "p80"] = "p50") -> float:
        """Return milliseconds per step, the cases weighted by their probabilities."""
        return float(sum(c.probability * getattr(c, percentile) for c in self.cases))


def bench(
    names: Iterable[str],
    *,
    changes: dict[str, object] | None = None,
    repeats: int = REPEATS,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[MethodTime]:
    """Time one training step of each recipe; ``say`` gets an estimate after its first steps."""
    for name in names:
        yield time_recipe(changed(find_recipe(name), changes or {}), repeats, say)


def time_recipe(
    recipe: Recipe, repeats: int, say: Callable[[str], None] = lambda line: None
) -> MethodTime:
    """Time every case of one recipe on random images of its data's size."""
    mixer, entry = recipe.mixer, datasets.find(recipe.data.name)
    side, num_classes = entry.image_size, entry.num_classes
    if num_classes is None:
        raise ValueError(f"the classes of {entry.name} depend on its files: bench other data")
    if isinstance(mixer, StyleMixer) and not mixer.weights:
        # Untrained weights take the same time.
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "style.safetensors")
            style = small_adain(rng=torch.Generator().manual_seed(0))
            style.class_distances = torch.ones(num_classes, num_classes)
            save_adain(style, path)
            styled = dataclasses.replace(mixer, weights=path)
            return time_recipe(dataclasses.replace(recipe, mixer=styled), repeats, say)
    device = pick_device(recipe.train.device)
    images = _random_images(recipe.data.name, side, num_classes, 2 * recipe.train.batch_size)
    net = build_net(recipe, images, device)
    net.train()
    with current_device(device), fast_convolutions():
        return _time_net(recipe, net, images, device, repeats, say)


def _time_net(
    recipe: Recipe,
    net: nn.Module,
    images: ImageSet,
    device: torch.device,
    repeats: int,
    say: Callable[[str], None],
) -> MethodTime:
    settings = recipe.train
    is_last = compute_for(settings, device).channels_last
    b = settings.batch_size
    loader = datasets.DeviceLoader(images, b, 0, device, drop_last=True, channels_last=is_last)
    rows = loader.rows(0)[:b]
    mixer = recipe.mixer.attach(net, loader.gather(rows)[0])
    optimizer = make_optimizer(net, settings, mixer)
    plain = PlainStep(prepared(net, settings), mixer, optimizer, settings, loader.gather)
    step = make_step(plain, device)
    reset_peak_memory(device)
    draws = {draw.case: draw for draw in draw_each_case(mixer, b // settings.accumulate, seed=0)}
    # On a CPU a step may take seconds, and nothing is tuned or captured.
    num_warm, calls = (WARM_UP_STEPS + 4, GPU_CALLS) if is_gpu(device) else (1, 1)
    for draw in draws.values():
        for _ in range(num_warm):
            step((rows,), draw)
    # Nothing is timed before all cases are compiled: where several recipes share a GPU, they take
    # turns from here on. One step of each case, in ms:
    pace = sum(sum(time_calls(partial(step, (rows,), d), device, 1)) for d in draws.values())
    steps, remaining = repeats * calls * len(draws), repeats * calls * pace / 1e3
    say(f"{steps} steps of {pace / len(draws):.3g} ms, about {duration(remaining)}")
    cases = tuple(
        _time_case(step, rows, draws[case], share, device, repeats)
        for case, share in mixer.cases.items()
        if case in draws
    )
    num_parameters, _ = count_parameters(net)
    return MethodTime(recipe.name, cases, num_parameters, peak_memory_mb(device), step.path)


def check_rows(path: Path) -> None:
    """Raise if ``write_rows`` could not append to the file; called before hours of timing."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder of {path} does not exist: create it first")
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
    """Append one row per case to a CSV file, with its provenance."""
    check_rows(path)
    is_new = not path.exists()
    where = {k: str(v) for k, v in provenance().items()}
    with writing(path), path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(_header())
        for method in measured:
            peak = "" if method.peak_memory_mb is None else f"{method.peak_memory_mb:.0f}"
            for c in method.cases:
                times = [f"{t:.4f}" for t in (c.p20, c.p50, c.p80)]
                tail = (method.num_parameters, peak, method.step_path, *where.values())
                writer.writerow((method.recipe, c.case, f"{c.probability:.4f}", *times, *tail))


def _time_case(
    step: Step, rows: torch.Tensor, draw: Draw, share: float, device: torch.device, repeats: int
) -> CaseTime:
    times = time_calls(lambda: step((rows,), draw), device, repeats, gpu_calls=GPU_CALLS)
    p20, p50, p80 = torch.tensor(times).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return CaseTime(draw.case, share, p20, p50, p80)


def _random_images(name: str, side: int, num_classes: int, count: int) -> ImageSet:
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
