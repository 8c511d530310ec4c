"""What a run keeps of its images, so that it opens without them and is scored on no others.

It is the record "images" in RUN/run.json; a run begun by an older version has none.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from alignmixup import datasets
from alignmixup.contracts import ImageSet
from alignmixup.datasets.folder import FileSet
from alignmixup.datasets.loading.layout import PATH_PREFIXES, is_gone
from alignmixup.evaluation.forward import ALONE
from alignmixup.experiments.batches import load_split, side_of
from alignmixup.recipes.schema import DataSpec
from alignmixup.training.distributed import Team


@dataclass(frozen=True)
class Sets:
    """The training and test images of a run, for data that have no name of their own.

    Args:
        train: Images to train on.
        test: Images of the same classes and size to evaluate on.

    Raises:
        ValueError: If a set is empty, there is one class alone, or classes or sizes differ.

    Example:
        ```python
        from alignmixup.datasets import shapes

        sets = am.Sets(shapes("train", 64), shapes("test", 32))
        ```
    """

    train: ImageSet
    test: ImageSet

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            value = getattr(self, name)
            if not isinstance(value, ImageSet | FileSet):
                raise ValueError(f"{name} must be an ImageSet, got {type(value).__name__}")
        if self.train.class_names != self.test.class_names:
            raise ValueError(
                f"train and test must have the same class_names; {self.train.name} has "
                f"{_listed(self.train.class_names)}, {self.test.name} "
                f"{_listed(self.test.class_names)}"
            )
        if self.train.num_classes < 2:
            raise ValueError(
                f"{self.train.name} has {_listed(self.train.class_names)}, and a classifier needs "
                "two: add images of another class (of a folder, PATH/train/CLASS/*)"
            )
        for images in (self.train, self.test):
            if not len(images):
                raise ValueError(f"{images.name}/{images.split} has no image: fill it")
        if isinstance(self.train, ImageSet) and isinstance(self.test, ImageSet):
            train, test = (list(images.images.shape[2:]) for images in (self.train, self.test))
            if train != test:
                raise ValueError(
                    f"the images of both sets must have one size, got {train} for training and "
                    f"{test} for the test: resize one of them"
                )


def load_sets(spec: DataSpec, root: Path | str | None, team: Team, device: torch.device) -> Sets:
    """Load both splits."""
    with team.guarded():
        return Sets(*(load_split(spec, split, root, team, device) for split in ("train", "test")))  # type: ignore[arg-type]


@dataclass(frozen=True)
class DataRecord:
    """The name, classes, image size and normalization of the images of a run.

    ``test_sha256`` is the checksum of the test set, where the sets were passed to ``train``: their
    name alone does not say which images they are.
    """

    name: str
    class_names: tuple[str, ...]
    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    num_train: int
    num_test: int
    test_sha256: str | None = None

    @classmethod
    def of(cls, spec: DataSpec, sets: Sets, *, is_given: bool) -> DataRecord:
        """Describe the two splits of a run."""
        train, test = sets.train, sets.test
        return cls(
            name=train.name,
            class_names=train.class_names,
            image_size=side_of(spec, train),
            mean=train.mean,
            std=train.std,
            num_train=len(train),
            num_test=len(test),
            test_sha256=checksum(test) if is_given else None,
        )

    @classmethod
    def unnamed(cls, name: str, num_classes: int, image_size: int) -> DataRecord:
        """Describe the images of a run that did not record them; its weights normalize."""
        names = tuple(map(str, range(num_classes)))
        return cls(name, names, image_size, (0.0,) * 3, (1.0,) * 3, 0, 0)


def is_named(spec: DataSpec, name: str) -> bool:
    """Whether images of this name may be those of ``spec``; a folder's are named after it."""
    if spec.name.startswith(PATH_PREFIXES):
        return Path(spec.name).name.partition("@")[0] == name
    return spec.name == name


