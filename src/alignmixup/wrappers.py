"""Layers by name in any network, also inside of wrappers.

A layer has the name that it has in the module without wrappers: DistributedDataParallel,
``torch.compile``, ``as_logits``, Lightning's Fabric, and ``Around`` of this package.
"""

from __future__ import annotations

import copy
import difflib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from alignmixup.outputs import AsLogits

Action = Callable[..., Tensor | None]  # what a tap does with the output of a layer

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


def layer_names(net: nn.Module) -> list[str]:
    """Return the names of all layers of ``net``, outer layers first."""
    plain = (name.replace(f"{COMPILED}.", "") for name, _ in plain_module(net).named_modules())
    names = {name for name in plain if name and not name.endswith(COMPILED)}
    return sorted(names, key=lambda name: (name.count("."), name))


def list_layers(net: nn.Module) -> str:
    """Return a sentence that lists the first layers of ``net``, for an error."""
    names = layer_names(net)
    return "its layers: " + ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")


def check_layer_name(layer: object) -> None:
    """Raise a ``ValueError`` unless ``layer`` is a string."""
    if not isinstance(layer, str):
        raise ValueError(
            f"a layer is the name of a sub-module, such as 'layer4', got {layer!r}; list them by "
            "[name for name, _ in net.named_modules()]"
        )


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


def _no_such_layer(net: nn.Module, layer: str) -> str:
    close = difflib.get_close_matches(layer, layer_names(net), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    kind = type(plain_module(net)).__name__
    return f"there is no layer {layer!r} in {kind}; {hint}{list_layers(net)}"


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
