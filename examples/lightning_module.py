"""A mixer in Lightning: python examples/lightning_module.py --devices 1

Needs `pip install 'alignmixup[lightning]'`. The mixin adds a ``training_step`` that mixes. With
several devices Lightning wraps the module in DDP; all processes draw the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import alignmixup as am
from alignmixup.datasets import shapes
from alignmixup.integrations.lightning import MixupModule
from alignmixup.models import PreActResNet18


class Classifier(MixupModule, L.LightningModule):
    """A small residual network; ``training_step`` is the mixin's."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = PreActResNet18(num_classes, mean=(0.5,) * 3, std=(0.25,) * 3, width=8)
        self.mixer = am.AlignMixup("net.layer3")

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("val_accuracy", (logits.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.05)


def loader(split: str, size: int, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    images = shapes(split, size)
    data = TensorDataset(images.images.float() / 255, images.labels)
    return DataLoader(data, batch_size, shuffle=split == "train", drop_last=split == "train")


def main(argv: Sequence[str] | None = None) -> L.Trainer:
    """Train, validate, and return the trainer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--num-train", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    args = parser.parse_args(argv)

    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        devices=args.devices,
        accelerator=args.accelerator,
        logger=False,
        enable_checkpointing=False,
    )
    train = loader("train", args.num_train, args.batch_size)
    trainer.fit(Classifier(10), train, loader("test", 100, 100))
    print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
    return trainer


if __name__ == "__main__":
    main()
