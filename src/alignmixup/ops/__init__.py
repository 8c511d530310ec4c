"""The mathematics of the methods: pure functions of tensors, each with its kernel beside it."""

from alignmixup.ops.cost import pairwise_cost
from alignmixup.ops.sinkhorn import Transport, sinkhorn

__all__ = ["Transport", "pairwise_cost", "sinkhorn"]
