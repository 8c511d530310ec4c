"""Names and options of tasks, as the signatures of their functions have them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from alignmixup.checking import check_call, check_kind
from alignmixup.registry import TASKS, suggestion

DETECTION = (
    "it trains a detector first, with the network as its backbone: use 'alignmixup detect RUN "
    "--data voc' (or coco)"
)


def task_names(tasks: Sequence[str]) -> list[str]:
    """Return the tasks that are meant, each once; raise for none or an unknown one."""
    if isinstance(tasks, str):
        raise ValueError(f"tasks must be a list of names: write [{tasks!r}]")
    if "detection" in tasks:
        raise ValueError(f"evaluate has no task 'detection': {DETECTION}")
    if not tasks:
        raise ValueError(f"no task is named; choose from {', '.join([*sorted(TASKS), 'all'])}")
    for task in set(tasks) - {*TASKS, "all"}:
        hint = suggestion(task, [*sorted(TASKS), "all"])
        raise ValueError(f"unknown task {task!r}{hint}")
    return list(TASKS) if "all" in tasks else list(dict.fromkeys(tasks))


# The arguments of a task that evaluate passes; all others are options.
NEEDS = frozenset(
    {"seed", "amp_dtype", "normalized_by", "mixer", "boxes", "outliers", "on_images", "team"}
)


def task_options(name: str) -> dict[str, Any]:
    """Return the type of each option of a task, by name.

    The fields of an argument whose default is a dataclass are options themselves.
    """
    function, others = TASKS[name].function, list(parameters_of(name))[2:]
    check_call(f"the task {name!r}", function, "model", "batches", named=others)
    hints = _hints(function)
    found: dict[str, Any] = {}
    for option, parameter in list(parameters_of(name).items())[2:]:
        if option in NEEDS:
            continue
        if dataclasses.is_dataclass(parameter.default):
            found |= get_type_hints(type(parameter.default))
        else:
            if parameter.default is parameter.empty:
                raise ValueError(
                    f"the argument {option!r} of the task {name!r} needs a default; without one "
                    f"an argument is one of {', '.join(sorted(NEEDS))}"
                )
            found[option] = hints.get(option, object)
    return found


def _hints(function: object) -> dict[str, Any]:
    """Return type hints by name; none where they cannot be read.

    They name what is imported for type checkers alone, or are of a ``functools.partial``.
    """
    try:
        return get_type_hints(function)
    except (NameError, TypeError):
        return {}


def parameters_of(name: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the function of a task."""
    return inspect.signature(TASKS[name].function).parameters


def check_options(options: Mapping[str, Mapping[str, object]], names: Sequence[str]) -> None:
    """Raise for options of a task that is not run, unknown ones, wrong types and ranges."""
    if not isinstance(options, Mapping):
        raise ValueError(f'options must be a dict such as {{"pgd": {{...}}}}, got {options!r}')
    known_options = {name: task_options(name) for name in names}
    for task, chosen in options.items():
        if task not in names:
            (known,) = task_names([task])
            raise ValueError(f"options for {known!r}, which is not among the tasks {names}: add it")
        if not isinstance(chosen, Mapping):
            raise ValueError(f"the options of {task!r} must be a dict of names, got {chosen!r}")
        types = known_options[task]
        for name, value in chosen.items():
            if name not in types:
                hint = suggestion(name, sorted(types)) or "; it has none"
                raise ValueError(f"{task} has no option {name!r}{hint}")
            check_kind(f"{task}.{name}", value, types[name])
        try:
            arguments = task_arguments(task, chosen)
            if check := TASKS[task].check:
                check(arguments)
        except ValueError as error:
            raise ValueError(f"{task}: {error}") from None


def task_arguments(name: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a task that make up its options, by the chosen ones."""
    arguments: dict[str, Any] = {}
    for argument, parameter in list(parameters_of(name).items())[2:]:
        default = parameter.default
        if argument in NEEDS:
            continue
        if dataclasses.is_dataclass(default):
            own = {f.name: chosen[f.name] for f in dataclasses.fields(default) if f.name in chosen}
            arguments[argument] = dataclasses.replace(default, **own)  # type: ignore[type-var]
        else:
            arguments[argument] = chosen.get(argument, default)
    return arguments


def check_sources(ood: Sequence[str], names: Sequence[str]) -> None:
    """Raise if out-of-distribution sources are named but the task is not."""
    if isinstance(ood, str):
        raise ValueError(f"ood must be a list of names: write [{ood!r}]")
    if (named := [name for name in ood if name != "all"]) and "ood" not in names:
        raise ValueError(
            f"out-of-distribution sources {named} are named, but 'ood' is not among the tasks "
            f"{names}: add it"
        )
