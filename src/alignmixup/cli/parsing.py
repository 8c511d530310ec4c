"""From words to a command that is ready to run."""

from __future__ import annotations

from collections.abc import Callable

import tyro

__all__ = ["PROGRAM", "Call", "Parse", "parse_as"]

PROGRAM = "alignmixup"

Call = Callable[[], None]
Parse = Callable[[list[str]], Call]


def parse_as(kind: Callable[..., Call], name: str) -> Parse:
    """Return what reads the words behind the command ``name`` as the fields of ``kind``."""

    def parse(args: list[str]) -> Call:
        return tyro.cli(kind, prog=f"{PROGRAM} {name}", args=args)

    return parse
