"""Gradient saliency of a network, for PuzzleMix and Co-Mixup.

    s = sqrt(mean_c (dCE / dx_c)^2),  x the clean batch

The pass over the clean batch is either discarded (``clean_lam = 0``: evaluation mode, running
statistics unchanged) or used as a regularizer (``clean_lam > 0``: training mode, the clean loss and
its gradients are part of the step).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.contracts import sigmoid_bce, soft_cross_entropy, soft_targets
from alignmixup.hooks import check_module, evaluating
from alignmixup.ops.blend import channel_values, check_logits
from alignmixup.wrappers import is_sharded, without_reducer

# Of a network that has no gradient at the images.
FREEZE = "freeze it by requires_grad_(False), not by torch.no_grad() or detach()"


@dataclass(frozen=True, slots=True)
class Saliency:
    """Saliency of each pixel, ``up`` times the gradient, and the clean loss if it is used.

    Each map is scaled by its own largest gradient: only ratios within an image are meaningful.
    """

    maps: Float[Tensor, "b h w"]
    scaled: Float[Tensor, "b c h w"]
    up: float
    extra: Mapping[str, Tensor]

    @property
    def gradient(self) -> Float[Tensor, "b c h w"]:
        """Gradient of the loss at the pixels."""
        return self.scaled / self.up


def gradient_saliency(
    net: nn.Module,
    x: Float[Tensor, "b c h w"],
    y: Tensor,
    *,
    clean_lam: float = 0.0,
    loss: Literal["ce", "bce", "sigmoid_bce"] = "bce",
    std: tuple[float, ...] | None = None,
) -> Saliency:
    """Return the saliency of a clean batch by one forward and backward pass.

    With ``clean_lam > 0`` the same backward pass computes the gradients of the parameters, unless
    FSDP shards them, they or layers have hooks, which would run at another scale or twice, or the
    network learns others than its own (``torch.func.functional_call``). They are stored in
    ``extra["clean"]``, a loss whose backward pass returns them. It is clean_lam CE, or
    2 clean_lam CE / k if the mixed loss is ``"bce"``, whose mean over k classes is smaller by about
    that factor. Multi-label targets (``"sigmoid_bce"``) have their own loss in place of CE.

    ``std`` converts gradients with respect to pixels in [0, 1] to those with respect to the
    normalized input, for a network that divides by ``std`` in its first layer.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "saliency needs a gradient, which torch.inference_mode() disables: call the mixer "
            "outside it, or use torch.no_grad()"
        )
    check_module(net)
    module = without_reducer(net)
    pixels = x if x.requires_grad else x.detach().requires_grad_()
    # float16 has no numbers as small as the gradients of a mean over a batch. A power of two leaves
    # all other types as they are.
    up = 64.0 * 2 ** (int(x.shape[0]) - 1).bit_length()
    extra: dict[str, Tensor] = {}
    with torch.enable_grad():
        if clean_lam > 0:
            logits = _logits(module, pixels)
            scale = clean_lam * (2 / logits.shape[1] if loss == "bce" else 1)
            clean = scale * _clean_loss(logits, y, loss)
            parameters: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
            # FSDP collects gradients in the backward pass alone, by other tensors than these.
            is_apart = is_sharded(module) or _has_backward_hooks(module)
            keeps = not is_apart and _ends_at(clean, [pixels, *parameters])
            parameters = parameters if keeps else []
            gradient, *kept = _gradients(up * clean, [pixels, *parameters], retain=not keeps)
            if x.requires_grad:  # also where a module of the user's has made the images
                parameters, kept = [*parameters, x], [*kept, gradient]
            extra["clean"] = _keep(clean, parameters, kept, up) if keeps else clean
        else:
            with _evaluating_frozen(module):
                clean = _clean_loss(_logits(module, pixels), y, loss)
                gradient, *_ = _gradients(up * clean, [pixels])
    if gradient is None:
        raise ValueError(
            "the loss has no gradient at the images, which saliency needs: a part of the network "
            f"runs without gradients; {FREEZE}"
        )
    return Saliency(_magnitude(gradient, std), gradient, up, extra)


