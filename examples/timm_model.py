"""AlignMixup in a timm model: python examples/timm_model.py --model resnet18 --layer layer3

Needs `pip install 'alignmixup[timm]'`. The model is unchanged; ``layer`` names one of its modules.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import timm
import torch

import alignmixup as am
from alignmixup.datasets import shapes


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train for some steps and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--layer", default="layer3", help="a module that returns [b, c, h, w]")
    parser.add_argument("--pretrained", action="store_true", help="download ImageNet weights")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=64)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    images = shapes("train", args.steps * args.batch_size, args.image_size)
    model = timm.create_model(
        args.model, pretrained=args.pretrained, num_classes=images.num_classes
    )
    # timm models expect normalized images; AlignMixup and input mixup are linear, so either works.
    mean, std = (torch.tensor(model.default_cfg[k]).view(3, 1, 1) for k in ("mean", "std"))
    x = (images.images.float() / 255 - mean) / std

    print(am.alignment_effect(model, args.layer, x[:16]))
    mixer = am.AlignMixup(layer=args.layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    losses = []
    for rows in torch.randperm(len(x)).split(args.batch_size):
        loss = mixer(model, x[rows], images.labels[rows]).loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {len(losses)}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
