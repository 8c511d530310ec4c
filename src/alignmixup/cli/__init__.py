"""The command line: parsing and printing, nothing else.

``program`` has the table of commands and ``main``; the commands are by theme in ``training``,
``scoring``, ``using``, ``pictures``, ``material`` and ``bench``. A command is a dataclass: its
fields are the flags, its docstrings their help, and calling it imports what does the work and
prints the answer.
"""

from __future__ import annotations

from alignmixup.cli.program import main

__all__ = ["main"]
