"""The command line: parsing and printing, nothing else.

``program`` has the table of commands and ``main``; the commands are by theme in ``training``,
``recipes``, ``scoring``, ``using``, ``pictures``, ``detection``, ``material``, ``doctor`` and
``bench``. A command is a dataclass: its fields are the flags, its docstrings their help, and
calling it imports what does the work and prints the answer. ``examples`` ends each help page.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

__all__ = ["main"]

INTERRUPTED = "alignmixup: interrupted"
SHORT_WAIT = "1000"  # libgomp's own choice where it knows that threads outnumber cores


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status.

    The commands are imported here, where Ctrl-C prints no trace either.
    """
    _wait_briefly()
    with _interruptible_imports():
        try:
            from alignmixup.cli.program import main as run
        except KeyboardInterrupt:
            print(INTERRUPTED, file=sys.stderr)
            return 128 + signal.SIGINT
        return run(argv)


def _wait_briefly() -> None:
    """Let torch's threads sleep after a short wait for each other, unless the user has set it.

    libgomp reads this when torch is loaded. By default a thread spins for some ms; if another
    process needs a core, the one that it waits for may not run at all, and training takes many
    times as long. On idle cores the short wait costs nothing that can be measured.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SHORT_WAIT)


@contextmanager
def _interruptible_imports() -> Iterator[None]:
    """End the process at Ctrl-C while torch is being imported.

    Its C++ code imports numpy and discards any error of that import, a KeyboardInterrupt too: the
    command would continue, with a numpy that is half imported.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if _is_importing_torch(frame):
            with suppress(OSError):  # stderr is closed
                os.write(2, f"{INTERRUPTED}\n".encode())
            os._exit(128 + number)
        signal.default_int_handler(number, frame)

    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if is_ours:
            signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread, and only that may handle signals
        is_ours = False
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_importing_torch(frame: FrameType | None) -> bool:
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if frame.f_code.co_name == "<module>" and name.partition(".")[0] == "torch":
            return True
        frame = frame.f_back
    return False
