"""The joint assignment of Co-Mixup: the inputs shown by each block of each output.

    F(z) = sum_j <c, z_j> + (beta/2) sum_uv ||z_ju - z_jv||^2 + gamma sum_j <o_j, v_j [v_j > tau]>
    o_j = sum of z_j over its blocks,   v_j = A sum_{k != j} o_k

over shares z_j of the inputs in the blocks of output j; u and v are neighbors. The last term
penalizes an input that has more than tau blocks in the other outputs.

Each output in turn is cut on its grid with the others fixed and the last term linearized; then
single blocks of each output are changed if that lowers F. Outputs are sequential; parts of the
batch and restarts are batch dimensions. On a GPU the whole search is one kernel
(``triton/joint.py``), of which this is the reference.

Symbols: p parts, i of N inputs, j of N outputs, s blocks, r restarts, b = r p, L labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alignmixup.ops import block_kernels as kernels
from alignmixup.ops._precision import full_float32
from alignmixup.ops.backend import Backend, choose_backend, refuse_blocks
from alignmixup.ops.gridcut import PottsGrid, grid_adjacency, label_rows

Penalty = Literal["hard", "soft"]

NEVER = 1e6  # the cost of an unavailable label
HALF_BONUS = 5e-4  # subtracted from the mean cost of two inputs for a half label
HALF_LIKENESS = 0.75  # similarity of a half label to its parents and siblings
WORTH_IT = 1e-6  # a single change must lower F by more than rounding


@dataclass(frozen=True, slots=True)
class JointCosts:
    """The terms of F. Smaller parts are padded; ``is_real`` marks the samples."""

    unary: Float[Tensor, "p N s"]
    compatibility: Float[Tensor, "p N N"]
    is_real: Bool[Tensor, "p N"]
    beta: float
    gamma: float
    tau: float
    penalty: Penalty = "hard"

    @property
    def side(self) -> int:
        return math.isqrt(self.unary.shape[2])

    def repeated(self, times: int) -> JointCosts:
        """Return the same parts repeated, one copy per restart."""
        return replace(
            self,
            unary=self.unary.repeat(times, 1, 1),
            compatibility=self.compatibility.repeat(times, 1, 1),
            is_real=self.is_real.repeat(times, 1),
        )

    def excess(self, counts: Tensor) -> Tensor:
        """Return v [v > tau], or max(v - tau, 0) if the penalty is soft."""
        if self.penalty == "soft":
            return (counts - self.tau).clamp_min(0)
        return torch.nn.functional.threshold(counts, self.tau, 0.0)


def joint_objective(costs: JointCosts, shares: Float[Tensor, "p N s N"]) -> Float[Tensor, " p"]:
    """Return F of each part; autocast does not apply."""
    unary = (shares * costs.unary.mT.unsqueeze(1)).sum((1, 2, 3))
    adjacent = grid_adjacency(costs.side, shares)
    norms = (shares.square().sum(3) * adjacent.sum(1)).sum((1, 2))
    shown = shares.sum(2)
    with full_float32(shares.device):
        products = (shares * (adjacent @ shares)).sum((1, 2, 3))
        elsewhere = (shown.sum(1, keepdim=True) - shown) @ costs.compatibility
    crowding = (shown * costs.excess(elsewhere)).sum((1, 2))
    return unary + costs.beta / 2 * (norms - products) + costs.gamma * crowding


@dataclass(frozen=True, slots=True)
class Assignment:
    """Shares of the inputs in each block of each output, and the backend that ran."""

    shares: Float[Tensor, "p N s N"]
    backend: str


@torch.no_grad()
def assign_blocks(
    costs: JointCosts,
    start: Int[Tensor, "r p N s"],
    *,
    num_iters: int = 4,
    num_sweeps: int = 2,
    half_labels: bool = True,
    resolve_ties: bool = True,
    backend: Backend = "auto",
) -> Assignment:
    """Minimize F from each start and return the best result: shares of one input or halves of two.

    Halves are available from the second iteration. Before the last iteration, unless it is the only
    one, outputs that show the same set of inputs are penalized.
    """
    _, num, sites = costs.unary.shape
    device = costs.unary.device
    name = choose_backend(backend, device, "reference", refuse_blocks, costs.unary, sites, num)
    search = (num_iters, num_sweeps, half_labels, resolve_ties)
    if name == "triton":
        terms = (costs.unary, costs.compatibility, costs.is_real, start)
        weights = (costs.beta, costs.gamma, costs.tau, costs.penalty == "soft")
        return Assignment(kernels.joint_assignment(*terms, *weights, *search), name)
    return Assignment(_assign(costs, start, *search), name)


def _assign(
    costs: JointCosts,
    start: Int[Tensor, "r p N s"],
    num_iters: int,
    num_sweeps: int,
    half_labels: bool,
    resolve_ties: bool,
) -> Float[Tensor, "p N s N"]:
    restarts, parts = start.shape[:2]
    with full_float32(start.device):
        many = costs.repeated(restarts)
        state = _State.of(many, start.flatten(0, 1))
        for iteration in range(num_iters):
            if resolve_ties and 0 < iteration == num_iters - 1:
                state.push_ties_apart()
            state.improve(num_sweeps, half_labels and iteration > 0)
        state.descend()
        value = joint_objective(many, state.shares).view(restarts, parts)
        best = value.min(0).indices.view(1, parts, 1, 1, 1)
        shares = state.shares.view(restarts, parts, *state.shares.shape[1:])
        return shares.take_along_dim(best, dim=0).squeeze(0)


@dataclass
class _State:
    """The shares of all outputs during the search."""

    costs: JointCosts
    grid: PottsGrid
    shares: Float[Tensor, "b N s N"]
    push: Float[Tensor, "b N N"]

    @classmethod
    def of(cls, costs: JointCosts, labels: Int[Tensor, "b N s"]) -> _State:
        inputs = torch.arange(labels.shape[1], device=labels.device)
        is_shown = (labels.unsqueeze(3) == inputs) & costs.is_real[:, :, None, None]
        shares = is_shown.to(costs.unary.dtype)
        grid = PottsGrid.of(costs.side, costs.beta, costs.unary)
        return cls(costs, grid, shares, torch.zeros_like(shares[:, :, 0]))

    def improve(self, num_sweeps: int, half_labels: bool) -> None:
        """Cut each output once, given the others."""
        costs = self.costs
        menu = _Menu.of(self, half_labels)
        shown = self.shares.sum(2)
        total = shown.sum(1, keepdim=True)
        picked = []
        for j in range(shown.shape[1]):
            elsewhere = total - shown[:, j : j + 1]
            crowding = costs.excess(elsewhere @ costs.compatibility) @ menu.shares[:, j].mT
            unary = torch.add(menu.unary[:, j], crowding, alpha=2 * costs.gamma)
            labels = self.grid.sweep(unary, menu.labels[:, j], menu.likeness[:, j], num_sweeps)
            picked.append(label_rows(menu.shares[:, j], labels))
            total = elsewhere + picked[j].sum(1, keepdim=True)
        self.shares = torch.stack(picked, dim=1)

    def descend(self) -> None:
        """In each output in turn, make the change of one block that lowers F most, if any does.

        The choice neglects the off-diagonal terms of the compatibility, which are small.
        """
        costs, num = self.costs, self.shares.shape[1]
        like = self.shares
        inputs = torch.arange(num, device=like.device)
        is_other = (inputs.unsqueeze(1) != inputs).to(like.dtype).unsqueeze(2)
        blocks = torch.arange(like.shape[2], device=like.device)
        single = _SingleChanges.of(costs, self.push, like)
        shown = like.sum(2)
        v = (shown.sum(1, keepdim=True) - shown) @ costs.compatibility
        for j in range(num):
            own = self.shares[:, j]
            now = costs.excess(v)
            crowding = single.crowding(v, now, shown * is_other[j])
            change = single.changes(j, own, now[:, j : j + 1], crowding)
            value, place = change.flatten(1).min(1)
            is_worth = (value < -WORTH_IT) & costs.is_real[:, j]
            is_changed = (blocks == (place // num).unsqueeze(1)) & is_worth.unsqueeze(1)
            new = (inputs == (place % num).unsqueeze(1)).to(own.dtype).unsqueeze(1)
            step = (new - own) * is_changed.unsqueeze(2)
            own += step  # in place: a view of self.shares
            moved = step.sum(1, keepdim=True)
            v = torch.addcmul(v, is_other[j], moved @ costs.compatibility)
            shown[:, j : j + 1] += moved

    def push_ties_apart(self) -> None:
        """Penalize outputs that show the same set of several inputs.

        The first input costs 1 more in all but the last of them, the second in all but the first.
        """
        is_used = self.shares.sum(2) > 0
        rank = is_used.cumsum(2)
        several = rank[:, :, -1:] > 1
        same = (is_used.unsqueeze(2) == is_used.unsqueeze(1)).all(3) & several
        has_later = same.triu(1).any(2, keepdim=True)
        has_earlier = same.tril(-1).any(2, keepdim=True)
        is_dear = (has_later & (rank == 1)) | (has_earlier & (rank == 2))
        self.push = (is_used & is_dear).to(self.shares.dtype)


@dataclass(frozen=True)
class _SingleChanges:
    """Changes of F if a single block is assigned to one input."""

    costs: JointCosts
    adjacent: Float[Tensor, "s s"]
    edges: Float[Tensor, "s 1"]
    plain: Float[Tensor, "b N s N"]
    steps: Float[Tensor, "b 3 1 N"]

    @classmethod
    def of(cls, costs: JointCosts, push: Tensor, like: Tensor) -> _SingleChanges:
        adjacent = grid_adjacency(costs.side, like)
        itself = costs.compatibility.diagonal(dim1=1, dim2=2).unsqueeze(1)
        return cls(
            costs,
            adjacent,
            costs.beta / 2 * adjacent.sum(1, keepdim=True),
            costs.unary.mT.unsqueeze(1) + costs.gamma * push.unsqueeze(2),
            # One block more of an input, half a block less, one block less.
            torch.stack([itself, -0.5 * itself, -itself], dim=1),
        )

    def crowding(
        self, v: Float[Tensor, "b N N"], now: Float[Tensor, "b N N"], others: Float[Tensor, "b N N"]
    ) -> Float[Tensor, "b 3 N"]:
        """Return the change of the other outputs' penalty for each of the steps."""
        then = self.costs.excess(v.unsqueeze(1) + self.steps)
        return (others.unsqueeze(1) * (then - now.unsqueeze(1))).sum(2)

    def changes(
        self,
        j: int,
        own: Float[Tensor, "b s N"],
        now: Float[Tensor, "b 1 N"],
        crowding: Float[Tensor, "b 3 N"],
    ) -> Float[Tensor, "b s N"]:
        costs = self.costs
        more, half_less, less = crowding.unsqueeze(2).unbind(1)
        base = torch.add(self.plain[:, j], now, alpha=costs.gamma)
        base = torch.add(base, self.adjacent @ own, alpha=-costs.beta)
        taken = torch.add(base, more, alpha=costs.gamma) + self.edges
        freed = torch.where(own.amax(2, keepdim=True) < 1, 2 * half_less, less)
        left = torch.add(base, freed, alpha=-costs.gamma) + self.edges * own
        left = (own * left).sum(2, keepdim=True)
        is_out = (own > 0) | ~costs.is_real.unsqueeze(1)
        return (taken - left).masked_fill(is_out, NEVER)


