"""Mathematics of the methods as functions of tensors; fused kernels are in ``triton``."""
