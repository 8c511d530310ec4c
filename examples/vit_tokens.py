"""AlignMixup on the patch tokens of a vision transformer: python examples/vit_tokens.py

Needs `pip install 'alignmixup[timm]'`. The patches of the chosen layer are aligned; a class token,
which this small model does not have, would be mixed in place.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import timm
import torch
from torch import Tensor

import alignmixup as am
from alignmixup.datasets import shapes


def main(argv: Sequence[str] | None = None) -> Tensor:
    """Train for some steps and return the effect of alignment on the logits, block by block."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    images = shapes("train", args.steps * args.batch_size, image_size=32)
    model = timm.models.VisionTransformer(
        img_size=32,
        patch_size=4,
        embed_dim=args.dim,
        depth=args.depth,
        num_heads=4,
        num_classes=images.num_classes,
        class_token=False,
        global_pool="avg",
    )
    x = images.images.float() / 127.5 - 1  # timm's ViTs expect [-1, 1]

    # Blocks that follow the layer can use the positions; after the last one only the mean is read.
    effects = [am.alignment_effect(model, f"blocks.{i}", x[:16]) for i in range(args.depth)]
    for effect in effects:
        print(effect)

    mixer = am.AlignMixup(layer=f"blocks.{args.depth // 2}", num_iters=50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    for step, rows in enumerate(torch.randperm(len(x)).split(args.batch_size), start=1):
        loss = mixer(model, x[rows], images.labels[rows]).loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
    return torch.tensor([effect.logits for effect in effects])


if __name__ == "__main__":
    main()
