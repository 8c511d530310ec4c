"""Settings read back from JSON, or given by name: names and types are checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

from alignmixup.checking import check_kind


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
