"""Figures that others published for methods and networks of ours, as data with their source.

They are kept apart from the tables of the AlignMixup paper (``paper``): protocols differ, so that
a figure is comparable with others of the same source alone. Values are top-1 accuracies in percent,
as printed.
``quoted_beside`` returns those that a recipe's result may be shown with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from alignmixup.contracts import RecipeKey
from alignmixup.report import paper


@dataclass(frozen=True, slots=True)
class Source:
    """Where figures were published, and how they were measured."""

    name: str
    where: str
    protocol: str


SOURCES: Mapping[str, Source] = {
    "openmixup": Source(
        "OpenMixup",
        "github.com/Westlake-AI/openmixup, docs/en/mixup_benchmarks",
        "R-18 with a 3x3 stem of stride 1, batch 100, SGD with weight decay 1e-4, rate 0.1 (Tiny "
        "0.2), cosine; Tiny-ImageNet by random resized crops; median of the last ten epochs, of "
        "ViTs the best one",
    ),
    "awesome-mixup": Source(
        "Awesome-Mixup",
        "github.com/Westlake-AI/Awesome-Mixup and the authors' repositories",
        "that of each paper",
    ),
    "adautomix": Source(
        "AdAutoMix", "github.com/JinXins/Adversarial-AutoMixup", "that of OpenMixup"
    ),
    "resizemix": Source("ResizeMix", "github.com/JayQine/ResizeMix", "its own"),
    "tokenmix": Source("TokenMix", "github.com/Sense-X/TokenMix", "its own"),
    "snapmix": Source("SnapMix", "github.com/Shaoli-Huang/SnapMix", "its own"),
}

# Names of the methods that the AlignMixup paper does not have.
METHODS: Mapping[str, str] = {
    "labelsmoothing": "Label smoothing",
    "oneof": "OneOf (DeiT)",
    "resizemix": "ResizeMix",
    "fmix": "FMix",
    "smoothmix": "SmoothMix",
    "gridmix": "GridMix",
    "attentivemix": "AttentiveMix+",
    "snapmix": "SnapMix",
    "regmixup": "RegMixup",
    "decoupled": "Decoupled mixup",
    "transmix": "TransMix",
    "tokenmix": "TokenMix",
    "recursivemix": "RecursiveMix",
    "automix": "AutoMix",
    "samix": "SAMix",
    "adautomix": "AdAutoMix",
    "multimix": "MultiMix",
    "densemultimix": "Dense MultiMix",
}
# All that have a name, in the order of tables.
NAMES: Mapping[str, str] = {**paper.METHODS, **METHODS}

# What a figure is of, where it is not what the method's name says.
NOTES: Mapping[tuple[str, str], str] = {
    ("openmixup", "smoothmix"): "labels swapped",
    ("awesome-mixup", "smoothmix"): "which labels is not stated",
    ("openmixup", "fmix"): "masks of the released code",
    ("openmixup", "gridmix"): "holes",
    ("openmixup", "attentivemix"): "guided by a frozen ImageNet network",
    ("openmixup", "transmix"): "one label weight per batch",
    ("openmixup", "tokenmix"): "by the authors' code",
    ("openmixup", "comixup"): "by the authors' code",
    ("openmixup", "automix"): "best of several heads",
    ("openmixup", "samix"): "best of several heads",
    ("adautomix", "adautomix"): "the teacher",
}


@dataclass(frozen=True, slots=True)
class Quoted:
    """One published top-1 accuracy."""

    source: str
    data: str
    network: str
    method: str
    epochs: int | None  # None: not stated here
    top1: float

    @property
    def top1_error(self) -> float:
        """The error, which the AlignMixup paper's tables print; two decimals, as printed."""
        return round(100 - self.top1, 2)

    @property
    def note(self) -> str:
        """What the figure is of, where it is not what the method's name says."""
        return NOTES.get((self.source, self.method), "")


