"""Train a decoder on top of a frozen encoder, to see what its features hold.

    min over D of the mean of |x - D(f(F(x)))|^2,   F as it is               (paper, Decoder)

Knows a module whose ``net(x, decode=True)`` gives a record with ``output`` and ``target``, and
batches; no network by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DecoderFit", "fit_decoder"]


@dataclass(frozen=True)
class DecoderFit:
    """The reconstruction error at each step, before that step.

    Errors are means over pixel values, in the network's normalised space. ``mean_image_error`` is
    that of answering every image with the mean of all images seen: a decoder worth looking at is
    well below it.
    """

    errors: tuple[float, ...]
    mean_image_error: float

    @property
    def final_error(self) -> float:
        """Mean over the last tenth of the steps."""
        tail = self.errors[-max(1, len(self.errors) // 10) :]
        return sum(tail) / len(tail)

    def __str__(self) -> str:
        return (
            f"reconstruction error {self.final_error:.4f} after {len(self.errors)} steps, "
            f"{self.final_error / self.mean_image_error:.0%} of the mean image's"
        )


def fit_decoder(
    net: nn.Module,
    batches: Any,
    *,
    steps: int,
    lr: float = 1e-3,
    seed: int = 0,
    device: torch.device | str | None = None,
    parts: tuple[str, ...] = ("decoder",),
) -> DecoderFit:
    """Train ``parts`` of ``net`` from fresh weights to reconstruct images; the rest stays frozen.

    ``batches`` is a loader with ``epoch(number)``, or anything that can be iterated again and again
    for (images, ...). ``parts`` are names of sub-modules: ``("embed", "decoder")`` where the
    embedding is new too, as it is around a network trained without one. Frozen means no gradient,
    no weight decay and no change of batch statistics. Adam, its rate falling to zero as a cosine;
    fresh weights are a function of ``seed``. ``device`` is where the network is unless given.
    """
    if steps < 1 or not lr > 0:
        raise ValueError(f"steps must be at least 1 and lr positive, got steps={steps}, lr={lr}")
    known = dict(net.named_modules())
    missing = [part for part in parts if part not in known]
    if missing or not parts:
        raise ValueError(f"no parts {missing} to train; the network has {list(net._modules)}")
    where = torch.device(device) if device is not None else next(net.parameters()).device
    net.to(where)
    trained = [known[part] for part in parts]
    _start_afresh(trained, seed)
    modes = {module: module.training for module in net.modules()}
    wants = {parameter: parameter.requires_grad for parameter in net.parameters()}
    net.eval().requires_grad_(False)
    for part in trained:
        part.train().requires_grad_(True)
    try:
        return _fit(net, trained, batches, steps, lr, where)
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, wanted in wants.items():
            parameter.requires_grad_(wanted)
            parameter.grad = None


def _start_afresh(parts: list[nn.Module], seed: int) -> None:
    """Reset every module by its own rule, from ``seed`` and without touching global chance."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for part in parts:
            for module in part.modules():
                reset = getattr(module, "reset_parameters", None)
                if reset is not None:
                    reset()


def _fit(
    net: nn.Module,
    trained: list[nn.Module],
    batches: Any,
    steps: int,
    lr: float,
    device: torch.device,
) -> DecoderFit:
    parameters = [parameter for part in trained for parameter in part.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=lr)
    errors: list[Tensor] = []
    first, second = torch.zeros((), device=device), torch.zeros((), device=device)
    num_images = 0
    stream = _stream(batches)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2
        decoded = net(next(stream)[0].to(device), decode=True)
        error = (decoded.output - decoded.target).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        errors.append(error.detach())
        seen = decoded.target.detach().to(torch.float32)
        first, second = first + seen.sum(0), second + seen.square().sum(0)
        num_images += len(seen)
    spread = second / num_images - (first / num_images).square()
    return DecoderFit(tuple(torch.stack(errors).tolist()), float(spread.mean()))


def _stream(batches: Any) -> Iterator[tuple[Tensor, ...]]:
    """Batches without end, epoch after epoch."""
    epoch = 0
    while True:
        again: Iterable[tuple[Tensor, ...]]
        again = batches.epoch(epoch) if hasattr(batches, "epoch") else batches
        is_empty = True
        for batch in again:
            is_empty = False
            yield batch
        if is_empty:
            raise ValueError(
                f"the batches ended after {epoch} epochs: pass a loader, or a list, that can be "
                "iterated again"
            )
        epoch += 1