@dataclass(frozen=True)
class _Menu:
    """The labels of each output in this iteration: all inputs, and halves of two.

    ``shares`` are zero in padded outputs. Halves are pairs of the two or three inputs with the most
    blocks in the output.
    """

    shares: Float[Tensor, "b N L N"]
    unary: Float[Tensor, "b N s L"]
    likeness: Float[Tensor, "b N L L"]
    labels: Int[Tensor, "b N s"]

    @classmethod
    def of(cls, state: _State, half_labels: bool) -> _Menu:
        b, num, _, _ = state.shares.shape
        costs = state.costs
        plain = costs.unary.mT.unsqueeze(1) + costs.gamma * state.push.unsqueeze(2)
        # Padded inputs are never shown.
        plain = plain.masked_fill(~costs.is_real[:, None, None], NEVER)
        eye = torch.eye(num, device=plain.device, dtype=plain.dtype).expand(b, num, num, num)
        is_real = costs.is_real.to(plain.dtype)[:, :, None, None]
        if not half_labels:
            return cls(eye * is_real, plain, eye, state.shares.max(3).indices)
        halves, is_there = _halves(state.shares.sum(2))
        absent = (~is_there).to(plain.dtype).unsqueeze(2) * NEVER
        half_cost = plain @ halves.mT + (absent - HALF_BONUS)
        shares = torch.cat([eye, halves], dim=2)
        # The label nearest to the current shares: argmin ||z - x||^2 = const - 2 z x + |x|^2.
        far = shares.square().sum(3).unsqueeze(2) - 2 * state.shares @ shares.mT
        far[..., num:] += absent
        labels = far.min(3).indices
        unary = torch.cat([plain, half_cost], dim=3)
        return cls(shares * is_real, unary, _likeness(halves), labels)


