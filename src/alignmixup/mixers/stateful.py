"""Shared by methods with parameters or state: attaching, the EMA teacher, reading its maps.

A state is the buffers of ``module`` and its parameters without gradient. ``apply`` writes it in
place, at fixed addresses, so that the writes are part of a captured step.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from alignmixup.contracts import Draw, Mixed, NotAttached, fusible
from alignmixup.hooks import Peeked, check_module, keep, tap
from alignmixup.mixers.base import Method
from alignmixup.mixers.checks import check_images
from alignmixup.ops.blend import check_logits
from alignmixup.wrappers import is_sharded, logits_module, plain_module

M = TypeVar("M", bound=nn.Module)


class Stateful(Method):
    """Base class of methods with a module; a subclass builds it in ``_build``."""

    @property
    def module(self) -> nn.Module | None:
        module: nn.Module | None = vars(self).get("_module")
        return module

    @property
    def has_module(self) -> bool:
        """Whether the method has parameters or state with these settings."""
        return True

    def attach(self, net: nn.Module, x: Tensor) -> Self:
        if not self.has_module:
            return self
        check_images(x)
        if is_sharded(net):
            raise ValueError(
                f"{type(self).__name__} looks at the whole network, which FSDP shards: attach it "
                "before fully_shard"
            )
        attached = copy.copy(self)
        module = self._build(logits_module(net), x).to(x.device)
        object.__setattr__(attached, "_module", module)  # settings are frozen
        return attached

    @abstractmethod
    def _build(self, net: nn.Module, x: Tensor) -> nn.Module:
        """Return the module for a network that returns logits, and images of this size and number.

        The network has no wrapper but ``as_logits``.
        """

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        if self.module is None and self.has_module:
            name = type(self).__name__
            raise NotAttached(
                f"{name} has parameters or state: call mixer = mixer.attach(model, x) first, and "
                "give mixer.module.parameters() to the optimizer"
            )
        if self.module is not None:
            check_module(net)
        if self.module is None or torch.is_grad_enabled():
            return super().apply(net, x, y, draw)
        with _unchanged(self.module):
            return super().apply(net, x, y, draw)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restore the state afterwards: without gradients a call is a picture or a test."""
    state = [t for t in (*module.buffers(), *module.parameters()) if not t.requires_grad]
    kept = [tensor.clone() for tensor in state]
    try:
        yield
    finally:
        for tensor, value in zip(state, kept, strict=True):
            tensor.copy_(value)


