"""Interpolation of aligned feature tensors: the core of AlignMixup as a function.

    R = r P*,   A~_i = sum_j R_ij a'_j,   out = lam A + (1 - lam) A~            keep = "anchor"
                A~'_j = sum_i R_ij a_i,   out = lam A~' + (1 - lam) A'          keep = "partner"

Symbols: a_i, a'_j features of anchor and partner at r positions; P* the transport plan between
them (rows: positions of the anchor); lam the share of the anchor in both directions. In its second
direction the paper's algorithm exchanges the two images, so that lam is the share of the image
whose positions are kept. The distribution of lam is symmetric, so the method is the same.

Gradients flow through both feature tensors and not through the plan.

**A plan whose columns sum to 1/r preserves the mean over positions** (keep = "anchor"; the rows
for keep = "partner"): (1/r) sum_i A~_i = sum_j (sum_i P_ij) a'_j, the mean of a'. If the next
layers read only that mean, as average pooling and a linear layer do, logits and gradients are the
same with and without alignment. The marginal updated last is exact; by default it is the one that
preserves the mean. The authors' code updates the columns last in both directions, so its feat' does
not preserve the mean: the rows have an error after a finite number of iterations. See
``alignment_effect``.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.compiler import is_compiling

from alignmixup.ops._precision import autocasts_to_bf16, full_float32
from alignmixup.ops.blend import blend
from alignmixup.ops.cost import pairwise_cost
from alignmixup.ops.sinkhorn import Backend, Side, check_settings, sinkhorn, solver_name
from alignmixup.ops.size_classes import size_class

Keep = Literal["anchor", "partner"]


def align_mix(
    features: Float[Tensor, "b c h w"] | Float[Tensor, "b n c"],
    perm: Int[Tensor, " b"],
    lam: Float[Tensor, "*b"],
    *,
    keep: Keep = "anchor",
    eps: float = 0.1,
    num_iters: int = 100,
    tol: float | None = None,
    last: Side | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Mix the features of each sample with those of its partner, aligned by optimal transport.

    One operator for ``torch.compile``. Gradients, also second ones, flow through the features of
    both samples and not through the plan. Forward-mode derivatives (``torch.func.jvp``) are zero,
    as those of all of torch's custom operators. Under autocast to bf16, the kernels multiply
    float32 features in bf16 as well, except for the costs, which have 16 bits.

    Args:
        features: Maps ``[b, c, h, w]`` or tokens ``[b, n, c]``. Every token is a position: remove a
            class token first, as ``AlignMixup`` does.
        perm: Permutation of the batch: the partner of sample ``i`` is ``perm[i]``.
        lam: Share of the anchor, sample ``i``: a scalar or one value per sample.
        keep: Whose positions are kept, ``"anchor"`` (case ``feat``) or ``"partner"`` (case
            ``feat'``).
        eps: Strength of the entropic regularization.
        num_iters: Sinkhorn iterations; with 0 each kept position takes the softmax of its
            similarities, as in cross-attention.
        tol: Stop the iterations of a pair at this marginal error; None runs all of them.
        last: The marginal of the plan that is exact; None chooses the one that preserves the mean
            over positions.
        backend: ``"auto"`` chooses by device; see ``sinkhorn``.

    Returns:
        Mixed features of the same shape.

    Raises:
        ValueError: If shapes, settings or permutation are not valid, or the backend cannot run.

    Example:
        ```python
        features = torch.randn(8, 64, 4, 4)
        perm = torch.randperm(8)
        mixed = am.align_mix(features, perm, torch.tensor(0.3))
        assert mixed.shape == features.shape
        assert torch.equal(am.align_mix(features, perm, torch.tensor(1.0)), features)
        ```
    """
    if keep not in ("anchor", "partner"):
        raise ValueError(f"keep must be 'anchor' or 'partner', got {keep!r}")
    side = exact_side(keep, num_iters) if last is None else last
    check_settings(eps, num_iters, tol, side)
    _check_features(features, perm, lam)
    positions = to_positions(features)
    name = solver_name(backend, features, positions.shape[1])
    dtype = torch.promote_types(features.dtype, torch.float32)
    shares = lam.to(features.device, dtype).expand(features.shape[0]).contiguous()
    mixed, _ = _align_mix(
        positions,
        perm.to(features.device, torch.int64),  # indexing by uint8 would be a mask
        shares,
        keep == "partner",
        eps,
        num_iters,
        tol or 0.0,
        side,
        name,
        features.dtype == torch.float32 and autocasts_to_bf16(features.device),
    )
    return from_positions(mixed, features.shape)


