"""Train a decoder on top of a frozen encoder, to see what its features hold.

    min over D of the mean of |x - D(f(F(x)))|^2,   F as it is               (paper, Decoder)

It knows a module whose ``net(x, decode=True)`` returns a record with ``output`` and ``target``, and
batches; no network by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignmixup.device import fork_rng
from alignmixup.hooks import evaluating
from alignmixup.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    naming_damage,
    remove_checkpoint,
)
from alignmixup.training.loop import run_steps
from alignmixup.training.optimizer_state import load_optimizer, optimizer_tensors
from alignmixup.training.settings import check_same

# Reads of the error and checkpoints, each of which waits for the device.
NUM_REPORTS = 20
# What the facts of its checkpoint must be.
FACTS = {"settings": dict, "step": int, "num_images": int}


class OtherSettings(ValueError):
    """The checkpoint is that of a decoder with other settings, which the message names."""


class _Diverged(ValueError):
    """The reconstruction error is no longer finite."""


@dataclass(frozen=True)
class DecoderFit:
    """The reconstruction error at each step, before its update.

    Errors are means over pixel values, in the network's normalized space. ``mean_image_error`` is
    the error of the mean of all training images as the answer to each: a useful decoder is well
    below it.
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
    checkpoint: Path | None = None,
    facts: Mapping[str, object] | None = None,
    quiet: bool = True,
    on_step: Callable[[], object] | None = None,
) -> DecoderFit:
    """Train ``parts`` of ``net`` from fresh weights to reconstruct images; the rest is frozen.

    Adam, with a cosine schedule to zero. Frozen means no gradient, no weight decay and no change of
    batch statistics.

    Args:
        net: The network.
        batches: A loader with ``epoch(number)``, or anything that can be iterated repeatedly, of
            (images, ...). To resume, a loader needs ``epoch(number, start)``.
        steps: Steps in all.
        lr: Initial learning rate.
        seed: Seed of the fresh weights.
        device: Defaults to that of the network.
        parts: Names of sub-modules: ``("embed", "decoder")`` where the embedding is new as well.
        checkpoint: A safetensors file for the parts: an unfinished training is resumed from it, a
            finished one only read.
        facts: Settings to keep in the checkpoint; a file with other ones is refused.
        quiet: Print no progress.
        on_step: Called after each step.

    Raises:
        OtherSettings: The checkpoint was written with other settings.
        Stopped: Ctrl-C or SIGTERM has ended the training, with a checkpoint.
        ValueError: An argument is not valid, or training has diverged.
    """
    if steps < 1 or not 0 < lr < math.inf:
        raise ValueError(
            f"steps must be at least 1 and lr positive and finite, got steps={steps}, lr={lr}"
        )
    known = dict(net.named_modules())
    missing = [part for part in parts if part not in known]
    if missing or not parts:
        raise ValueError(f"no parts {missing} to train; the network has {list(net._modules)}")
    where = torch.device(device) if device is not None else next(net.parameters()).device
    net.to(where)
    trained = {part: known[part] for part in parts}
    with fork_rng(where, seed):
        _reset(trained.values())
    settings = {**(facts or {}), "steps": steps, "lr": lr, "seed": seed}
    fitting = _Fitting(net, trained, settings, where)
    with _frozen_but(net, trained.values()):
        if checkpoint is not None and checkpoint.exists():
            fitting.resume(checkpoint)
        todo, done, state = fitting.steps(batches, on_step), fitting.step, fitting.checkpoint
        try:
            if done < steps:
                run_steps(todo, steps, done=done, state=state, path=checkpoint, quiet=quiet)
        except _Diverged:
            if checkpoint is not None:
                remove_checkpoint(checkpoint)  # resumed from, it would diverge again
            raise
    return fitting.outcome()


def _reset(parts: Iterable[nn.Module]) -> None:
    """Give every module fresh weights by its own rule."""
    for part in parts:
        for module in part.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()


@contextmanager
def _frozen_but(net: nn.Module, parts: Iterable[nn.Module]) -> Iterator[None]:
    """Freeze all of ``net`` but ``parts`` inside the block, and restore it afterwards."""
    wants = {parameter: parameter.requires_grad for parameter in net.parameters()}
    with evaluating(net):
        net.requires_grad_(False)
        for part in parts:
            part.train().requires_grad_(True)
        try:
            yield
        finally:
            for parameter, wanted in wants.items():
                parameter.requires_grad_(wanted)
                parameter.grad = None


