"""One step of training, run eagerly or replayed as a CUDA graph.

Both take the same batch and the same draw and do the same arithmetic: mix, forward, loss, backward,
clip, update, EMA. The plain step is the reference; the captured one replays it without the work of
the host, which on a small network is most of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixer, check_mixed, fusing
from alignmixup.device import compute_for, is_gpu
from alignmixup.training.distributed import Team, is_wrapped
from alignmixup.training.optim import EMA, mixer_parameters
from alignmixup.training.partners import JoinedNet, join
from alignmixup.training.settings import TrainSettings

# Makes (images, labels) of the tensors that the loader yields: with a loader that gathers on the
# device, rows of the epoch's order; otherwise the batch itself.
Batch = tuple[Tensor, ...]
Gather = Callable[..., tuple[Tensor, Tensor]]

WARM_UP_STEPS = 3
# DistributedDataParallel times its first ten passes by events, which a graph cannot hold.
WARM_UP_PASSES = 11


class Loader(Protocol):
    """Batches of (images, labels) on the device, the order a pure function of the epoch."""

    def __len__(self) -> int: ...
    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]: ...


@runtime_checkable
class GatheringLoader(Protocol):
    """A loader whose batches are made on the device from rows of numbers, as part of the step."""

    batch_size: int

    def __len__(self) -> int: ...
    def rows(self, epoch: int) -> Tensor: ...
    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor]: ...


class Batches:
    """This process's share of a loader's batches, as the tensors that ``gather`` takes."""

    def __init__(self, loader: Loader, team: Team) -> None:
        self._loader, self._team = loader, team
        self.gather: Gather = lambda x, y: (x, y)
        if isinstance(loader, GatheringLoader):
            self.gather = loader.gather
        self._rows: dict[int, Tensor] = {}  # of one epoch

    def __len__(self) -> int:
        return len(self._loader)

    def prepare(self, epoch: int) -> None:
        """Draw the rows of an epoch, unless they are drawn already."""
        if isinstance(self._loader, GatheringLoader) and epoch not in self._rows:
            self._rows = {epoch: self._loader.rows(epoch)}

    def first(self) -> Tensor:
        """Return images of the size and number that a step gets."""
        batch = next(self.of(0, 0))
        return self.gather(*batch)[0]

    def of(self, epoch: int, start_step: int) -> Iterator[Batch]:
        """Return the batches of an epoch from ``start_step`` on; none if it was the last."""
        if start_step == len(self):
            return iter(())
        if not isinstance(self._loader, GatheringLoader):
            return self._loader.epoch(epoch, start_step)
        self.prepare(epoch)
        rows, b = self._rows[epoch], self._loader.batch_size
        if self._team.size > 1 and len(rows) < len(self) * b:
            raise ValueError(
                f"a last batch of {len(rows) % b} images is not split over {self._team.size} "
                "processes: use a loader with drop_last=True"
            )
        share, steps = self._team.share(b), range(start_step, len(self))
        return ((rows[i * b : (i + 1) * b][share],) for i in steps)


def draw_size(batch: Batch, settings: TrainSettings, team: Team) -> int:
    """Return the number of images that a draw is for: a part of this process, or of all."""
    size, num_parts = len(batch[0]), settings.accumulate
    if size % num_parts:
        raise ValueError(
            f"a batch of {size} images has no {num_parts} equal parts: use train.accumulate=1, or "
            "a loader without a smaller last batch"
        )
    return size // num_parts * (team.size if settings.partners == "batch" else 1)


class PlainStep:
    """Runs each step eagerly.

    With ``settings.accumulate`` the batch is taken in equal parts, one after the other. All parts
    have the same draw, as all processes have: R processes that take A parts each give the weights
    of R A processes.
    """

    path = "plain"

    def __init__(
        self,
        net: nn.Module,
        mixer: Mixer,
        optimizer: torch.optim.Optimizer,
        settings: TrainSettings,
        gather: Gather,
        ema: EMA | None = None,
        team: Team | None = None,
    ) -> None:
        self.net, self.mixer, self.optimizer = net, mixer, optimizer
        self.settings, self.gather, self.ema = settings, gather, ema
        self.team, self.mixer_parameters = team or Team(), mixer_parameters(mixer)
        self.compute = compute_for(settings, next(net.parameters()).device, self.team.size)
        self.num_parts = settings.accumulate
        self.joins = settings.partners == "batch" and self.team.size > 1
        if mixer.module is not None:
            _check_stateful(type(mixer).__name__, settings)

    def __call__(self, batch: Batch, draw: Draw) -> Tensor:
        """Take one step and return its loss, a scalar that stays on the device."""
        if draw.case not in self.mixer.cases:
            raise ValueError(
                f"{type(self.mixer).__name__}.draw returned the case {draw.case!r}, and its cases "
                f"are {', '.join(map(repr, self.mixer.cases))}: name it there, with its probability"
            )
        self.optimizer.zero_grad(set_to_none=True)
        parts = list(zip(*(tensor.chunk(self.num_parts) for tensor in batch), strict=True))
        losses = []
        for part in parts:
            # Gradients are averaged over processes once, in the last part.
            with nullcontext() if part is parts[-1] else self.team.no_sync(self.net):
                losses.append(self._backward(part, draw))
        self.team.average_gradients(self.mixer_parameters)
        if self.settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), self.settings.clip_norm)
            nn.utils.clip_grad_norm_(self.mixer_parameters, self.settings.clip_norm)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update()
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _backward(self, batch: Batch, draw: Draw) -> Tensor:
        """Add the gradients of one part of the batch, whose share in the mean loss is equal."""
        with fusing(self.compute.compile):
            x, y = self.gather(*batch)
            net = self.net
            if self.joins:
                x, y = join(x), join(y)
                net = JoinedNet(net, len(x))
            with self._autocast(x.device):
                loss = check_mixed(self.mixer, self.mixer.apply(net, x, y, draw)).loss()
        (loss if self.num_parts == 1 else loss / self.num_parts).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _autocast(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=self.compute.precision == "bf16"
        )


def _check_stateful(name: str, settings: TrainSettings) -> None:
    """Raise for settings that a mixer with parameters or state does not support."""
    if settings.accumulate > 1:
        raise ValueError(
            f"train.accumulate={settings.accumulate} with {name}: its state changes once a step, "
            "not once a part; use train.accumulate=1"
        )
    if settings.partners == "batch":
        raise ValueError(
            f"train.partners='batch' with {name}: its state is that of the share of a process; "
            "use train.partners='share'"
        )


class CapturedStep:
    """Replays one CUDA graph per case.

    The first steps of a case run eagerly: they are ordinary steps, and they create what is created
    once (compiled code, momentum, workspaces). Then the case is captured and from there on
    replayed, its inputs copied into fixed buffers. A case that cannot be captured runs eagerly, and
    ``path`` names it.

    With several processes the graph holds the communication too. All capture a case at the same
    step, since their draws have the same case, and run it eagerly if one of them cannot capture.
    ``stream`` is then the one on which the network was wrapped.
    """

    def __init__(
        self, plain: PlainStep, device: torch.device, stream: torch.cuda.Stream | None = None
    ) -> None:
        self.plain = plain
        self.path = "captured"
        self._num_eager, self._min_eager, self._error_mode = 0, 0, "global"
        if is_wrapped(plain.net):
            # A thread of NCCL asks for the state of earlier work during a capture.
            self._min_eager, self._error_mode = WARM_UP_PASSES, "thread_local"
        self._taken: dict[str, int] = {}
        self._graphs: dict[str, tuple[torch.cuda.CUDAGraph, Batch, Draw, Tensor]] = {}
        self._refused: set[str] = set()
        self._stream = stream or capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch, draw: Draw) -> Tensor:
        case = draw.case
        if case not in self._graphs:
            taken = self._taken[case] = self._taken.get(case, 0) + 1
            is_warm = taken > WARM_UP_STEPS and self._num_eager >= self._min_eager
            if not is_warm or case in self._refused or not self._capture(batch, draw):
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
        # Capture has its own stream, and what it uses must have been used there.
        self._num_eager += 1
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
        why = ""
        try:
            self.plain.optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode=self._error_mode,
            ):
                loss = self.plain(static_batch, static_draw)
        except RuntimeError as error:
            # The network or the mixer does what a graph cannot hold, e.g. waits for the device.
            # The reason is the error behind that of the end of the capture.
            why, *_ = [*str(error.__context__ or error).splitlines(), "no reason given"]
            self._leave_capture(before)
        if self.plain.team.any(bool(why), device):
            self._refused.add(draw.case)
            why = why or "another process could not capture it"
            self.path = f"plain for {sorted(self._refused)}: {why}"
            return False
        self._graphs[draw.case] = (graph, static_batch, static_draw, loss)
        return True

    def _leave_capture(self, before: torch.cuda.Stream) -> None:
        """After a failed capture, restore the stream and capture a dummy graph, which resets the
        CUDA generator: without it the next dropout raises."""
        torch.cuda.set_stream(before)
        torch.cuda.synchronize()
        with torch.cuda.graph(
            torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode=self._error_mode
        ):
            torch.zeros(1, device=self._stream.device)  # torch warns of an empty graph


Step = PlainStep | CapturedStep


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream to capture steps on, and to wrap their network on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def make_step(
    plain: PlainStep, device: torch.device, stream: torch.cuda.Stream | None = None
) -> Step:
    """Return the step that the settings choose; capture exists on CUDA alone."""
    if plain.compute.capture:
        return CapturedStep(plain, device, stream)
    return plain


def prepared(net: nn.Module, settings: TrainSettings) -> nn.Module:
    """Return the module that steps run, compiled if the settings choose it."""
    device = next(net.parameters()).device
    if not compute_for(settings, device).compile:
        return net
    # Compiled code is cached by class, not by module, and ignores later hooks: the code of an
    # earlier network of this class, without a tap, must not be used for this one.
    torch.compiler.reset()
    # The casts of all weights in one launch, and the counters of all batch norms.
    options: dict[str, Any] | None = {"combo_kernels": True} if is_gpu(device) else None
    return cast(nn.Module, torch.compile(net, options=options))
