"""All randomness of one step: the case, the partners, the shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """All randomness of one step, drawn once, outside the network.

    ``case`` names everything that changes the shape of the computation, so a step whose case is
    known is a fixed computation. A method with more randomness extends this class with further
    tensors; positions are fractions of the image, so a draw needs no image.

    Args:
        case: One of the mixer's ``cases``, such as ``"input"`` or ``"feat"``.
        perm: Permutation of the batch: the partner of sample ``i`` is sample ``perm[i]``.
        lam: Share of the anchor, sample ``i``: a scalar for the batch or one value per sample.

    Example:
        ```python
        draw = am.Draw("input", perm=torch.arange(8).flip(0), lam=torch.tensor(0.7))
        mixed = am.InputMixup().apply(model, x, y, draw)
        ```
    """

    case: str
    perm: Int[Tensor, " b"]
    lam: Float[Tensor, "*b"]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensor fields by name."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return the same case with other tensors, e.g. the buffers of a captured step."""
        return dataclasses.replace(self, **tensors)  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> Self:
        """Return the draw on ``device``; tensors that are already there are not copied."""
        return self.with_tensors({k: to_device(v, device) for k, v in self.tensors().items()})


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Move a tensor without waiting for the device, safe to forget the original at once.

    From pinned memory: a copy from pageable memory may be read by the GPU later, when the host has
    long put something else there.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
