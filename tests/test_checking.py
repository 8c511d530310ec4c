"""Switches and named choices: every one is refused by its value, with those it may have."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

import pytest
import torch

import alignmixup as am
from alignmixup.checking import check_call, check_choices, check_kind
from alignmixup.datasets import load
from alignmixup.experiments.plugins import open_recipe
from alignmixup.figures.by_name import draw_figure
from alignmixup.models import build
from alignmixup.ops.sinkhorn import SOLVERS
from alignmixup.registry import FIGURES, MIXERS
from alignmixup.training.loggers import make_loggers

if TYPE_CHECKING:
    from alignmixup.evaluation.forward import Batches

REQUIRED: dict[str, Any] = {"mixer": am.InputMixup(), "name": "cifar10"}
SETTINGS = [*MIXERS.values(), am.TrainSettings, am.DataSpec, am.NetSpec]


def made(kind: Any, **settings: object) -> Any:
    """An object of a settings class with its required fields."""
    needed = [f.name for f in dataclasses.fields(kind)]
    return kind(**{name: REQUIRED[name] for name in needed if name in REQUIRED}, **settings)


def listed_by(hint: Any) -> bool:
    """Whether a type hint is of switches and names: its parts are ``bool``, Literal and None."""
    words = re.sub(
        r"typing\.|Literal\[[^\]]*\]|Optional|NoneType|None|<class|>|bool", "", str(hint)
    )
    return not re.search(r"\w", words)


def choices() -> list[Any]:
    return [
        pytest.param(kind, field.name, id=f"{kind.__name__}-{field.name}")
        for kind in SETTINGS
        for field in dataclasses.fields(kind)
        if listed_by(get_type_hints(kind)[field.name])
    ]


def test_the_choices_are_found() -> None:
    found = {param.id for param in choices()}
    assert {"AlignMixup-aligned", "AlignMixup-backend", "AlignMixup-last"} <= found
    assert {"AlignMixupAE-clean", "TrainSettings-nesterov", "OneOf-mode"} <= found
    assert {f"{kind.__name__}-loss" for kind in MIXERS.values() if hasattr(kind, "loss")} <= found
    assert "AlignMixup-resolution" not in found


@pytest.mark.parametrize(("kind", "name"), choices())
def test_a_value_that_is_no_choice_is_refused(kind: Any, name: str) -> None:
    for value in ("", "nonesuch", 3, 1.0, ["auto"]):
        message = f"^{name} must be .* or .*, got {re.escape(repr(value))}$"
        with pytest.raises(ValueError, match=message):
            made(kind, **{name: value})


@pytest.mark.parametrize(("kind", "name"), choices())
def test_the_default_is_a_choice(kind: Any, name: str) -> None:
    usual = made(kind)
    assert getattr(made(kind, **{name: getattr(usual, name)}), name) == getattr(usual, name)


def test_a_choice_of_numbers_is_no_switch() -> None:
    with pytest.raises(ValueError, match="heads must be 1 or 2, got True"):
        am.AutoMix(heads=True)
    with pytest.raises(ValueError, match="aligned must be True or False, got 1"):
        am.AlignMixup(aligned=1)
    with pytest.raises(ValueError, match="k must be 1 or 2 or None, got True"):
        check_kind("k", True, Literal[1, 2] | None)


def test_a_mixer_of_a_user_is_checked_by_its_hints() -> None:
    @dataclass(frozen=True)
    class Mine(am.InputMixup):
        mode: Literal["a", "b"] = "a"

    with pytest.raises(ValueError, match="lam_per_sample must be True or False, got 'no'"):
        made(Mine, lam_per_sample="no")


def test_a_hint_that_names_something_local_is_left_alone() -> None:
    Local = Literal["a", "b"]

    @dataclass(frozen=True)
    class Settings:
        mode: Local = "a"  # type: ignore[valid-type]

        def __post_init__(self) -> None:
            check_choices(self)

    assert Settings("c").mode == "c"


@pytest.mark.parametrize("value", ["", "nonesuch", False, 0, ["rows"]])
@pytest.mark.parametrize("name", ["keep", "last", "backend"])
def test_the_choices_of_the_operators_are_refused(name: str, value: object) -> None:
    arguments: dict[str, Any] = {name: value}
    message = f"({name} must be|unknown {name}).*{re.escape(repr(value))}"
    with pytest.raises(ValueError, match=message):
        am.align_mix(torch.ones(2, 3, 4), torch.arange(2), torch.ones(()), **arguments)
    if name != "keep":
        with pytest.raises(ValueError, match=message):
            am.sinkhorn(torch.ones(3, 3), **arguments)


def test_the_backends_of_the_hint_are_the_solvers() -> None:
    assert set(get_args(get_type_hints(am.AlignMixup)["backend"])) == {"auto", *SOLVERS}


@pytest.mark.parametrize("seed", [2**70, -(2**70), 1.5, True, "0"])
def test_what_is_no_seed_is_refused_where_a_seed_is_taken(seed: Any, tmp_path: Path) -> None:
    message = re.escape(f"seed must be a whole number from -2**62 to 2**62, got {seed!r}")
    data = [(torch.rand(2, 3, 4, 4), torch.zeros(2).long())]
    with pytest.raises(ValueError, match=message):
        am.evaluate(torch.nn.Flatten(), data, tasks=["accuracy"], seed=seed)
    with pytest.raises(ValueError, match=message):
        draw_figure("toy", tmp_path, seed=seed)


class Wrong:
    """Takes one argument that nobody passes."""

    def __init__(self, *, nonesuch: int) -> None:
        pass


def wrong_figure(tmp_path: Path) -> None:
    FIGURES.add("wrong", Wrong)
    draw_figure("wrong", tmp_path)


def wrong_model(tmp_path: Path) -> None:
    am.register_model("wrong", layer="")(Wrong)
    build(am.NetSpec("wrong"), 2, (0.5,) * 3, (0.5,) * 3, 8)


def wrong_data(tmp_path: Path) -> None:
    am.register_dataset("wrong", description="", image_size=8)(Wrong)
    load("wrong", "train")


def wrong_task(tmp_path: Path) -> None:
    am.register_task("wrong")(Wrong)
    am.evaluate(torch.nn.Identity(), [(torch.zeros(1, 3, 8, 8), torch.zeros(1))], tasks=["wrong"])


def wrong_logger(tmp_path: Path) -> None:
    am.register_logger("wrong")(Wrong)
    make_loggers(["wrong"], tmp_path)


def wrong_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def wrong(nonesuch): ...")
    open_recipe(f"{tmp_path}/mine.py:wrong")


@pytest.mark.parametrize(
    ("use", "arguments"),
    [
        (wrong_figure, "out, run=..., seed=..., data_root=..."),
        (wrong_model, "num_classes, mean=..., std=..."),
        (wrong_data, "root, split"),
        (wrong_task, "model, batches"),
        (wrong_logger, "folder"),
        (wrong_recipe, ""),
    ],
)
def test_what_takes_other_arguments_than_it_is_called_with_is_named(
    tmp_path: Path, use: Callable[[Path], None], arguments: str
) -> None:
    """It was a traceback of a ``TypeError``."""
    named = f"wrong.? is called with ({arguments}), which it does not take: "
    with pytest.raises(ValueError, match=named.replace("(", r"\(").replace(")", r"\)")):
        use(tmp_path)


def test_a_class_without_a_signature_is_not_judged() -> None:
    check_call("it", dict, "anything")


def hinted(model: torch.nn.Module, batches: Batches, *, name: str, top: int = 1) -> list[am.Result]:
    return [am.Result(name, "top", float(top))]


def unseen(model: torch.nn.Module, batches: Batches, top: int = 1) -> list[am.Result]:
    return hinted(model, batches, name="unseen", top=top)


@pytest.mark.parametrize(
    ("name", "task"), [("unseen", unseen), ("part", functools.partial(hinted, name="part"))]
)
def test_a_task_needs_no_hints_that_can_be_read(name: str, task: Callable[..., Any]) -> None:
    """Tracebacks of a ``NameError`` and a ``TypeError``."""
    am.register_task(name)(task)
    data = [(torch.zeros(1, 3, 8, 8), torch.zeros(1))]
    for chosen in ({}, {"top": 3}):
        scores = am.evaluate(torch.nn.Flatten(), data, tasks=[name], options={name: chosen})
        assert scores.value(name, "top") == chosen.get("top", 1)
