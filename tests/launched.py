"""What the tests of launchers start: a call that saves when it is stopped, and imports no torch."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

__all__ = ["sleep_and_write"]


def sleep_and_write(path: Path, *seconds: float) -> None:
    """Write a line at the beginning and one at the end; SIGTERM ends it early.

    ``seconds`` are those of the first call, of the second, and so on.
    """
    number = path.read_text().count("began") if path.exists() else 0
    caught: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
    path.with_suffix(".parent").write_text(str(os.getppid()))
    with open(path, "a") as file:
        file.write("began\n")
    deadline = time.monotonic() + seconds[number]
    while not caught and time.monotonic() < deadline:
        time.sleep(0.02)
    with open(path, "a") as file:
        file.write("saved\n" if caught else "done\n")
