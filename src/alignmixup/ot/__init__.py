"""Entropic optimal transport for batches of small problems."""

from alignmixup.ot.cost import pairwise_cost
from alignmixup.ot.sinkhorn import Transport, sinkhorn

__all__ = ["Transport", "pairwise_cost", "sinkhorn"]
