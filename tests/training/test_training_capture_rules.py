"""When steps are captured, and what a replay is given: on a CPU, with graphs that only remember.

A graph here keeps what was called while it was captured, and calls it again; what CUDA makes of it
is in ``test_training_capture.py``.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw
from alignmixup.training import steps
from alignmixup.training.distributed import Team
from alignmixup.training.steps import CapturedStep, make_step

CPU = torch.device("cpu")


class Graph:
    """What is captured; the latest one is the one that records."""

    recording: Graph | None = None
    modes: ClassVar[list[str]] = []
    streams: ClassVar[list[object]] = []

    def __init__(self) -> None:
        self.replay: Callable[[], object] = lambda: None

    @classmethod
    @contextlib.contextmanager
    def capture(
        cls, graph: Graph, *, stream: object, capture_error_mode: str, pool: object = None
    ) -> Iterator[None]:
        cls.modes.append(capture_error_mode)
        cls.streams.append(stream)
        cls.recording = graph
        try:
            yield
        finally:
            cls.recording = None


class Stream:
    """The ``order`` of what happened: a stream that waits for another, or what runs on one."""

    current: ClassVar[Stream]
    order: ClassVar[list[tuple[object, ...]]] = []

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, other: object) -> None:
        self.order.append((self, "waits for", other))

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        self.order.append(("runs on", self))
        yield


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.SimpleNamespace(
        CUDAGraph=Graph,
        graph=Graph.capture,
        Stream=Stream,
        stream=Stream.used,
        current_stream=lambda: Stream.current,
        set_stream=lambda stream: None,
        synchronize=lambda: None,
        graph_pool_handle=lambda: None,
    )
    for name, what in vars(fake).items():
        monkeypatch.setattr(torch.cuda, name, what)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(Graph, "modes", [])
    monkeypatch.setattr(Graph, "streams", [])
    monkeypatch.setattr(Stream, "order", [])
    monkeypatch.setattr(Stream, "current", Stream(CPU), raising=False)


def expected(batch: tuple[Tensor, ...], draw: Draw) -> Tensor:
    """A number that no other batch or draw gives."""
    return (batch[0] * batch[0][draw.perm] * draw.lam).sum() + batch[1].sum()


class Plain:
    """Stands for the plain step; ``ran`` are the cases of the steps that it ran itself."""

    def __init__(self, refused: str = "", is_refused_elsewhere: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters())
        self.refused, self.ran, self.tried = refused, list[str](), list[str]()
        any_of = (lambda flag, device: True) if is_refused_elsewhere else Team().any
        self.team = types.SimpleNamespace(any=any_of)
        self.compute = types.SimpleNamespace(capture=True)

    def __call__(self, batch: tuple[Tensor, ...], draw: Draw) -> Tensor:
        if Graph.recording is None:
            self.ran.append(draw.case)
            return expected(batch, draw)
        self.tried.append(draw.case)
        if draw.case == self.refused:
            raise RuntimeError("waits for the device\nand many lines")
        loss = torch.zeros(())
        Graph.recording.replay = lambda: loss.copy_(expected(batch, draw))
        return loss


def taken(
    plain: Plain,
    cases: str,
    size: Callable[[int], int] = lambda i: 4,
    stream: Stream | None = None,
) -> CapturedStep:
    """Take a step of each case; every loss must be that of its own batch and draw."""
    step = make_step(plain, CPU, stream)
    assert isinstance(step, CapturedStep)
    rng = torch.Generator().manual_seed(0)
    losses, wanted, given = [], [], []
    for i, case in enumerate(cases):
        batch = (torch.rand(size(i), generator=rng), torch.rand(size(i), generator=rng))
        draw = Draw(case, torch.randperm(size(i), generator=rng), torch.rand((), generator=rng))
        given.append((batch, draw, [t.clone() for t in (*batch, draw.perm, draw.lam)]))
        losses.append(step(batch, draw))
        wanted.append(expected(batch, draw))
    torch.testing.assert_close(losses, wanted)  # all of them after the last step
    for batch, draw, before in given:  # buffers are the graph's own
        assert all(map(torch.equal, (*batch, draw.perm, draw.lam), before))
    return step


def test_a_case_is_captured_after_three_steps_and_replayed_with_what_it_is_given() -> None:
    plain = Plain()
    step = taken(plain, "abaabbabab")
    assert plain.ran == list("abaabb")
    assert plain.tried == list("ab")
    assert step.path == "captured"
    assert Graph.modes == ["global", "global"]


def test_a_smaller_last_batch_runs_itself_and_the_next_one_is_replayed() -> None:
    plain = Plain()
    taken(plain, "aaaaaaa", lambda i: 3 if i == 5 else 4)
    assert plain.ran == list("aaaa")
    assert plain.tried == ["a"]


def test_a_case_that_cannot_be_captured_runs_itself_and_is_named() -> None:
    plain = Plain(refused="b")
    step = taken(plain, "abababababab")
    assert plain.ran == list("abababbbb")
    assert plain.tried == ["a", "b"]  # and not again
    assert step.path == "plain for ['b']: waits for the device"


def test_a_case_that_another_process_cannot_capture_runs_itself() -> None:
    plain = Plain(is_refused_elsewhere=True)
    step = taken(plain, "aaaaaa")
    assert plain.ran == list("aaaaaa")
    assert plain.tried == ["a"]
    assert step.path == "plain for ['a']: another process could not capture it"


def test_a_wrapped_network_is_captured_after_eleven_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any case; and its capture lets a thread of NCCL ask for the state of earlier work."""
    monkeypatch.setattr(steps, "is_wrapped", lambda net: True)
    plain = Plain()
    taken(plain, "ababababababab")
    assert plain.ran == list("abababababa")
    assert plain.tried == ["b", "a"]
    assert Graph.modes == ["thread_local", "thread_local"]


def test_steps_run_on_one_stream_after_what_came_before_and_before_what_comes_after() -> None:
    """That on which the network was wrapped, or one of their own; captures are on it, too."""
    own, now = Stream(CPU), Stream.current
    taken(Plain(refused="b"), "bbbbaaaaa", stream=own)
    one_step = [(own, "waits for", now), ("runs on", own), (now, "waits for", own)]
    assert Stream.order == 7 * one_step
    assert Graph.streams == 3 * [own]  # for b, for what a failed capture leaves, and for a
    Stream.order.clear()
    taken(Plain(), "aaa")
    (_, other), *_ = (what for what in Stream.order if what[0] == "runs on")
    assert isinstance(other, Stream)
    assert other not in (own, now)
    assert other.device == CPU
