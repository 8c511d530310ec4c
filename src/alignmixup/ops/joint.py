"""The joint assignment behind Co-Mixup: which inputs each block of each output shows.

    F(z) = sum_j <c, z_j> + (beta/2) sum_uv ||z_ju - z_jv||^2 + gamma sum_j <o_j, v_j [v_j > tau]>
    o_j = sum of z_j over its blocks,   v_j = A sum_{k != j} o_k

over shares z_j of the inputs in the blocks of output j; u and v are neighbours. The last term keeps
outputs from showing the same inputs, once an input is shown more than tau blocks elsewhere.

One output at a time is cut on its grid with the others fixed, as if what they show were dear in
proportion; then one block of each output at a time is changed where that lowers F itself. That is
sequential by nature, so all else lies side by side: parts of the batch and restarts. On a GPU the
whole search is one kernel (``_triton_joint``), of which this is the reference.

Symbols: p parts, i of N inputs, j of N outputs, s blocks, r restarts, b = r p, L labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alignmixup.ops import block_kernels as kernels
from alignmixup.ops._precision import full_float32
from alignmixup.ops.block_kernels import Backend, choose_backend
from alignmixup.ops.gridcut import PottsGrid, grid_adjacency, label_rows

__all__ = ["Assignment", "JointCosts", "Penalty", "assign_blocks", "joint_objective"]

Penalty = Literal["hard", "soft"]

NEVER = 1e6  # the cost of a label that is not there
HALF_BONUS = 5e-4  # what a block shared by two inputs saves over the mean of the two
HALF_LIKENESS = 0.75  # of a half-and-half label to its parents and to its siblings
WORTH_IT = 1e-6  # by how much a single change must lower F; less is rounding


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
    """F of each part; autocast does not apply."""
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
    """The shares of the inputs in each block of each output, and which backend found them."""

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
    """Lower F from each start and return the best: shares of one input, or halves of two.

    Halves come in from the second iteration on. Before the last iteration, unless it is the only
    one, outputs that show the same set of inputs are pushed apart.
    """
    _, num, sites = costs.unary.shape
    name = choose_backend(backend, costs.unary, sites, num)
    if name == "triton":
        shares = kernels.joint_assignment(
            costs.unary,
            costs.compatibility,
            costs.is_real,
            start,
            costs.beta,
            costs.gamma,
            costs.tau,
            costs.penalty == "soft",
            num_iters,
            num_sweeps,
            half_labels,
            resolve_ties,
        )
    else:
        shares = _assign(costs, start, num_iters, num_sweeps, half_labels, resolve_ties)
    return Assignment(shares, name)


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
        """In each output in turn, give the block to the input that lowers F most, if any does.

        Beside the block's own input and the new one, a change of counts moves v by no more than
        the little that compatibility has off its diagonal; that is left out of the choice.
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
            own += step  # in place: a view of the shares
            moved = step.sum(1, keepdim=True)
            v = torch.addcmul(v, is_other[j], moved @ costs.compatibility)
            shown[:, j : j + 1] += moved

    def push_ties_apart(self) -> None:
        """Where two outputs show one set of several inputs, make its first input dearer by 1 in
        the earlier one and its second in the later one, however many outputs show that set."""
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
    """What F gains where a single block is given to one input alone."""

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
            # A block more of an input, a half less, a whole one less.
            torch.stack([itself, -0.5 * itself, -itself], dim=1),
        )

    def crowding(
        self, v: Float[Tensor, "b N N"], now: Float[Tensor, "b N N"], others: Float[Tensor, "b N N"]
    ) -> Float[Tensor, "b 3 N"]:
        """How the other outputs' crowding changes with each of the steps."""
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
