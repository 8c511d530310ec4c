"""Taps: replace the output of a named layer during one forward pass of any module.

    with tap(net, "layer4", action, *args):
        logits = net(x)                       # layer4 gave out = action(out, *args) to what follows

A tap that did not act exactly once is an error, never a plain forward that nobody notices.

In eager mode the hook lives as long as the ``with`` block. A module that goes through
``torch.compile`` is different: a hook that comes after the first compiled call is silently
ignored, and one that comes and goes compiles anew each time. There the hook is installed at the
first ``tap`` (with ``action=None`` too: a mixer taps in every case), stays, and does nothing
outside the block.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

__all__ = [
    "WrongOutput",
    "attribute_around",
    "check_layer_name",
    "check_rows",
    "find_layer",
    "layer_names",
    "plain_module",
    "tap",
]

Action = Callable[..., Tensor]


class WrongOutput(ValueError):
    """An action cannot replace this output; ``tap`` adds to the message which layers there are."""


def check_rows(output: Tensor, layer: str, batch_size: int) -> None:
    """Raise where an output has not one row a sample: others would be mixed than the labels are."""
    if not output.ndim or len(output) != batch_size:
        raise WrongOutput(
            f"layer {layer!r} gives {list(output.shape)} for a batch of {batch_size}: the batch "
            "must come first; name a layer where it does"
        )


class _Slot:
    """What the hook of one layer reads: the action of this forward and how often it has acted."""

    def __init__(self) -> None:
        self.action: Action | None = None
        self.args: tuple[Any, ...] = ()
        self.fired = 0
        self.layer = ""
        self.has_backward = False

    def hook(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if self.action is None:
            return None  # leaves the output as it is
        self.fired += 1
        if not isinstance(output, Tensor):
            raise WrongOutput(f"layer {self.layer!r} gives {type(output).__name__}, not a tensor")
        if self.has_backward and not torch.compiler.is_compiling():
            _refuse_checkpointing(self.layer)
        return self.action(output, *self.args)


def _refuse_checkpointing(layer: str) -> None:
    """Raise within activation checkpointing: backward runs the layer again, after the tap is gone.

    The gradient would be that of features nobody mixed.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "checkpoint" and frame.f_globals is vars(checkpoint):
            raise WrongOutput(
                f"layer {layer!r} runs within torch.utils.checkpoint, which runs it again, "
                "unmixed, in the backward pass; name a layer outside of what is checkpointed"
            )
        frame = frame.f_back


# Layers of compiled modules, whose hook stays.
_installed: WeakKeyDictionary[nn.Module, _Slot] = WeakKeyDictionary()


@contextmanager
def tap(net: nn.Module, layer: str, action: Action | None, *args: Any) -> Iterator[None]:
    """Let ``action(output, *args)`` replace the output of ``layer`` in one forward of ``net``.

    With ``action=None`` the forward is a plain one. ``action`` should be a function with a fixed
    identity and ``args`` what changes between steps, so that a compiled module is compiled once a
    case and not once a step.
    """
    target, is_compiled = find_layer(net, layer)
    if not is_compiled:
        if action is None:
            yield
            return
        slot = _Slot()
        handle = target.register_forward_hook(slot.hook)
        try:
            yield from _acting(slot, action, args, net, layer, is_compiled)
        finally:
            handle.remove()
        return
    if target not in _installed:
        slot = _installed[target] = _Slot()
        target.register_forward_hook(slot.hook)
    yield from _acting(_installed[target], action, args, net, layer, is_compiled)


def _acting(
    slot: _Slot,
    action: Action | None,
    args: tuple[Any, ...],
    net: nn.Module,
    layer: str,
    is_compiled: bool,
) -> Iterator[None]:
    slot.action, slot.args, slot.fired, slot.layer = action, args, 0, layer
    # A compiled module runs again in backward what it has traced, action and all.
    slot.has_backward = torch.is_grad_enabled() and not is_compiled
    try:
        yield
    except WrongOutput as error:
        raise ValueError(f"{error}; {_there_is(net)}") from None
    finally:
        slot.action, slot.args = None, ()
    if action is not None and slot.fired != 1:
        raise ValueError(_misfire(net, layer, slot.fired, is_compiled))


