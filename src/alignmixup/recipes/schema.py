"""A recipe: one row of a table, as a frozen record of everything a run depends on.

A variant changes what differs (``changed``); a record on disk (``to_json``, ``from_json``) holds
every setting, so that a run can be read again whatever the recipe of that name has become since.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from alignmixup.contracts import Mixer
from alignmixup.models.zoo import NetSpec
from alignmixup.registry import MIXERS
from alignmixup.report.paper import Published
from alignmixup.training.settings import FREE_SETTINGS, TrainSettings

__all__ = [
    "DataSpec",
    "Phase",
    "Recipe",
    "Row",
    "changed",
    "check_kind",
    "on_data",
]


@dataclass(frozen=True)
class DataSpec:
    """A data set by name and how its images are prepared.

    A set in memory is augmented by a random crop of the image padded by ``pad``, and by a flip; it
    is evaluated as it is.

    With ``stream``, a set whose source has one file an image is decoded batch by batch instead, to
    squares of ``image_size`` (None: the source's). In training they are random parts of ``area`` of
    the surface or, with ``resize``, random windows of the image resized to that, flipped, their
    colours changed by ``jitter`` and ``lighting``. In evaluation they are the centre of the image
    resized to ``eval_resize`` (None: 8/7 of ``image_size``). Resizing is that of the shorter side,
    or with ``squash`` of both. ``StreamLoader`` says more. A source without files is in memory
    whatever ``stream`` says.
    """

    name: str
    pad: int = 4
    flip: bool = True
    stream: bool = False
    image_size: int | None = None
    area: tuple[float, float] = (0.08, 1.0)
    resize: int | None = None
    eval_resize: int | None = None
    squash: bool = False
    jitter: float = 0.0
    lighting: float = 0.0


@dataclass(frozen=True)
class Phase:
    """Other settings for the epochs before ``until``, by their names on the command line.

    A phase may change how images are prepared, the mixer and ``train.batch_size``.
    """

    until: int
    changes: dict[str, object]

    def __post_init__(self) -> None:
        for path in self.changes:
            if not path.startswith(("data.", "mixer.")) and path != "train.batch_size":
                raise ValueError(
                    f"a phase cannot change {path!r}; it may change data.*, mixer.* and "
                    "train.batch_size"
                )


@dataclass(frozen=True)
class Recipe:
    """What to train on what, how.

    ``phases`` are the beginnings of training that have other settings, in order; from the end of
    the last on, the settings are those of the recipe, which evaluation always has.
    """

    name: str
    data: DataSpec
    net: NetSpec
    mixer: Mixer
    train: TrainSettings
    phases: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        ends = [0, *(phase.until for phase in self.phases)]
        if ends != sorted(set(ends)):
            raise ValueError(f"phases must end at epochs from 1 on, and rise, got {ends[1:]}")
        for part in ("mixer", "train"):
            owner = getattr(self, part)
            for setting in dataclasses.fields(owner):
                value = getattr(owner, setting.name)
                if isinstance(value, float) and not math.isfinite(value):
                    # JSON has no such number, so no result could be written at the end.
                    raise ValueError(f"{part}.{setting.name} must be finite, got {value}")

    def stages(self) -> list[tuple[range, Recipe]]:
        """The epochs of each phase, counted from 0, with the recipe as it is then."""
        end = self.train.epochs
        whole = dataclasses.replace(self, phases=())
        stages, begin = [], 0
        for phase in self.phases:
            if begin < end:
                stages.append((range(begin, min(phase.until, end)), changed(whole, phase.changes)))
            begin = phase.until
        return stages + ([(range(begin, end), whole)] if begin < end else [])

    def shrunk(self) -> Self:
        """The same recipe as a run of two steps on a CPU: a narrow network, tiny batches.

        Phases are left out: two steps would see the first alone.
        """
        settings = dataclasses.replace(
            self.train,
            epochs=1,
            batch_size=4,
            milestones=(),
            warmup_epochs=0.0,
            precision="float32",
            compile=False,
            capture=False,
            device="cpu",
        )
        own = not self.net.name.startswith(("timm:", "torchvision:"))
        net = dataclasses.replace(self.net, width=4 if own else None, pretrained=False)
        return dataclasses.replace(self, net=net, train=settings, phases=())

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        record = dataclasses.asdict(self)
        record["mixer"]["kind"] = type(self.mixer).__name__
        return record

    def chosen(self) -> dict[str, object]:
        """The settings that are not the defaults, by the names they have on the command line.

        Not those that say where and how often rather than what, nor the seed; the number of epochs
        always: a run may not have come to its end.
        """
        found: dict[str, object] = {"mixer": type(self.mixer).__name__}
        found["train.epochs"] = self.train.epochs
        for part in ("data", "net", "mixer", "train"):
            owner = getattr(self, part)
            for setting in dataclasses.fields(owner):
                value = getattr(owner, setting.name)
                is_left = part == "train" and setting.name in (*FREE_SETTINGS, "seed")
                if not is_left and value != _default(setting):
                    found[f"{part}.{setting.name}"] = value
        if self.phases:
            found["phases"] = [dataclasses.asdict(phase) for phase in self.phases]
        return found

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Undo ``to_json``; a setting this version does not know is an error that names it."""
        mixer = dict(record["mixer"])
        kind = MIXERS[mixer.pop("kind")]
        return cls(
            name=record["name"],
            data=_read(DataSpec, record["data"]),
            net=_read(NetSpec, _with_block(record["net"])),
            mixer=_read(kind, mixer),
            train=_read(TrainSettings, record["train"]),
            phases=tuple(_read(Phase, phase) for phase in record.get("phases", ())),
        )


def _with_block(net: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record from before ``block`` was a setting is of a network with the standard block."""
    has_blocks = net["name"] in ("preact_resnet18", "wrn16_8")
    return {"block": "standard", **net} if has_blocks else net


def _default(setting: dataclasses.Field[Any]) -> object:
    if setting.default_factory is not dataclasses.MISSING:
        return setting.default_factory()
    return setting.default  # where there is none, MISSING, which equals no value


@dataclass(frozen=True)
class Row:
    """A recipe and the cell of the paper's tables it stands beside, if there is one."""

    recipe: Recipe
    published: Published | None = None


def changed(recipe: Recipe, changes: Mapping[str, object]) -> Recipe:
    """Return the recipe with settings replaced, named as on the command line: ``train.epochs``.

    All at once: fewer epochs and a shorter warm-up may only be right together. A setting that a
    phase would change holds in that phase too.
    """
    parts: dict[str, dict[str, object]] = {}
    for path, value in changes.items():
        part, _, name = path.partition(".")
        if path == "data.name":
            raise ValueError("other data have a way of their own, dataset=, which names the run so")
        known = [f.name for f in dataclasses.fields(recipe) if f.name not in ("name", "phases")]
        if part not in known or not name:
            raise ValueError(f"unknown setting {path!r}; write PART.NAME with PART from {known}")
        owner = getattr(recipe, part)
        names = [f.name for f in dataclasses.fields(owner)]
        if name not in names:
            raise ValueError(f"unknown setting {path!r}; {part} has {names}")
        check_kind(path, value, get_type_hints(type(owner))[name])
        parts.setdefault(part, {})[name] = value
    if not parts:
        return recipe
    replaced = {
        part: dataclasses.replace(getattr(recipe, part), **values) for part, values in parts.items()
    }
    phases = tuple(
        Phase(phase.until, {k: v for k, v in phase.changes.items() if k not in changes})
        for phase in recipe.phases
    )
    return dataclasses.replace(recipe, **replaced, phases=phases)


def on_data(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe for other data, under a name that says so: a figure must not say it is for
    the recipe's own."""
    ours, theirs = (re.sub("[^A-Za-z0-9]+", "_", data) for data in (recipe.data.name, name))
    words = recipe.name.split("-")
    # The data come first, or after the family: ablation-cifar100-ae-xAe.
    if ours in words:
        words[words.index(ours)] = theirs
    else:
        words.insert(0, theirs)
    spec, phases = dataclasses.replace(recipe.data, name=name), recipe.phases
    size = re.fullmatch(r"folder:.+@(\d+)", name)
    if size and spec.image_size:  # else it is the folder's already
        scale = int(size[1]) / spec.image_size
        spec = dataclasses.replace(spec, **_scaled(dataclasses.asdict(spec), "", scale))
        phases = tuple(
            Phase(p.until, {**p.changes, **_scaled(p.changes, "data.", scale)}) for p in phases
        )
    return dataclasses.replace(recipe, name="-".join(words), data=spec, phases=phases)


def _scaled(settings: Mapping[str, Any], prefix: str, scale: float) -> dict[str, Any]:
    """The sides of images among these settings, in another size."""
    names = [prefix + side for side in ("image_size", "resize", "eval_resize")]
    return {name: round(scale * settings[name]) for name in names if settings.get(name)}


def _read(kind: Any, record: Mapping[str, Any]) -> Any:
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
    """Raise for a value of another type than its setting: comparisons would fail further on."""
    if not _fits(value, hint):
        wanted = getattr(hint, "__name__", None) if get_origin(hint) is None else None
        raise ValueError(f"{name} must be {wanted or hint}, got {value!r}")


def _fits(value: object, hint: Any) -> bool:
    """Whether a plain value is of this type; a whole number will do for a float."""
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