def probe(net: nn.Module, x: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    """Return the output of ``layer`` and the logits, for their shapes; the network is unchanged."""
    twin = copied(net)
    twin.eval()  # a module's own may return nothing
    dtype = next((p.dtype for p in twin.parameters()), x.dtype)
    with torch.no_grad():
        kept, logits = run_and_keep(twin, x.detach().to(dtype), layer)
    check_logits(logits, len(x))
    return kept, logits


def run_and_keep(net: nn.Module, x: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    """Return the output of ``layer`` and of the network, without gradient through the layer."""
    peeked = Peeked()
    with tap(net, layer, keep, peeked, stays=True):
        logits = run(net, x)
    return peeked.output, logits


class _Reached(Exception):
    """Ends a forward pass early."""


def run_to(net: nn.Module, x: Tensor, layer: str) -> Tensor:
    """Return the output of ``layer``; nothing after it runs."""
    peeked = Peeked()
    with tap(net, layer, _stop, peeked, stays=True):
        run(net, x)
    return peeked.output


def read_layer(net: nn.Module, x: Tensor, layer: str) -> Tensor:
    """Return the output of ``layer``; what follows it runs where it has statistics to update."""
    if tracking_norms(net):
        return run_and_keep(net, x, layer)[0]
    return run_to(net, x, layer)


def tracking_norms(net: nn.Module) -> list[_NormBase]:
    """Return the normalizations whose running statistics a pass updates."""
    norms = [m for m in net.modules() if isinstance(m, _NormBase)]
    return [m for m in norms if m.training and m.track_running_stats]


def _stop(output: Tensor, peeked: Peeked) -> Tensor:
    peeked.output = output
    raise _Reached


def _run(net: nn.Module, x: Tensor) -> Any:
    """Return net(x), or None where a tap ends the pass."""
    try:
        return net(x)
    except _Reached:
        return None


# A network beside that of the step, such as a teacher, compiled as that is.
run = fusible(_run, combines=True)


def make_teacher(net: nn.Module) -> nn.Module:
    """Return a copy of the network without gradients, its batch norms in training mode."""
    teacher = copied(net).requires_grad_(False)
    teacher.train()
    return teacher


def copied(net: M) -> M:
    """Return a deep copy; of what a pass has left in the network, such as features, the values.

    A tensor with a history, as torch's old ``weight_norm`` leaves one, has no deep copy.
    """
    held = tree_leaves([[*vars(module).values()] for module in net.modules()])
    left = [t for t in held if isinstance(t, Tensor) and not t.is_leaf]
    return copy.deepcopy(net, {id(tensor): tensor.detach().clone() for tensor in left})


class NormUpdates:
    """What a pass adds to the running statistics of batch norms, to be added again later.

    with NormUpdates(net) as updates:
        net(x)
    updates.repeat(2)  # the statistics of two more passes on x, in any order of its images
    """

    def __init__(self, net: nn.Module) -> None:
        kept = [(m, m.momentum) for m in tracking_norms(net) if m.momentum is not None]
        # A backward pass keeps them without need, and would find them changed but for ``data``.
        self._statistics = [
            (statistic.data, 1 - momentum)
            for norm, momentum in kept
            for statistic in (norm.running_mean, norm.running_var)
            if statistic is not None
        ]

    def __enter__(self) -> NormUpdates:
        self._before = self._copies()
        return self

    def __exit__(self, *_: object) -> None:
        self._after = self._copies()

    def _copies(self) -> list[Tensor]:
        return [statistic.clone() for statistic, _ in self._statistics]

    @torch.no_grad()
    def repeat(self, times: int) -> None:
        """Update the statistics ``times`` times by those of the batch in the block."""
        if self._statistics:
            statistics, kept = zip(*self._statistics, strict=True)
            _repeat_updates(list(statistics), self._before, self._after, list(kept), times)


def _updates(
    statistics: list[Tensor],
    before: list[Tensor],
    after: list[Tensor],
    kept: list[float],
    times: int,
) -> None:
    # after = k before + (1 - k) batch; wanted: k^n statistics + (1 - k^n) batch
    added = [sum(k**i for i in range(times)) for k in kept]
    torch._foreach_mul_(statistics, [k**times for k in kept])
    torch._foreach_add_(statistics, torch._foreach_mul(after, added))
    subtracted = [k * share for k, share in zip(kept, added, strict=True)]
    torch._foreach_sub_(statistics, torch._foreach_mul(before, subtracted))


_repeat_updates = fusible(_updates, combines=True)


@torch.no_grad()
def follow(teacher: nn.Module, net: nn.Module, share: Tensor) -> None:
    """Take ``share`` of the network's parameters into the teacher: (1 - share) ours + share theirs.

    Exact at both ends. Batch statistics are the teacher's own.
    """
    # By name: a framework may have registered the module of the mixer in the network since.
    if is_sharded(net):
        raise ValueError(
            "the mixer keeps an average of the network's parameters, which FSDP shards: use "
            "DistributedDataParallel"
        )
    latest = dict(plain_module(net).named_parameters())
    followed = dict(plain_module(teacher).named_parameters())
    for name, parameter in followed.items():
        if name not in latest or latest[name].shape != parameter.shape:
            raise ValueError(
                f"the mixer is attached to another network ({name} differs): call "
                "mixer.attach(model, x) for each network"
            )
    _move([p.data for p in followed.values()], [latest[name].data for name in followed], share)


def _approach(ours: list[Tensor], theirs: list[Tensor], share: Tensor) -> None:
    torch._foreach_mul_(ours, 1 - share)
    torch._foreach_add_(ours, torch._foreach_mul(theirs, share))


_move = fusible(_approach, combines=True)
