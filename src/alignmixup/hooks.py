"""Taps: replace the output of a named layer during one forward pass of any module.

    with tap(net, "layer4", action, *args):
        logits = net(x)                       # layer4 returns action(out, *args)

A tap whose layer did not run exactly once raises an error.

A tap acts in the thread that entered it: a plain forward pass of another thread stays plain, and
threads that mix at once each see their own mix. Compiled code cannot ask for its thread, so a
compiled module is one thread's during the block; a second tap of the layer raises an error.

In eager mode the hook exists only within the ``with`` block. ``torch.compile`` ignores hooks that
are added after the first compiled call, and recompiles when hooks come and go. In a compiled module
the hook is therefore installed by the first ``tap`` (also with ``action=None``: a mixer taps in
every case), stays installed, and does nothing outside the block.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from alignmixup.outputs import Selection, WrongOutput
from alignmixup.wrappers import Action, Around, find_layer, list_layers


@contextmanager
def keeping_modes(net: nn.Module) -> Iterator[None]:
    """Restore the training mode of every sub-module at the end of the block.

    By ``train`` where the mode has changed: a module's own may do more than set it, as LoRA layers
    do that merge their weights for evaluation.
    """
    check_module(net)
    modes = [(module, module.training) for module in net.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            if module.training != mode:
                with suppress(NotImplementedError):
                    module.train(mode)
        for module, mode in modes:  # which train() of another may have changed again
            module.training = mode


def check_module(net: object) -> None:
    """Raise a ``ValueError`` unless the network is a module: modes and weights are read from it."""
    if not isinstance(net, nn.Module):
        raise ValueError(
            f"this method looks into the network and needs an nn.Module, got a "
            f"{type(net).__name__}: pass the module itself, alignmixup.as_logits(model) if it does "
            "not return logits"
        )


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Put the network in eval mode; restore the mode of every sub-module afterwards.

    A program of torch.export keeps the mode that it was exported in; torch raises for any other.
    """
    with keeping_modes(net):
        with suppress(NotImplementedError):
            net.eval()
        yield


def check_rows(output: Tensor, layer: str, batch_size: int) -> None:
    """Raise unless ``output`` has one row per sample: partners would not match the labels."""
    if not output.ndim or len(output) != batch_size:
        raise WrongOutput(
            f"layer {layer!r} returns {list(output.shape)} for a batch of {batch_size}: the first "
            "dimension must be the batch; choose another layer"
        )


