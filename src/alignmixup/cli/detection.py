"""The command ``detect``: transfer of a run's backbone to detection."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table
from tyro.conf import Positional

from alignmixup.cli.printing import print_table


@dataclass
class Detect:
    """Fine-tune a detector from the ResNet-50 of a run and score it.

    voc: SSD300 on VOC 2007 and 2012 trainval, scored on the test images of 2007. coco: Faster
    R-CNN (FPN) on train2017, scored on val2017. Results are appended to results.jsonl of the run.
    Needs torchvision and, for COCO, pycocotools: pip install 'alignmixup[detection]'. The same
    command resumes what was stopped or killed."""

    run: Positional[Path]
    """Folder of the run, e.g. of imagenet-r50-alignmixup."""
    data: Literal["voc", "coco"]
    """The data set, which also chooses the detector."""
    root: Path | None = None
    """Folder that holds VOCdevkit or coco; else ALIGNMIXUP_DATA, else ./datasets."""
    years: tuple[int, ...] = (2007, 2012)
    """Years of VOC to train on."""
    epochs: int | None = None
    """Epochs; None: 240 for VOC, 12 for COCO. The rate falls at the same shares of them."""
    batch_size: int | None = None
    """Images per step; None: 32 for VOC, 16 for COCO."""
    lr: float | None = None
    """Learning rate; None: 0.001 for VOC, 0.02 for COCO."""
    limit: int | None = None
    """Use this many images of each split, for a trial."""
    seed: int = 0
    """Seed of the new layers, the order of the images and their augmentation."""
    threads: int = 8
    """Threads that decode images; results do not depend on it."""
    again: bool = False
    """Delete what was fine-tuned on these data before, and start over."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: a GPU where there is one."""

    def __call__(self) -> None:
        from alignmixup.experiments.detecting import Transfer, schedule, transfer

        tuning = schedule(
            self.data,
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            seed=self.seed,
            num_threads=self.threads,
        )
        what = Transfer(self.data, tuning, self.years, self.limit)
        results = transfer(self.run, what, root=self.root, device=self.device, again=self.again)
        table = Table("detector", "data", "metric", "%", box=None)
        for result in results:
            where = (str(result.settings[name]) for name in ("network", "data"))
            table.add_row(*where, result.metric, f"{result.value:.2f}")
        print_table(table)
