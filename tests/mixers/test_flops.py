"""FLOPs of a step of the learned methods relative to no mixing, as the documentation quotes them.

Counted by torch on the meta device, forward and backward: exact, and the same on every machine.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import alignmixup as am
from alignmixup.mixers import automix
from alignmixup.models import PreActResNet18

BATCH = 8


def step_flops(mixer: am.Mixer) -> int:
    """The FLOPs of one step of PreActResNet-18 on 32 x 32 pixels and 100 classes."""
    with torch.device("meta"):
        net = PreActResNet18(100, mean=(0.5,) * 3, std=(0.25,) * 3)
        x, y = torch.rand(BATCH, 3, 32, 32), torch.zeros(BATCH, dtype=torch.long)
    mixer = mixer.attach(net, x)
    draw = mixer.draw(BATCH, torch.Generator().manual_seed(0), 0.5)
    with FlopCounterMode(display=False) as counter:
        mixer.apply(net, x, y, draw).loss().backward()
    return counter.get_total_flops()


@pytest.fixture(scope="module")
def plain() -> int:
    return step_flops(am.NoMix())


@pytest.mark.parametrize(
    ("mixer", "ratio"),
    [
        (am.InputMixup(), 1.00),
        (am.AutoMix(), 3.01),
        (am.SAMix(), 3.02),
        (am.SAMix(pretrained="a run"), 2.26),
        (am.AdAutoMix(), 4.03),
    ],
    ids=["input", "automix", "samix", "samix-pretrained", "adautomix"],
)
def test_a_step_has_the_flops_that_the_documentation_quotes(
    mixer: am.Mixer, ratio: float, plain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In docs/speed.md and docs/methods/samix.md: change them with this table."""
    monkeypatch.setattr(automix, "load_pretrained", lambda *_: None)  # weights cost no FLOPs
    assert round(step_flops(mixer) / plain, 2) == ratio