def _gradients(
    loss: Tensor, tensors: list[Tensor], *, retain: bool = False
) -> Sequence[Tensor | None]:
    """Return the gradient of the loss at each tensor, None where it does not depend on it."""
    if not loss.requires_grad:
        return [None] * len(tensors)
    return torch.autograd.grad(loss, tensors, allow_unused=True, retain_graph=retain)


def _ends_at(loss: Tensor, tensors: list[Tensor]) -> bool:
    """Return whether these tensors are all that the loss has a gradient at."""
    known, seen, left = set(tensors), {t.grad_fn for t in tensors}, [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not node.next_functions and getattr(node, "variable", loss) not in known:
            return False
        left.extend(before for before, _ in node.next_functions)
    return True


def _has_backward_hooks(module: nn.Module) -> bool:
    """Return whether hooks of parameters or layers may change gradients of the backward pass."""
    return any(
        part._backward_hooks
        or part._backward_pre_hooks
        or any(p is not None and p._backward_hooks for p in part._parameters.values())
        for part in module.modules()
    )


def _clean_loss(logits: Float[Tensor, "b k"], y: Tensor, loss: str) -> Tensor:
    multi_label = loss == "sigmoid_bce"
    targets = soft_targets(y, logits.shape[1], multi_label=multi_label)
    return sigmoid_bce(logits, targets) if multi_label else soft_cross_entropy(logits, targets)


@contextmanager
def _evaluating_frozen(module: nn.Module) -> Iterator[None]:
    """Evaluate, for the gradient of the pixels only; restore all modes at the end.

    The parameters require no gradient meanwhile: compiled code computes all required gradients, and
    those of the weights are half of the work. The backward pass belongs in the block too:
    activation checkpointing runs the layers again in it, and must find the same modes.
    """
    learned = [p for p in module.parameters() if p.requires_grad and p.is_leaf]
    with evaluating(module):
        try:
            for parameter in learned:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in learned:
                parameter.requires_grad_()


def _logits(module: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = module(x)
    check_logits(logits, len(x))
    return logits


class _KeptGradients(torch.autograd.Function):
    """A loss whose gradients are already computed; backward returns them."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: list[Tensor], up: float, *parameters: Tensor
    ) -> Tensor:
        ctx.gradients, ctx.up = gradients, up
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise ValueError(
                "the clean loss of this mixer has no second derivative: set clean_lam=0 for a "
                "backward pass with create_graph=True, and add a clean loss of your own"
            )
        # One launch for all parameters: a launch each would cost more than the solver.
        return None, None, None, *torch._foreach_mul(ctx.gradients, scale / ctx.up)


def _keep(
    loss: Tensor, parameters: list[Tensor], gradients: Sequence[Tensor | None], up: float
) -> Tensor:
    """Return the loss with the gradients that it has, given as ``up`` times theirs."""
    pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    used, known = [p for p, _ in pairs], [g for _, g in pairs]
    kept: Tensor = _KeptGradients.apply(loss.detach(), known, up, *used)  # type: ignore[no-untyped-call]
    return kept


def _magnitude(gradient: Tensor, std: tuple[float, ...] | None) -> Float[Tensor, "b h w"]:
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    if std is not None:
        wide = wide * channel_values(std, wide)
    # Squares of the small gradients of a trained network underflow float32.
    largest = wide.abs().amax((1, 2, 3), keepdim=True)
    wide = wide / largest.clamp_min(torch.finfo(wide.dtype).tiny)
    return wide.square().mean(1).sqrt()


def block_saliency(maps: Float[Tensor, "b h w"], side: int) -> Float[Tensor, "b n m"]:
    """Return the mean saliency of each block of ``side`` pixels, normalized to sum to one.

    An image without gradient has uniform saliency.
    """
    blocks = nn.functional.avg_pool2d(maps.unsqueeze(1), side).squeeze(1) + 1e-12
    shares: Tensor = blocks / blocks.sum((1, 2), keepdim=True)
    return shares
