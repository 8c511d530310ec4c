"""A plain training loop with any mixer: python examples/plain_loop.py --mixer AlignMixup

The built-in shapes stand in for your data, a small convolutional network for your model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

import alignmixup as am
from alignmixup.datasets import shapes

MIXERS: dict[str, am.Mixer] = {
    "NoMix": am.NoMix(),
    "InputMixup": am.InputMixup(alpha=1.0),
    "CutMix": am.CutMix(alpha=1.0, prob=0.5),
    "ManifoldMixup": am.ManifoldMixup(layers=("input", "features")),
    "AlignMixup": am.AlignMixup(layer="features"),
}


class SmallNet(nn.Module):
    """Three convolutions and a flattened head, so that positions matter to the logits."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        widths = (3, 16, 32, 64)
        self.features = nn.Sequential()
        for before, after in pairwise(widths):
            self.features.append(nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False))
            self.features.append(nn.BatchNorm2d(after)).append(nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


def batches(images: am.ImageSet, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return one epoch in random order, as floats in [0, 1]."""
    order = torch.randperm(len(images)).split(size)
    return [(images.images[i].float() / 255, images.labels[i]) for i in order]


def main(argv: Sequence[str] | None = None) -> float:
    """Train and return the test accuracy in percent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixer", choices=MIXERS, default="AlignMixup")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--num-train", type=int, default=2000)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    train_set, test_set = shapes("train", args.num_train), shapes("test", 500)
    model = SmallNet(train_set.num_classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    mixer = MIXERS[args.mixer]
    for epoch in range(args.epochs):
        model.train()
        losses = []
        for x, y in batches(train_set, 64):
            loss = mixer(model, x, y).loss()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}")
    top1 = am.evaluate(model, test_set, device="cpu").value("accuracy", "top1")
    print(f"{args.mixer}: top-1 {top1:.1f} %")
    return top1


if __name__ == "__main__":
    main()
