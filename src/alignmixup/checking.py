"""Whether a plain value fits a type hint: settings of recipes and options of tasks."""

from __future__ import annotations

from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin


def check_kind(name: str, value: object, hint: Any) -> None:
    """Raise a ``ValueError`` for a value of another type than its setting."""
    if not _fits(value, hint):
        raise ValueError(f"{name} must be {_words(hint)}, got {value!r}")


def _words(hint: Any) -> str:
    """Return a type hint in words, such as "float or None"."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, parts))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    return str(hint) if origin else getattr(hint, "__name__", str(hint)).replace("NoneType", "None")


def _fits(value: object, hint: Any) -> bool:
    """Whether a plain value is of this type; an int is accepted for a float."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        each = parts[:1] * len(value) if parts[1:] == (...,) else parts
        return len(each) == len(value) and all(map(_fits, value, each))
    if origin is list:
        return isinstance(value, list) and all(_fits(v, parts[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, parts[1]) for v in value.values())
    if hint is object:
        return True
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)
