"""A recipe: one row of a table, as a frozen record of everything a run depends on.

``changed`` replaces single settings. A record on disk (``to_json``, ``from_json``) holds every
setting, so that a run can be read after the recipe of that name has changed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

from alignmixup.checking import check_choices, check_kind
from alignmixup.contracts import Mixer, RecipeKey
from alignmixup.datasets.loading.layout import PATH_PREFIXES, absolute
from alignmixup.datasets.loading.rand_augment import check_augmentation
from alignmixup.models.zoo import NetSpec, options_of
from alignmixup.recipes.records import (
    check_registered,
    default_of,
    plain,
    read_mixer,
    read_record,
    with_block,
)
from alignmixup.registry import suggestion
from alignmixup.training.settings import FREE_SETTINGS, TrainSettings

PARTS = ("data", "net", "mixer", "train")
# Training settings that do not change what is trained, and the seed.
UNTRAINED = (*FREE_SETTINGS, "compile", "capture", "seed")
# Values that are not recorded as settings of a trained network.
PLAIN: dict[str, tuple[object, ...]] = {
    "precision": ("auto", "float32"),
    "channels_last": ("auto", False),
}


@dataclass(frozen=True)
class DataSpec:
    """A data set by name and how its images are prepared.

    A set in memory is augmented by a random crop of the padded image and a flip, and evaluated
    unchanged. With ``stream``, a set whose source has one file per image is decoded batch by batch
    instead: in training to random parts of the image (or windows of the resized image), flipped and
    with changed colors, in evaluation to the center of the resized image. A source without files is
    in memory in any case.

    Args:
        name: Data set: ``"cifar10"``, ``"folder:PATH@64"``, ``"shards:PATH"``. A relative path
            becomes absolute, so that a run can be opened from other directories.
        pad: Pixels by which an image in memory is padded before the random crop.
        flip: Flip training images at random.
        stream: Decode files batch by batch, where the source has files.
        image_size: Side of streamed images; None: the source's.
        area: Smallest and largest share of the image that a random part has.
        resize: Side to resize to for random windows in place of random parts.
        eval_resize: Side to resize to in evaluation; None: 8/7 of ``image_size``.
        squash: Resize both sides, not only the shorter one.
        jitter: Strength of the random change of brightness, contrast and saturation.
        lighting: Strength of the random change along the principal axes of color.
        limit: Number of images of a trial, at most, of each split.
        on_error: What a streamed training image does that cannot be read: ``"raise"`` ends the run
            with its name; ``"skip"`` names it and takes the next image. A resumed run may change
            it. In evaluation it always raises.
        reduced: Decode a streamed training JPEG at 1/2, 1/4 or 1/8 of its size where the part
            shown has ``image_size`` pixels still.
        rand_augment: Magnitude of RandAugment of streamed training images, from 0 (none) to 10;
            DeiT has 9.
        erasing: Probability that a rectangle of a streamed training image is erased.
        repeats: Copies of a streamed training image in a batch, augmented differently; an epoch
            then has that part of the images.

    Example:
        ```python
        data = am.DataSpec("cifar10", flip=False)
        ```
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
    limit: int | None = None
    on_error: Literal["raise", "skip"] = "raise"
    reduced: bool = False
    rand_augment: float = 0.0
    erasing: float = 0.0
    repeats: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", absolute(self.name))
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, or None for all images, got {self.limit}")
        check_choices(self)
        check_augmentation(self.rand_augment, self.erasing, self.repeats)


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
    """Everything a training run depends on.

    Args:
        key: Identity of the recipe; its name is rendered from it.
        data: Data set, and how its images are prepared.
        net: Network.
        mixer: Method.
        train: Optimizer, schedule, seed and device.
        phases: Parts at the start of training that have other settings, in order. After the last
            one, and always in evaluation, the settings are those of the recipe.
        base: Key of the recipe this one was made from by a change of data or of ``data.limit``.

    Example:
        ```python
        recipe = am.Recipe(
            am.RecipeKey("cifar10", "r18", "cutmix", "mine"),
            am.DataSpec("cifar10"),
            am.NetSpec("preact_resnet18"),
            am.CutMix(alpha=1.0, prob=0.5),
            am.TrainSettings(epochs=30, schedule="cosine", milestones=()),
        )
        assert recipe.name == "cifar10-r18-cutmix-mine"
        ```
    """

    key: RecipeKey
    data: DataSpec
    net: NetSpec
    mixer: Mixer
    train: TrainSettings
    phases: tuple[Phase, ...] = ()
    base: RecipeKey | None = None

    def __post_init__(self) -> None:
        ends = [0, *(phase.until for phase in self.phases)]
        if ends != sorted(set(ends)):
            raise ValueError(f"phases must end at increasing epochs from 1 on, got {ends[1:]}")
        for part in ("mixer", "train"):
            owner = getattr(self, part)
            if isinstance(owner, type) or not dataclasses.is_dataclass(owner):
                kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
                raise ValueError(
                    f"{part} must be an instance of a dataclass, so that a run can record its "
                    f"settings, got {owner!r}: decorate {kind} with @dataclass(frozen=True), and "
                    f"pass {kind}()"
                )
            for setting in dataclasses.fields(owner):
                value = getattr(owner, setting.name)
                if isinstance(value, float) and not math.isfinite(value):
                    # JSON has no such number, so no result could be written at the end.
                    raise ValueError(f"{part}.{setting.name} must be finite, got {value}")

    @property
    def name(self) -> str:
        """The name on the command line and of the run's folder."""
        return self.key.name

    @property
    def folder(self) -> str:
        """The name of the run's folder, where no other one is chosen."""
        name = f"{self.name}-seed{self.train.seed}"
        if any(sign in name for sign in "/\\\0"):
            raise ValueError(
                f"the name {self.name!r} contains a slash and cannot name a folder: rename the "
                "recipe's key, or pass --out"
            )
        return name

    def stages(self) -> list[tuple[range, Recipe]]:
        """Return the epochs of each phase, counted from 0, with the recipe as it is then."""
        end = self.train.epochs
        whole = dataclasses.replace(self, phases=())
        stages, begin = [], 0
        for phase in self.phases:
            if begin < end:
                stages.append((range(begin, min(phase.until, end)), changed(whole, phase.changes)))
            begin = phase.until
        return stages + ([(range(begin, end), whole)] if begin < end else [])

    def shrunk(self) -> Self:
        """Return the recipe as a run of two steps on a CPU: narrow, tiny batches, no phases."""
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
        width = 4 if "width" in options_of(self.net.name) else None
        net = dataclasses.replace(self.net, width=width, pretrained=False)
        return dataclasses.replace(self, net=net, train=settings, phases=())

    def to_json(self) -> dict[str, Any]:
        """Return every setting as plain values."""
        record = dataclasses.asdict(self)
        record["mixer"] = plain(self.mixer)
        return record

    def chosen(self) -> dict[str, object]:
        """Return the settings that are not defaults, by their names on the command line.

        The number of epochs is always among them, the seed and the settings that do not change what
        is trained never. Precision and layout are recorded in the run's ledger.
        """
        found: dict[str, object] = {"mixer": type(self.mixer).__name__}
        found["train.epochs"] = self.train.epochs
        for part in PARTS:
            owner = getattr(self, part)
            for setting in dataclasses.fields(owner):
                value = getattr(owner, setting.name)
                is_left = part == "train" and (
                    setting.name in UNTRAINED or value in PLAIN.get(setting.name, ())
                )
                if not is_left and value != default_of(setting):
                    found[f"{part}.{setting.name}"] = plain(value)
        if self.phases:
            found["phases"] = [dataclasses.asdict(phase) for phase in self.phases]
        return found

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` returned; an unknown setting raises a ``ValueError``."""
        mixer = read_mixer(record["mixer"])
        trained = {"data.name": record["data"]["name"], "net.name": record["net"]["name"]}
        trained["mixer"] = type(mixer).__name__
        return cls(
            key=RecipeKey.from_record(record, trained, record.get("name", "")),
            data=read_record(DataSpec, record["data"]),
            net=read_record(NetSpec, with_block(record["net"])),
            mixer=mixer,
            train=read_record(TrainSettings, record["train"]),
            phases=tuple(read_record(Phase, phase) for phase in record.get("phases", ())),
            base=RecipeKey(**record["base"]) if record.get("base") else None,
        )


def check_record(recipe: Recipe) -> None:
    """Raise unless the recipe can be recorded and read again, as it is when the run is opened."""
    check_registered(recipe.mixer)
    try:
        record = json.dumps(recipe.to_json())
    except TypeError as error:
        raise ValueError(
            f"the settings of {recipe.name} cannot be recorded ({error}): use numbers, text, "
            "tuples and mixers"
        ) from None
    Recipe.from_json(json.loads(record))


def changed(recipe: Recipe, changes: Mapping[str, object]) -> Recipe:
    """Return the recipe with settings replaced, named as on the command line: ``train.epochs``.

    All are replaced together, since two settings may be valid only in combination. A setting that
    a phase would change is replaced in that phase too.
    """
    parts: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        part, _, name = str(path).partition(".")
        if path == "data.name":
            raise ValueError("data.name cannot be overridden; use --dataset (dataset=)")
        if part not in PARTS or not name:
            raise ValueError(f"unknown setting {path!r}; write PART.NAME with PART from {PARTS}")
        owner = getattr(recipe, part)
        names = [f.name for f in dataclasses.fields(owner)]
        if name not in names:
            near = suggestion(str(path), [f"{part}.{each}" for each in names])
            raise ValueError(f"unknown setting {path!r}{near or f'; {part} has {names}'}")
        check_kind(path, value, get_type_hints(type(owner))[name])
        parts.setdefault(part, {})[name] = value
    if "limit" in parts.get("data", {}):
        recipe = limited(recipe, parts["data"]["limit"])
    replaced = {
        part: dataclasses.replace(getattr(recipe, part), **values) for part, values in parts.items()
    }
    phases = tuple(
        Phase(phase.until, {k: v for k, v in phase.changes.items() if k not in changes})
        for phase in recipe.phases
    )
    return dataclasses.replace(recipe, **replaced, phases=phases)


def limited(recipe: Recipe, limit: int | None) -> Recipe:
    """Return the recipe for a trial on ``limit`` images, with a label ``limitN`` in its key."""
    kept = (label for label in recipe.key.labels if label != f"limit{recipe.data.limit}")
    key = dataclasses.replace(recipe.key, variant="-".join(kept))
    key = key if limit is None else key.labeled(f"limit{limit}")
    return _made_from(recipe, key, data=dataclasses.replace(recipe.data, limit=limit))


def on_data(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe for other data, with these in its key."""
    spec, phases = dataclasses.replace(recipe.data, name=name), recipe.phases
    if name.startswith("shards:"):
        spec = dataclasses.replace(spec, stream=True)
    size = re.fullmatch(r"(?:folder|shards):.+@(\d+)", name)
    if size and spec.image_size:  # else it is the folder's already
        scale = int(size[1]) / spec.image_size
        spec = dataclasses.replace(spec, **_scaled(dataclasses.asdict(spec), "", scale))
        phases = tuple(
            Phase(p.until, {**p.changes, **_scaled(p.changes, "data.", scale)}) for p in phases
        )
    key = dataclasses.replace(recipe.key, data=_word(name))
    return _made_from(recipe, key, data=spec, phases=phases)


def _made_from(recipe: Recipe, key: RecipeKey, **changes: Any) -> Recipe:
    """Return the recipe under another key, with the key it was made from as ``base``."""
    base = recipe.base or recipe.key
    return dataclasses.replace(recipe, key=key, base=None if base == key else base, **changes)


def _word(data: str) -> str:
    """Return the name of the data as part of a key: of a path, its last part."""
    if data.startswith(PATH_PREFIXES):
        data = f"{data.partition(':')[0]}:{Path(absolute(data)).name}"
    return re.sub(r"[\W_]+", "_", data)


def _scaled(settings: Mapping[str, Any], prefix: str, scale: float) -> dict[str, Any]:
    """Return the sides of images among these settings, scaled."""
    names = [prefix + side for side in ("image_size", "resize", "eval_resize")]
    return {name: round(scale * settings[name]) for name in names if settings.get(name)}
