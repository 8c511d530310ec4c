"""A mixer in Hugging Face's Trainer: python examples/hf_trainer.py --out runs/vit

Needs `pip install 'alignmixup[transformers]'`. The mixin's ``compute_loss`` mixes training batches;
evaluation is the Trainer's. A small ViT with random weights stands in for a pretrained one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import alignmixup as am
from alignmixup.datasets import shapes
from alignmixup.integrations.transformers import MixupTrainerMixin


class MixupTrainer(MixupTrainerMixin, Trainer):
    """A Trainer that mixes."""


class Shapes(Dataset[dict[str, Tensor]]):
    """The built-in images, in the names that image models of Transformers take."""

    def __init__(self, split: str, size: int) -> None:
        self.set = shapes(split, size)

    def __len__(self) -> int:
        return len(self.set)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = self.set.images[index].float() / 127.5 - 1
        return {"pixel_values": image, "labels": self.set.labels[index]}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and return the metrics of the evaluation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/vit")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--num-train", type=int, default=2000)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    sizes = {"hidden_size": args.hidden, "intermediate_size": 2 * args.hidden}
    depth = {"num_hidden_layers": args.layers, "num_attention_heads": 4}
    config = ViTConfig(image_size=32, patch_size=4, num_labels=10, **sizes, **depth)
    settings = TrainingArguments(
        args.out,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=64,
        learning_rate=1e-3,
        report_to="none",
        save_strategy="no",
    )
    trainer = MixupTrainer(
        ViTForImageClassification(config),
        settings,
        train_dataset=Shapes("train", args.num_train),
        eval_dataset=Shapes("test", 100),
        # One class token, which is mixed in place; the patches are aligned.
        mixer=am.AlignMixup(f"vit.layers.{args.layers // 2}", prefix_tokens=1),
    )
    trainer.train()
    metrics: dict[str, float] = trainer.evaluate()
    print(metrics)
    return metrics


if __name__ == "__main__":
    main()