def _halves(counts: Float[Tensor, "b N N"]) -> tuple[Tensor, Tensor]:
    """Return the half labels of the three most shown inputs, and which of them are available."""
    inputs = torch.arange(counts.shape[2], device=counts.device)
    # Counts are multiples of 1/2; the small slope breaks ties equally on every device.
    top = (counts - 0.2 / len(inputs) * inputs).topk(3, dim=2)
    first = torch.cat([top.indices[..., :1], top.indices[..., :2]], dim=2)
    second = torch.cat([top.indices[..., 1:], top.indices[..., 2:]], dim=2)
    is_there = torch.cat([top.values[..., 1:], top.values[..., 2:]], dim=2) > 0.25
    is_parent = (first.unsqueeze(3) == inputs) | (second.unsqueeze(3) == inputs)
    return is_parent.to(counts.dtype) / 2, is_there


def _likeness(halves: Float[Tensor, "b N 3 N"]) -> Float[Tensor, "b N L L"]:
    """Return S: 1 for equal labels, 0.75 for a half and its parent or sibling, 0 otherwise."""
    b, num = halves.shape[:2]
    eye = torch.eye(num, device=halves.device, dtype=halves.dtype).expand(b, num, num, num)
    kin = 2 * HALF_LIKENESS * halves
    three = torch.eye(3, device=halves.device, dtype=halves.dtype)
    siblings = (HALF_LIKENESS + (1 - HALF_LIKENESS) * three).expand(b, num, 3, 3)
    above = torch.cat([eye, kin.mT], dim=3)
    return torch.cat([above, torch.cat([kin, siblings], dim=3)], dim=2)