def checksum(images: ImageSet | FileSet) -> str:
    """The SHA-256 of the images, or of the names of their files, and of their labels."""
    digest = hashlib.sha256()
    if isinstance(images, ImageSet):
        digest.update(images.images.contiguous().numpy().data)
    else:
        digest.update(os.fsencode("\n".join(images.paths)))  # names may be any bytes
    digest.update(images.labels.long().contiguous().numpy().data)
    return digest.hexdigest()


def own_test_set(
    folder: Path,
    spec: DataSpec,
    record: DataRecord | None,
    root: Path | str | None,
    *,
    remedy: str = "pass the images to evaluate(run, images), or name other data with --dataset",
    team: Team = ALONE,
    device: torch.device | str = "cpu",
) -> ImageSet | FileSet:
    """Load the test split that the run in ``folder`` was evaluated on, for all of ``team``.

    Raises:
        ValueError: The run was trained on sets passed to ``train``, which are not those that can be
            loaded under their name.
    """
    if record is None or record.test_sha256 is None:
        return load_own(spec, "test", root, remedy=remedy, team=team, device=device)
    passed = (
        f"{folder} was trained on images passed as sets= ({record.name!r}, {record.num_test} test "
        "images)"
    )
    try:
        datasets.find(spec.name)
    except ValueError:
        raise ValueError(f"{passed}, which cannot be loaded by name: {remedy}") from None
    images = load_split(spec, "test", root, team, device)
    if checksum(images) != record.test_sha256:
        raise ValueError(f"{passed}, which differ from {len(images)} of {spec.name}: {remedy}")
    return images


def load_own(
    spec: DataSpec,
    split: str,
    root: Path | str | None,
    *,
    remedy: str,
    team: Team = ALONE,
    device: torch.device | str = "cpu",
) -> ImageSet | FileSet:
    """Load a split of a run's data by name; the error of a folder that has moved has remedies."""
    try:
        return load_split(spec, split, root, team, device)
    except (FileNotFoundError, ValueError) as error:
        if not is_gone(spec.name):  # else the error has the remedy
            raise
        kind = spec.name.partition(":")[0]
        raise FileNotFoundError(
            f"{error}; if they have moved, repeat the training command with --dataset {kind}:NEW, "
            f"which records their new path, or {remedy}"
        ) from None


def check_classes(
    folder: Path,
    record: DataRecord | None,
    images: ImageSet | FileSet,
    *,
    is_given: bool,
    warns: bool = True,
) -> None:
    """Raise for images of other classes.

    Images that were ``is_given`` may name the same number of classes otherwise, as shards with
    numbers do: one that ``warns`` says that they are matched by their order. A class that both
    name must have the same place, unless the names are the numbers of places.
    """
    if record is None or images.class_names == record.class_names:
        return
    pairs = list(zip(record.class_names, images.class_names, strict=False))
    same = next((place for place, (own, other) in enumerate(pairs) if own != other), len(pairs))
    begin = max(same - 1, 0)
    what = (
        f"{folder} was trained on {_listed(record.class_names, begin)}, {images.name} has "
        f"{_listed(images.class_names, begin)}"
    )
    moved = {other for own, other in pairs if own != other} & set(record.class_names)
    is_permuted = sorted(images.class_names) == sorted(record.class_names)
    is_numbered = images.class_names == tuple(map(str, range(images.num_classes)))
    is_other = is_permuted or (moved and not is_numbered)
    if not is_given or images.num_classes != len(record.class_names) or is_other:
        raise ValueError(f"{what}: the images must be of the run's classes, in their order")
    if warns:
        warnings.warn(f"{what}: they are matched by their order", stacklevel=2)


def _listed(names: tuple[str, ...], begin: int = 0) -> str:
    """The number of classes, and the names of three from ``begin`` on."""
    shown = [*(["..."] if begin else []), *names[begin : begin + 3]]
    shown += ["..."] if len(names) > begin + 3 else []
    return f"{len(names)} class{'' if len(names) == 1 else 'es'} ({', '.join(shown)})"
