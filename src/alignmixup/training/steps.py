"""One step of training, run plainly or replayed as a CUDA graph.

Both ways take the same batch and the same draw and do the same arithmetic: mix, forward, loss,
backward, clip, update. The plain one is the reference; the captured one replays it without the
host's part, which on a small network is most of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixer, fusing
from alignmixup.training.device import compute_for
from alignmixup.training.settings import TrainSettings

__all__ = [
    "Batch",
    "CapturedStep",
    "PlainStep",
    "Step",
    "make_optimizer",
    "make_step",
    "prepared",
    "trying_convolutions",
]

# What makes a batch (images, labels) out of the tensors the loader hands over: with a loader that
# gathers on the device, the rows of the epoch's order; otherwise the batch itself.
Batch = tuple[Tensor, ...]
Gather = Callable[..., tuple[Tensor, Tensor]]

WARM_UP_STEPS = 3


class PlainStep:
    """Runs each step as written."""

    path = "plain"

    def __init__(
        self,
        net: nn.Module,
        mixer: Mixer,
        optimizer: torch.optim.Optimizer,
        settings: TrainSettings,
        gather: Gather,
    ) -> None:
        self.net, self.mixer, self.optimizer = net, mixer, optimizer
        self.settings, self.gather = settings, gather
        self.compute = compute_for(settings, next(net.parameters()).device)

    def __call__(self, batch: Batch, draw: Draw) -> Tensor:
        """Take one step and return its loss, a scalar that stays on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        with fusing(self.compute.compile):
            x, y = self.gather(*batch)
            with self._autocast(x.device):
                loss = self.mixer.apply(self.net, x, y, draw).loss()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        return loss.detach()

    def _autocast(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=self.compute.precision == "bf16"
        )


class CapturedStep:
    """Replays one CUDA graph a case.

    The first steps of a case run plainly: they are steps like any other, and meanwhile everything
    that is made once (compiled code, momentum, workspaces) is made. Then the case is captured and
    from there on replayed, its inputs copied into buffers that stay where they are. A case that
    cannot be captured is run plainly from then on, and ``path`` says so.
    """

    def __init__(self, plain: PlainStep, device: torch.device) -> None:
        self.plain = plain
        self.path = "captured"
        self._taken: dict[str, int] = {}
        self._graphs: dict[str, tuple[torch.cuda.CUDAGraph, Batch, Draw, Tensor]] = {}
        self._refused: set[str] = set()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch, draw: Draw) -> Tensor:
        case = draw.case
        if case not in self._graphs:
            taken = self._taken[case] = self._taken.get(case, 0) + 1
            if taken <= WARM_UP_STEPS or case in self._refused:
                return self._warm_up(batch, draw)
            if not self._capture(batch, draw):
                return self._warm_up(batch, draw)
        graph, static_batch, static_draw, loss = self._graphs[case]
        if any(a.shape != b.shape for a, b in zip(static_batch, batch, strict=True)):
            return self._warm_up(batch, draw)  # a last, smaller batch
        for buffer, value in zip(static_batch, batch, strict=True):
            buffer.copy_(value)
        for name, buffer in static_draw.tensors().items():
            value = getattr(draw, name)
            # From pinned memory, for the same reason as in `to_device`, and straight to its place.
            value = value.pin_memory() if value.device.type == "cpu" else value
            buffer.copy_(value, non_blocking=True)
        graph.replay()
        return loss.clone()

    def _warm_up(self, batch: Batch, draw: Draw) -> Tensor:
        # Capture happens on a stream of its own, and what it uses must have been used there.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self.plain(batch, draw)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _capture(self, batch: Batch, draw: Draw) -> bool:
        static_batch = tuple(tensor.clone() for tensor in batch)
        device = static_batch[0].device
        # Copies, not moves: the draw's own tensors may be on the device already, and be shared.
        moved = {k: v.to(device, copy=True) for k, v in draw.tensors().items()}
        static_draw = draw.with_tensors(moved)
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        torch.cuda.synchronize()
        try:
            self.plain.optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                loss = self.plain(static_batch, static_draw)
        except RuntimeError as error:
            # The network or the mixer does what a graph cannot hold, e.g. waits for the device.
            # What it was is the error behind that of the capture's end.
            why, *_ = [*str(error.__context__ or error).splitlines(), "no reason given"]
            self._refused.add(draw.case)
            self.path = f"plain for {sorted(self._refused)}: {why}"
            self._leave_capture(before)
            return False
        self._graphs[draw.case] = (graph, static_batch, static_draw, loss)
        return True

    def _leave_capture(self, before: torch.cuda.Stream) -> None:
        """A capture that failed leaves its stream current, and the random numbers of the device
        waiting for its end: the next dropout raises. The end of any other capture is as good."""
        torch.cuda.set_stream(before)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
            torch.zeros(1, device=self._stream.device)  # an empty one would be warned of


