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

import copy
import difflib
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from alignmixup.outputs import AsLogits, Selection, WrongOutput as WrongOutput

Action = Callable[..., Tensor | None]

COMPILED = "_orig_mod"  # the network in what ``torch.compile`` returns
FABRIC = "_forward_module"  # the network in what Lightning's ``Fabric.setup`` returns


class Around(nn.Module, ABC):
    """A module around a network that also changes what taps on its layers do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @abstractmethod
    def around(self, action: Action) -> Action:
        """Return what a tap does in place of ``action``."""

    @abstractmethod
    def inside(self, module: nn.Module) -> Self:
        """Return the same around another module."""


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
        raise ValueError(f"{error}; {_list_layers(net)}") from None
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
            f"{_list_layers(net)}"
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
        f"{_list_layers(net)}"
    )


def check_layer_name(layer: object) -> None:
    """Raise a ``ValueError`` unless ``layer`` is a string."""
    if not isinstance(layer, str):
        raise ValueError(
            f"a layer is the name of a sub-module, such as 'layer4', got {layer!r}; list them by "
            "[name for name, _ in net.named_modules()]"
        )


def find_layer(net: nn.Module, layer: str) -> tuple[nn.Module, bool]:
    """Return the sub-module named ``layer`` and whether it runs inside compiled code.

    ``layer`` is the name in the module without wrappers (DistributedDataParallel,
    ``torch.compile``, ``as_logits``, Lightning's Fabric).
    """
    *around, (parent, is_compiled) = _modules_around(net, layer)
    target = parent.get_submodule(layer.rpartition(".")[2])
    # torch.compile(layer) is hooked from outside; layer.compile() compiles its hooks.
    is_compiled = is_compiled or target._compiled_call_impl is not None
    return target, is_compiled or any(entered for _, entered in around)


def attribute_around(net: nn.Module, layer: str, name: str) -> Any:
    """Return attribute ``name`` of the innermost module around ``layer`` that has it, or None.

    The outermost is ``net`` itself, also where that is a wrapper.
    """
    around = [net, *(module for module, _ in _modules_around(net, layer))]
    return next((getattr(m, name) for m in reversed(around) if hasattr(m, name)), None)


def parameters_around(net: nn.Module, layer: str) -> set[str]:
    """Return the names of the parameters of the modules around ``layer`` and of their parts."""
    return {name for module, _ in _modules_around(net, layer) for name in own_parameters(module)}


def own_parameters(module: nn.Module) -> set[str]:
    """Return the names of the parameters of a module and of its parts, without those of theirs."""
    owners = (module, *_parts(module))
    own = (owner.named_parameters(recurse=False, remove_duplicate=False) for owner in owners)
    return {name for named in own for name, _ in named}


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module, and those of children that are lists of modules."""
    for child in module.children():
        yield child
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield from _parts(child)


def _modules_around(net: nn.Module, layer: str) -> list[tuple[nn.Module, bool]]:
    """Return the modules that contain ``layer``, outermost first, and which are compiled."""
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
    """Return the module without wrappers and whether one of them compiles it."""
    chain = _wrapped(module)
    is_compiled = any(
        COMPILED in each._modules or each._compiled_call_impl is not None for each in chain
    )
    return chain[-1], is_compiled


def _wrapped(module: nn.Module) -> list[nn.Module]:
    """Return the module, what it wraps, and so on to the module that is no wrapper."""
    chain: list[nn.Module] = []
    while True:
        if isinstance(module, nn.DataParallel):
            raise ValueError(
                "DataParallel splits the batch and separates partners; use DistributedDataParallel"
            )
        if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"the layers of a {type(module).__name__} cannot be tapped: pass the nn.Module, "
                "or the result of torch.compile"
            )
        chain.append(module)
        if COMPILED in module._modules:
            module = module.get_submodule(COMPILED)
        elif isinstance(module, nn.parallel.DistributedDataParallel | Around):
            module = module.module
        elif isinstance(module, AsLogits):
            module = module.model
        elif FABRIC in module._modules:
            module = module.get_submodule(FABRIC)
        else:
            return chain


def plain_module(net: nn.Module) -> nn.Module:
    """Return the module without wrappers."""
    return _unwrap(net)[0]


def logits_module(net: nn.Module) -> nn.Module:
    """Return the module without wrappers, except for the one that returns its logits."""
    *wrappers, module = _wrapped(net)
    for wrapper in reversed(wrappers):  # as_logits may be inside DistributedDataParallel
        if isinstance(wrapper, AsLogits):
            twin = copy.copy(wrapper)
            vars(twin).update(_modules={"model": module})
            module = twin
    return module


def without_reducer(net: nn.Module) -> nn.Module:
    """Return the module for a pass that belongs to no backward pass of the training loop.

    It has no DistributedDataParallel, whose reducer expects one after each forward pass.
    """
    if isinstance(net, AsLogits):
        return AsLogits(without_reducer(net.model), net.output)
    if isinstance(net, Around):
        return net.inside(without_reducer(net.module))
    if isinstance(net, nn.Module) and FABRIC in net._modules:
        twin = copy.copy(net)
        inside = {FABRIC: without_reducer(net.get_submodule(FABRIC))}
        # With mixed precision Fabric refuses every backward pass that it does not run itself.
        vars(twin).update(
            _modules={**net._modules, **inside}, _register_backward_hook=nn.Identity()
        )
        return twin
    return net.module if isinstance(net, nn.parallel.DistributedDataParallel) else net


def is_sharded(net: nn.Module) -> bool:
    """Whether FSDP shards parameters of the network, which are then others within a pass."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in net.modules())


def _no_such_layer(net: nn.Module, layer: str) -> str:
    close = difflib.get_close_matches(layer, layer_names(net), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    kind = type(plain_module(net)).__name__
    return f"there is no layer {layer!r} in {kind}; {hint}{_list_layers(net)}"


def _list_layers(net: nn.Module) -> str:
    names = layer_names(net)
    return "its layers: " + ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")


def layer_names(net: nn.Module) -> list[str]:
    """Return the names of all layers of ``net``, outer layers first."""
    plain = (name.replace(f"{COMPILED}.", "") for name, _ in plain_module(net).named_modules())
    names = {name for name in plain if name and not name.endswith(COMPILED)}
    return sorted(names, key=lambda name: (name.count("."), name))
