"""The two problems on blocks behind PuzzleMix: which image a place shows, and which block of it.

Symbols: b pairs, n blocks along a side, L labels. Of a pair the anchor comes first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alignmixup.ops import block_kernels as kernels
from alignmixup.ops.block_kernels import Backend, choose_backend
from alignmixup.ops.gradient_saliency import block_saliency

__all__ = ["Energy", "puzzle_energy", "repeat_blocks", "transport"]


@dataclass(frozen=True, slots=True)
class Energy:
    """The cut of each pair: the cost of each label in each block, the weights between blocks."""

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
    """The energy of each pair; label l stands for the anchor's share l / (num_labels - 1).

    The cost of the four ways two blocks can meet (anchor-anchor, anchor-partner, ...) is split into
    a part of each block alone and a weight on differing blocks. Weights below zero would make the
    cut intractable and are set to zero; with gamma <= 1 and pixels in [0, 1] there are none.
    """
    n, block = num_blocks, pixels.shape[-1] // num_blocks
    shown = block_saliency(maps, block)
    smooth = beta / (16 * n)
    patch = min(neigh_size, block)
    colours = F.avg_pool2d(pixels.to(maps.dtype), patch)
    down = _meet(colours, perm, block // patch, smooth * gamma)
    right = _meet(colours.mT, perm, block // patch, smooth * gamma).mT
    # Showing one image loses the saliency of the other. Index 0: the anchor shown, 1: the partner.
    alone = torch.stack([shown[perm], shown])
    alone[:, :, :-1] += down.mean(1)  # each block meets, on average, either image below it
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
    colours: Float[Tensor, "b c r r"], perm: Tensor, patches: int, scale: float
) -> Float[Tensor, "2 2 b i n"]:
    """How much colours jump between each block and the one below; [image above, image below]."""
    edge = colours[:, :, patches - 1 : -1 : patches]
    next_edge = colours[:, :, patches::patches]
    above = torch.stack([edge, edge[perm]]).unsqueeze(1)
    below = torch.stack([next_edge, next_edge[perm]]).unsqueeze(0)
    jump = (above - below).abs().mean(3)
    return jump.view(*jump.shape[:4], -1, patches).mean(-1) * scale


def _excess(jump: Float[Tensor, "2 2 b i j"]) -> Float[Tensor, "b i j"]:
    """How much more it costs that the two images meet than that an image meets itself."""
    return (jump[0, 1] + jump[1, 0] - jump[0, 0] - jump[1, 1]) / 2


IMPOSSIBLE = 1e6  # in units of -log p, for what lam = 0 or lam = 1 rule out


def _prior(lam: Float[Tensor, "*b"], num_labels: int) -> Float[Tensor, "*b L"]:
    """-log p of each label, p binomial of mean lam."""
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
    """Move salient blocks into the shown region: block i to place j at the cost

        t_eps |p_i - p_j|^2 / (n - 1)^2 - salient_i shown_j,

    one block a place, by n rounds of an auction. A place that nobody has won in the last round
    keeps its own block.
    """
    n = salient.shape[1]
    if choose_backend(backend, salient, n * n) == "triton":
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
    """Rows are blocks, columns the places they may go to."""
    n = salient.shape[1]
    line = torch.arange(n, device=salient.device, dtype=salient.dtype)
    steps = (line.unsqueeze(1) - line).square()
    distance = (steps.view(n, 1, n, 1) + steps.view(1, n, 1, n)).view(n * n, n * n)
    gain = salient.flatten(1).unsqueeze(2) * is_shown.flatten(1).unsqueeze(1)
    return torch.sub(distance * (t_eps / (n - 1) ** 2), gain)


def _auction(cost: Float[Tensor, "b s s"], num_rounds: int) -> Int[Tensor, "b s"]:
    """Which block each place gets; ``cost`` is used up.

    In a round each block bids for its cheapest place, the cheapest bidder wins a place (of equals
    the first), and losers find that place dearer by one from then on.
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
    """Each entry as a square of that many equal ones."""
    b, n, _ = grid.shape
    wide = grid.view(b, n, 1, n, 1).expand(b, n, times, n, times)
    return wide.reshape(b, n * times, n * times)