class _Fitting:
    """The state of one training of a decoder."""

    def __init__(
        self,
        net: nn.Module,
        parts: Mapping[str, nn.Module],
        settings: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self.net, self.parts, self.settings, self.device = net, parts, settings, device
        self.num_steps, self.lr = settings["steps"], settings["lr"]
        parameters = [parameter for part in parts.values() for parameter in part.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=self.lr)
        self.errors: list[Tensor] = []
        self.first = torch.zeros((), device=device)
        self.second = torch.zeros((), device=device)
        self.num_images = 0

    @property
    def step(self) -> int:
        return len(self.errors)

    def steps(self, batches: Any, on_step: Callable[[], object] | None = None) -> Iterator[str]:
        """Take the remaining steps, with a line to print now and then."""
        every = -(-self.num_steps // NUM_REPORTS)
        for batch in islice(_stream(batches, self.step), self.num_steps - self.step):
            self._take_step(batch[0].to(self.device))
            if on_step is not None:
                on_step()
            is_due = self.step % every == 0 or self.step == self.num_steps
            yield self._report(every) if is_due else ""

    def _report(self, count: int) -> str:
        """The mean error of the last steps; raises if it is not finite."""
        error = float(torch.stack(self.errors[-count:]).mean())
        if not math.isfinite(error):
            raise _Diverged(
                f"the decoder has diverged: its error is {error} by step {self.step} of "
                f"{self.num_steps}; lower lr (--lr), which is {self.lr}"
            )
        return f"decoder: step {self.step}/{self.num_steps}  error {error:.4f}"

    def _take_step(self, images: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * (1 + math.cos(math.pi * self.step / self.num_steps)) / 2
        decoded = self.net(images, decode=True)
        error = (decoded.output - decoded.target).square().mean()
        self.optimizer.zero_grad()
        error.backward()
        self.optimizer.step()
        self.errors.append(error.detach())
        seen = decoded.target.detach().to(torch.float32)
        self.first, self.second = self.first + seen.sum(0), self.second + seen.square().sum(0)
        self.num_images += len(seen)

    def outcome(self) -> DecoderFit:
        spread = self.second / self.num_images - (self.first / self.num_images).square()
        return DecoderFit(tuple(torch.stack(self.errors).tolist()), float(spread.mean()))

    def checkpoint(self) -> Checkpoint:
        tensors = {
            f"model.{name}.{key}": value
            for name, part in self.parts.items()
            for key, value in part.state_dict().items()
        }
        tensors |= {"errors": torch.stack(self.errors), "first": self.first, "second": self.second}
        if self.step < self.num_steps:
            tensors |= optimizer_tensors(self.net, self.optimizer)
        facts = {"settings": self.settings, "step": self.step, "num_images": self.num_images}
        return Checkpoint(tensors, facts)

    def resume(self, path: Path) -> None:
        """Load the state in ``path``, unless it was written with other settings."""
        there = load_checkpoint(path, FACTS)
        facts: Mapping[str, Any] = there.facts
        what = f"{path} holds a decoder with other settings"
        check_same(facts["settings"], self.settings, what, "use the same", OtherSettings)
        with naming_damage(path):
            for name, part in self.parts.items():
                part.load_state_dict(there.part(f"model.{name}"))
            load_optimizer(self.net, self.optimizer, there)
            self.errors = list(there.tensors["errors"].to(self.device))
            self.first = there.tensors["first"].to(self.device)
            self.second = there.tensors["second"].to(self.device)
        self.num_images = int(facts["num_images"])


def _stream(batches: Any, start: int) -> Iterator[tuple[Tensor, ...]]:
    """Endless batches, epoch after epoch, from step ``start`` on."""
    if start and hasattr(batches, "epoch"):
        epoch, first = divmod(start, len(batches))
        return chain(batches.epoch(epoch, first), _epochs(batches, epoch + 1))
    return islice(_epochs(batches), start, None)


def _epochs(batches: Any, epoch: int = 0) -> Iterator[tuple[Tensor, ...]]:
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
