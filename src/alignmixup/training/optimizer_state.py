"""The state of an optimizer in a checkpoint: its tensors by name, its numbers among the facts.

    optimizer.momentum_buffer.WEIGHT    of a parameter; mixer_optimizer.* of one of the mixer
    group.0.step                        of a group

Torch's own optimizers have tensors of parameters alone. Others count their steps in Python numbers,
or in their groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from alignmixup.training.checkpoint import Checkpoint


def optimizer_tensors(
    net: nn.Module, optimizer: torch.optim.Optimizer, part: str = "optimizer"
) -> dict[str, Tensor]:
    """Return the optimizer's tensors of the parameters of ``net``, under their names."""
    state = _optimizer_state(net, optimizer, part)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def optimizer_numbers(
    net: nn.Module, optimizer: torch.optim.Optimizer, part: str = "optimizer"
) -> dict[str, float]:
    """Return the optimizer's Python numbers of the parameters of ``net``, under their names."""
    state = _optimizer_state(net, optimizer, part)
    numbers = {name: value for name, value in state.items() if isinstance(value, int | float)}
    for name, value in state.items():
        if not isinstance(value, Tensor | int | float | None):
            raise ValueError(
                f"{type(optimizer).__name__} has a {type(value).__name__} as {name!r}, which a "
                "checkpoint cannot hold: it must have tensors or numbers"
            )
    return numbers


def _optimizer_state(
    net: nn.Module, optimizer: torch.optim.Optimizer, part: str
) -> dict[str, object]:
    names: dict[Tensor, str] = {p: name for name, p in net.named_parameters()}
    return {
        f"{part}.{key}.{names[parameter]}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if parameter in names
    }


def load_optimizer(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint: Checkpoint,
    part: str = "optimizer",
) -> None:
    """Restore what ``optimizer_tensors`` and ``optimizer_numbers`` returned."""
    parameters = dict(net.named_parameters())
    # Adam's count of steps stays on the CPU unless the update runs on the GPU as a whole.
    is_on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    for name, value in checkpoint.part(part).items():
        key, parameter = name.split(".", 1)
        owner = parameters[parameter]
        # A buffer has the memory layout of its parameter.
        like = owner if value.shape == owner.shape else value
        device = owner.device if key != "step" or is_on_device else value.device
        buffer = torch.empty_like(like, dtype=value.dtype, device=device)
        optimizer.state[owner][key] = buffer.copy_(value)
    for name, number in checkpoint.numbers(part).items():
        key, parameter = name.split(".", 1)
        optimizer.state[parameters[parameter]][key] = number


class GroupState:
    """What an optimizer changes in its groups by itself, such as a count of steps.

    The learning rate is not part of it: a schedule sets it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._first = [dict(group) for group in self._groups]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors, by group and name."""
        return {
            f"group.{i}.{name}": value
            for i, group in enumerate(self._groups)
            for name, value in group.items()
            if name != "lr" and isinstance(value, Tensor)
        }

    def numbers(self) -> dict[str, float]:
        """Return the numbers that are not as they were at first, by group and name."""
        return {
            f"group.{i}.{name}": value
            for i, (group, first) in enumerate(zip(self._groups, self._first, strict=True))
            for name, value in group.items()
            if name != "lr" and isinstance(value, int | float) and value != first.get(name)
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Restore what ``tensors`` and ``numbers`` returned."""
        for name, number in checkpoint.numbers("group").items():
            group, key = name.split(".", 1)
            self._groups[int(group)][key] = number
        for name, value in checkpoint.part("group").items():
            group, key = name.split(".", 1)
            there = self._groups[int(group)].get(key, value)
            self._groups[int(group)][key] = value.to(there.device)
