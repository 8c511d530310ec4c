# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""PuzzleMix's auction in one launch: one program per image, no cost matrix in memory.

The cost of a block at a place is computed from their positions. A block tries the places it has not
lost in the order of (cost, place), so the last one it tried identifies all earlier ones. The places
it has lost, at most one per round, are stored with their increased costs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def auction(salient: Tensor, is_shown: Tensor, t_eps: float) -> Tensor:
    """Return the block at each place [b, s], for contiguous float32 and bool grids [b, n, n]."""
    b, n, _ = salient.shape
    source = torch.empty(b, n * n, dtype=torch.int64, device=salient.device)
    bids = torch.empty(b, n * n, dtype=torch.float32, device=salient.device)
    places = torch.empty(b, n * n, dtype=torch.int32, device=salient.device)
    S = max(32, int(triton.next_power_of_2(n * n)))
    _auction_kernel[(b,)](
        salient, is_shown.view(torch.uint8), source, bids, places, t_eps / (n - 1) ** 2,
        n=n, S=S, ROUNDS=max(2, int(triton.next_power_of_2(n))), num_warps=S // 32,
    )  # fmt: skip
    return source


@triton.jit
def _auction_kernel(
    salient_ptr, shown_ptr, source_ptr, bids_ptr, places_ptr, scale,
    n: tl.constexpr, S: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """cost_ij = scale |p_i - p_j|^2 - salient_i shown_j; each round: bid, then win or cost += 1."""
    first = tl.program_id(0).to(tl.int64) * (n * n)
    source_ptr += first
    bids_ptr += first
    places_ptr += first
    block = tl.arange(0, S)
    is_block = block < n * n
    salient = tl.load(salient_ptr + first + block, mask=is_block, other=0.0)
    tried = tl.full([S], float("-inf"), tl.float32)
    tried_place = tl.full([S], -1, tl.int32)
    slot = tl.arange(0, ROUNDS)[None, :]
    lost_cost = tl.full([S, ROUNDS], float("inf"), tl.float32)
    lost_place = tl.full([S, ROUNDS], S, tl.int32)
    turn = 0
    num_losers = 1
    # Without losers all further rounds are identical.
    while (turn < n) & (num_losers > 0):
        bid, place = _cheapest_untried(
            shown_ptr + first, salient, block, tried, tried_place, scale, n, S
        )
        again = tl.min(lost_cost, axis=1)
        again_place = tl.min(tl.where(lost_cost == again[:, None], lost_place, S), axis=1)
        is_again = (again < bid) | ((again == bid) & (again_place < place))
        bid = tl.where(is_again, again, bid)
        place = tl.where(is_again, again_place, place)
        tl.store(bids_ptr + block, bid, mask=is_block)
        tl.store(places_ptr + block, place, mask=is_block)
        tl.debug_barrier()  # threads read what others have written
        winner = _winners(bids_ptr, places_ptr, block, n, S)
        tl.store(source_ptr + block, winner.to(tl.int64), mask=is_block)
        tl.debug_barrier()
        # A block whose saliency is NaN has no place to bid for.
        has_place = is_block & (place < n * n)
        has_lost = has_place & (tl.load(source_ptr + place, mask=has_place, other=0) != block)
        is_slot = tl.where(is_again[:, None], lost_place == place[:, None], slot == turn)
        is_slot = is_slot & has_lost[:, None]
        lost_cost = tl.where(is_slot, (bid + 1)[:, None], lost_cost)
        lost_place = tl.where(is_slot, place[:, None], lost_place)
        is_new = has_lost & (is_again == 0)
        tried = tl.where(is_new, bid, tried)
        tried_place = tl.where(is_new, place, tried_place)
        num_losers = tl.sum(has_lost.to(tl.int32), axis=0)
        turn += 1
        tl.debug_barrier()  # the next round overwrites what others read
    # A place without a winner keeps its own block. Each thread reads its own store.
    winner = tl.load(source_ptr + block, mask=is_block, other=0)
    tl.store(source_ptr + block, tl.where(winner < n * n, winner, block), mask=is_block)


@triton.jit
def _cheapest_untried(
    shown_ptr, salient, block, tried, tried_place, scale, n: tl.constexpr, S: tl.constexpr
):
    """Return cost and index of the cheapest untried place of each block; the first on ties."""
    bid = tl.full([S], float("inf"), tl.float32)
    place = tl.full([S], S, tl.int32)
    row = block // n
    col = block % n
    for r in range(n):
        for c in tl.static_range(n):
            j = r * n + c
            gain = tl.where(tl.load(shown_ptr + j) != 0, salient, 0.0)
            distance = (row - r) * (row - r) + (col - c) * (col - c)
            cost = distance.to(tl.float32) * scale - gain
            is_untried = (cost > tried) | ((cost == tried) & (j > tried_place))
            is_better = is_untried & (cost < bid)
            bid = tl.where(is_better, cost, bid)
            place = tl.where(is_better, j, place)
    return bid, place


@triton.jit
def _winners(bids_ptr, places_ptr, place, n: tl.constexpr, S: tl.constexpr):
    """Return the block with the lowest bid for each place, the first on ties; S without bids."""
    least = tl.full([S], float("inf"), tl.float32)
    winner = tl.full([S], S, tl.int32)
    for r in range(n):
        for c in tl.static_range(n):
            i = r * n + c
            bid = tl.load(bids_ptr + i)
            is_less = (tl.load(places_ptr + i) == place) & (bid < least)
            least = tl.where(is_less, bid, least)
            winner = tl.where(is_less, i, winner)
    return winner
