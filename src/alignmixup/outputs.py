"""Tensors inside the outputs of layers and networks: tuples, dicts, ``ModelOutput``, dataclasses.

Selection("encoder.3", key=0)     the tensor of a layer's output that a mixer replaces
as_logits(model)                  a network whose output is the tensor of logits
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor, nn

Key = int | str


class WrongOutput(ValueError):
    """An output does not have the tensor that was asked for, or not in a shape that can be used."""


@dataclass(frozen=True, slots=True)
class Selection:
    """One tensor of a layer's output, read and replaced as maps ``[b, c, h, w]`` or tokens.

    ``key`` is an index or a name; None stands for an output that is a tensor. With
    ``channels_last`` maps are ``[b, h, w, c]`` in the network.
    """

    layer: str
    key: Key | None = None
    channels_last: bool = False

    def get(self, output: Any) -> Tensor:
        """Return the tensor; raise ``WrongOutput`` if there is none."""
        tensor = self._tensor(output)
        return tensor.movedim(-1, 1) if self.channels_last and tensor.ndim == 4 else tensor

    def put(self, output: Any, tensor: Tensor) -> Any:
        """Return the output with the tensor replaced; the original stays as it is."""
        if self.channels_last and tensor.ndim == 4:
            tensor = tensor.movedim(1, -1)
        if self.key is None:
            return tensor
        if isinstance(output, tuple):
            fields = getattr(output, "_fields", ())
            values = [*output]
            values[fields.index(self.key) if isinstance(self.key, str) else self.key] = tensor
            return type(output)(*values) if fields else tuple(values)
        replaced = copy.copy(output)
        if isinstance(output, Mapping | list):
            replaced[_name(replaced, self.key)] = tensor
        else:
            object.__setattr__(replaced, str(self.key), tensor)  # also of a frozen dataclass
        return replaced

    def _tensor(self, output: Any) -> Tensor:
        if self.key is None:
            if isinstance(output, Tensor):
                return output
            raise WrongOutput(
                f"layer {self.layer!r} returns {_describe(output)}, not a tensor: choose another "
                f"layer or, in a mixer with this setting, the part to mix by {_remedy(output)}"
            )
        if isinstance(output, Tensor):
            raise WrongOutput(
                f"layer {self.layer!r} returns a tensor, which has no part {self.key!r}: leave "
                "output out"
            )
        found = _look_up(output, self.key)
        if isinstance(found, Tensor):
            return found
        raise WrongOutput(
            f"layer {self.layer!r} returns {_describe(output)}: output={self.key!r} is not a "
            f"tensor of it; use {_remedy(output)}"
        )


class AsLogits(nn.Module):
    """A network that returns the logits of another one; layers keep the names they have there."""

    def __init__(self, model: nn.Module, output: Key | None) -> None:
        super().__init__()
        self.model = model
        self.output = output
        self.training = model.training

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        returned = self.model(x, **kwargs)
        if isinstance(returned, Tensor):  # also where ``output`` is a part of it in training alone
            return returned
        keys = ("logits", 0) if self.output is None else (self.output,)
        for key in keys:
            found = _look_up(returned, key)
            # The first part of a tuple; of a mapping only what is named.
            if isinstance(found, Tensor) and (key != 0 or not isinstance(returned, Mapping)):
                return found
        wanted = "logits" if self.output is None else f"output {self.output!r}"
        raise ValueError(
            f"{type(self.model).__name__} returns {_describe(returned)}, in which there are no "
            f"{wanted}: name them by as_logits(model, {_remedy(returned)})"
        )


def as_logits(model: nn.Module, output: Key | None = None) -> nn.Module:
    """Wrap a network so that it returns the tensor of logits.

    For networks that return a ``ModelOutput`` (Hugging Face Transformers), a dict, a tuple or a
    dataclass. The weights are shared, and mixers find layers by the names they have in ``model``.

    Args:
        model: The network, also inside DistributedDataParallel or ``torch.compile``.
        output: Name or index of the logits in the output of the network. None takes ``"logits"`` of
            anything that has it, and otherwise the first part of a tuple. A tensor is taken as it
            is: Inception returns a tuple in training and a tensor in evaluation.

    Returns:
        A module that returns logits; its forward raises a ``ValueError`` if there are none.

    Example:
        ```python
        class Verbose(torch.nn.Module):
            def __init__(self, net):
                super().__init__()
                self.net = net

            def forward(self, x):
                return {"logits": self.net(x), "attentions": None}


        mixer = am.AlignMixup("net.layer4")
        mixer(am.as_logits(Verbose(model)), x, y).loss().backward()
        ```
    """
    return AsLogits(model, output)


def _look_up(output: Any, key: Key) -> Any:
    """Return the part of this name or index, or None."""
    if isinstance(key, str) and not isinstance(output, Mapping):
        return getattr(output, key, None)  # of a named tuple or a dataclass
    try:
        return output[_name(output, key)]
    except (KeyError, IndexError, TypeError):
        return None


def _name(output: Any, key: Key) -> Key:
    """Return the name of the part at an index of a mapping; any other key as it is."""
    names: list[Key] = [*output] if isinstance(output, Mapping) else []
    return names[key] if isinstance(key, int) and names and key not in names else key


def _parts(output: Any) -> Iterator[tuple[Key, Any]]:
    if isinstance(output, Mapping):
        yield from output.items()
    elif isinstance(output, tuple | list):
        yield from enumerate(output)
    elif is_dataclass(output):
        yield from ((field.name, getattr(output, field.name)) for field in fields(output))


def _describe(output: Any) -> str:
    """Return the type of an output and the shapes of its parts."""
    parts = [
        f"{key!r}: {list(value.shape) if isinstance(value, Tensor) else type(value).__name__}"
        for key, value in _parts(output)
    ]
    inside = f" of {{{', '.join(parts)}}}" if parts else ""
    return f"a {type(output).__name__}{inside}"


def _remedy(output: Any) -> str:
    """Return how to name a tensor of this output."""
    keys = [key for key, value in _parts(output) if isinstance(value, Tensor)]
    return " or ".join(f"output={key!r}" for key in keys[:4]) or "output=..."
