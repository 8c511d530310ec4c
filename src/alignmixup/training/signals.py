"""Ctrl-C and SIGTERM as a wish that the work hears at its next safe place."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["stop_signals"]


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM instead of dying of them; a second Ctrl-C is obeyed at once.

    SIGTERM after Ctrl-C is not: a terminal tells all processes of a sweep, and it tells its own.
    """
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in caught:
            raise KeyboardInterrupt
        caught.append(number)

    try:
        before = {n: signal.signal(n, catch) for n in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's
        before = {}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
