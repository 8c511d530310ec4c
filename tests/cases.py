"""Every mixer in one table, and the tiny networks the tests run them on.

A new method is one more ``Row``; the generic tests of ``tests/mixers/test_mixers.py`` then hold
for each of its cases.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import alignmixup as am
from alignmixup.contracts import Draw, Mixed, Mixer
from alignmixup.ops.adain import save_adain, small_adain
from seeds import seed_everywhere

NUM_CLASSES = 5
IMAGE_SIZE = 16


@dataclass(frozen=True)
class Row:
    """One line of the table: a mixer and what its cases give back at the end of lam.

    ``recovers`` says which image a case gives back whole: ``"anchor"`` at lam = 1 (what is not
    listed), ``"partner"`` at lam = 0, or None where it changes the image at any lam. A mixer that
    ``is_guided`` by the network's gradient chooses its regions by images and labels: lam is a
    prior, not the share of the targets, and a rounding of the network may change a region. A mixer
    that ``is_beside`` the clean loss has the logits and targets of the clean batch. ``smoothing``
    is its label smoothing. ``mixes`` a pair of the batch, more than two of it, or its history:
    nothing in a first step. ``num_rows`` is that of the logits, where they are not one per image.
    """

    name: str
    mixer: Mixer
    recovers: Mapping[str, str | None] = field(default_factory=dict)
    is_guided: bool = False
    mixes: Literal["pairs", "more", "history"] = "pairs"
    num_rows: Mapping[str, int] = field(default_factory=dict)
    is_beside: bool = False
    smoothing: float = 0.0

    def attached(self, net: nn.Module, x: Tensor) -> Mixer:
        """The mixer with its first parameters and state, the same ones each time."""
        with torch.random.fork_rng(devices=[]):
            seed_everywhere(0)
            return self.mixer.attach(net, x)

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        """Apply the mixer in its first step."""
        return self.attached(net, x).apply(net, x, y, draw)

    def sharp(self, targets: Tensor) -> Tensor:
        """Targets without their smoothing."""
        if not self.smoothing:
            return targets
        return (targets - self.smoothing / targets.shape[1]) / (1 - self.smoothing)


# Aligned features keep the positions of one image; in feat' that is the partner's.
ALIGNED = {"feat'": "partner"}

# Random weights do for everything but looks.
STYLE = str(Path(tempfile.mkdtemp()) / "style.safetensors")
save_adain(small_adain(4, torch.Generator().manual_seed(0)), STYLE)

ROWS = [
    Row("none", am.NoMix()),
    Row("none-bce", am.NoMix(loss="bce")),
    Row("input", am.InputMixup()),
    Row("input-per-sample", am.InputMixup(lam_per_sample=True)),
    Row("input-bce", am.InputMixup(loss="bce")),
    Row("cutout", am.Cutout(length=6), recovers={"cut": None}),
    Row("cutmix", am.CutMix()),
    Row("cutmix-always", am.CutMix(prob=1.0, correct_lam=False)),
    Row("cutmix-per-sample", am.CutMix(lam_per_sample=True)),
    Row("manifold", am.ManifoldMixup()),
    Row("manifold-per-sample", am.ManifoldMixup(("layer2", "layer4"), lam_per_sample=True)),
    Row("align", am.AlignMixup(), recovers=ALIGNED),
    Row("align-unaligned", am.AlignMixup(aligned=False)),
    Row("align-per-sample", am.AlignMixup(lam_per_sample=True), recovers=ALIGNED),
    # Mixed at two by two positions and repeated: finer detail is gone at any lam.
    Row("align-resolution", am.AlignMixup(resolution=2), recovers={"feat": None, "feat'": None}),
    Row("align-early", am.AlignMixup("layer1", num_iters=20), recovers=ALIGNED),
    Row("align-attention", am.AlignMixup(num_iters=0), recovers=ALIGNED),
    Row("align-tol", am.AlignMixup(tol=1e-3), recovers=ALIGNED),
    Row("align-bce", am.AlignMixup(loss="bce"), recovers=ALIGNED),
    Row("align-released", am.AlignMixup.released(), recovers=ALIGNED),
    Row("align-ae-xA", am.AlignMixupAE("layer4", layers=("x", "A"), clean=False), recovers=ALIGNED),
    Row("saliencymix", am.SaliencyMix()),
    Row("saliencymix-per-sample", am.SaliencyMix(prob=1.0, saliency="per_sample")),
    Row("stylemix", am.StyleMix(STYLE), recovers={"style": None}),
    Row("stylecutmix", am.StyleCutMix(STYLE)),
    Row("resizemix", am.ResizeMix()),
    Row("resizemix-openmixup", am.ResizeMix.openmixup()),
    Row("smoothmix", am.SmoothMix()),
    Row("fmix", am.FMix()),
    Row("fmix-released", am.FMix.released()),
    Row("fmix-soft", am.FMix(max_soft=0.2)),
    Row("gridmix", am.GridMix()),
    Row("gridmix-cells", am.GridMix("cells")),
    Row("gridmix-local", am.GridMix("cells", local_weight=1.0)),
    Row("attentivemix", am.AttentiveMix(min_cells=0)),
    Row("tokenmix", am.TokenMix(grid=8, score="area", loss="ce")),
    Row("regmixup", am.RegMixup(), is_beside=True),
    Row("oneof", am.OneOf((am.InputMixup(), am.CutMix()), weights=(1.0, 3.0), prob=0.75)),
    Row("oneof-deit", am.OneOf.deit(), smoothing=0.1),
    Row("oneof-elem", am.OneOf((am.InputMixup(), am.CutMix(prob=0.8)), mode="elem", prob=0.75)),
    Row("oneof-pair", am.OneOf(mode="pair", pairing="reverse", smoothing=0.1), smoothing=0.1),
    Row("smoothed", am.LabelSmoothing(am.CutMix(), 0.2), smoothing=0.2),
    Row("decoupled", am.Decoupled(am.InputMixup(lam_per_sample=True))),
    Row("puzzle", am.PuzzleMix(), is_guided=True),
    Row("puzzle-clean", am.PuzzleMix(clean_lam=1.0, t_size=-1, loss="ce"), is_guided=True),
    Row("co", am.CoMixup(), recovers={"4": None}, is_guided=True),
    Row(
        "co-small-parts",
        am.CoMixup(part_size=4, grids=(2, 4), clean_lam=0.0),
        recovers={"2": None, "4": None},
        is_guided=True,
    ),
    Row("recursive", am.RecursiveMix(), mixes="history"),
    Row("automix", am.AutoMix("layer2")),
    Row("automix-imagenet", replace(am.AutoMix.imagenet(), layer="layer2")),
    Row("automix-heads", am.AutoMix("layer2", heads=2, classifier="fc")),
    Row("samix", am.SAMix("layer2", rescale_prob=0.5)),
    Row("adautomix", am.AdAutoMix("layer2"), mixes="more"),
    Row("multimix", am.MultiMix(num_mixes=6), {"all": None}, mixes="more", num_rows={"all": 6}),
    Row("adautomix-pairs", replace(am.AdAutoMix.imagenet(), layer="layer2")),
]

# Other settings of a method that has a row: they run with the slow tests.
VARIANTS = {
    *("none-bce", "input-bce", "input-per-sample", "cutmix-always", "manifold-per-sample"),
    *("align-per-sample", "align-early", "align-attention", "align-tol", "align-bce"),
    *("saliencymix-per-sample", "puzzle-clean", "automix-imagenet", "adautomix-pairs"),
    *("resizemix-openmixup", "fmix-released", "gridmix-cells", "oneof-deit", "oneof-pair"),
    *("cutmix-per-sample", "fmix-soft", "automix-heads"),
}


def params(rows: Iterable[Row]) -> list[Any]:
    """The rows as parameters of a test."""
    return [pytest.param(row, id=row.name, marks=_marks(row)) for row in rows]


def case_params(rows: Iterable[Row]) -> list[Any]:
    """The rows with each of their cases."""
    return [
        pytest.param(row, case, id=f"{row.name}-{case}", marks=_marks(row))
        for row in rows
        for case in row.mixer.cases
    ]


def _marks(row: Row) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if row.name in VARIANTS else []


every_row = pytest.mark.parametrize("row", params(ROWS))
every_case = pytest.mark.parametrize(("row", "case"), case_params(ROWS))
every_unguided_case = pytest.mark.parametrize(
    ("row", "case"), case_params(row for row in ROWS if not row.is_guided)
)


class TinyNet(nn.Module):
    """Three named stages of a convolution and batch norm, 16 x 16 -> 4 x 4, and a linear head."""

    def __init__(self, head: str = "flatten", seed: int = 0) -> None:
        super().__init__()
        self.head = head
        self.layer1 = _stage(3, 6, stride=2)
        self.layer2 = _stage(6, 8, stride=2)
        self.layer4 = _stage(8, 8, stride=1)
        self.fc = nn.Linear(8 if head == "pool" else 8 * 4 * 4, NUM_CLASSES)
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.fc.bias.zero_()
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    fan_in = parameter[0].numel()
                    parameter.normal_(0, (2 / fan_in) ** 0.5, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        features = self.layer4(self.layer2(self.layer1(x)))
        return self.fc(features.mean((2, 3)) if self.head == "pool" else features.flatten(1))


def _stage(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU())


class Recorder(nn.Module):
    """A network that keeps what it is shown, and gives the mean color as logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer4 = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return self.layer4(x).flatten(2).mean(2)


class PixelRecorder(nn.Module):
    """A network that keeps what it is shown, and gives its first pixels as logits."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return x.flatten(1)[:, :NUM_CLASSES]


def images(batch_size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE, generator=rng).to(dtype)


def labels(batch_size: int) -> Tensor:
    """Neighbours differ, so that no mixed label is clean by accident."""
    return torch.arange(batch_size) % NUM_CLASSES


def draw_case(mixer: Mixer, case: str, batch_size: int, seed: int = 0) -> Draw:
    """The first draw of ``mixer`` that is this case."""
    rng = torch.Generator().manual_seed(seed)
    for _ in range(1000):
        draw = mixer.draw(batch_size, rng)
        if draw.case == case:
            return draw
    raise AssertionError(f"{mixer} gave no {case!r} in 1000 draws")


def with_lam(draw: Draw, lam: float) -> Draw:
    """The same draw with all of its shares set; StyleMix has one each for content and style."""
    shares = ("lam", "content", "style")
    same = {n: torch.full_like(t, lam) for n, t in draw.tensors().items() if n in shares}
    return draw.with_tensors({**draw.tensors(), **same})
