"""The joint assignment behind Co-Mixup: which inputs each block of each output shows.

    F(z) = sum_j <c, z_j> + (beta/2) sum_uv ||z_ju - z_jv||^2 + gamma sum_j <o_j, v_j [v_j > tau]>
    o_j = sum of z_j over its blocks,   v_j = A sum_{k != j} o_k

over shares z_j of the inputs in the blocks of output j; u and v are neighbours. The last term keeps
outputs from showing the same inputs, once an input is shown more than tau blocks elsewhere.

One output at a time is cut on its grid with the others fixed. That is sequential by nature, so all
else lies side by side: parts of the batch and restarts.

Symbols: p parts, i of N inputs, j of N outputs, s blocks, r restarts, b = r p, L labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alignmixup.mixing.gridcut import PottsGrid, grid_adjacency, label_rows
from alignmixup.ot._precision import full_float32

__all__ = ["JointCosts", "Penalty", "assign_blocks", "joint_objective"]

Penalty = Literal["hard", "soft"]

NEVER = 1e6  # the cost of a label that is not there
HALF_BONUS = 5e-4  # what a block shared by two inputs saves over the mean of the two
HALF_LIKENESS = 0.75  # of a half-and-half label to its parents and to its siblings


@dataclass(frozen=True, slots=True)
class JointCosts:
    """What F is made of. A part with fewer samples is filled up; ``is_real`` says which count."""

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
        """The same parts, several times over: what restarts work on."""
        unary, compatibility, is_real = (
            tensor.repeat(times, *[1] * (tensor.ndim - 1))
            for tensor in (self.unary, self.compatibility, self.is_real)
        )
        return JointCosts(
            unary, compatibility, is_real, self.beta, self.gamma, self.tau, self.penalty
        )

    def excess(self, counts: Tensor) -> Tensor:
        """v [v > tau], or what v has above tau where the penalty is soft."""
        if self.penalty == "soft":
            return (counts - self.tau).clamp_min(0)
        return torch.nn.functional.threshold(counts, self.tau, 0.0)


def joint_objective(costs: JointCosts, shares: Float[Tensor, "p N s N"]) -> Float[Tensor, " p"]:
    """F of each part."""
    unary = (shares * costs.unary.mT.unsqueeze(1)).sum((1, 2, 3))
    adjacent = grid_adjacency(costs.side, shares)
    norms = (shares.square().sum(3) * adjacent.sum(1)).sum((1, 2))
    products = (shares * (adjacent @ shares)).sum((1, 2, 3))
    shown = shares.sum(2)
    elsewhere = (shown.sum(1, keepdim=True) - shown) @ costs.compatibility
    crowding = (shown * costs.excess(elsewhere)).sum((1, 2))
    return unary + costs.beta / 2 * (norms - products) + costs.gamma * crowding


@torch.no_grad()
def assign_blocks(
    costs: JointCosts,
    start: Int[Tensor, "r p N s"],
    *,
    num_iters: int = 4,
    num_sweeps: int = 2,
    half_labels: bool = True,
    resolve_ties: bool = True,
) -> Float[Tensor, "p N s N"]:
    """Lower F from each start and return the best: shares of one input, or halves of two.

    Halves come in from the second iteration on. Before the last two iterations, outputs that show
    the same set of inputs are pushed apart.
    """
    restarts, parts = start.shape[:2]
    with full_float32(start.device):
        many = costs.repeated(restarts)
        state = _State.of(many, start.flatten(0, 1))
        for iteration in range(num_iters):
            if resolve_ties and iteration == max(num_iters - 2, 1):
                state.push_ties_apart()
            state.improve(num_sweeps, half_labels and iteration > 0)
        value = joint_objective(many, state.shares).view(restarts, parts)
        best = value.min(0).indices.view(1, parts, 1, 1, 1)
        shares = state.shares.view(restarts, parts, *state.shares.shape[1:])
        return shares.take_along_dim(best, dim=0).squeeze(0)


@dataclass
class _State:
    """The shares of all outputs while they are improved in turn."""

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
        """Cut every output once, given all others."""
        costs = self.costs
        menu = _Menu.of(self, half_labels)
        shown = self.shares.sum(2)
        total = shown.sum(1, keepdim=True) @ costs.compatibility
        own = shown @ costs.compatibility
        picked = []
        for j in range(shown.shape[1]):
            elsewhere = total - own[:, j : j + 1]
            crowding = costs.excess(elsewhere) @ menu.shares[:, j].mT
            unary = torch.add(menu.unary[:, j], crowding, alpha=2 * costs.gamma)
            labels = self.grid.sweep(unary, menu.labels[:, j], menu.likeness[:, j], num_sweeps)
            picked.append(label_rows(menu.shares[:, j], labels))
            total = torch.baddbmm(elsewhere, picked[j].sum(1, keepdim=True), costs.compatibility)
        self.shares = torch.stack(picked, dim=1)

    def push_ties_apart(self) -> None:
        """Where two outputs show one set of several inputs, make its first input dearer in the
        one and its second in the other."""
        is_used = self.shares.sum(2) > 0
        rank = is_used.cumsum(2)
        several = rank[:, :, -1:] > 1
        same = (is_used.unsqueeze(2) == is_used.unsqueeze(1)).all(3) & several
        later = same.triu(1).sum(2, keepdim=True)
        earlier = same.tril(-1).sum(2, keepdim=True)
        first, second = is_used & (rank == 1), is_used & (rank == 2)
        self.push = (later * first + earlier * second).to(self.shares.dtype)


@dataclass(frozen=True)
class _Menu:
    """The labels each output may take in this iteration: every input, and halves of two.

    ``shares`` are zero in the outputs that only fill up a part: whatever they take, nothing shows.
    Halves are made from the inputs the output shows now: of two, or of the three it shows most.
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
        # Inputs that only fill up a part are never shown.
        plain = plain.masked_fill(~costs.is_real[:, None, None], NEVER)
        eye = torch.eye(num, device=plain.device, dtype=plain.dtype).expand(b, num, num, num)
        is_real = costs.is_real.to(plain.dtype)[:, :, None, None]
        if not half_labels:
            return cls(eye * is_real, plain, eye, state.shares.max(3).indices)
        halves, is_there = _halves(state.shares.sum(2))
        absent = (~is_there).to(plain.dtype).unsqueeze(2) * NEVER
        half_cost = plain @ halves.mT + (absent - HALF_BONUS)
        shares = torch.cat([eye, halves], dim=2)
        # The nearest label to what the output shows now: least ||z - x||^2 = const - 2 z x + |x|^2.
        far = shares.square().sum(3).unsqueeze(2) - 2 * state.shares @ shares.mT
        far[..., num:] += absent
        labels = far.min(3).indices
        unary = torch.cat([plain, half_cost], dim=3)
        return cls(shares * is_real, unary, _likeness(halves), labels)


