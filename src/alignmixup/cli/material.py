"""Commands for what training needs beforehand: ``data list|check|fetch|shard``, and ``adain``."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.table import Table
from tyro.conf import Positional

from alignmixup.cli.parsing import PROGRAM, Call, examples, listing, read_words
from alignmixup.cli.printing import print_table, progress


@dataclass
class Adain:
    """Train the style network that StyleMix and StyleCutMix need, on any image set.

    Then train with --mixer.weights FILE, and --mixer.sha256 to check it; without
    the flag each run trains a small network of its own. The file also has the
    style distances between the classes, which StyleCutMix needs for gamma=auto."""

    dataset: Positional[str]
    """Data set by name, or folder:PATH@SIZE; its training images."""
    out: Path
    """The .safetensors file to write."""
    weights: str = ""
    """Weights to use without training: a folder of vgg_normalised and decoder, or a file that this
    command wrote. The class distances of the data set are added."""
    steps: int = 4000
    """Steps of the training."""
    images: int = 10_000
    """How many images at most."""
    width: int = 32
    """Channels of the first layer."""
    seed: int = 0
    """Seed of the weights and of the order of the images."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: a GPU where there is one."""

    def __call__(self) -> None:
        from alignmixup.experiments.styling import make_style_weights, shown_steps

        with shown_steps() as on_step:
            made = make_style_weights(
                self.dataset,
                self.out,
                weights=self.weights,
                steps=self.steps,
                num_images=self.images,
                width=self.width,
                seed=self.seed,
                data_root=self.data,
                device=self.device,
                on_step=on_step,
            )
        print(made)


OTHERS = {
    "folder:PATH": "any folder of train/CLASS and val/CLASS images",
    "shards:PATH": "tar files of WebDataset; 'alignmixup data shard' writes them",
}


@dataclass
class DataList:
    """List the data sets."""

    def __call__(self) -> None:
        from alignmixup import datasets

        table = Table("name", "classes", "size", "what", box=None)
        for name in datasets.names():
            if name in OTHERS:
                table.add_row(name, "", "", OTHERS[name])
                continue
            source = datasets.find(name)
            table.add_row(name, str(source.num_classes), str(source.image_size), source.description)
        print_table(table)


@dataclass
class DataCheck:
    """List what is missing or damaged in a data set."""

    name: Positional[str]
    """Name of the data set; 'alignmixup data list' shows them."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""

    def __call__(self) -> None:
        from alignmixup import datasets

        problems = datasets.check(self.name, self.data)
        if problems:
            raise ValueError("\n".join(problems))
        print(f"{self.name}: complete")


@dataclass
class DataFetch:
    """Download a data set, check it and unpack it; an interrupted download is resumed."""

    name: Positional[str]
    """Name of the data set; 'alignmixup data list' shows them."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""
    url: str | None = None
    """A mirror; the checksum stays that of the official file."""

    def __call__(self) -> None:
        from alignmixup import datasets

        columns = (TextColumn(self.name), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with progress(*columns) as bar:
            task = bar.add_task(self.name, visible=False)  # until the first byte
            folder = datasets.fetch(
                self.name,
                self.data,
                lambda done, total: bar.update(task, completed=done, total=total, visible=True),
                url=self.url,
            )
        print(folder)


@dataclass
class DataShard:
    """Write a data set as tar files of WebDataset, to train with --dataset shards:OUT.

    Files are copied as they are, the training images in random order. Boxes are
    not written."""

    name: Positional[str]
    """Data set by name, or folder:PATH."""
    out: Positional[Path]
    """Folder of the tar files."""
    images: int = 2000
    """Images in a file."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""

    def __call__(self) -> None:
        from alignmixup import datasets

        source = datasets.find(self.name)
        out = datasets.write_shards(
            source, self.out, self.data, images_per_shard=self.images, on_shard=print
        )
        print(f"train with --dataset {shlex.quote(f'shards:{out}')}")


DATA_COMMANDS: dict[str, Callable[..., Call]] = {
    "list": DataList,
    "check": DataCheck,
    "fetch": DataFetch,
    "shard": DataShard,
}


def parse_data(args: list[str]) -> Call:
    """The first word behind ``data`` says which of its commands the rest is for."""
    if not args or args[0] in ("--help", "-h"):
        return lambda: print(_data_help())
    name = args[0]
    if name not in DATA_COMMANDS:
        from alignmixup.registry import suggestion

        raise ValueError(f"unknown data command {name!r}{suggestion(name, [*DATA_COMMANDS])}")
    return read_words(DATA_COMMANDS[name], f"data {name}", args[1:])


def _data_help() -> str:
    abouts = {name: str(kind.__doc__).split("\n\n")[0] for name, kind in DATA_COMMANDS.items()}
    lines = [f"usage: {PROGRAM} data COMMAND ...", listing("Commands:", abouts)]
    return "\n\n".join([*lines, examples(*(f"data {name}" for name in DATA_COMMANDS))])