def to_positions(features: Tensor) -> Float[Tensor, "b n c"]:
    """Return maps or tokens as positions x channels, a view if the strides allow."""
    if features.ndim == 3:
        return features
    return features.permute(0, 2, 3, 1).flatten(1, 2)


def from_positions(positions: Float[Tensor, "b n c"], shape: torch.Size) -> Tensor:
    """Undo ``to_positions``."""
    if len(shape) == 3:
        return positions
    b, c, h, w = shape
    return positions.view(b, h, w, c).permute(0, 3, 1, 2)


def exact_side(keep: Keep, num_iters: int) -> Side:
    """Return the default of ``last``: the marginal that preserves the mean over positions.

    If the anchor is kept, exact columns preserve the mean, and exact rows make each A~_i a convex
    combination. Without iterations the default is the latter, as in cross-attention.
    """
    if keep == "anchor":
        return "columns" if num_iters else "rows"
    return "rows" if num_iters else "columns"


def _check_features(features: Tensor, perm: Tensor, lam: Tensor) -> None:
    shape = list(features.shape)
    if features.ndim not in (3, 4) or not features.is_floating_point():
        raise ValueError(
            "features must be float maps [b, c, h, w] or tokens [b, n, c], "
            f"got {features.dtype} {shape}; choose a layer that returns one of these"
        )
    if 0 in shape[1:]:
        raise ValueError(f"features must have positions and channels, got {shape}")
    for name, value in (("perm", perm), ("lam", lam)):
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {value!r}: use torch.tensor({value!r})")
    b = features.shape[0]  # len() would make a batch size that torch.export traces a constant
    if perm.shape != (b,):
        raise ValueError(f"perm must have shape [{b}], got {list(perm.shape)}")
    if perm.is_floating_point() or perm.dtype == torch.bool:
        raise ValueError(f"perm must have an integer dtype, got {perm.dtype}")
    # On a GPU the check would synchronize at each step; a traced tensor has no values.
    if type(perm) is Tensor and perm.device.type == "cpu" and b and not is_compiling():
        low, high = (int(end) for end in torch.aminmax(perm))
        if low < 0 or high >= b:
            raise ValueError(f"perm must have values 0 to {b - 1}, got {low} to {high}")
    if lam.ndim and lam.shape != perm.shape:
        raise ValueError(f"lam must have shape [] or [{b}], got {list(lam.shape)}")