_TABLES = {
    "openmixup": """
data          cifar10 cifar10 cifar100 cifar100 cifar100 tiny   imagenet imagenet imagenet
network       r18     r18     r18      r18      deit-s   r18    r50      r50      deit-s
epochs        200     800     200      800      200      400    100      300      300
baseline      94.87   95.50   76.42    78.04    65.81    61.68  76.83    77.35    75.66
input         95.70   96.62   78.52    79.12    69.98    63.86  77.12    78.44    77.72
cutmix        96.11   96.68   79.45    78.17    74.12    65.53  77.17    78.69    80.13
manifold      96.04   96.71   79.18    80.35    --       64.15  77.01    78.21    --
saliencymix   96.05   96.20   79.75    79.12    69.78    64.60  77.14    78.46    --
puzzlemix     96.42   97.10   79.96    81.13    73.60    65.81  77.54    78.86    --
comixup       --      --      80.01    81.17    --       65.92  77.60    --       --
oneof         --      --      --       --       75.92    --     77.27    --       79.80
resizemix     96.16   96.76   79.56    80.01    68.45    63.74  77.42    78.91    78.61
fmix          96.17   96.18   78.91    79.69    70.41    63.47  77.19    78.51    77.37
smoothmix     95.29   96.17   77.90    78.69    67.54    66.65  --       --       --
gridmix       95.89   96.56   78.23    78.72    68.86    65.14  77.04    78.50    --
attentivemix  96.21   96.63   79.62    78.91    75.98    64.85  77.28    --       80.32
transmix      --      --      --       --       76.17    --     --       --       80.68
tokenmix      --      --      --       --       --       --     --       --       80.80
automix       96.59   97.34   80.12    82.04    76.24    67.33  77.91    79.25    80.78
samix         96.67   97.50   81.21    82.30    77.94    68.89  78.14    79.39    80.94
""",
    "awesome-mixup": """
data          cifar10 cifar100 cifar100 imagenet
network       r18     r18      r18      r50
epochs        800     200      2000     300
smoothmix     --      --       --       77.66
recursivemix  --      81.36    --       79.20
adautomix     97.55   --       --       --
multimix      --      --       81.82    78.81
""",
    "adautomix": """
data          cifar100 cifar100 tiny   imagenet
network       r18      r18      r18    r50
epochs        200      800      400    100
adautomix     81.55    82.32    69.19  78.04
""",
    "resizemix": """
data          imagenet cifar10  cifar100
network       r50      wrn28-10 wrn28-10
epochs        --       --       --
resizemix     79.00    97.60    84.31
""",
    "tokenmix": """
data          imagenet
network       deit-s
epochs        300
tokenmix      80.8
""",
    "snapmix": """
data          cub200
network       r50
epochs        200
snapmix       87.75
""",
}


def _read(source: str, text: str) -> list[Quoted]:
    """Read a table: three lines that name the columns, a line per method, dashes empty."""
    data, networks, epochs, *rows = (line.split() for line in text.strip().splitlines())
    columns = list(zip(data[1:], networks[1:], epochs[1:], strict=True))
    return [
        Quoted(source, where, net, method, None if length == "--" else int(length), float(cell))
        for method, *cells in rows
        for (where, net, length), cell in zip(columns, cells, strict=True)
        if cell != "--"
    ]


QUOTED: Sequence[Quoted] = [q for source, text in _TABLES.items() for q in _read(source, text)]


def quoted_beside(key: RecipeKey) -> list[Quoted]:
    """Return what others published for the data, network and method of this recipe.

    The variant is ignored, except that an unaligned one has no figures, and neither has GridMix of
    cells: those are of holes.
    """
    if {"unaligned", "cells"} & set(key.labels):
        return []
    place = (key.data, key.network, key.method)
    return [figure for figure in QUOTED if (figure.data, figure.network, figure.method) == place]


def quotation(figures: Sequence[Quoted]) -> str:
    """Return top-1 errors with their sources: ``20.44/19.99 (OpenMixup, 200/800 epochs)``."""
    parts = []
    for source in dict.fromkeys(figure.source for figure in figures):
        own = [figure for figure in figures if figure.source == source]
        about = [SOURCES[source].name]
        if all(figure.epochs for figure in own):
            about.append("/".join(str(figure.epochs) for figure in own) + " epochs")
        about += [own[0].note] if own[0].note else []
        values = "/".join(f"{figure.top1_error:.2f}" for figure in own)
        parts.append(f"{values} ({', '.join(about)})")
    return "; ".join(parts)