Step = PlainStep | CapturedStep


def make_step(plain: PlainStep, device: torch.device) -> Step:
    """Return the step the settings ask for; capture exists on CUDA alone."""
    if plain.compute.capture:
        return CapturedStep(plain, device)
    return plain


def prepared(net: nn.Module, settings: TrainSettings) -> nn.Module:
    """Return the module that steps run: compiled if the settings say so."""
    device = next(net.parameters()).device
    if not compute_for(settings, device).compile:
        return net
    # Compiled code is kept by class, not by module, and ignores hooks that come later: code of an
    # earlier network of this class, which knew no tap, must not serve this one.
    torch.compiler.reset()
    # The casts of all weights in one launch, and the counters of all batch norms.
    options: dict[str, Any] | None = {"combo_kernels": True} if device.type == "cuda" else None
    return cast(nn.Module, torch.compile(net, options=options))


@contextmanager
def trying_convolutions() -> Iterator[None]:
    """Let cuDNN try all the convolutions it has for a shape once, and keep the best.

    Training has one shape for all its steps. What comes after it may have many (an attack goes on
    with the images that are left), each of which would be tried anew: the settings are put back.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, 0
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


def make_optimizer(net: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """Return the optimizer over all parameters, in groups where rates or weight decay differ."""
    named = list(net.named_parameters())
    is_cuda = named[0][1].is_cuda
    groups = [
        {"params": [p for _, p in part], "lr": rate, "weight_decay": decay}
        for rated, rate in _by_rate(named, settings)
        for part, decay in _by_decay(rated, settings)
    ]
    for group in groups:
        group["base_lr"] = group["lr"]
        if is_cuda:  # a tensor, so that a captured step reads the rate of its own moment
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=named[0][1].device)
    if settings.optimizer == "adamw":
        return _adamw(groups, settings, is_cuda)
    optimizer = torch.optim.SGD(
        groups, momentum=settings.momentum, nesterov=settings.nesterov, fused=is_cuda
    )
    if is_cuda and settings.momentum:
        # From the start, where SGD would begin each at its first gradient, which is the same: the
        # fused update refuses a step in which some parameters (a decoder) see their first one.
        for _, parameter in named:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _adamw(
    groups: list[dict[str, Any]], settings: TrainSettings, is_cuda: bool
) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(
        groups, betas=(settings.momentum, 0.999), fused=is_cuda, capturable=is_cuda
    )
    if is_cuda:
        # From the start: made inside a captured step, it would be made anew at every replay.
        for parameter in (p for group in groups for p in group["params"]):
            state = optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
    return optimizer


Named = list[tuple[str, nn.Parameter]]


def _by_rate(named: Named, settings: TrainSettings) -> list[tuple[Named, float]]:
    """All parameters with their rate, the classifier's last where it has one of its own."""
    if settings.classifier_lr is None:
        return [(named, settings.lr)]
    head = [pair for pair in named if pair[0].startswith(settings.classifier)]
    rest = [pair for pair in named if not pair[0].startswith(settings.classifier)]
    if not head:
        raise ValueError(
            f"classifier_lr is set, but no parameter's name starts with "
            f"{settings.classifier!r}; the names begin with "
            f"{sorted({name.split('.')[0] for name, _ in named})}"
        )
    return [(rest, settings.lr), (head, settings.classifier_lr)]


def _by_decay(named: Named, settings: TrainSettings) -> list[tuple[Named, float]]:
    """The parameters with their weight decay, those without it last."""
    if settings.decay_vectors:
        return [(named, settings.weight_decay)]
    others = [pair for pair in named if pair[1].ndim > 1]
    vectors = [pair for pair in named if pair[1].ndim <= 1]
    parts = ((others, settings.weight_decay), (vectors, 0.0))
    return [(part, decay) for part, decay in parts if part]
