"""Pictures of a run for the report page, kept in the run's folder (``report.artifacts``).

Decoded interpolations, transport plans, localization examples, confusions and certain mistakes.
What a run or its images do not allow is recorded with the reason.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignmixup.contracts import ImageSet
from alignmixup.evaluation.forward import check_finite
from alignmixup.experiments.decoding import DECODER, align_settings, mixed_layer, open_painter
from alignmixup.experiments.load import Run, load_run
from alignmixup.experiments.run_folder import read_recipe
from alignmixup.experiments.scoring import run_images
from alignmixup.figures.correspondences import aligned_pair
from alignmixup.figures.interpolations import interpolation
from alignmixup.figures.localization import localized_pictures
from alignmixup.figures.sources import different_pairs, floats, shown
from alignmixup.figures.style import Image
from alignmixup.report.artifacts import KINDS, read_artifact, write_artifact
from alignmixup.training.checkpoint import CHECKPOINT, read_facts

NUM_PAIRS = 4
NUM_MISTAKES = 12
NUM_IMAGES = 1000  # test images of the confusion matrix
MAX_POSITIONS = 256  # of a map whose plan is written out
SHARES = tuple(round(0.1 * i, 1) for i in range(11))
SIDE = 96  # pixels of a picture on the page, at most

Fields = dict[str, object]


@dataclass(frozen=True)
class _Subject:
    run: Run
    images: ImageSet
    seed: int

    def names(self, i: int, j: int) -> list[str]:
        return [self.images.class_names[int(self.images.labels[k])] for k in (i, j)]

    @torch.no_grad()
    def logits(self, rows: Sequence[int]) -> Tensor:
        """Return the logits of these images; raise if they are not finite."""
        device = next(self.run.model.parameters()).device
        parts = (rows[start : start + 250] for start in range(0, len(rows), 250))
        x = (floats(self.images, list(part)).to(device) for part in parts)
        logits = torch.cat([self.run.model(each).float().cpu() for each in x])
        check_finite(logits)
        return logits


def make_pictures(
    runs: Iterable[Path],
    data_root: Path | None = None,
    on_run: Callable[[Path], object] = lambda folder: None,
) -> None:
    """Make the pictures of the runs that have weights but no pictures yet.

    ``on_run`` is called with the folder of a run before its pictures are made.
    """
    for folder in runs:
        if (folder / CHECKPOINT).exists() and not has_pictures(folder):
            on_run(folder)
            write_pictures(folder, data_root=data_root)


def has_pictures(run: Path | str) -> bool:
    """Return whether the pictures of a run are there, made with its present weights.

    They are not if nothing could be made, or if a decoder has been trained since.
    """
    folder = Path(run)
    epoch = read_facts(folder / CHECKPOINT)["epoch"]
    made = {kind: read_artifact(folder, kind) for kind in KINDS}
    there = {kind: a for kind, a in made.items() if a is not None and a.get("epoch") == epoch}
    left_out = {kind for kind, artifact in there.items() if "left_out" in artifact}
    has_new_decoder = "interpolations" in left_out and (folder / DECODER).exists()
    return len(there) == len(KINDS) > len(left_out) and not has_new_decoder


def write_pictures(
    run: Path | str,
    *,
    images: ImageSet | None = None,
    data_root: Path | None = None,
    seed: int = 0,
    device: str = "auto",
) -> dict[str, str]:
    """Make the pictures that the report page shows of a run, and keep them in its folder.

    ``images`` are its test images, by default those of its data; ``seed`` chooses among them.

    Returns:
        The reason for each kind of picture that was left out.

    Raises:
        FileNotFoundError: If the folder holds no run, or no checkpoint yet.
    """
    folder = Path(run)
    common: Fields = {"run": read_recipe(folder).name}
    left_out: dict[str, str] = {}
    try:
        found = images or run_images(folder, data_root)
        size = found.images.shape[-1]
        opened = load_run(folder, num_classes=found.num_classes, image_size=size, device=device)
        subject = _Subject(opened, found, seed)
        common["epoch"] = opened.epoch
        subject.logits([0])  # or the reason why there is no picture of a diverged network
    except (FileNotFoundError, ValueError) as error:
        left_out = dict.fromkeys(KINDS, str(error))
        common["epoch"] = read_facts(folder / CHECKPOINT)["epoch"]
    for kind, make in _MAKERS.items():
        fields: Fields = {}
        if kind not in left_out:
            try:
                fields = make(subject)
            except (FileNotFoundError, ValueError) as error:
                left_out[kind] = str(error)
        if kind in left_out:
            fields = {"left_out": left_out[kind]}
        write_artifact(folder, kind, {**common, **fields})
    return left_out


def _interpolations(subject: _Subject) -> Fields:
    images, run = subject.images, subject.run
    device = str(next(run.model.parameters()).device)
    side = images.images.shape[-1]
    opened, painter = open_painter(run.folder, images.num_classes, side, device=device)
    eps, num_iters = align_settings(run.recipe.mixer)
    pairs = []
    for i, j in different_pairs(images, NUM_PAIRS, subject.seed):
        made = interpolation(painter, floats(images, [i, j]), SHARES, eps, num_iters)
        rows = {name: _png(np.concatenate(list(made.keep_first[name]), 1)) for name in _ROWS}
        first, second = _png(made.first), _png(made.second)
        pairs.append({"first": first, "second": second, "names": subject.names(i, j), "rows": rows})
    caption = f"decoded from {painter.layer}, positions of the first image kept"
    return {"caption": caption, "epoch": opened.epoch, "shares": list(SHARES), "pairs": pairs}


_ROWS = ("aligned", "unaligned")


def _transport(subject: _Subject) -> Fields:
    images, run = subject.images, subject.run
    layer = mixed_layer(run)
    eps, num_iters = align_settings(run.recipe.mixer)
    pairs: list[Mapping[str, object]] = []
    side = 0
    for i, j in different_pairs(images, NUM_PAIRS, subject.seed):
        made = aligned_pair(run.model, layer, images, i, j, eps, num_iters)
        positions = len(made.assignment)
        side = round(positions**0.5)
        if side * side != positions or positions > MAX_POSITIONS:
            raise ValueError(
                f"{layer} has {positions} positions; the page shows square maps of at most "
                f"{MAX_POSITIONS}"
            )
        plan = np.rint(1000 * made.assignment).astype(int).tolist()
        first, second = _png(made.first), _png(made.second)
        pairs.append({"first": first, "second": second, "names": subject.names(i, j), "plan": plan})
    caption = f"features at {layer}, eps {eps:g}, {num_iters} iterations"
    return {"caption": caption, "grid": [side, side], "pairs": pairs}


def _localization(subject: _Subject) -> Fields:
    from matplotlib import colormaps

    examples = [
        {
            "image": _png(picture.image),
            "heat": _png(colormaps["cividis"](picture.heat)[..., :3]),
            "size": list(picture.image.shape[:2]),
            "box": None if picture.box is None else list(picture.box),
            "true_boxes": [list(box) for box in picture.true_boxes],
            "iou": picture.iou,
            "caption": picture.caption,
        }
        for picture in localized_pictures(subject.run.model, subject.images, seed=subject.seed)
    ]
    return {"caption": "images drawn at random", "examples": examples}


def _confusion(subject: _Subject) -> Fields:
    images = subject.images
    rng = torch.Generator().manual_seed(subject.seed)
    chosen = torch.randperm(len(images), generator=rng)[:NUM_IMAGES].tolist()
    confidence, predicted = subject.logits(chosen).softmax(dim=1).max(dim=1)
    labels = images.labels[chosen].cpu()
    k = images.num_classes
    counts = (labels * k + predicted).bincount(minlength=k * k).view(k, k)
    wrong = (predicted != labels).nonzero().flatten()
    certain = wrong[confidence[wrong].argsort(descending=True)][:NUM_MISTAKES].tolist()
    mistakes = [
        {
            "image": _png(shown(floats(images, [chosen[i]])[0])),
            "true": images.class_names[int(labels[i])],
            "predicted": images.class_names[int(predicted[i])],
            "confidence": round(100 * float(confidence[i]), 1),
        }
        for i in certain
    ]
    return {
        "caption": f"{len(chosen):,} test images, {len(wrong):,} mistakes",
        "classes": list(images.class_names),
        "counts": counts.tolist(),
        "num_images": len(chosen),
        "mistakes": mistakes,
    }


_MAKERS: dict[str, Callable[[_Subject], Fields]] = {
    "interpolations": _interpolations,
    "transport": _transport,
    "localization": _localization,
    "confusion": _confusion,
}


def _png(picture: Image) -> str:
    """Encode a picture [h, w, 3] in [0, 1] as a data URI; its height is at most ``SIDE``."""
    from PIL import Image as Pil

    pixels: Any = Pil.fromarray(np.rint(255 * np.clip(picture, 0, 1)).astype(np.uint8))
    if pixels.height > SIDE:
        width = round(pixels.width * SIDE / pixels.height)
        pixels = pixels.resize((width, SIDE), Pil.Resampling.LANCZOS)
    buffer = io.BytesIO()
    pixels.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
