"""Batch norm with the statistics of all processes: that of the joined batch.

    mean = 1/R sum_r mean_r(x),   var = 1/R sum_r mean_r((x - mean)^2)             R equal shares

On a GPU torch's own ``nn.SyncBatchNorm`` computes it. That one refuses CPU tensors, so the same
arithmetic is written out here for gloo.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def sync_norms(module: nn.Module) -> int:
    """Replace each batch norm inside ``module``, in place, and return their number.

    Parameters and buffers stay the same tensors under the same names: optimizers, averages and
    checkpoints do not change.
    """
    if isinstance(module, _BatchNorm):
        raise ValueError("the network is a batch norm alone: put it into an nn.Sequential")
    count = 0
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm) and not isinstance(child, SyncNorm | nn.SyncBatchNorm):
                setattr(parent, name, _synced(child))
                count += 1
    return count


class SyncNorm(_BatchNorm):
    """``nn.SyncBatchNorm`` for tensors on the CPU."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"a batch norm needs [b, c, ...], got {list(input.shape)}")

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        dims = [0, *range(2, x.ndim)]
        mean = _mean_over_ranks(x.mean(dims))
        centered = x - _as_maps(mean, x)
        var = _mean_over_ranks(centered.square().mean(dims))
        if self.track_running_stats:
            self._track(mean.detach(), var.detach(), x.numel() // x.shape[1])
        scaled = centered * _as_maps((var + self.eps).rsqrt(), x)
        if not self.affine:
            return scaled
        return scaled * _as_maps(self.weight, x) + _as_maps(self.bias, x)

    def _track(self, mean: Tensor, var: Tensor, num_values: int) -> None:
        """Update the running statistics, the variance without bias, as torch does."""
        running_mean, running_var = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        counter = cast(Tensor, self.num_batches_tracked).add_(1)
        share = self.momentum if self.momentum is not None else 1 / float(counter)
        joined = num_values * dist.get_world_size()
        running_mean.lerp_(mean.to(running_mean.dtype), share)
        running_var.lerp_((var * (joined / (joined - 1))).to(running_var.dtype), share)


def _synced(norm: _BatchNorm) -> _BatchNorm:
    """Return the synchronized form of a norm, with its own parameters and buffers."""
    tensors = (*norm.parameters(), *norm.buffers())
    kind = SyncNorm if all(tensor.device.type == "cpu" for tensor in tensors) else nn.SyncBatchNorm
    synced = kind(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    for name, parameter in norm.named_parameters(recurse=False):
        setattr(synced, name, parameter)
    for name, buffer in norm.named_buffers(recurse=False):
        setattr(synced, name, buffer)
    return synced.train(norm.training)


def _as_maps(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.ndim - 2))


def _mean_over_ranks(value: Tensor) -> Tensor:
    total = cast(Tensor, _Sum.apply(value))  # type: ignore[no-untyped-call]
    return total / dist.get_world_size()


class _Sum(torch.autograd.Function):
    """The sum over all processes; the gradient of a sum that all use is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total
