"""ReLU after batch normalization; in training on a GPU one kernel each for forward and backward.

Unfused, the two take a third of the step of a small residual network, all of it memory traffic: six
kernels read the tensor twice in the forward and twice in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.ops.backend import choose_backend, has_hooks, refuse_norm_relu


def norm_relu(norm: nn.BatchNorm2d, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Return ReLU(``norm(x)``), by the kernel where it can run."""
    if choose_backend("auto", x.device, "reference", refuse_norm_relu, norm, x) == "reference":
        return F.relu(norm(x))
    out: Tensor
    out, mean, var = _norm_relu(x, norm.weight, norm.bias, norm.eps)
    _update(norm, mean, var, x.numel() // x.shape[1])
    return out


class NormReluSequential(nn.Sequential):
    """A sequence that runs batch norm and a following ReLU by ``norm_relu``."""

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        while layers:
            layer = layers.pop(0)
            is_before_relu = len(layers) > 0 and type(layers[0]) is nn.ReLU
            if isinstance(layer, nn.BatchNorm2d) and is_before_relu and not has_hooks(layers[0]):
                layers.pop(0)
                x = norm_relu(layer, x)
            else:
                x = layer(x)
        return x


def _update(norm: nn.BatchNorm2d, mean: Tensor, var: Tensor, count: int) -> None:
    """Update the running statistics as ``norm`` does."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        unbiased = var * (count / (count - 1))
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), norm.momentum)


@torch.library.custom_op("alignmixup::norm_relu", mutates_args=())
def _norm_relu(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ReLU(BN(x)), the mean and the biased variance."""
    from alignmixup.ops.triton import norm_relu as _triton_norm_relu

    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        return _triton_norm_relu.forward(x, weight, bias, eps)


@_norm_relu.register_fake
def _(x, weight, bias, eps):  # type: ignore[no-untyped-def]
    stats = x.new_empty(x.shape[1], dtype=torch.float32)
    return torch.empty_like(x), stats, torch.empty_like(stats)


@torch.library.custom_op("alignmixup::norm_relu_backward", mutates_args=())
def _norm_relu_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to x, weight and bias."""
    from alignmixup.ops.triton import norm_relu as _triton_norm_relu

    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        dy = dy.contiguous(memory_format=torch.channels_last)
        return _triton_norm_relu.backward(dy, x, weight, bias, mean, var, eps)


@_norm_relu_backward.register_fake
def _(dy, x, weight, bias, mean, var, eps):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, ctx.eps = inputs
    _, mean, var = output
    ctx.save_for_backward(x, weight, bias, mean, var)
    ctx.mark_non_differentiable(mean, var)


def _gradients(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, mean, var = ctx.saved_tensors
    dx, dweight, dbias = _norm_relu_backward(dy, x, weight, bias, mean, var, ctx.eps)
    return dx, dweight.to(weight.dtype), dbias.to(bias.dtype), None


_norm_relu.register_autograd(_gradients, setup_context=_save)
