"""AutoMix, SAMix and AdAutoMix on the tiny network: settings, attached mixers, draws and maps."""

from __future__ import annotations

import torch
from torch import Tensor

from alignmixup.contracts import Draw
from alignmixup.mixers.adautomix import AdAutoMix
from alignmixup.mixers.automix import AutoMix
from alignmixup.mixers.learned import Learned
from alignmixup.mixers.samix import SAMix
from alignmixup.mixers.stateful import run_to
from cases import TinyNet, images, with_lam

METHODS = {
    "automix": AutoMix("layer2"),
    "automix-channel": AutoMix("layer2", lam_channel=True),
    "samix": SAMix("layer2"),
    "adautomix": AdAutoMix("layer2"),
    "adautomix-pairs": AdAutoMix("layer2", num_images=2, mixup_share=0.0, lam_channel=True),
}


def attached(mixer: Learned, *, noise: float = 0.5) -> tuple[Learned, TinyNet]:
    """An attached mixer; its block far from the first, almost constant, masks."""
    net = TinyNet()
    torch.manual_seed(0)
    mixer = mixer.attach(net, images(6))
    with torch.no_grad():
        for parameter in mixer.learner.block.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return mixer, net


def drawn(mixer: Learned, lam: float | None = 0.4, seed: int = 0, progress: float = 0.0) -> Draw:
    draw = mixer.draw(6, torch.Generator().manual_seed(seed), progress)
    return draw if lam is None else with_lam(draw, lam)


def maps(mixer: Learned) -> Tensor:
    return run_to(mixer.learner.teacher, images(6), "layer2")
