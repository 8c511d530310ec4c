"""Partners across processes: every mixer sees the joined batch, the network its own share.

    joined images -> mixer -> [take] share of the mixed images -> network -> [give] joined logits
    at a tapped layer:  [give] joined features -> mixer -> [take] share of the mixed features

What lies outside of the network is computed by all processes alike. Its gradient is that of the
joined batch; inside it is R times that of the share, because the mean over R processes follows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alignmixup.wrappers import Action, Around


class JoinedNet(Around):
    """A network that takes the joined batch, runs the share of this process, and joins logits."""

    def __init__(self, module: nn.Module, batch_size: int) -> None:
        super().__init__(module)
        self.batch_size = batch_size  # joined

    def forward(self, x: Tensor, **flags: Any) -> Tensor:
        out = self.module(_take(x, self.batch_size), **flags)
        if not isinstance(out, Tensor):
            raise ValueError(
                f"train.partners='batch' needs a network that returns logits, not "
                f"{type(out).__name__}; use train.partners='share'"
            )
        return _give(out, self.batch_size)

    def around(self, action: Action) -> Action:
        return partial(_on_joined, self.batch_size, action)

    def inside(self, module: nn.Module) -> Self:
        return type(self)(module, self.batch_size)


def join(value: Tensor) -> Tensor:
    """Return the rows of all processes, by rank; without gradient."""
    return _gathered(value.detach())


def _on_joined(batch_size: int, action: Action, output: Tensor, *args: Any) -> Tensor | None:
    result = action(_give(output, batch_size), *args)
    return None if result is None else _take(result, batch_size)


def _take(value: Tensor, batch_size: int) -> Tensor:
    return cast(Tensor, _Take.apply(value, batch_size))  # type: ignore[no-untyped-call]


def _give(value: Tensor, batch_size: int) -> Tensor:
    return cast(Tensor, _Give.apply(value, batch_size))  # type: ignore[no-untyped-call]


class _Take(torch.autograd.Function):
    """The rows of this process."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, batch_size: int) -> Tensor:
        ctx.batch_size = batch_size
        return _own(value, batch_size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all(gradients[0], ctx.batch_size) / dist.get_world_size(), None


class _Give(torch.autograd.Function):
    """The rows of all processes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, batch_size: int) -> Tensor:
        ctx.batch_size = batch_size
        return _all(value, batch_size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _own(gradients[0], ctx.batch_size) * dist.get_world_size(), None


def _own(value: Tensor, batch_size: int) -> Tensor:
    """Return the share of this process in each of the stacked batches that ``value`` holds."""
    size = dist.get_world_size()
    batches = value.reshape(-1, size, batch_size // size, *value.shape[1:])
    return batches[:, dist.get_rank()].flatten(0, 1).clone()


def _all(value: Tensor, batch_size: int) -> Tensor:
    """Undo ``_own`` with the shares of all processes."""
    size = dist.get_world_size()
    ranks = _gathered(value).reshape(size, -1, batch_size // size, *value.shape[1:])
    return ranks.transpose(0, 1).flatten(0, 2)


def _gathered(value: Tensor) -> Tensor:
    own = value.contiguous()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts)
