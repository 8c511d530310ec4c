"""Deferred handling of Ctrl-C, SIGTERM and SIGHUP: training stops at its next safe point, saved.

SIGHUP comes when the terminal is closed or its connection is lost; under nohup it is ignored.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = "stopping after this step or batch; press Ctrl-C again to quit now"


class Stopped(KeyboardInterrupt):
    """A signal has stopped the training, which is saved; ``number`` is that of the signal.

    It is a ``KeyboardInterrupt``, so that a script does not continue after unfinished training.
    """

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message)
        self.number = number


def signal_name(number: int) -> str:
    """Return what people call a signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@contextmanager
def step_under(caught: Sequence[int]) -> Iterator[None]:
    """Raise ``Stopped`` for an error in this block, one step, if ``caught`` has a signal.

    Ctrl-C on a terminal reaches the compilers that a step has started, too, and ends them.
    """
    try:
        yield
    except Exception as error:
        if not caught:
            raise
        what = next(iter(str(error).splitlines()), "")
        raise Stopped(
            caught[0],
            f"stopped by {signal_name(caught[0])} within a step, which failed "
            f"({type(error).__name__}: {what}); run again to continue from the last checkpoint",
        ) from error


class EvaluationStopped(KeyboardInterrupt):
    """A signal has ended the evaluation of an epoch, which a resumed run repeats."""


# The signals that the training in evaluation has caught, and the number of its processes.
_evaluations: list[tuple[list[int], int]] = []


@contextmanager
def stopping_evaluation(caught: list[int], num_processes: int) -> Iterator[None]:
    """Let ``check_stopped`` raise in this block once ``caught`` has a signal."""
    _evaluations.append((caught, num_processes))
    try:
        yield
    finally:
        _evaluations.pop()


def check_stopped(num_processes: int) -> None:
    """Raise if a signal came during the evaluation of an epoch; call it between batches.

    It does nothing in an evaluation that not all processes of the training share: one that left it
    alone would leave the others waiting.
    """
    if any(caught and size == num_processes for caught, size in _evaluations):
        raise EvaluationStopped("stopped by a signal")


@contextmanager
def stop_signals(message: str = STOPPING, *, quiet: bool = False) -> Iterator[list[int]]:
    """Collect signals to stop; the first one prints ``message``, a second Ctrl-C raises.

    SIGTERM after Ctrl-C does not raise: Ctrl-C on a terminal reaches all processes of a sweep,
    which then also sends SIGTERM to its own. A third Ctrl-C ends the process without cleaning up.
    A process that is forked in the block, to decode images, leaves them to this one.
    """
    caught: list[int] = []
    owner = os.getpid()

    def catch(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            return
        if number == signal.SIGINT and number in caught:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        if not caught and not quiet:
            _print(message)
        caught.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    try:
        before = {n: signal.signal(n, catch) for n in numbers}
    except ValueError:  # not the main thread, and only that may handle signals
        before = {}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print(message: str) -> None:
    """Print from a signal handler, where the stream may be in the middle of a write, or closed."""
    with suppress(OSError):
        try:
            print(f"\n{message}", file=sys.stderr, flush=True)
        except RuntimeError:  # a reentrant call
            os.write(2, f"\n{message}\n".encode())
