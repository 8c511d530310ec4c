"""Settings read back from JSON, or given by name: names and types are checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from alignmixup.checking import check_kind
from alignmixup.contracts import Mixer
from alignmixup.registry import MIXERS, suggestion


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


def plain(value: Any) -> Any:
    """Return a setting as JSON can hold it; a mixer is its settings and the name of its class."""
    if isinstance(value, Mixer):
        fields = dataclasses.fields(value)  # type: ignore[arg-type]
        settings = {f.name: plain(getattr(value, f.name)) for f in fields}
        return {**settings, "kind": type(value).__name__}
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def read_mixer(record: Mapping[str, Any]) -> Mixer:
    """Return the mixer of a record that ``plain`` made."""
    kind = record["kind"]
    if kind not in MIXERS:
        hint = suggestion(kind, list(MIXERS))
        raise ValueError(f"unknown mixer {kind!r}{hint} (--plugin MODULE registers others)")
    settings = {name: value for name, value in record.items() if name != "kind"}
    mixer: Mixer = read_record(MIXERS[kind], settings)
    return mixer


def held_mixers(mixer: Mixer) -> Iterator[Mixer]:
    """Yield the mixer and every mixer among its settings."""
    yield mixer
    for field in dataclasses.fields(mixer):  # type: ignore[arg-type]
        value = getattr(mixer, field.name)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Mixer):
                yield from held_mixers(inner)


def check_registered(mixer: Mixer) -> None:
    """Raise for a mixer, or one among its settings, that ``read_mixer`` would not find."""
    for kind in map(type, held_mixers(mixer)):
        name = kind.__name__
        if name not in MIXERS:
            raise ValueError(
                f"the mixer {name} is not registered, and a run with it could not be opened: write "
                "@register_mixer above the class"
            )
        if _home(MIXERS[name]) != _home(kind):
            raise ValueError(
                f"the mixer {name} of {kind.__module__} is not the registered one of "
                f"{MIXERS[name].__module__}: give it another name, and write @register_mixer above "
                "it"
            )


def _home(kind: type) -> tuple[str, str]:
    """Where a class is defined: in a notebook it may be defined again."""
    return kind.__module__, kind.__qualname__


def _with_tuples(value: Any) -> Any:
    """JSON has no tuples; no setting is a list. An object with a ``kind`` is a mixer."""
    if isinstance(value, dict):
        if isinstance(value.get("kind"), str):
            return read_mixer(value)
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
