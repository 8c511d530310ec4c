"""Recipe keys and results: the records that reports are made of. This module imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

# What the fields of a line must be.
KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "value": ("a number", (int, float)),
    **dict.fromkeys(("seed", "epoch"), ("an integer or null", (int, type(None)))),
    **dict.fromkeys(("settings", "trained"), ("an object", (dict,))),
    **dict.fromkeys(("key", "base"), ("an object or null", (dict, type(None)))),
    **dict.fromkeys(
        ("task", "metric", "version", "hardware", "commit", "date", "command", "recipe"),
        ("a string", (str,)),
    ),
}


@dataclass(frozen=True, slots=True)
class RecipeKey:
    """Identity of a recipe: its data, network and method, and what else sets it apart.

    Reports take rows and columns from these parts. The name is rendered from them and parsed
    nowhere.

    Args:
        data: Data set, such as ``"cifar10"``.
        network: Network, such as ``"r18"`` or ``"r18-flatten"``.
        method: Row of the paper's tables, such as ``"alignmixup-ae"``, or a name of your own.
        variant: Labels joined by ``-``, such as ``"unaligned-fast"``.

    Example:
        ```python
        key = am.RecipeKey("cifar10", "r18", "alignmixup", "unaligned")
        assert key.name == "cifar10-r18-alignmixup-unaligned"
        assert key.labeled("fast").labels == ("unaligned", "fast")
        ```
    """

    data: str
    network: str
    method: str
    variant: str = ""

    def __post_init__(self) -> None:
        for name, part in dataclasses.asdict(self).items():
            if not isinstance(part, str):
                raise ValueError(f"{name} of a recipe's key must be a string, got {part!r}")

    @property
    def name(self) -> str:
        """The name on the command line: ``data-network-method[-variant]``."""
        parts = (self.data, self.network, self.method, self.variant)
        return "-".join(part for part in parts if part)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of ``variant``."""
        return tuple(self.variant.split("-")) if self.variant else ()

    def labeled(self, *labels: str) -> Self:
        """Return the key with further labels in its variant; empty ones are left out."""
        variant = "-".join(label for label in (self.variant, *labels) if label)
        return dataclasses.replace(self, variant=variant)

    @classmethod
    def from_record(
        cls, record: Mapping[str, Any], trained: Mapping[str, Any], old_name: str
    ) -> Self:
        """Read the key of a run or a result from JSON, where it is an object.

        Runs and results written before there were keys have a name alone. Their key is made of the
        settings they were trained with: the names of data and network and the class of the mixer,
        with the old name as variant. What is not recorded is ``unknown``.

        Args:
            record: The run or result.
            trained: Its settings, by their names on the command line.
            old_name: Its name, where it has no key.

        Returns:
            The key.
        """
        if record.get("key") is not None:
            return cls(**record["key"])
        names = {"data": "data.name", "network": "net.name", "method": "mixer"}
        parts = {part: str(trained.get(name, "unknown")) for part, name in names.items()}
        return cls(**parts, variant=old_name)


@dataclass(frozen=True, slots=True)
class Result:
    """One measured number and its origin: one line of JSON.

    A task fills in the first four fields; the caller adds the rest with ``stamped``.

    Args:
        task: Name of the evaluation, such as ``"accuracy"``.
        metric: Name of the number, such as ``"top1"``; percentages are on the scale 0 to 100.
        value: The number.
        settings: Settings of the evaluation that the number depends on.
        key: Key of the recipe that trained the network.
        seed: Seed of the training run.
        epoch: Epoch of the checkpoint.
        trained: Training settings that differ from the defaults.
        version: Versions of alignmixup and torch.
        hardware: Device the number was measured on.
        commit: Commit of the source, if known.
        date: Time of the measurement.
        command: Command line of the measurement.
        base: Key of the registered recipe that ``key`` was made from by a change of data or of
            ``data.limit``; None if there was none.

    Example:
        ```python
        key = am.RecipeKey("cifar10", "r18", "alignmixup")
        line = am.Result("accuracy", "top1", 96.0, key=key).to_json()
        assert am.Result.from_json(line).value == 96.0
        ```
    """

    task: str
    metric: str
    value: float
    settings: Mapping[str, object] = field(default_factory=dict)
    key: RecipeKey | None = None
    seed: int | None = None
    epoch: int | None = None
    trained: Mapping[str, object] = field(default_factory=dict)  # settings that are no defaults
    version: str = ""
    hardware: str = ""
    commit: str = ""
    date: str = ""
    command: str = ""
    base: RecipeKey | None = None

    def stamped(self, **where: object) -> Self:
        """Return a copy with the given fields filled in."""
        return dataclasses.replace(self, **where)  # type: ignore[arg-type]

    def to_json(self) -> str:
        """Return the result as one line of JSON.

        Raises:
            ValueError: If a value is NaN or infinite, which JSON cannot hold, or of a wrong type.
        """
        try:
            fields = dataclasses.asdict(self)
            _check_kinds(fields)
            return json.dumps(fields, allow_nan=False)
        except (TypeError, ValueError) as error:
            name = self.key.name if self.key else "no recipe"
            raise ValueError(
                f"{self.task} {self.metric} = {self.value} of {name} cannot be recorded: {error}"
            ) from None

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read a line written by ``to_json``, or by a version without keys.

        Raises:
            ValueError: If the line is no result, or has fields that this version does not know.
        """
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError("expected a JSON object")
        missing = [name for name in ("task", "metric", "value") if name not in fields]
        if missing:
            raise ValueError(
                f"a result of alignmixup has a {missing[0]}; remove the line or the file"
            )
        _check_kinds(fields)
        old_name = fields.pop("recipe", "")
        unknown = sorted(set(fields) - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"a result has unknown fields {unknown}; upgrade alignmixup")
        if old_name or fields.get("key"):
            fields["key"] = RecipeKey.from_record(fields, fields.get("trained", {}), old_name)
        if fields.get("base"):
            fields["base"] = RecipeKey(**fields["base"])
        return cls(**fields)

    @classmethod
    def from_line(cls, line: bytes, place: str) -> Self:
        """Read a line of a file; an error names its ``place``."""
        try:
            return cls.from_json(line.decode("utf-8"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place}: not a result line: {error}") from error


def _check_kinds(fields: Mapping[str, object]) -> None:
    for name in fields.keys() & KINDS.keys():
        kind, types = KINDS[name]
        if not isinstance(fields[name], types) or isinstance(fields[name], bool):
            raise ValueError(f"{name} must be {kind}, got {fields[name]!r}")


class Skipped(ValueError):
    """Raised by a task that these data or this model do not allow, with the reason."""
