"""A mixer reads maps [b, h, w, c] as it reads [b, c, h, w], or says that it cannot tell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import alignmixup as am
from cases import NUM_CLASSES, labels

CLASSIFIED = {"layer": "stage", "classifier": "head"}
MIXERS = (
    am.AlignMixup("stage", weights={"feat": 1.0}),
    am.AlignMixup("stage", weights={"feat'": 1.0}, resolution=2),
    am.ManifoldMixup(("stage",)),
    am.AttentiveMix(layer="stage"),
    am.AutoMix("stage"),
    am.SAMix("stage"),
    am.AdAutoMix("stage"),
    am.RecursiveMix("stage"),
    am.GridMix(grid="cells", layer="stage", local_weight=0.5),
    am.SnapMix(**CLASSIFIED),
    am.DenseMultiMix(num_mixes=8, prob=1.0, **CLASSIFIED),
)


class Net(nn.Module):
    """A network whose layer ``stage`` returns maps in one of the two layouts."""

    def __init__(self, *, is_last: bool, says_so: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_last = is_last
        if says_so:
            self.output_fmt = "NHWC" if is_last else "NCHW"
        self.stem = nn.Conv2d(3, 12, 5, 4, 2)
        self.stage = Stage(is_last)
        self.head = nn.Linear(12, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.stage(self.stem(x))
        logits: Tensor = self.head(maps.mean((1, 2) if self.is_last else (2, 3)))
        return logits


class Stage(nn.Module):
    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last
        self.conv = nn.Conv2d(12, 12, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.conv(x).relu()
        return maps.movedim(1, -1) if self.is_last else maps


def losses(mixer: am.Mixer, net: Net) -> list[float]:
    x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)  # weights of the mixer
    attached, rng = mixer.attach(net, x), torch.Generator().manual_seed(0)
    # Twice: the first step of RecursiveMix has no history.
    return [attached(net, x, labels(4), rng).loss().item() for _ in range(2)]


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: type(mixer).__name__)
def test_the_layout_of_maps_does_not_matter(mixer: am.Mixer) -> None:
    first = losses(mixer, Net(is_last=False, says_so=True))
    last = losses(mixer, Net(is_last=True, says_so=True))
    assert last == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: type(mixer).__name__)
def test_an_unstated_layout_is_named(mixer: am.Mixer) -> None:
    net = Net(is_last=True, says_so=False)
    if isinstance(mixer, am.ManifoldMixup):  # every position with its own
        assert losses(mixer, net) == pytest.approx(losses(mixer, Net(is_last=False, says_so=False)))
        return
    with pytest.raises(ValueError, match=r"\[4, 8, 8, 12\], which looks like maps \[b, h, w, c\]"):
        losses(mixer, net)


def test_a_stated_setting_ends_the_doubt() -> None:
    mixer = am.AlignMixup("stage", weights={"feat": 1.0}, channels_last=True)
    last = losses(mixer, Net(is_last=True, says_so=False))
    plain = am.AlignMixup("stage", weights={"feat": 1.0})
    assert last == pytest.approx(losses(plain, Net(is_last=False, says_so=False)), rel=1e-5)
    wide = torch.rand(2, 3, 48, 72)  # maps [2, 12, 12, 18]
    net = Net(is_last=False, says_so=False)
    with pytest.raises(ValueError, match="or to False"):
        plain(net, wide, labels(2))
    am.AlignMixup("stage", channels_last=False)(net, wide, labels(2)).loss()
    am.AttentiveMix(layer="stage")(net, wide, labels(2)).loss()


def test_without_a_plan_the_layout_is_not_needed() -> None:
    mixer = am.AlignMixup("stage", weights={"feat": 1.0}, aligned=False)
    last, first = (losses(mixer, Net(is_last=is_last, says_so=False)) for is_last in (True, False))
    assert last == pytest.approx(first, rel=1e-5)
