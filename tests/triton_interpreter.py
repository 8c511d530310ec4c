"""Triton kernels on a machine without a GPU: by Triton's interpreter, run in this process.

Triton decides between compiler and interpreter where a kernel is decorated, its own library
included. Whatever in the test session has loaded Triton before, e.g. torch.compile, has done so
for the compiler; then Triton and our kernels are loaded once more.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import sys

import pytest
import torch

from alignmixup.ops.backend import NO_COOPERATION

KERNELS = "alignmixup.ops.triton"


def interpret_kernels() -> None:
    """Have the kernels of this process interpreted, unless there is a GPU to run them."""
    if torch.cuda.is_available():
        return
    if NO_COOPERATION:
        pytest.skip(f"kernels are not interpreted: {NO_COOPERATION}", allow_module_level=True)
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
    _find_builtins_once()
    _skip_checks_without_effect()


def _find_builtins_once() -> None:
    """Triton looks for its builtins at every call of a kernel's function, for milliseconds."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    is_builtin = importlib.import_module("triton.language").core.is_builtin

    @functools.cache
    def builtins_of(place: object) -> list[str]:
        return [name for name, member in inspect.getmembers(place) if is_builtin(member)]

    def patch_builtin(place: object, *args: object) -> None:
        for name in builtins_of(place):
            member = getattr(place, name)
            if is_builtin(member):  # not patched yet
                interpreter._patch_attr(place, name, member, *args)

    interpreter._patch_builtin = patch_builtin


def _skip_checks_without_effect() -> None:
    """Triton computes whether an integer overflows, and asserts it in its debug mode alone."""
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
