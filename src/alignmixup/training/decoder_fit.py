"""Train a decoder on top of a frozen encoder, to see what its features hold.

    min over D of the mean of |x - D(f(F(x)))|^2,   F as it is               (paper, Decoder)

Knows a module whose ``net(x, decode=True)`` gives a record with ``output`` and ``target``, and
batches; no network by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignmixup.training.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    load_checkpoint,
    named_state,
)
from alignmixup.training.progress import Reporter

__all__ = ["DecoderFit", "OtherSettings", "fit_decoder"]

# Looks at the error and copies of the state, each of which waits for the device.
NUM_REPORTS = 20


class OtherSettings(ValueError):
    """The checkpoint there is that of a decoder with other settings; the text names them."""


class _Diverged(ValueError):
    """The reconstruction error is no longer finite."""


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
    checkpoint: Path | None = None,
    facts: Mapping[str, object] | None = None,
    quiet: bool = True,
) -> DecoderFit:
    """Train ``parts`` of ``net`` from fresh weights to reconstruct images; the rest stays frozen.

    ``batches`` is a loader with ``epoch(number)``, or anything that can be iterated again and again
    for (images, ...). ``parts`` are names of sub-modules: ``("embed", "decoder")`` where the
    embedding is new too, as it is around a network trained without one. Frozen means no gradient,
    no weight decay and no change of batch statistics. Adam, its rate falling to zero as a cosine;
    fresh weights are a function of ``seed``. ``device`` is where the network is unless given.

    ``checkpoint`` is a safetensors file for the parts: training goes on from it where it is half
    done (a loader needs ``epoch(number, start)`` for that) and only reads it where it is done. It
    keeps ``facts`` and the settings, and a file with others is refused. ``quiet=False`` shows how
    far it has come. A training that diverges is an error.
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
    _start_afresh(trained.values(), seed)
    settings = {**(facts or {}), "steps": steps, "lr": lr, "seed": seed}
    fitting = _Fitting(net, trained, steps, lr, where)
    with _frozen_but(net, trained.values()):
        if checkpoint is not None and checkpoint.exists():
            fitting.resume(load_checkpoint(checkpoint), settings, checkpoint)
        try:
            fitting.run(batches, checkpoint, settings, quiet)
        except _Diverged:
            if checkpoint is not None:
                checkpoint.unlink(missing_ok=True)  # from there it would go the same way again
            raise
    return fitting.outcome()


def _start_afresh(parts: Iterable[nn.Module], seed: int) -> None:
    """Reset every module by its own rule, from ``seed`` and without touching global chance."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for part in parts:
            for module in part.modules():
                reset = getattr(module, "reset_parameters", None)
                if reset is not None:
                    reset()


@contextmanager
def _frozen_but(net: nn.Module, parts: Iterable[nn.Module]) -> Iterator[None]:
    """Let nothing of ``net`` but ``parts`` be trained for a while; then all is as it was."""
    modes = {module: module.training for module in net.modules()}
    wants = {parameter: parameter.requires_grad for parameter in net.parameters()}
    net.eval().requires_grad_(False)
    for part in parts:
        part.train().requires_grad_(True)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, wanted in wants.items():
            parameter.requires_grad_(wanted)
            parameter.grad = None


class _Fitting:
    """The state of one training of a decoder."""

    def __init__(
        self,
        net: nn.Module,
        parts: Mapping[str, nn.Module],
        steps: int,
        lr: float,
        device: torch.device,
    ) -> None:
        self.net = net
        self.parts = parts
        self.steps = steps
        self.lr = lr
        self.device = device
        parameters = [parameter for part in parts.values() for parameter in part.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=lr)
        self.errors: list[Tensor] = []
        self.first = torch.zeros((), device=device)
        self.second = torch.zeros((), device=device)
        self.num_images = 0

    @property
    def step(self) -> int:
        return len(self.errors)

    def run(
        self, batches: Any, path: Path | None, settings: Mapping[str, object], quiet: bool
    ) -> None:
        """Take the steps that are left, saving and reporting now and then."""
        if self.step == self.steps:
            return
        every = -(-self.steps // NUM_REPORTS)
        writer = CheckpointWriter(path) if path is not None else None
        stream = _stream(batches, self.step)
        try:
            with Reporter(self.steps, self.step, quiet=quiet) as reporter:
                while self.step < self.steps:
                    self._take_step(next(stream)[0].to(self.device))
                    reporter.advance()
                    if self.step % every == 0 or self.step == self.steps:
                        error = self._recent_error(every)
                        reporter.epoch(f"decoder: step {self.step}/{self.steps}  error {error:.4f}")
                        if writer is not None:
                            writer.save(self._checkpoint(settings))
        finally:
            if writer is not None:
                writer.close()

    def _recent_error(self, count: int) -> float:
        """Mean over the last steps; a decoder that has diverged is an error."""
        error = float(torch.stack(self.errors[-count:]).mean())
        if not math.isfinite(error):
            raise _Diverged(
                f"the decoder has diverged: its error is {error} by step {self.step} of "
                f"{self.steps}; lower lr (--lr), which is {self.lr}"
            )
        return error

    def _take_step(self, images: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * (1 + math.cos(math.pi * self.step / self.steps)) / 2
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

    def _checkpoint(self, settings: Mapping[str, object]) -> Checkpoint:
        tensors = {
            f"model.{name}.{key}": value
            for name, part in self.parts.items()
            for key, value in part.state_dict().items()
        }
        tensors |= {"errors": torch.stack(self.errors), "first": self.first, "second": self.second}
        if self.step < self.steps:  # what is done goes on no more
            moments = named_state(self.net, self.optimizer)
            tensors |= {f"optimizer.{key}": value for key, value in moments.items()}
        facts = {"settings": settings, "step": self.step, "num_images": self.num_images}
        return Checkpoint(tensors, facts)

    def resume(self, there: Checkpoint, settings: Mapping[str, object], path: Path) -> None:
        """Take up the state of ``there``; other settings are an error that names them."""
        facts: Mapping[str, Any] = there.facts
        before = facts["settings"]
        differences = [
            f"{key}: {before.get(key)} there, {settings.get(key)} now"
            for key in sorted({*before, *settings})
            if before.get(key) != settings.get(key)
        ]
        if differences:
            raise OtherSettings(
                f"{path} holds a decoder with other settings ({'; '.join(differences)})"
            )
        for name, part in self.parts.items():
            part.load_state_dict(there.part(f"model.{name}"))
        parameters = dict(self.net.named_parameters())
        for name, value in there.part("optimizer").items():
            key, parameter = name.split(".", 1)
            # Adam counts its steps on the CPU wherever the weights are.
            placed = value if key == "step" else value.to(self.device)
            self.optimizer.state[parameters[parameter]][key] = placed
        self.errors = list(there.tensors["errors"].to(self.device))
        self.first = there.tensors["first"].to(self.device)
        self.second = there.tensors["second"].to(self.device)
        self.num_images = int(facts["num_images"])


def _stream(batches: Any, start: int) -> Iterator[tuple[Tensor, ...]]:
    """Batches without end, epoch after epoch, from the one of step ``start`` on."""
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
