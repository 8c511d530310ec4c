"""Settings read back from JSON, or given by name: names and types are checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def read_record(kind: Any, record: Mapping[str, Any]) -> Any:
    """Return the dataclass ``kind`` of these settings, with every name and type checked."""
    names = {f.name for f in dataclasses.fields(kind)}
    unknown = sorted(set(record) - names)
    if unknown:
        raise ValueError(f"{kind.__name__} has no settings {unknown}; it has {sorted(names)}")
    values = {name: _with_tuples(value) for name, value in record.items()}
    hints = get_type_hints(kind)
    for name, value in values.items():
        check_kind(name, value, hints[name])
    return kind(**values)


def _with_tuples(value: Any) -> Any:
    """JSON has no tuples; no setting is a list."""
    if isinstance(value, dict):
        return {name: _with_tuples(inner) for name, inner in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def check_kind(name: str, value: object, hint: Any) -> None:
    """Raise a ``ValueError`` for a value of another type than its setting."""
    if not _fits(value, hint):
        wanted = getattr(hint, "__name__", None) if get_origin(hint) is None else None
        wanted = wanted or str(hint).replace("typing.", "")
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


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
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, parts[1]) for v in value.values())
    if hint is object:
        return True
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def with_block(net: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a network's record with its block; records from before it was a setting are of the
    standard one."""
    has_blocks = net["name"] in ("preact_resnet18", "wrn16_8")
    return {"block": "standard", **net} if has_blocks else net


def default_of(setting: dataclasses.Field[Any]) -> object:
    """Return the default of a setting; MISSING, which equals no value, where it has none."""
    if setting.default_factory is not dataclasses.MISSING:
        return setting.default_factory()
    return setting.default
