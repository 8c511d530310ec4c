"""Whether a plain value fits a type hint, and a user's function the call that it is for."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# The settings of a class that are switches or named choices, with the values each may have.
_choices: dict[type, dict[str, tuple[object, ...]]] = {}


def check_choices(settings: object) -> None:
    """Raise a ``ValueError`` for a setting that is none of the values its type hint lists.

    Such a hint is made of ``bool``, ``Literal`` and ``None`` alone: a switch or a named choice.
    """
    kind = type(settings)
    if kind not in _choices:
        _choices[kind] = _choices_of(kind)
    for name, values in _choices[kind].items():
        value = getattr(settings, name)
        if not _is_one_of(value, values):
            raise ValueError(f"{name} must be {' or '.join(map(repr, values))}, got {value!r}")


def check_kind(name: str, value: object, hint: Any) -> None:
    """Raise a ``ValueError`` for a value of another type than its setting."""
    if not _fits(value, hint):
        raise ValueError(f"{name} must be {_words(hint)}, got {value!r}")


def check_seed(seed: object) -> None:
    """Raise a ``ValueError`` for what is no seed of a ``torch.Generator``, as of training."""
    if not isinstance(seed, int) or isinstance(seed, bool) or abs(seed) >= 2**62:
        raise ValueError(f"seed must be a whole number from -2**62 to 2**62, got {seed!r}")


def check_call(what: str, function: object, *arguments: str, named: Iterable[str] = ()) -> None:
    """Raise a ``ValueError`` for a function of another signature, before it is called."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # type: ignore[arg-type]
        signature.bind(*arguments, **dict.fromkeys(named))
    except TypeError as error:
        shown = ", ".join([*arguments, *(f"{name}=..." for name in named)])
        raise ValueError(
            f"{what} is called with ({shown}), which it does not take: {error}"
        ) from None
    except ValueError:  # a built-in class without a signature
        return


def _choices_of(kind: type) -> dict[str, tuple[object, ...]]:
    try:
        hints = get_type_hints(kind)
    except NameError:  # a hint names something inside a function, where typing cannot look
        return {}
    found = {field.name: _values(hints[field.name]) for field in dataclasses.fields(kind)}
    return {name: values for name, values in found.items() if values}


def _values(hint: Any) -> tuple[object, ...]:
    """Return every value of a type hint, if it lists them; none otherwise."""
    if hint is bool:
        return (True, False)
    if hint is NoneType:
        return (None,)
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        parts = [_values(part) for part in get_args(hint)]
        return tuple(value for part in parts for value in part) if all(parts) else ()
    return ()


def _is_one_of(value: object, values: tuple[object, ...]) -> bool:
    """Whether a value equals one of these and is of its type; True is not 1."""
    return any(
        isinstance(value, type(one))
        and isinstance(value, bool) == isinstance(one, bool)
        and value == one
        for one in values
    )


def _words(hint: Any) -> str:
    """Return a type hint in words, such as "float or None"."""
    if values := _values(hint):
        return " or ".join(map(repr, values))
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, parts))
    return str(hint) if origin else getattr(hint, "__name__", str(hint))


def _fits(value: object, hint: Any) -> bool:
    """Whether a plain value is of this type; an int is accepted for a float."""
    if values := _values(hint):
        return _is_one_of(value, values)
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
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
        return False
    return isinstance(value, (int, float) if hint is float else hint)
