"""ReLU after batch normalisation, in training on a GPU as one kernel each way.

The plain way the two are a third of the time of a small residual network's step, and all of it is
memory traffic: the tensor is read twice forward and twice backward, by six kernels.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["NormReluSequential", "norm_relu"]

# Other makers' devices are called "cuda" as well; how they launch cooperatively is untried.
_HAS_TRITON = importlib.util.find_spec("triton") is not None and torch.version.hip is None
# More channels than the kernel has places for its programs to meet; 8 fill a load of 16 bytes.
MAX_CHANNELS = 2048
CHANNEL_STEP = 8


def norm_relu(norm: nn.BatchNorm2d, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Return ReLU(``norm(x)``), by the kernel where it serves."""
    if not (x.is_cuda and _serves(norm, x)):
        return F.relu(norm(x))
    out: Tensor
    out, mean, var = _norm_relu(x, norm.weight, norm.bias, norm.eps)
    _update(norm, mean, var, x.numel() // x.shape[1])
    return out


class NormReluSequential(nn.Sequential):
    """A sequence in which batch norm and the ReLU after it are one step."""

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        while layers:
            layer = layers.pop(0)
            is_before_relu = bool(layers) and type(layers[0]) is nn.ReLU
            if isinstance(layer, nn.BatchNorm2d) and is_before_relu and not _has_hooks(layers[0]):
                layers.pop(0)
                x = norm_relu(layer, x)
            else:
                x = layer(x)
        return x


def _has_hooks(layer: nn.Module) -> bool:
    kinds = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
    )
    return any(kinds)


def _serves(norm: nn.BatchNorm2d, x: Tensor) -> bool:
    """Whether the kernel does what ``norm`` would: the usual settings, in training, channels_last.

    A hook on ``norm`` wants to see its output, which the kernel never holds.
    """
    return (
        _HAS_TRITON
        and type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and not _has_hooks(norm)
        and x.shape[1] <= MAX_CHANNELS
        and x.shape[1] % CHANNEL_STEP == 0
        and x.numel() > x.shape[1]
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def _update(norm: nn.BatchNorm2d, mean: Tensor, var: Tensor, count: int) -> None:
    """Move the running statistics as ``norm`` itself would have done."""
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
    """ReLU(BN(x)), the mean and the biased variance, by Triton."""
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
    """The gradients by x, weight and bias, by Triton."""
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
