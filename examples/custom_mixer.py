"""A mixer of your own: python examples/custom_mixer.py

Bands: the upper part of each image is its own and the lower part its partner's; labels by area.
``draw`` holds all randomness, ``apply`` all arithmetic, so one draw always gives one result.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import alignmixup as am
from alignmixup.contracts import soft_targets
from alignmixup.datasets import shapes


@dataclass(frozen=True)
class BandMix(am.Mixer):
    """Show the upper ``lam`` of the image and the rest of its partner.

    Args:
        low: Smallest share of the image.
    """

    low: float = 0.5

    @property
    def cases(self) -> Mapping[str, float]:
        return {"bands": 1.0}

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> am.Draw:
        perm = torch.randperm(batch_size, generator=rng)
        lam = self.low + (1 - self.low) * torch.rand((), generator=rng)
        return am.Draw("bands", perm, lam)

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: am.Draw) -> am.Mixed:
        draw = draw.to(x.device)
        height = x.shape[2]
        rows = torch.arange(height, device=x.device)
        is_own = rows < (draw.lam * height).round()  # no .item(): a GPU need not wait
        mixed = torch.where(is_own.view(1, 1, height, 1), x, x[draw.perm])
        logits = net(mixed)
        share = is_own.float().mean()  # the share that is shown, not the one that was drawn
        targets = soft_targets(y, logits.shape[1])
        return am.Mixed(logits, share * targets + (1 - share) * targets[draw.perm])


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train a linear classifier with the mixer and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    images = shapes("train", 64 * args.steps)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, images.num_classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mixer = BandMix()
    losses = []
    for x, y in zip(images.images.split(64), images.labels.split(64), strict=True):
        loss = mixer(model, x.float() / 255, y).loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
