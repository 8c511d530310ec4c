"""From words to a command that is ready to run."""

from __future__ import annotations

import ast
from collections.abc import Callable
from fractions import Fraction

import tyro

__all__ = ["PROGRAM", "Call", "Parse", "parse_as", "parse_setting"]

PROGRAM = "alignmixup"

Call = Callable[[], None]
Parse = Callable[[list[str]], Call]


def parse_as(kind: Callable[..., Call], name: str) -> Parse:
    """Return what reads the words behind the command ``name`` as the fields of ``kind``."""

    def parse(args: list[str]) -> Call:
        return tyro.cli(kind, prog=f"{PROGRAM} {name}", args=args)

    return parse


def parse_setting(text: str, example: str) -> tuple[str, object]:
    """train.epochs=200 as a name and a value; what is no Python value or fraction is a word."""
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"--set takes NAME=VALUE, e.g. {example}, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        pass
    try:
        return name, float(Fraction(value))  # 8/255
    except (ValueError, ZeroDivisionError):
        return name, value
