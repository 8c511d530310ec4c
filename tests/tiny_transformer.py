"""A vision transformer of timm's names, small enough for every test."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import NUM_CLASSES

__all__ = ["TinyTransformer"]


class TinyTransformer(nn.Module):
    """A class token and patches of 4 x 4 pixels, two blocks, a linear head on the class token."""

    def __init__(self, num_registers: int = 0, num_classes: int = NUM_CLASSES) -> None:
        super().__init__()
        self.num_prefix_tokens = 1 + num_registers
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.patch_embed = nn.Conv2d(3, 12, 4, 4)
            self.cls_token = nn.Parameter(torch.randn(1, 1, 12))
            self.reg_token = nn.Parameter(torch.randn(1, num_registers, 12))
            self.blocks = nn.ModuleList([_Block(), _Block()])
            self.head = nn.Linear(12, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        first = (token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token))
        tokens = torch.cat((*first, patches), dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens[:, 0])


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.attn = _Attention()
        self.mlp = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x).relu()


class _Attention(nn.Module):
    """Fused attention of three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.proj = nn.Linear(12, 12)
        with torch.no_grad():
            self.qkv.weight.mul_(3)  # attention that is far from uniform

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(out.transpose(1, 2).reshape(b, n, c))
