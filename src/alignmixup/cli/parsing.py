"""From words to a command that is ready to run."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro.conf import DisallowNone, FlagCreatePairsOff, PositionalMetavarFromFieldName

from alignmixup.cli.examples import EXAMPLES

PROGRAM = "alignmixup"
WIDTH = 79  # of a page of text in a terminal of 80 columns or more
# Paths and commands stay whole, to be copied.
WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
LEAST = 20  # columns for a text beside its name

Call = Callable[[], None]
Parse = Callable[[list[str]], Call]
T = TypeVar("T")


def read_words(
    kind: Callable[..., T],
    name: str,
    args: Sequence[str],
    *,
    about: str = "",
    settings: Callable[[], Iterable[str]] = tuple,
) -> T:
    """Read the words behind the command ``name`` as the fields of the dataclass ``kind``.

    Its help has ``about`` before the examples. ``settings`` lists the settings of recipes
    (``train.lr``) to suggest for an unknown flag.

    Raises:
        ValueError: If a flag or a word is unknown; with the nearest flag.
    """
    if os.environ.get("NO_COLOR"):  # versions of tyro before these options heed it
        getattr(tyro, "_experimental_options", {})["ansi_codes"] = False
    command = f"{PROGRAM} {name}"
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = {f"--{field.name.replace('_', '-')}" for field in fields}
    for word in args:
        flag = word.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in known | {"--help"}:
            hint = _nearest_flag(flag, known, settings())
            raise ValueError(f"unknown flag {flag!r} of '{command}'{hint}")
    first, *details = (inspect.getdoc(kind) or "").split("\n\n")
    try:
        value, unknown = tyro.cli(
            kind,
            prog=command,
            args=args,
            description=first,
            config=(PositionalMetavarFromFieldName, DisallowNone, FlagCreatePairsOff),
            return_unknown_args=True,
        )
    except SystemExit as stop:
        if stop.code == 0:  # after --help
            pages = [textwrap.fill(text, page_width()) for text in details]
            print("\n\n".join([*pages, *filter(None, [about]), examples(name)]))
        raise
    if unknown:
        word = unknown[0]
        is_file = word.startswith("-") and Path(word).exists()
        hint = f"for the file write ./{word}" if is_file else f"see '{command} --help'"
        raise ValueError(f"'{command}' does not take {word!r}; {hint}")
    for field in fields:
        setattr(value, field.name, _in_home(getattr(value, field.name)))
    return value


def _in_home(value: object) -> object:
    """Expand ``~/`` in paths: a shell does not in ``--out=~/runs``, nor within quotes."""
    if isinstance(value, tuple):
        return tuple(map(_in_home, value))
    if isinstance(value, Path) and value.parts[:1] == ("~",):  # not ~x.png, the name of a file
        return value.expanduser()
    return value


def examples(*names: str) -> str:
    """Return the examples of commands as the end of a help page."""
    lines = [f"  {PROGRAM} {line}" for name in names for line in EXAMPLES[name]]
    return "\n".join(["Examples:", *lines])


def page_width() -> int:
    """Return the width of a page: that of the terminal, or COLUMNS, up to 79."""
    return max(LEAST, min(WIDTH, shutil.get_terminal_size().columns - 1))


def wrapped(start: str, text: str, **options: Any) -> list[str]:
    """Break text into the lines of a page: ``start``, and below it as many spaces.

    On a page too narrow for both, ``start`` is a line of its own.
    """
    width = page_width()
    if start.strip() and width - len(start) < LEAST:
        return [start.rstrip(), *(wrapped(" " * 4, text, **options) if text else [])]
    options |= {"initial_indent": start, "subsequent_indent": " " * len(start)}
    return textwrap.wrap(text, width, **options) or [start.rstrip()]


def listing(title: str, abouts: Mapping[str, str]) -> str:
    """Return names and what they are about, below a title."""
    width = max(map(len, abouts)) + 2
    lines = [line for n, text in abouts.items() for line in wrapped(f"  {n:<{width}}", text)]
    return "\n".join([title, *lines])


def _nearest_flag(flag: str, known: Iterable[str], settings: Iterable[str]) -> str:
    """Suggest a flag: by its whole name, or by the last part of a setting's (--lr, --train.lr)."""
    from alignmixup.registry import nearest

    flags = [*sorted(known), *(f"--{name.replace('_', '-')}" for name in settings)]
    last = {f"--{each.rpartition('.')[2].lstrip('-')}": each for each in reversed(flags)}
    if flag in last:
        return f"; did you mean {last[flag]}?"
    found = nearest(flag, flags) or [last[name] for name in nearest(flag, [*last])]
    return f"; did you mean {' or '.join(found)}?" if found else "; --help lists all"


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
    if any(isinstance(value, dict) for value in now) and len(values) % 2 == 0:
        return dict(zip(values[::2], values[1::2], strict=True))  # as the help shows it
    is_one = len(values) == 1 and isinstance(values[0], tuple)
    if len(values) > 1 or (any(isinstance(value, tuple) for value in now) and not is_one):
        return values
    if not values and any(type(value) in (int, float) for value in now):
        raise ValueError(f"--{path.replace('_', '-')} needs a value")
    return values[0] if values else True


def parse_setting(text: str, example: str, flag: str = "--set") -> tuple[str, object]:
    """train.epochs=200 as a name and a value."""
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"{flag} takes NAME=VALUE, e.g. {example}, got {text!r}")
    return name, parse_value(value)


def parse_value(text: str) -> object:
    """Read a Python value, ``true``, ``false`` or a fraction; anything else is a word."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        pass
    try:
        return float(Fraction(*map(Fraction, text.split("/"))))  # 8/255, 0.5/255
    except (TypeError, ValueError, ArithmeticError):
        return text
