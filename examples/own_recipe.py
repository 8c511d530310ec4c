"""A mixer and a recipe of your own: alignmixup train examples/own_recipe.py:own_recipe

The run records this file and imports it again when it is resumed, evaluated or opened. Settings are
changed as in any recipe: --train.epochs 2 --mixer.strength 0.5.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import alignmixup as am
from alignmixup.contracts import soft_targets


@am.register_mixer
@dataclass(frozen=True)
class FaintMix(am.Mixer):
    """Blend each image with a faint share of its partner.

    Args:
        strength: Largest share of the partner.
    """

    strength: float = 0.3

    @property
    def cases(self) -> Mapping[str, float]:
        return {"faint": 1.0}

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> am.Draw:
        perm = torch.randperm(batch_size, generator=rng)
        return am.Draw("faint", perm, 1 - self.strength * torch.rand((), generator=rng))

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: am.Draw) -> am.Mixed:
        draw = draw.to(x.device)
        logits = net(draw.lam * x + (1 - draw.lam) * x[draw.perm])
        targets = soft_targets(y, logits.shape[1])
        return am.Mixed(logits, draw.lam * targets + (1 - draw.lam) * targets[draw.perm])


def own_recipe() -> am.Recipe:
    """A narrow PreActResNet-18 on the built-in shapes."""
    return am.Recipe(
        key=am.RecipeKey("shapes", "r18", "faint"),
        data=am.DataSpec("shapes", flip=False),
        net=am.NetSpec("preact_resnet18", width=8),
        mixer=FaintMix(),
        train=am.TrainSettings(epochs=10, batch_size=64, lr=0.05, schedule="cosine", milestones=()),
    )


def main(argv: Sequence[str] | None = None) -> am.Run:
    """Train the recipe from Python instead."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/faint")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--limit", type=int, default=None)
    args = parser.parse_args(argv)
    changes = {"train.epochs": args.epochs, "data.limit": args.limit}
    run = am.train(own_recipe(), args.out, changes=changes)
    print(run.summary)
    return run


if __name__ == "__main__":
    main()
