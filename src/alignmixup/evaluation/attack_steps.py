"""The steps of an attack within an L-infinity ball around the pixels.

    x_{t+1} = clip(x_t + step * sign(grad_x loss(f(x_t), y)))

where clip is to [x - eps, x + eps] and to [0, 1]; eps and step are in units of the pixel range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Attack:
    """The settings of an attack.

    ``loss`` is what the steps increase: cross-entropy, or the margin max_{j != y} z_j - z_y, whose
    gradient does not vanish where the softmax saturates. An image is broken if it is wrong after
    the last step (``keep="last"``), or clean or after any step (``"any"``), in one of the
    ``restarts``.
    """

    eps: float
    step: float
    num_steps: int
    random_start: bool = False
    restarts: int = 1
    loss: Literal["ce", "margin"] = "ce"
    keep: Literal["last", "any"] = "last"

    def __post_init__(self) -> None:
        if not 0 <= self.eps <= 1:
            raise ValueError(f"eps must lie in [0, 1] (pixels; 8/255 is usual), got {self.eps}")
        if not 0 < self.step <= 1 and not self.step == self.eps == 0:
            raise ValueError(f"step must lie in (0, 1] (pixels; 2/255 is usual), got {self.step}")
        if self.num_steps < 1 or self.restarts < 1:
            raise ValueError(
                f"num_steps and restarts must be at least 1, "
                f"got {self.num_steps} and {self.restarts}"
            )
        if self.restarts > 1 and not self.random_start:
            raise ValueError("restarts without random_start all take the same path; set it to True")
        if self.loss not in LOSSES:
            raise ValueError(f"unknown loss {self.loss!r}; choose from {sorted(LOSSES)}")
        if self.keep not in ("last", "any"):
            raise ValueError(f"keep must be 'last' or 'any', got {self.keep!r}")


class Iterate(NamedTuple):
    """One point on the path of an attack, and its logits."""

    images: Float[Tensor, "b c h w"]
    logits: Float[Tensor, "b k"]


def trajectory(
    forward: Callable[[Tensor], Tensor],
    x: Float[Tensor, "b c h w"],
    y: Int[Tensor, " b"],
    attack: Attack,
    start: Float[Tensor, "b c h w"],
) -> Iterator[Iterate]:
    """Yield the start, clipped to the ball, and the point after each step: num_steps + 1 in all.

    ``forward`` maps pixels to logits. The forward pass of the next gradient also scores the step
    before it.
    """
    low, high = (x - attack.eps).clamp(min=0), (x + attack.eps).clamp(max=1)
    current = start.clamp(low, high)
    for _ in range(attack.num_steps):
        logits, gradient = _gradient(forward, current, y, attack)
        yield Iterate(current, logits)
        current = (current + attack.step * gradient.sign()).clamp(low, high)
    with torch.no_grad():
        last = forward(current)
    yield Iterate(current, last)


def _gradient(
    forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, attack: Attack
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        logits = forward(x)
        if not logits.requires_grad:
            raise ValueError(
                "the model's logits carry no gradient to the images; "
                "does its forward run under torch.no_grad or detach?"
            )
        # The sum, not the mean: images are independent in eval mode, and dividing by the batch
        # size would bring gradients nearer to underflow.
        (gradient,) = torch.autograd.grad(LOSSES[attack.loss](logits, y), x)
    return logits.detach(), gradient


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def _margin(logits: Tensor, y: Tensor) -> Tensor:
    own = logits.gather(1, y.unsqueeze(1)).squeeze(1)
    others = logits.scatter(1, y.unsqueeze(1), -torch.inf)
    return (others.amax(dim=1) - own).sum()


LOSSES = {"ce": _cross_entropy, "margin": _margin}