def _misfire(net: nn.Module, layer: str, fired: int, is_compiled: bool) -> str:
    if fired > 1:
        return (
            f"layer {layer!r} ran {fired} times in one forward pass, so what to mix is ambiguous; "
            f"name a layer that runs once; {_there_is(net)}"
        )
    if is_compiled:
        return (
            f"layer {layer!r} was compiled before the mixer first saw the module, and "
            "torch.compile ignores hooks that come later: let the mixer make the first call of "
            "the compiled module, or call torch.compiler.reset() before it; or it does not run "
            "in this forward pass at all"
        )
    return (
        f"layer {layer!r} did not run in this forward pass; name a layer that does; "
        f"{_there_is(net)}"
    )


def check_layer_name(layer: object) -> None:
    """Raise a ``ValueError`` for what cannot be the name of a layer."""
    if not isinstance(layer, str):
        raise ValueError(
            f"a layer is the name of a sub-module, such as 'layer4', got {layer!r}; "
            "[name for name, _ in net.named_modules()] lists them"
        )


def find_layer(net: nn.Module, layer: str) -> tuple[nn.Module, bool]:
    """Return the sub-module called ``layer`` and whether it runs inside compiled code.

    Wrappers (DistributedDataParallel, ``torch.compile``) are looked through, so a layer has the
    name it has in the plain module.
    """
    *around, (parent, is_compiled) = _modules_around(net, layer)
    target = parent.get_submodule(layer.rpartition(".")[2])
    # A layer wrapped by torch.compile is hooked from outside; module.compile() compiles its hooks.
    is_compiled = is_compiled or target._compiled_call_impl is not None
    return target, is_compiled or any(entered for _, entered in around)


def attribute_around(net: nn.Module, layer: str, name: str) -> Any:
    """Return attribute ``name`` of the innermost module around ``layer`` that has it, or None."""
    around = [module for module, _ in _modules_around(net, layer)]
    return next((getattr(m, name) for m in reversed(around) if hasattr(m, name)), None)


def _modules_around(net: nn.Module, layer: str) -> list[tuple[nn.Module, bool]]:
    """The modules around ``layer``, outermost first, and which of them a wrapper compiles."""
    check_layer_name(layer)
    around = [_unwrap(net)]
    *parents, name = layer.split(".")
    for parent in parents:
        module = around[-1][0]
        if parent not in module._modules:
            raise ValueError(_no_such_layer(net, layer))
        around.append(_unwrap(module.get_submodule(parent)))
    if not name or name not in around[-1][0]._modules:
        raise ValueError(_no_such_layer(net, layer))
    return around


def _unwrap(module: nn.Module) -> tuple[nn.Module, bool]:
    """Return the module inside all wrappers and whether one of them compiles it."""
    is_compiled = False
    while True:
        if isinstance(module, nn.DataParallel):
            raise ValueError(
                "DataParallel splits a batch, so partners are lost; use DistributedDataParallel"
            )
        if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"a {type(module).__name__} has no layers whose output can be replaced: give the "
                "mixer the nn.Module itself, or one that torch.compile has wrapped"
            )
        is_compiled = is_compiled or module._compiled_call_impl is not None
        if isinstance(module, torch._dynamo.OptimizedModule):
            module, is_compiled = module._orig_mod, True
        elif isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        else:
            return module, is_compiled


def plain_module(net: nn.Module) -> nn.Module:
    """Return the module inside all wrappers."""
    return _unwrap(net)[0]


def _no_such_layer(net: nn.Module, layer: str) -> str:
    close = difflib.get_close_matches(layer, layer_names(net), n=5, cutoff=0.4)
    hint = f"did you mean {close}? " if close else ""
    return (
        f"there is no layer {layer!r} in {type(plain_module(net)).__name__}; {hint}{_there_is(net)}"
    )


def _there_is(net: nn.Module) -> str:
    names = layer_names(net)
    return "it has: " + ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")


def layer_names(net: nn.Module) -> list[str]:
    """Return the names a tap of ``net`` can have, outer layers first."""
    plain = (name.replace("_orig_mod.", "") for name, _ in plain_module(net).named_modules())
    names = {name for name in plain if name and not name.endswith("_orig_mod")}
    return sorted(names, key=lambda name: (name.count("."), name))
