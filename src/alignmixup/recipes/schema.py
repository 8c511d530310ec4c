"""A recipe: one row of a table, as a frozen record of everything a run depends on.

A variant changes what differs (``changed``); a record on disk (``to_json``, ``from_json``) holds
every setting, so that a run can be read again whatever the recipe of that name has become since.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from alignmixup import mixing
from alignmixup.contracts import Mixer
from alignmixup.nets.zoo import NetSpec
from alignmixup.train.settings import TrainSettings

__all__ = ["DataSpec", "Recipe", "changed", "mixer_names"]


@dataclass(frozen=True)
class DataSpec:
    """A data set by name and how it is augmented: a random crop of the padded image, a flip."""

    name: str
    pad: int = 4
    flip: bool = True


@dataclass(frozen=True)
class Recipe:
    """What to train on what, how."""

    name: str
    data: DataSpec
    net: NetSpec
    mixer: Mixer
    train: TrainSettings

    def shrunk(self) -> Self:
        """The same recipe as a run of two steps on a CPU: a narrow network, tiny batches."""
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
        net = dataclasses.replace(self.net, width=4) if own else self.net
        return dataclasses.replace(self, net=net, train=settings)

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        record = dataclasses.asdict(self)
        record["mixer"]["kind"] = type(self.mixer).__name__
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Undo ``to_json``; a setting this version does not know is an error that names it."""
        mixer = dict(record["mixer"])
        kind = mixer.pop("kind")
        if kind not in mixer_names():
            raise ValueError(f"unknown mixer {kind!r}; this version has {mixer_names()}")
        return cls(
            name=record["name"],
            data=_read(DataSpec, record["data"]),
            net=_read(NetSpec, record["net"]),
            mixer=_read(getattr(mixing, kind), mixer),
            train=_read(TrainSettings, record["train"]),
        )


def changed(recipe: Recipe, changes: Mapping[str, object]) -> Recipe:
    """Return the recipe with settings replaced, named as on the command line: ``train.epochs``."""
    for path, value in changes.items():
        part, _, name = path.partition(".")
        known = [f.name for f in dataclasses.fields(recipe)]
        if part not in known or not name:
            raise ValueError(f"unknown setting {path!r}; write PART.NAME with PART from {known}")
        owner = getattr(recipe, part)
        names = [f.name for f in dataclasses.fields(owner)]
        if name not in names:
            raise ValueError(f"unknown setting {path!r}; {part} has {names}")
        recipe = dataclasses.replace(recipe, **{part: dataclasses.replace(owner, **{name: value})})
    return recipe


def mixer_names() -> list[str]:
    """The class names of all mixers."""
    public = {name: getattr(mixing, name) for name in mixing.__all__}
    return [n for n, v in public.items() if isinstance(v, type) and issubclass(v, Mixer)]


def _read(kind: Any, record: Mapping[str, Any]) -> Any:
    names = {f.name for f in dataclasses.fields(kind)}
    unknown = sorted(set(record) - names)
    if unknown:
        raise ValueError(f"{kind.__name__} has no settings {unknown}; it has {sorted(names)}")
    # JSON has no tuples; no setting is a list.
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in record.items()})