def _halves(counts: Float[Tensor, "b N N"]) -> tuple[Tensor, Tensor]:
    """Half-and-half shares of the three inputs shown most, and which of them there are."""
    inputs = torch.arange(counts.shape[2], device=counts.device)
    # Counts are multiples of 1/2; the small slope decides between equals on every device alike.
    top = (counts - 0.2 / len(inputs) * inputs).topk(3, dim=2)
    first = torch.cat([top.indices[..., :1], top.indices[..., :2]], dim=2)
    second = torch.cat([top.indices[..., 1:], top.indices[..., 2:]], dim=2)
    is_there = torch.cat([top.values[..., 1:], top.values[..., 2:]], dim=2) > 0.25
    is_parent = (first.unsqueeze(3) == inputs) | (second.unsqueeze(3) == inputs)
    return is_parent.to(counts.dtype) / 2, is_there


def _likeness(halves: Float[Tensor, "b N 3 N"]) -> Float[Tensor, "b N L L"]:
    """S: 1 for equal labels, 0.75 for a half with a parent or a sibling, 0 otherwise."""
    b, num = halves.shape[:2]
    eye = torch.eye(num, device=halves.device, dtype=halves.dtype).expand(b, num, num, num)
    kin = 2 * HALF_LIKENESS * halves
    three = torch.eye(3, device=halves.device, dtype=halves.dtype)
    siblings = (HALF_LIKENESS + (1 - HALF_LIKENESS) * three).expand(b, num, 3, 3)
    above = torch.cat([eye, kin.mT], dim=3)
    return torch.cat([above, torch.cat([kin, siblings], dim=3)], dim=2)
