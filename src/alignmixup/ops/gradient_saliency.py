"""Where a network looks: the size of the loss's gradient at each pixel, for PuzzleMix and Co-Mixup.

    s = sqrt(mean_c (dCE / dx_c)^2),  x the clean batch

The pass over the clean batch can be thrown away (``clean_lam = 0``: evaluation mode, no running
statistics change) or kept as a regulariser (``clean_lam > 0``: training mode, the clean loss and
its gradients count in the step).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.contracts import soft_cross_entropy, soft_targets
from alignmixup.ops.blend import Loss, check_logits

__all__ = [
    "Rgb",
    "Saliency",
    "block_saliency",
    "channel_values",
    "check_grids",
    "check_saliency_settings",
    "gradient_saliency",
]

Rgb = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Saliency:
    """Saliency of each pixel, the gradient it comes from, and the clean loss where it is kept.

    Each map is scaled by its own largest gradient: only ratios within an image mean anything.
    """

    maps: Float[Tensor, "b h w"]
    gradient: Float[Tensor, "b c h w"]
    extra: Mapping[str, Tensor]


def gradient_saliency(
    net: nn.Module,
    x: Float[Tensor, "b c h w"],
    y: Tensor,
    *,
    clean_lam: float = 0.0,
    loss: Loss = "bce",
    std: Rgb | None = None,
) -> Saliency:
    """Run the clean batch forward and back to its pixels.

    With ``clean_lam > 0`` one backward pass serves saliency and parameters alike: its parameter
    gradients wait in ``extra["clean"]``, a loss whose own backward pass hands them out. It is
    clean_lam CE, and 2 clean_lam CE / k where the mixed loss is ``"bce"``, whose mean over k
    classes is smaller than CE by about that factor.

    ``std`` turns gradients with respect to pixels in [0, 1] into those with respect to the
    normalised input, for a network that divides by ``std`` in its first layer.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "saliency needs a gradient, which torch.inference_mode() rules out: call the mixer "
            "outside it, or use torch.no_grad()"
        )
    # Past DistributedDataParallel: its reducer expects a backward pass to .grad after each forward.
    module = net.module if isinstance(net, nn.parallel.DistributedDataParallel) else net
    pixels = x.detach().requires_grad_()
    extra: dict[str, Tensor] = {}
    with torch.enable_grad():
        if clean_lam > 0:
            logits = _logits(module, pixels)
            scale = clean_lam * (2 / logits.shape[1] if loss == "bce" else 1)
            clean = scale * soft_cross_entropy(logits, soft_targets(y, logits.shape[1]))
            parameters = [p for p in module.parameters() if p.requires_grad]
            gradient, *kept = torch.autograd.grad(clean, [pixels, *parameters], allow_unused=True)
            extra["clean"] = _keep(clean, parameters, kept)
        else:
            logits = _evaluated_logits(module, pixels)
            clean = soft_cross_entropy(logits, soft_targets(y, logits.shape[1]))
            (gradient,) = torch.autograd.grad(clean, pixels, allow_unused=True)
    # A network that ignores its input has no gradient there: every pixel is as good as another.
    gradient = torch.zeros_like(x) if gradient is None else gradient
    return Saliency(_magnitude(gradient, std), gradient, extra)


def _evaluated_logits(module: nn.Module, x: Tensor) -> Tensor:
    """Logits in evaluation mode, for gradients by the pixels alone; then all is as it was.

    The parameters ask for no gradient meanwhile: compiled code works out every gradient that is
    asked for when it runs forward, wanted or not, and those of the weights are half of the work.
    """
    modes = [(part, part.training) for part in module.modules()]
    learned = [p for p in module.parameters() if p.requires_grad]
    module.eval()
    try:
        for parameter in learned:
            parameter.requires_grad_(False)
        return _logits(module, x)
    finally:
        for parameter in learned:
            parameter.requires_grad_()
        for part, mode in modes:
            part.training = mode


def _logits(module: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = module(x)
    check_logits(logits, len(x))
    return logits


class _KeptGradients(torch.autograd.Function):
    """A loss whose gradients are known already: backward hands them out."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        # One launch for all parameters; a hundred small ones would cost more than the solver.
        return None, None, *torch._foreach_mul(ctx.gradients, scale)


def _keep(
    loss: Tensor, parameters: list[nn.Parameter], gradients: Sequence[Tensor | None]
) -> Tensor:
    pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    used, known = [p for p, _ in pairs], [g for _, g in pairs]
    kept: Tensor = _KeptGradients.apply(loss.detach(), known, *used)  # type: ignore[no-untyped-call]
    return kept


def _magnitude(gradient: Tensor, std: Rgb | None) -> Float[Tensor, "b h w"]:
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    if std is not None:
        wide = wide * channel_values(std, wide)
    # Gradients of a trained network may be too small to square in float32.
    largest = wide.abs().amax((1, 2, 3), keepdim=True)
    wide = wide / largest.clamp_min(torch.finfo(wide.dtype).tiny)
    return wide.square().mean(1).sqrt()


def channel_values(values: Rgb, like: Float[Tensor, "b c h w"]) -> Float[Tensor, "c 1 1"]:
    """One value a channel, made on the device, so that a step can be captured."""
    if len(values) != like.shape[1]:
        raise ValueError(
            f"{values} has {len(values)} values, but the images have {like.shape[1]} channels"
        )
    return torch.stack([like.new_full((1, 1), value) for value in values])


def block_saliency(maps: Float[Tensor, "b h w"], side: int) -> Float[Tensor, "b n m"]:
    """Mean saliency of each block of ``side`` pixels, as shares that sum to one in each image.

    An image without any gradient is equally salient everywhere.
    """
    blocks = nn.functional.avg_pool2d(maps.unsqueeze(1), side).squeeze(1) + 1e-12
    shares: Tensor = blocks / blocks.sum((1, 2), keepdim=True)
    return shares


def check_saliency_settings(clean_lam: float, std: Rgb | None) -> None:
    if not 0 <= clean_lam < math.inf:
        raise ValueError(
            f"clean_lam must be 0 (clean gradients discarded) or more, and finite, got {clean_lam}"
        )
    if std is not None and not min(std) > 0:
        raise ValueError(f"saliency_std must be positive in each channel, got {std}")


def check_grids(grids: tuple[int, ...], least: int) -> None:
    """Raise a ``ValueError`` for what are no numbers of blocks to draw from."""
    if not isinstance(grids, tuple | list) or not all(isinstance(n, int) for n in grids):
        raise ValueError(f"grids must be a tuple of whole numbers, such as (2, 4), got {grids!r}")
    if not grids or len(set(grids)) < len(grids) or min(grids) < least:
        raise ValueError(f"grids must be different numbers of blocks >= {least}, got {grids}")
