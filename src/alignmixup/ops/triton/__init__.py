"""Triton kernels, one file per operator, imported when they first run."""
