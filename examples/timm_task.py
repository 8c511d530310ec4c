"""A mixer in timm's training task: python examples/timm_task.py --model vit_tiny_patch16_224

Needs `pip install 'alignmixup[timm]'`. ``MixupTask`` stands where a script of timm has its
``ClassificationTask``: compile it, wrap it in DDP and average its weights as usual.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import timm
import torch
from timm.optim import create_optimizer_v2

import alignmixup as am
from alignmixup.datasets import shapes
from alignmixup.integrations.timm import MixupTask


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train for some steps and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--layer", default="blocks.5")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    images = shapes("train", args.steps * args.batch_size, args.image_size)
    model = timm.create_model(args.model, num_classes=images.num_classes, img_size=args.image_size)
    task = MixupTask(model, am.AlignMixup(args.layer), num_steps=args.steps, verbose=False)
    task.setup_ema(decay=0.99)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)

    losses = []
    for rows in torch.randperm(len(images)).split(args.batch_size):
        x = images.images[rows].float() / 127.5 - 1
        loss = task(x, images.labels[rows])["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.update_ema()
        losses.append(loss.item())
        print(f"step {len(losses)}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
