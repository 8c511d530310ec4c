"""Commands that show: ``figure``, and ``decoder`` for the figures of decoded features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from alignmixup.cli.parsing import Call, listing, read_words


@dataclass
class Figure:
    """Draw a figure as PNG and PDF, or in the format of the file that --out names.

    Its caption is written as text beside it: what is shown, what was chosen, from which network."""

    name: Positional[str]
    """Name of the figure, from the list below."""
    run: Path | None = None
    """Folder of a trained run; None: the built-in shapes and a small network, trained or not."""
    out: Path = Path("figures")
    """Folder of the pictures, or one file: 'methods.svg' is vector graphics, as .pdf is."""
    style: Literal["screen", "one-column", "two-column", "two-column-wide"] = "screen"
    """screen, with a title; for papers, without: the text of a one-column paper (5.5 in), a column
    of a two-column paper (3.25 in) or both of them (6.875 in)."""
    seed: int = 0
    """Seed of points, pairs of images, untrained weights and the methods' chance."""
    pairs: int | None = None
    """Number of pairs of images in interpolations (3) and correspondences (5)."""
    data: Path | None = None
    """Folder of the data sets of the run; else ALIGNMIXUP_DATA, else ./datasets."""

    def __call__(self) -> None:
        from alignmixup.figures.by_name import draw_figure

        written = draw_figure(
            self.name,
            self.out,
            run=self.run,
            seed=self.seed,
            data_root=self.data,
            style=self.style,
            num_pairs=self.pairs,
        )
        for path in written:
            print(path)


def parse_figure(args: list[str]) -> Call:
    """Read the words after ``figure``; its help lists the figures that are registered."""
    from alignmixup.figures.by_name import list_figures

    return read_words(Figure, "figure", args, about=listing("Figures:", list_figures()))


@dataclass
class Decoder:
    """Train a decoder for the frozen network of a run, to see what its features hold.

    It is kept in the run's folder for 'alignmixup figure interpolations --run RUN'
    and the like. Interrupted training is resumed. A run of AlignMixup/AE has a
    decoder of its own: --kind own measures it, and with --again figures use it."""

    run: Positional[Path]
    """Folder of the run."""
    layer: str | None = None
    """Layer whose features are decoded; None: the one whose map the run mixes, else the paper's."""
    kind: Literal["map", "vector", "own"] = "map"
    """map: of the layer's map; vector: of a fully connected embedding of it, as in the paper; own:
    the autoencoder's, which is measured and not trained."""
    epochs: int = 30
    """Epochs over the training images of the run."""
    batch_size: int = 128
    """Images per step."""
    lr: float = 2e-3
    """Learning rate of Adam."""
    channels: int | None = None
    """Channels of the decoder's first map; None: the layer's, 64 to 512 (to 256 at 224 px)."""
    seed: int = 0
    """Seed of the decoder's weights and of the order of the images."""
    again: bool = False
    """Discard the decoder of the run and start over."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: a GPU where there is one."""

    def __call__(self) -> None:
        from alignmixup.experiments.decoding import DecoderSettings, train_decoder

        settings = DecoderSettings(
            layer=self.layer,
            kind=self.kind,
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            channels=self.channels,
            seed=self.seed,
        )
        print(
            train_decoder(
                self.run, settings, data_root=self.data, device=self.device, again=self.again
            )
        )
