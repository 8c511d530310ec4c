"""From words to a command that is ready to run."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import tyro

PROGRAM = "alignmixup"

Call = Callable[[], None]
Parse = Callable[[list[str]], Call]


def parse_as(kind: Callable[..., Call], name: str) -> Parse:
    """Return what reads the words behind the command ``name`` as the fields of ``kind``."""

    def parse(args: list[str]) -> Call:
        return tyro.cli(kind, prog=f"{PROGRAM} {name}", args=args)

    return parse


def take_plugins(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off every ``--plugin MODULE``, wherever it stands; return the rest and the modules."""
    rest, plugins = [], []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--plugin":
            rest.append(word)
            continue
        plugins.append(value if equals else next(words, ""))
        if not plugins[-1] or plugins[-1].startswith("-"):
            raise ValueError("--plugin needs the name of a module, or the path of a .py file")
    return rest, plugins


def take_settings(args: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Split off settings: ``--train.batch-size 64`` becomes ``{"train.batch_size": ["64"]}``.

    A switch has no value: ``--train.nesterov``, ``--train.no-nesterov``.
    """
    rest: list[str] = []
    settings: dict[str, list[str]] = {}
    values = rest
    for word in args:
        found = re.fullmatch(r"--(data|net|mixer|train)\.(no-)?([\w-]+)(?:=(.*))?", word, re.S)
        if found is not None:
            part, negated, name, value = found.groups()
            values = settings[f"{part}.{name.replace('-', '_')}"] = []
            values += ["False"] if negated else [] if value is None else [value]
            continue
        if word.startswith("--"):
            values = rest
        values.append(word)
    return rest, settings


def typed_settings(
    settings: Mapping[str, Sequence[str]], recipes: Sequence[object]
) -> dict[str, object]:
    """Read the values of settings of these recipes, as ``train(changes=)`` takes them."""
    return {name: _typed(name, words, recipes) for name, words in settings.items()}


def _typed(path: str, words: Sequence[str], recipes: Sequence[object]) -> object:
    part, _, name = path.partition(".")
    now = [getattr(getattr(recipe, part, None), name, None) for recipe in recipes]
    values = tuple(map(parse_value, words))
    is_one = len(values) == 1 and isinstance(values[0], tuple)
    if len(values) > 1 or (any(isinstance(value, tuple) for value in now) and not is_one):
        return values
    return values[0] if values else True


def parse_setting(text: str, example: str) -> tuple[str, object]:
    """train.epochs=200 as a name and a value."""
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"--set takes NAME=VALUE, e.g. {example}, got {text!r}")
    return name, parse_value(value)


def parse_value(text: str) -> object:
    """Read a Python value or a fraction; anything else is a word."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    try:
        return float(Fraction(text))  # 8/255
    except (ValueError, ZeroDivisionError):
        return text
