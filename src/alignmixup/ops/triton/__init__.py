"""The Triton kernels, one file an operator; each is imported where it is first used."""
