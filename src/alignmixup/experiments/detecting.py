"""Transfer to detection: a detector on the backbone of a run, fine-tuned and scored.

    RUN/detection-voc/settings.json            what is trained, on what; the process there locks it
    RUN/detection-voc/ledger.jsonl             one line an epoch
    RUN/detection-voc/checkpoint.safetensors   weights, momentum and how far it has come
    RUN/results.jsonl                          the average precision, appended once it is done

VOC: SSD300 on the trainval images of 2007 and 2012, scored on the test images of 2007. COCO: Faster
R-CNN (FPN) on train2017, scored on val2017. A fine-tuning that was stopped or killed resumes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor, nn

from alignmixup.contracts import Result
from alignmixup.datasets.voc import DetectionSet, coco_splits, voc_splits
from alignmixup.device import pick_device
from alignmixup.evaluation.detection.detectors import faster_rcnn, ssd300
from alignmixup.evaluation.detection.fine_tuning import (
    COCO_FASTER_RCNN,
    VOC_SSD,
    FineTuner,
    FineTuning,
)
from alignmixup.evaluation.detection.results import detection
from alignmixup.experiments.detector_fit import DetectorFit
from alignmixup.experiments.provenance import origin, provenance
from alignmixup.experiments.run_folder import alone_in, append_results, read_recipe, write_json
from alignmixup.recipes.schema import Recipe
from alignmixup.training.checkpoint import CHECKPOINT, load_checkpoint, remove_checkpoint
from alignmixup.training.ledger import LEDGER
from alignmixup.training.progress import Reporter
from alignmixup.training.settings import check_same

SETTINGS = "settings.json"

TransferData = Literal["voc", "coco"]


@dataclass(frozen=True)
class Transfer:
    """What is fine-tuned on what; ``tuning`` None is the usual schedule of the detector.

    ``years`` are those of VOC; ``limit`` is the number of images, for a trial, of each split.
    """

    data: TransferData
    tuning: FineTuning | None = None
    years: tuple[int, ...] = (2007, 2012)
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.data not in KINDS:
            raise ValueError(f"data must be one of {sorted(KINDS)}, got {self.data!r}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")

    @property
    def schedule(self) -> FineTuning:
        return self.tuning or KINDS[self.data].schedule


@dataclass(frozen=True)
class _Kind:
    """A detector, as it stands in the paper's table, and how it is usually trained."""

    data: str
    network: str
    make: Callable[..., nn.Module]
    schedule: FineTuning


KINDS: Mapping[str, _Kind] = {
    "voc": _Kind("voc07", "ssd-r50", ssd300, VOC_SSD),
    "coco": _Kind("coco", "faster-rcnn-r50", faster_rcnn, COCO_FASTER_RCNN),
}


def schedule(
    data: TransferData,
    *,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    seed: int = 0,
    num_threads: int = 8,
) -> FineTuning:
    """Return the usual schedule with what is given changed; milestones keep their share of it."""
    usual = KINDS[data].schedule
    given: dict[str, Any] = {"num_epochs": epochs, "batch_size": batch_size, "lr": lr}
    changes = {name: value for name, value in given.items() if value is not None}
    length = epochs or usual.num_epochs
    changes["milestones"] = tuple(round(m * length / usual.num_epochs) for m in usual.milestones)
    return dataclasses.replace(usual, **changes, seed=seed, num_threads=num_threads)