# One opaque operator: torch.compile does not trace it, its products have a fixed precision in both
# passes, and a kernel can replace it.
@torch.library.custom_op("alignmixup::align_mix", mutates_args=())
def _align_mix(
    features: Tensor,
    perm: Tensor,
    lam: Tensor,
    keep_partner: bool,
    eps: float,
    num_iters: int,
    tol: float,
    last: str,
    backend: str,
    half: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the mixed features and the plan; ``tol = 0`` means None."""
    if backend == "triton":
        from alignmixup.ops.triton import align as _triton

        return _triton.align_mix(
            features, perm, lam, keep_partner, eps, num_iters, tol or None, last, half
        )
    A = features.to(lam.dtype)
    partner = A[perm]
    cost = pairwise_cost(A.transpose(1, 2), partner.transpose(1, 2))
    plan = sinkhorn(
        cost,
        eps=eps,
        num_iters=num_iters,
        tol=tol or None,
        last="rows" if last == "rows" else "columns",
        backend=cast(Backend, backend),
    ).plan
    mixed = _mix_by_plan(A, partner, lam, plan, keep_partner)
    # A solver may return a transposed view, but compiled code is made for the layout traced below.
    return torch.empty_like(features).copy_(mixed), plan.contiguous()


def _mix_by_plan(
    A: Tensor, partner: Tensor, lam: Tensor, plan: Tensor, keep_partner: bool
) -> Float[Tensor, "b n c"]:
    """Return the features of each pair mixed by a given plan."""
    r = plan.shape[-1]
    with full_float32(A.device):
        if keep_partner:
            return blend(r * plan.transpose(1, 2) @ A, partner, lam)
        return blend(A, r * plan @ partner, lam)


@_align_mix.register_fake
def _(features, perm, lam, keep_partner, eps, num_iters, tol, last, backend, half=False):  # type: ignore[no-untyped-def]
    b, n, _ = features.shape
    plan = lam.new_empty(b, n, n)
    # There the memory of the costs, whose columns are exact, becomes the plan.
    is_transposed = backend == "triton" and last == "rows" and size_class(n) is not None
    return torch.empty_like(features), plan.transpose(1, 2) if is_transposed else plan


@torch.library.custom_op("alignmixup::align_mix_backward", mutates_args=())
def _align_mix_backward(
    grad: Tensor,
    perm: Tensor,
    lam: Tensor,
    plan: Tensor,
    keep_partner: bool,
    backend: str,
    half: bool = False,
) -> Tensor:
    """Return the gradient of the features: of each sample as anchor plus as partner."""
    if backend == "triton":
        from alignmixup.ops.triton import align as _triton

        return _triton.align_mix_backward(grad, perm, lam, plan, keep_partner, half)
    g = grad.to(lam.dtype)
    w = lam[:, None, None]
    r = plan.shape[-1]
    with full_float32(grad.device):
        if keep_partner:
            as_anchor, as_partner = w * r * (plan @ g), (1 - w) * g
        else:
            as_anchor, as_partner = w * g, (1 - w) * r * (plan.transpose(1, 2) @ g)
        total = as_anchor.index_add(0, perm, as_partner)
    return torch.empty_like(grad).copy_(total)


@_align_mix_backward.register_fake
def _(grad, perm, lam, plan, keep_partner, backend, half=False):  # type: ignore[no-untyped-def]
    return torch.empty_like(grad)


def _save_for_double_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, perm, lam, plan, ctx.keep_partner, *_ = inputs
    ctx.save_for_backward(perm, lam, plan)


def _double_backward(ctx, grad):  # type: ignore[no-untyped-def]
    # Backward is linear in its gradient, and its transpose is the mix by the same plan.
    perm, lam, plan = ctx.saved_tensors
    g = grad.to(lam.dtype)
    mixed = _mix_by_plan(g, g[perm], lam, plan, ctx.keep_partner)
    return mixed.to(grad.dtype), *[None] * 6


_align_mix_backward.register_autograd(_double_backward, setup_context=_save_for_double_backward)


def _save_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, perm, lam, keep_partner, *_, backend, half = inputs
    ctx.save_for_backward(perm, lam, output[1])
    ctx.settings = (keep_partner, backend, half)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_plan):  # type: ignore[no-untyped-def]
    # No gradient flows through the plan, nor to lam: shares are drawn, not learned.
    perm, lam, plan = ctx.saved_tensors
    by_features = None
    if grad is not None:
        by_features = _align_mix_backward(grad, perm, lam, plan, *ctx.settings)
    return by_features, *[None] * 9


_align_mix.register_autograd(_backward, setup_context=_save_for_backward)