class _Slot:
    """State of the hook of one layer: the action of this forward pass and its number of calls."""

    def __init__(self) -> None:
        self.action: Action | None = None
        self.args: tuple[Any, ...] = ()
        self.fired = 0
        self.part = Selection("")
        self.reads_input = False
        self.has_backward = False
        self.thread: int | None = None  # None: entered in compiled code

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread has entered the tap."""
        if torch.compiler.is_compiling():
            return False
        return self.thread not in (None, threading.get_ident())

    def hook(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if self.action is None or self.is_elsewhere:
            return None  # keeps the output
        self.fired += 1
        if self.reads_input and not inputs:
            raise WrongOutput(
                f"layer {self.part.layer!r} is called by keyword: pass its input by position"
            )
        tensor = inputs[0] if self.reads_input else self.part.get(output)
        if self.has_backward and _is_checkpointed():
            raise WrongOutput(
                f"layer {self.part.layer!r} runs within torch.utils.checkpoint, which reruns it "
                "unmixed in the backward pass; choose a layer outside of the checkpoint"
            )
        result = self.action(tensor, *self.args)
        return None if result is None else self.part.put(output, result)


def _is_checkpointed() -> bool:
    """Whether activation checkpointing is to rerun the layer in backward, after the tap.

    The gradient would be that of unmixed features. Compiled code asks once, while it is compiled:
    then the checkpoint is a frame of the stack, unless its function is traced with the action.
    """
    return any(
        frame.f_code.co_name == "checkpoint" and frame.f_globals is vars(checkpoint)
        for frame, _ in traceback.walk_stack(None)
    )


# What torch.compiler.assume_constant_result does, which imports torch._dynamo: a second or more.
vars(_is_checkpointed)["_dynamo_marked_constant"] = True

# Slots of layers in compiled modules, whose hooks stay installed.
_installed: WeakKeyDictionary[nn.Module, _Slot] = WeakKeyDictionary()


@contextmanager
def tap(
    net: nn.Module,
    part: Selection | str,
    action: Action | None,
    *args: Any,
    reads_input: bool = False,
    stays: bool = False,
) -> Iterator[None]:
    """Replace the output of a layer by ``action(output, *args)`` in one forward pass of ``net``.

    ``part`` is the name of a layer that returns a tensor, or which tensor of its output is meant.
    With ``reads_input`` the action gets the layer's input in place of its output. ``stays`` leaves
    the hook installed, which does nothing outside of the block: for a plain module that runs inside
    a compiled function.

    With ``action=None``, or an action that returns None, the forward pass is unchanged. ``action``
    should be a function with a fixed identity and ``args`` the tensors that change between steps: a
    compiled module is then compiled once per case and not once per step.
    """
    part = part if isinstance(part, Selection) else Selection(part)
    target, is_compiled = find_layer(net, part.layer)
    stays = stays or is_compiled
    has_backward = torch.is_grad_enabled() and action is not keep_value
    if action is not None and isinstance(net, Around):
        action = net.around(action)
    if action is None and not stays:
        yield
        return
    slot = _installed.get(target) if stays else None
    if slot is None:
        slot = _Slot()
        handle = target.register_forward_hook(slot.hook)
        if stays:
            _installed[target] = slot
    if slot.action is not None and slot.is_elsewhere:
        raise RuntimeError(
            f"another thread mixes at layer {part.layer!r}, whose hook stays installed: call the "
            "mixer in one thread at a time, or copy.deepcopy the network for each"
        )
    slot.thread = None if torch.compiler.is_compiling() else threading.get_ident()
    slot.action, slot.args, slot.fired, slot.part = action, args, 0, part
    slot.reads_input = reads_input
    slot.has_backward = has_backward
    try:
        yield
    except WrongOutput as error:
        raise ValueError(f"{error}; {list_layers(net)}") from None
    finally:
        slot.action, slot.args = None, ()
        if not stays:
            handle.remove()
    if action is not None and slot.fired != 1:
        raise ValueError(_misfire(net, part.layer, slot.fired, is_compiled))


class Peeked:
    """Where ``peek`` puts what it reads; torch.compile traces an attribute, not a list."""

    output: Tensor


@contextmanager
def peek(
    net: nn.Module, layer: str, *, reads_input: bool = False, has_gradient: bool = True
) -> Iterator[Peeked]:
    """Hand out the output, or the input, of ``layer`` in one pass of ``net``, which is unchanged.

    with peek(net, "layer4") as peeked:
        logits = net(x)
    features = peeked.output

    Without ``has_gradient`` the layer may be within an activation checkpoint.
    """
    peeked = Peeked()
    action = keep if has_gradient else keep_value
    with tap(net, layer, action, peeked, reads_input=reads_input):
        yield peeked


def keep(tensor: Tensor, peeked: Peeked) -> None:
    """Keep a tensor of a layer in ``peeked``: the action of ``peek``."""
    peeked.output = tensor.clone()  # an activation in place may follow


def keep_value(tensor: Tensor, peeked: Peeked) -> None:
    """Keep a tensor of a layer without its gradient."""
    keep(tensor.detach(), peeked)


def _misfire(net: nn.Module, layer: str, fired: int, is_compiled: bool) -> str:
    if fired > 1:
        return (
            f"layer {layer!r} ran {fired} times in one forward pass; choose one that runs once; "
            f"{list_layers(net)}"
        )
    if is_compiled:
        return (
            f"layer {layer!r} did not run, or was compiled before the mixer's first call, and "
            "torch.compile ignores later hooks: call the mixer before any other forward pass of "
            "the compiled module, or call torch.compiler.reset() first"
        )
    parts = ""
    if isinstance(find_layer(net, layer)[0], nn.Sequential):
        parts = ", or its parts ran by themselves, as in timm's set_grad_checkpointing"
    return (
        f"layer {layer!r} did not run in this forward pass{parts}; choose one that does; "
        f"{list_layers(net)}"
    )
