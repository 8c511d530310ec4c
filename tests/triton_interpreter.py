"""Triton kernels on a machine without a GPU: by Triton's interpreter, run in this process.

Triton decides between compiler and interpreter where a kernel is decorated, its own library
included. Whatever in the test session has loaded Triton before, e.g. torch.compile, has done so
for the compiler; then Triton and our kernels are loaded once more.
"""

from __future__ import annotations

import importlib
import os
import sys

import torch

KERNELS = "alignmixup.ops.triton"


def interpret_kernels() -> None:
    """Have the kernels of this process interpreted, unless there is a GPU to run them."""
    if torch.cuda.is_available():
        return
    loaded = sys.modules.get("alignmixup.ops.triton.common")
    if loaded is not None and loaded.INTERPRETED:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        # The compiled part of Triton registers its types in Python and can do so only once.
        if name == "triton" or (name.startswith("triton.") and not name.startswith("triton._C")):
            del sys.modules[name]
        if name.startswith(f"{KERNELS}."):
            del sys.modules[name]
            delattr(sys.modules[KERNELS], name.removeprefix(f"{KERNELS}."))
    importlib.import_module(f"{KERNELS}.align")
