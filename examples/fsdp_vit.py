"""AlignMixup on a ViT whose parameters are sharded over GPUs (FSDP2).

    torchrun --nproc-per-node 8 examples/fsdp_vit.py --dim 1024 --depth 24 --image-size 224

Each rank keeps 1/N of parameters, gradients and optimizer state, and gathers one block at a time.
The mixer needs no change: `fully_shard` keeps the names of layers, and hooks on them act.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import alignmixup as am


class ViT(nn.Module):
    """Patches, transformer blocks, the mean over tokens, a linear head."""

    def __init__(self, dim: int, depth: int, image_size: int, patch: int, num_classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (image_size // patch) ** 2, dim) * 0.02)
        kind = functools.partial(nn.TransformerEncoderLayer, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(kind(dim, dim // 16, 4 * dim, 0.0) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens.mean(1))  # type: ignore[no-any-return]


def shard(model: ViT) -> ViT:
    """Shard the parameters, block by block: only one block is gathered at a time."""
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train on random images for some steps and return the losses of this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"dim": 192, "depth": 6, "image-size": 32, "patch": 4, "batch-size": 16, "steps": 10}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)  # the same first weights on every rank
    model = shard(ViT(args.dim, args.depth, args.image_size, args.patch, 10).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mixer, draws = am.AlignMixup(f"blocks.{args.depth // 2}"), torch.Generator().manual_seed(0)
    torch.manual_seed(1 + dist.get_rank())  # other images on every rank, the same draws
    losses = []
    for _ in range(args.steps):
        x = torch.rand(args.batch_size, 3, args.image_size, args.image_size, device=device)
        y = torch.randint(10, (args.batch_size,), device=device)
        loss = mixer(model, x, y, draws).loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
