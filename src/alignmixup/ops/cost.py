"""Squared distances between two sets of feature vectors: the cost of transport.

    C_ij = |a_i - b_j|^2 = |a_i|^2 + |b_j|^2 - 2 <a_i, b_j>          (paper, eq. for the cost)

Symbols: n, m positions; c channels; columns a_i, b_j are feature vectors. One batched product: the
b x n x m x c tensor of differences is never formed.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from alignmixup.ops._precision import full_float32


def pairwise_cost(
    a: Float[Tensor, "*batch c n"], b: Float[Tensor, "*batch c m"]
) -> Float[Tensor, "*batch n m"]:
    """Squared distances between the columns of ``a`` and those of ``b``; no gradient flows.

    Computed in full float32 (float64 stays float64), also under autocast and with tf32 enabled.

    Args:
        a: Feature vectors of the anchor as columns, ``[..., c, n]``.
        b: Feature vectors of the partner as columns, ``[..., c, m]``.

    Returns:
        Squared Euclidean distances ``[..., n, m]``.

    Raises:
        ValueError: If batch or channels differ.

    Example:
        ```python
        a, b = torch.randn(8, 64, 16), torch.randn(8, 64, 49)
        assert am.pairwise_cost(a, b).shape == (8, 16, 49)
        ```
    """
    if a.shape[:-1] != b.shape[:-1]:
        raise ValueError(
            "a and b must agree in batch and channels, [..., c, n] and [..., c, m], "
            f"got {list(a.shape)} and {list(b.shape)}"
        )
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    with torch.no_grad(), full_float32(a.device):
        a, b = a.detach().to(dtype), b.detach().to(dtype)
        # A common shift does not change the distances. Without it, features far from the origin,
        # as after a ReLU, cancel in the sum of squares and lose their digits.
        center = a.mean(dim=-1, keepdim=True)
        a, b = a - center, b - center
        squares = a.square().sum(-2).unsqueeze(-1) + b.square().sum(-2).unsqueeze(-2)
        return (squares - 2 * a.transpose(-2, -1) @ b).clamp_(min=0)
