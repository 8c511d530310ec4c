"""The energy of PuzzleMix's masks, and the transport of salient blocks by an auction.

Symbols: b pairs, n blocks along a side, L labels. The anchor is the first image of a pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alignmixup.ops import block_kernels as kernels
from alignmixup.ops.backend import Backend, choose_backend, refuse_blocks
from alignmixup.ops.gradient_saliency import block_saliency


@dataclass(frozen=True, slots=True)
class Energy:
    """The energy of each pair: cost of each label in each block, weights between blocks."""

    unary: Float[Tensor, "b L n m"]
    down: Float[Tensor, "b n-1 m"]
    right: Float[Tensor, "b n m-1"]


def puzzle_energy(
    pixels: Float[Tensor, "b c h h"],
    maps: Float[Tensor, "b h h"],
    perm: Tensor,
    lam: Float[Tensor, "*b"],
    *,
    num_blocks: int,
    num_labels: int = 3,
    eta: float = 0.2,
    beta: float = 1.2,
    gamma: float = 0.5,
    neigh_size: int = 4,
) -> Energy:
    """Return the energy of each pair; label l is the anchor's share l / (num_labels - 1).

    The cost of the four pairs of adjacent blocks (anchor-anchor, anchor-partner, ...) is split into
    unary terms and a weight on different labels. Negative weights would make the cut intractable
    and are set to zero; with gamma <= 1 and pixels in [0, 1] there are none.
    """
    n, block = num_blocks, pixels.shape[-1] // num_blocks
    shown = block_saliency(maps, block)
    smooth = beta / (16 * n)
    patch = min(neigh_size, block)
    colors = F.avg_pool2d(pixels.to(maps.dtype), patch)
    down = _meet(colors, perm, block // patch, smooth * gamma)
    right = _meet(colors.mT, perm, block // patch, smooth * gamma).mT
    # The cost of showing one image is the saliency of the other. Index 0: anchor shown, 1: partner.
    alone = torch.stack([shown[perm], shown])
    alone[:, :, :-1] += down.mean(1)  # averaged over the image of the block below
    alone[:, :, 1:] += down.mean(0)
    alone[:, :, :, :-1] += right.mean(1)
    alone[:, :, :, 1:] += right.mean(0)
    share = torch.linspace(0, 1, num_labels, device=maps.device, dtype=maps.dtype).view(-1, 1, 1)
    unary = torch.lerp(alone[1].unsqueeze(1), alone[0].unsqueeze(1), share)
    prior = _prior(lam.to(maps.dtype), num_labels) * (eta / n**2)
    return Energy(
        unary + prior.view(*prior.shape, 1, 1),
        (_excess(down) + smooth).clamp_min(0),
        (_excess(right) + smooth).clamp_min(0),
    )


def _meet(
    colors: Float[Tensor, "b c r r"], perm: Tensor, patches: int, scale: float
) -> Float[Tensor, "2 2 b i n"]:
    """Return the color jump between each block and the one below; [image above, image below]."""
    edge = colors[:, :, patches - 1 : -1 : patches]
    next_edge = colors[:, :, patches::patches]
    above = torch.stack([edge, edge[perm]]).unsqueeze(1)
    below = torch.stack([next_edge, next_edge[perm]]).unsqueeze(0)
    jump = (above - below).abs().mean(3)
    return jump.view(*jump.shape[:4], -1, patches).mean(-1) * scale


def _excess(jump: Float[Tensor, "2 2 b i j"]) -> Float[Tensor, "b i j"]:
    """Return the cost of an edge between different images over that within one image."""
    return (jump[0, 1] + jump[1, 0] - jump[0, 0] - jump[1, 1]) / 2


IMPOSSIBLE = 1e6  # -log p of labels excluded by lam = 0 or lam = 1


def _prior(lam: Float[Tensor, "*b"], num_labels: int) -> Float[Tensor, "*b L"]:
    """Return -log p of each label, p binomial of mean lam."""
    top = num_labels - 1
    shares = [math.comb(top, k) * lam**k * (1 - lam) ** (top - k) for k in range(num_labels)]
    p = torch.stack(shares, dim=-1)
    return (-torch.log(p + 1e-8)).masked_fill(p <= 0, IMPOSSIBLE)


def transport(
    images: Float[Tensor, "b c h h"],
    salient: Float[Tensor, "b n n"],
    is_shown: Bool[Tensor, "b n n"],
    t_eps: float = 0.8,
    backend: Backend = "auto",
) -> Float[Tensor, "b c h h"]:
    """Move salient blocks into the shown region. The cost of block i at place j is

        t_eps |p_i - p_j|^2 / (n - 1)^2 - salient_i shown_j

    with one block per place, assigned by n rounds of an auction. A place without a winner in the
    last round keeps its own block.
    """
    n = salient.shape[1]
    name = choose_backend(backend, salient.device, "reference", refuse_blocks, salient, n * n)
    if name == "triton":
        source = kernels.auction(salient, is_shown, t_eps)
    else:
        source = _auction(_transport_cost(salient, is_shown, t_eps), num_rounds=n)
    block = images.shape[-1] // n
    b, c = images.shape[:2]
    tiles = images.reshape(b, c, n, block, n, block).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    batch = torch.arange(b, device=images.device).unsqueeze(1)
    moved = tiles[batch, source].view(b, n, n, c, block, block)
    return moved.permute(0, 3, 1, 4, 2, 5).reshape(images.shape)


def _transport_cost(salient: Tensor, is_shown: Tensor, t_eps: float) -> Float[Tensor, "b s s"]:
    """Return the costs; rows are blocks, columns are places."""
    n = salient.shape[1]
    line = torch.arange(n, device=salient.device, dtype=salient.dtype)
    steps = (line.unsqueeze(1) - line).square()
    distance = (steps.view(n, 1, n, 1) + steps.view(1, n, 1, n)).view(n * n, n * n)
    gain = salient.flatten(1).unsqueeze(2) * is_shown.flatten(1).unsqueeze(1)
    return torch.sub(distance * (t_eps / (n - 1) ** 2), gain)


def _auction(cost: Float[Tensor, "b s s"], num_rounds: int) -> Int[Tensor, "b s"]:
    """Return the block at each place; ``cost`` is overwritten.

    In each round every block bids for its cheapest place. The lowest bid wins (the first on ties),
    and the cost of that place increases by one for the losers.
    """
    size = cost.shape[1]
    blocks = torch.arange(size, device=cost.device).expand(cost.shape[:2])
    nobody = torch.full_like(blocks, size)
    dear = torch.full_like(cost[:, 0], math.inf)
    winner = nobody
    for _ in range(num_rounds):
        bid, place = cost.min(2)
        least = dear.scatter_reduce(1, place, bid, "amin")
        is_beaten = bid > least.gather(1, place)
        winner = nobody.scatter_reduce(1, place, blocks.masked_fill(is_beaten, size), "amin")
        has_lost = winner.gather(1, place) != blocks
        cost.scatter_add_(2, place.unsqueeze(2), has_lost.to(cost.dtype).unsqueeze(2))
    return torch.where(winner < size, winner, blocks)


def repeat_blocks(grid: Float[Tensor, "b n n"], times: int) -> Float[Tensor, "b h h"]:
    """Repeat each entry to a square of ``times`` x ``times``."""
    b, n, _ = grid.shape
    wide = grid.view(b, n, 1, n, 1).expand(b, n, times, n, times)
    return wide.reshape(b, n * times, n * times)
