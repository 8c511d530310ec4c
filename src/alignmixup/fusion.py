"""Functions beside the network that are compiled in a step that compiles its network."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
R = TypeVar("R")

_is_fusing: ContextVar[bool] = ContextVar("is_fusing", default=False)

# What ``fusible`` has compiled, by the plain function.
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def fusible(function: Callable[P, R], *, combines: bool = False) -> Callable[P, R]:
    """Mark a function of tensors and modules that runs beside the network, once a step.

    In a step that compiles its network (``fusing``) it is compiled as well: ten launches of a few
    microseconds become one. Anywhere else it is the plain function.

    ``combines`` is for a function of many tensors, such as the weights of a network: on a GPU
    independent operations of the same kind are one launch.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or not _is_fusing.get():
            return function(*args, **kwargs)
        if function not in _compiled:
            together = combines and torch.cuda.is_available()
            _compiled[function] = torch.compile(
                function, dynamic=False, options={"combo_kernels": True} if together else None
            )
        compiled: Callable[P, R] = _compiled[function]
        if not any(isinstance(arg, nn.Module) for arg in args):
            return compiled(*args, **kwargs)
        # Otherwise a module with hooks would run by what was compiled for one without.
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            return compiled(*args, **kwargs)

    return call


@contextmanager
def fusing(enabled: bool = True) -> Iterator[None]:
    """Compile what is ``fusible`` within this block."""
    token = _is_fusing.set(enabled)
    try:
        yield
    finally:
        _is_fusing.reset(token)