def transfer(
    run: Path | str,
    what: Transfer,
    *,
    root: Path | str | None = None,
    device: str = "auto",
    again: bool = False,
    quiet: bool = False,
) -> list[Result]:
    """Fine-tune a detector from the backbone of a finished run, or resume it, and score it.

    Args:
        run: Folder of the run; its network must be a ResNet-50.
        what: Data, schedule and number of images.
        root: Folder of the data; None: ``ALIGNMIXUP_DATA``, else ``./datasets``.
        device: ``auto`` is a GPU where there is one.
        again: Delete what was fine-tuned here before, and start over.
        quiet: Show no progress.

    Returns:
        The results, which are also appended to the run's ``results.jsonl``, once.

    Raises:
        Stopped: At Ctrl-C or SIGTERM, after a checkpoint.
        ValueError: For a run that is not finished or no ResNet-50, or where other settings were
            used in the same folder.
    """
    folder, kind = Path(run), KINDS[what.data]
    recipe = read_recipe(folder)
    state = _finished_state(folder, recipe)
    splits = voc_splits(root, what.years) if what.data == "voc" else coco_splits(root)
    train_set, test_set = (split.first(what.limit) for split in splits)
    seed = what.schedule.seed
    detector = kind.make(state, train_set.num_classes, seed=seed).to(pick_device(device))
    tuner = FineTuner(detector, train_set, what.schedule)
    place = folder / f"detection-{what.data}"
    if again and (place / SETTINGS).exists():
        with alone_in(place, place / SETTINGS):
            remove_checkpoint(place / CHECKPOINT)
            for name in (LEDGER, SETTINGS):
                (place / name).unlink(missing_ok=True)
    _claim(place, what, train_set, test_set)
    with alone_in(place, place / SETTINGS):
        fit = DetectorFit(tuner, place, quiet)
        known = fit.results()
        if known is not None:
            return known
        fit.train()
        results = _scored(tuner, train_set, test_set, what, quiet)
        where = origin(recipe, recipe.train.epochs, folder) | provenance()
        stamped = [result.stamped(**where) for result in results]
        append_results(folder, stamped)
        fit.ledger.append("results", {"lines": [json.loads(r.to_json()) for r in stamped]})
    return stamped


def _finished_state(folder: Path, recipe: Recipe) -> dict[str, Tensor]:
    checkpoint = load_checkpoint(folder / CHECKPOINT, {"epoch": int})
    epoch = cast(int, checkpoint.facts["epoch"])
    if epoch < recipe.train.epochs:
        raise ValueError(
            f"the run in {folder} is at epoch {epoch} of {recipe.train.epochs}: resume it with "
            "'alignmixup train' first"
        )
    return checkpoint.weights()


def _claim(place: Path, what: Transfer, train_set: DetectionSet, test_set: DetectionSet) -> None:
    """Write the settings into the folder, or raise where others are in it."""
    ours = {
        "data": what.data,
        "train": train_set.name,
        "num_train": len(train_set),
        "num_test": len(test_set),
        "tuning": dataclasses.asdict(what.schedule),
    }
    path = place / SETTINGS
    if not path.exists():
        place.mkdir(parents=True, exist_ok=True)
        write_json(path, ours)
        return
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): start over with --again") from None
    # How many threads read images changes nothing.
    there["tuning"]["num_threads"] = what.schedule.num_threads
    remedy = "use the same, or --again to start over"
    check_same(there, ours, f"{place} was started with other settings", remedy)


def _scored(
    tuner: FineTuner, train_set: DetectionSet, test_set: DetectionSet, what: Transfer, quiet: bool
) -> list[Result]:
    kind, tuning = KINDS[what.data], what.schedule
    with Reporter(len(test_set), quiet=quiet) as reporter:
        reporter.epoch(f"scoring {len(test_set)} images of {kind.data}")
        advance = reporter.advance
        results = detection(tuner.detector, test_set, style=what.data, on_images=advance)
    # Flat, so that figures of other schedules are never averaged with these.
    facts: dict[str, object] = {
        "data": kind.data,
        "network": kind.network,
        "trained_on": train_set.name,
        "num_trained": len(tuner.usable),
        "num_epochs": tuning.num_epochs,
        "batch_size": tuning.batch_size,
        "lr": tuning.lr,
    }
    return [dataclasses.replace(r, settings={**r.settings, **facts}) for r in results]
