"""Open registries: everything that has a name in a recipe, a run folder or on the command line.

    @register_mixer
    @dataclass(frozen=True)
    class MyMixup(Mixer): ...

A registry holds built-in entries and those of a user's module (a plugin). Files name entries, never
code: ``run.json`` says ``{"kind": "MyMixup"}`` and which plugin to import before it is looked up.
This module imports no torch, so that names can be listed without it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from alignmixup.naming import Registry, nearest, suggestion
from alignmixup.plugins import import_plugin, imported_plugins, plugin_module, source_digest

__all__ = [
    "DATASETS",
    "FIGURES",
    "LOGGERS",
    "MIXERS",
    "MODELS",
    "OPTIMIZERS",
    "RECIPES",
    "TASKS",
    "DatasetEntry",
    "ModelEntry",
    "Registry",
    "TaskEntry",
    "import_plugin",
    "imported_plugins",
    "nearest",
    "plugin_module",
    "register_dataset",
    "register_logger",
    "register_mixer",
    "register_model",
    "register_optimizer",
    "register_recipe",
    "register_task",
    "source_digest",
    "suggestion",
    "task_abouts",
]

T = TypeVar("T")


@dataclass(frozen=True)
class ModelEntry:
    """A registered model; see ``register_model`` for the fields."""

    function: Callable[..., Any]
    layer: str
    initialize: bool = False
    autoencoder: bool = False
    pretrained: str | None = None
    finish: Callable[..., Any] | None = None


@dataclass(frozen=True)
class DatasetEntry:
    """A registered data set; see ``register_dataset`` for the fields."""

    name: str
    function: Callable[..., Any]
    description: str
    image_size: int
    num_classes: int | None = None
    check: Callable[..., list[str]] | None = None
    scan: Callable[..., Any] | None = None
    archive: Any = None
    by_hand: str = ""
    find: Callable[..., Path] | None = None


@dataclass(frozen=True)
class TaskEntry:
    """A registered task; see ``register_task`` for the fields."""

    function: Callable[..., list[Any]]
    units: Mapping[str, str] = field(default_factory=dict)
    about: str = ""
    check: Callable[[Mapping[str, Any]], object] | None = None

    def unit(self, metric: str) -> str:
        """Return the unit of a metric: percent, unless ``units`` has the start of its name."""
        return next((unit for start, unit in self.units.items() if metric.startswith(start)), "%")


MIXERS: Registry[Any] = Registry("mixer", "alignmixup.mixers")
MODELS: Registry[ModelEntry] = Registry("model", "alignmixup.models")
DATASETS: Registry[DatasetEntry] = Registry("data set", "alignmixup.datasets")
TASKS: Registry[TaskEntry] = Registry("task", "alignmixup.evaluation.tasks")
FIGURES: Registry[Any] = Registry("figure", "alignmixup.figures")
RECIPES: Registry[Any] = Registry("recipe", "alignmixup.recipes")
OPTIMIZERS: Registry[Any] = Registry("optimizer", "alignmixup.training.optim")
LOGGERS: Registry[Any] = Registry("logger", "alignmixup.training.loggers")


def register_mixer(mixer: type[T]) -> type[T]:
    """Register a mixer class under its own name, so that runs with it can be resumed and scored.

    Args:
        mixer: A frozen dataclass that extends ``Mixer``.

    Returns:
        The class.

    Raises:
        ValueError: If another mixer has that name, or a setting is called ``kind``.

    Example:
        ```python
        from dataclasses import dataclass


        @am.register_mixer
        @dataclass(frozen=True)
        class GentleMixup(am.InputMixup):
            alpha: float = 0.1


        assert am.GentleMixup().alpha == 0.1
        ```
    """
    if not isinstance(mixer, type):
        raise ValueError(f"write @register_mixer without brackets above the class, got {mixer!r}")
    if "kind" in getattr(mixer, "__dataclass_fields__", {}):
        raise ValueError(
            f"{mixer.__name__} has a setting 'kind', which is the name of the class in run.json: "
            "choose another name"
        )
    MIXERS.add(mixer.__name__, mixer)
    return mixer


def register_optimizer(name: str) -> Callable[[T], T]:
    """Register a function that makes an optimizer, chosen by ``train.optimizer``.

    Args:
        name: The value of ``train.optimizer``.

    Returns:
        A decorator of ``make(groups, settings)``, which returns a ``torch.optim.Optimizer``. Each
        of ``groups`` has ``params``, ``lr`` (a tensor on a GPU) and ``weight_decay``; ``settings``
        are the run's ``TrainSettings``.

    Example:
        ```python
        @am.register_optimizer("radam")
        def radam(groups, settings):
            return torch.optim.RAdam(groups, betas=(settings.momentum, 0.999))
        ```
    """
    return OPTIMIZERS.register(name)


def register_logger(name: str) -> Callable[[T], T]:
    """Register a logger, chosen by ``--logger NAME`` and ``train(loggers=[NAME])``.

    Args:
        name: The name to choose it by.

    Returns:
        A decorator of a class or function that is called with the folder of the run and returns an
        ``am.Logger``.

    Example:
        ```python
        @am.register_logger("print")
        class Print(am.Logger):
            def __init__(self, folder):
                self.folder = folder

            def log(self, values, epoch):
                print(self.folder, epoch, values["train/mixed_loss"])
        ```
    """
    return LOGGERS.register(name)


F = TypeVar("F", bound=Callable[..., Any])


def register_model(
    name: str,
    *,
    layer: str,
    initialize: bool = False,
    autoencoder: bool = False,
    pretrained: str | None = None,
    finish: Callable[..., Any] | None = None,
) -> Callable[[F], F]:
    """Return a decorator that registers a model class or a function that builds a model.

    It is called as ``build(num_classes, mean=..., std=..., image_size=..., ...)``; ``image_size``
    may be left out of its signature. Its other parameters that are fields of ``NetSpec`` (``width``
    and so on) are the options that a recipe can set. The model takes images in [0, 1], which it
    normalizes by ``mean`` and ``std``, and returns logits.

    Args:
        name: The name in ``NetSpec``, in recipes and in run folders.
        layer: The layer to mix at, as ``named_modules()`` has it.
        initialize: Redraw all weights as those of the built-in networks; without it the model keeps
            what its constructor draws, which follows from the seed as well.
        autoencoder: Whether ``NetSpec.autoencoder`` applies: the model's children begin with
            ``normalize`` and end with ``head``.
        pretrained: Name of the torchvision network whose ImageNet weights the model's method
            ``load_torchvision(state_dict)`` takes; None if ``NetSpec.pretrained`` does not apply.
        finish: Called last, as ``finish(model, seed=...)``, to insert modules without weights.

    Returns:
        The decorator, which returns what it decorates.

    Example:
        ```python
        from alignmixup.models import Normalize
        from torch import nn


        @am.register_model("tiny_cnn", layer="1")
        def tiny_cnn(num_classes, mean, std, width=8):
            conv, pool = nn.Conv2d(3, width, 3), nn.AdaptiveAvgPool2d(1)
            head = nn.Linear(width, num_classes)
            return nn.Sequential(Normalize(mean, std), conv, pool, nn.Flatten(), head)
        ```
    """

    def register(function: F) -> F:
        MODELS.add(name, ModelEntry(function, layer, initialize, autoencoder, pretrained, finish))
        return function

    return register


def register_dataset(
    name: str,
    *,
    description: str,
    image_size: int,
    num_classes: int | None = None,
    check: Callable[..., list[str]] | None = None,
    scan: Callable[..., Any] | None = None,
    archive: Any = None,
    by_hand: str = "",
    find: Callable[..., Path] | None = None,
) -> Callable[[F], F]:
    """Return a decorator that registers the function that loads a data set.

    It is called as ``load(root, split)``, with the folder of the data sets (None for the default)
    and ``"train"`` or ``"test"``, and returns an ``ImageSet``.

    Args:
        name: The name in ``DataSpec``, in recipes and on the command line.
        description: One line for ``alignmixup data list``.
        image_size: Side of the images in pixels.
        num_classes: Number of classes; None if it depends on the files.
        check: ``check(root)`` returns one line for each thing that is missing or damaged.
        scan: ``scan(root, split)`` lists the files as a ``FileSet``, for streaming.
        archive: What ``alignmixup data fetch`` downloads, an ``Archive``.
        by_hand: How to get a data set that no program can download.
        find: ``find(root)`` returns the folder of the files, or raises a ``FileNotFoundError``;
            None for a data set that has no files, such as the one below.

    Returns:
        The decorator, which returns what it decorates.

    Example:
        ```python
        @am.register_dataset("noise", description="noise", image_size=8, num_classes=2)
        def noise(root, split):
            images = torch.randint(256, (20, 3, 8, 8), dtype=torch.uint8)
            labels = torch.arange(20) % 2
            return am.ImageSet("noise", split, images, labels, ("a", "b"), (0.5,) * 3, (0.3,) * 3)
        ```
    """

    def register(load: F) -> F:
        files = (check, scan, archive, by_hand, find)
        DATASETS.add(name, DatasetEntry(name, load, description, image_size, num_classes, *files))
        return load

    return register


def register_task(
    name: str,
    *,
    about: str = "",
    units: Mapping[str, str] | None = None,
    check: Callable[[Mapping[str, Any]], object] | None = None,
) -> Callable[[F], F]:
    """Return a decorator that registers an evaluation, a function that returns ``Result`` records.

    It is called as ``task(model, batches, ...)`` with batches ``(x, y)`` of pixels in [0, 1]. Its
    signature says what it needs: ``seed``, ``amp_dtype``, ``normalized_by``, ``mixer``, ``boxes``,
    ``outliers``, ``on_images`` and ``team`` are passed by name. Its other parameters have defaults
    and are the options of the task, ``evaluate(..., options={name: {...}})``. With a parameter
    ``team`` each process of torchrun gets its share of the images; without one rank 0 gets all.

    Args:
        name: The name in ``evaluate(tasks=[...])`` and on the command line.
        about: One line for ``alignmixup evaluate --help``.
        units: Units of metrics by how their names begin; a metric that is not listed is in percent.
        check: Called with all options of the task before any task runs; raises a ``ValueError`` for
            one that is out of range.

    Returns:
        The decorator, which returns what it decorates.

    Example:
        ```python
        from alignmixup.evaluation import collect_logits


        @am.register_task("confidence", units={"logit": ""})
        def confidence(model, batches, *, normalized_by=None, top: int = 1):
            logits, _ = collect_logits(model, batches, normalized_by=normalized_by)
            value = float(logits.topk(top, dim=1).values.mean())
            return [am.Result("confidence", "logit", value, {"top": top})]


        scores = am.evaluate(model, [(x, y)], tasks=["confidence"], device="cpu")
        print(scores.value("confidence", "logit"))
        ```
    """

    TASKS.check_name(name)

    def register(function: F) -> F:
        TASKS.add(name, TaskEntry(function, dict(units or {}), about, check))
        return function

    return register


def task_abouts() -> dict[str, str]:
    """Return one line about each task, by name.

    Built-in tasks are read from their source, so that help loads no torch.
    """
    found: dict[str, str] = {}
    for path in sorted(Path(__file__).with_name("evaluation").joinpath("tasks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "register_task":
                words = {word.arg: word.value for word in node.keywords}
                found[ast.literal_eval(node.args[0])] = ast.literal_eval(words["about"])
    return found | {name: task.about for name, task in TASKS.imported().items()}


def register_recipe(function: Callable[[], T]) -> Callable[[], T]:
    """Register a function of one recipe, or of several; each is found by its name.

    Args:
        function: Takes no arguments and returns a ``Recipe`` or an iterable of them. It is called
            when a recipe is first looked up.

    Returns:
        The function.

    Example:
        ```python
        @am.register_recipe
        def narrow() -> am.Recipe:
            return am.Recipe(
                am.RecipeKey("cifar10", "r18", "input", "narrow"),
                am.DataSpec("cifar10"),
                am.NetSpec("preact_resnet18", width=16),
                am.InputMixup(alpha=0.2),
                am.TrainSettings(epochs=30, schedule="cosine", milestones=()),
            )


        print(narrow().name)  # for am.train, or "alignmixup train"
        ```
    """
    if not hasattr(function, "__qualname__"):  # a recipe, or a functools.partial
        raise ValueError(
            f"write @register_recipe without brackets above a function, got {function!r}"
        )
    return RECIPES.add(f"{function.__module__}.{function.__qualname__}", function)  # type: ignore[no-any-return]
