"""A mixer in an accelerate loop: accelerate launch examples/accelerate_loop.py

Needs `pip install 'alignmixup[accelerate]'`. Call the mixer on the prepared model: it finds the
layer inside of DDP. The generator has one seed, so that all processes draw the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import alignmixup as am
from alignmixup.datasets import shapes
from alignmixup.models import PreActResNet18


def main(argv: Sequence[str] | None = None) -> float:
    """Train and return the share of label mass that the last predictions hit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--num-train", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    images = shapes("train", args.num_train)
    data = TensorDataset(images.images.float() / 255, images.labels)
    model = PreActResNet18(images.num_classes, mean=(0.5,) * 3, std=(0.25,) * 3, width=8)
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05),
        DataLoader(data, args.batch_size, shuffle=True, drop_last=True),
    )
    mixer, rng = am.AlignMixup("layer3"), torch.Generator().manual_seed(0)
    num_steps, step = args.epochs * len(loader), 0
    for epoch in range(args.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                mixed = mixer(model, x, y, rng, progress=step / num_steps)
                accelerator.backward(mixed.loss())
                optimizer.step()
                optimizer.zero_grad()
            step += 1
        hit = accelerator.gather(mixed.accuracy_under_mixing()).mean().item()
        accelerator.print(f"epoch {epoch + 1}: hits {hit:.1%} of the label mass")
    return hit


if __name__ == "__main__":
    main()
