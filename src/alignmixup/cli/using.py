"""Commands that use a trained run elsewhere: ``predict`` and ``export``."""

from __future__ import annotations

from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Literal

from rich.table import Table
from tyro.conf import Positional

from alignmixup.cli.printing import note_unfinished, print_table


@dataclass
class Predict:
    """Classify image files with a trained run."""

    run: Positional[Path]
    """Folder of the run."""
    images: Positional[tuple[Path, ...]]
    """Image files, or folders of them."""
    top: int = 3
    """How many classes to show of each image, the most probable first."""
    json: bool = False
    """Print one JSON object per image: file, label, class and the probabilities shown."""
    batch_size: int = 256
    """Images per forward pass."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: a GPU where there is one."""

    def __call__(self) -> None:
        from alignmixup.datasets import list_images
        from alignmixup.experiments.load import load_run

        if self.top < 1:
            raise ValueError(f"--top must be at least 1, got {self.top}")
        found = [list_images(path) if path.is_dir() else [str(path)] for path in self.images]
        files = [file for some in found for file in some]
        if not files:
            raise ValueError("name at least one image file, or a folder of images")
        run = load_run(self.run, device=self.device)
        note_unfinished(run.folder, run.epoch, run.recipe.train.epochs)
        done = run.predict(files, batch_size=self.batch_size)
        top = done.probabilities.topk(min(self.top, len(run.class_names)), dim=1)
        table = Table("image", "class", "probability", "others", box=None)
        for file, label, shares, labels in zip(
            files, done.labels.tolist(), top.values.tolist(), top.indices.tolist(), strict=True
        ):
            names = [run.class_names[each] for each in labels]
            shown = dict(zip(names, shares, strict=True))
            if self.json:
                print(dumps({"image": file, "label": label, "class": names[0], "top": shown}))
            others = [f"{name} {share:.1%}" for name, share in [*shown.items()][1:]]
            table.add_row(file, names[0], f"{shares[0]:.1%}", ", ".join(others))
        if not self.json:
            print_table(table)


@dataclass
class Export:
    """Write the network of a run: plain weights, torch.export, or for the Hub."""

    run: Positional[Path]
    """Folder of the run."""
    path: Positional[Path]
    """File to write; a folder for --format hub."""
    format: Literal["safetensors", "torch-export", "hub"] = "safetensors"
    """safetensors: plain weights and a JSON file that says how to build the network; torch-export:
    a program that runs without this package (.pt2); hub: a folder for the Hugging Face Hub."""
    clean_statistics: bool = False
    """Estimate the statistics of batch norm anew first, from training images without mixing."""
    data: Path | None = None
    """Folder of the data sets, for --clean-statistics; else ALIGNMIXUP_DATA, else ./datasets."""

    def __call__(self) -> None:
        from alignmixup.experiments.load import load_run

        run = load_run(self.run, device="cpu")
        if self.clean_statistics:
            run = run.with_clean_statistics(data_root=self.data)
        note_unfinished(run.folder, run.epoch, run.recipe.train.epochs)
        for path in run.export(self.path, self.format):
            print(path)
