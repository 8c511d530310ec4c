"""The command line: parsing and printing, nothing else.

``program`` has the table of commands and ``main``; the commands are by theme in ``training``,
``recipes``, ``scoring``, ``using``, ``pictures``, ``detection``, ``material``, ``doctor`` and
``bench``. A command is a dataclass: its fields are the flags, its docstrings their help, and
calling it imports what does the work and prints the answer. ``examples`` ends each help page.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status.

    The commands are imported here, where Ctrl-C is no trace either.
    """
    try:
        from alignmixup.cli.program import main as run
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return run(argv)
