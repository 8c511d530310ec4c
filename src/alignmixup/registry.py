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
import difflib
import importlib
import importlib.util
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# One for all: modules of one package may look up the entries of another.
_importing = threading.RLock()


class Registry(Mapping[str, T], Generic[T]):
    """Entries of one kind by name.

    ``package`` holds the built-in entries, one module each, or is the one module of them. Its
    modules are imported at the first look-up, so that adding a file there is all it takes to add an
    entry.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package: str | None = package
        self._is_importing = False
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        """Register ``entry`` under ``name``; return it.

        Raises:
            ValueError: if another entry has that name. A module that is imported again may register
                the same entries once more.
        """
        there = self._entries.get(name)
        if there is not None and there != entry and _origin(there) != _origin(entry):
            raise ValueError(f"the {self.kind} {name!r} is registered already; choose another name")
        self._entries[name] = entry
        return entry

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers what it decorates under ``name``."""
        return lambda entry: self.add(name, entry)

    def __getitem__(self, name: str) -> T:
        """Return the entry, or raise a ``ValueError`` that suggests the nearest names."""
        entries = self._all()
        if name not in entries:
            raise ValueError(f"unknown {self.kind} {name!r}{suggestion(name, list(entries))}")
        return entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def imported(self) -> dict[str, T]:
        """Return the entries so far: those of plugins, and the built-in ones after a look-up."""
        return dict(self._entries)

    def _all(self) -> dict[str, T]:
        """Return the entries, after an import of the package at the first call."""
        if self._package is not None:
            with _importing:  # other threads wait for all entries
                self._import_package()
        return self._entries

    def _import_package(self) -> None:
        if self._package is None or self._is_importing:  # looked up by one of its own modules
            return
        self._is_importing = True
        try:
            package, prefix = importlib.import_module(self._package), f"{self._package}."
            for module in pkgutil.iter_modules(getattr(package, "__path__", []), prefix):
                if not module.ispkg:
                    importlib.import_module(module.name)
            self._package = None
        finally:
            self._is_importing = False


def suggestion(name: str, known: list[str]) -> str:
    """Return how a message about an unknown name ends: the nearest names, or all of a few."""
    close = nearest(name, known)
    if close:
        return f"; did you mean {' or '.join(repr(word) for word in close)}?"
    return f"; choose from {', '.join(known)}" if 0 < len(known) <= 20 else ""


def nearest(name: str, known: list[str]) -> list[str]:
    """Return up to three known names that look like ``name``, the most similar first."""
    return difflib.get_close_matches(name, known, n=3)


def _origin(entry: object) -> object:
    """Where a class or function is defined: the same place is the same entry, imported again."""
    entry = getattr(entry, "function", entry)
    name = getattr(entry, "__qualname__", None)
    return entry if name is None else (getattr(entry, "__module__", None), name)


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
    name: str, *, about: str = "", units: Mapping[str, str] | None = None
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

    def register(function: F) -> F:
        TASKS.add(name, TaskEntry(function, dict(units or {}), about))
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
    return RECIPES.add(f"{function.__module__}.{function.__qualname__}", function)  # type: ignore[no-any-return]


_plugins: dict[str, ModuleType] = {}


def import_plugin(name: str) -> str:
    """Import a user's module, ``package.module`` or a path ``file.py``, that registers entries.

    Args:
        name: The module's name, importable from the current directory, or the path of a file.

    Returns:
        The name to record in a run: a module's name, or a file's absolute path.
    """
    is_file = name.endswith(".py")
    recorded = str(Path(name).resolve()) if is_file else name
    if recorded in _plugins:
        return recorded
    if is_file:
        _plugins[recorded] = _import_file(Path(recorded))
    else:
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        if "" in name.split("."):  # a relative name
            raise ValueError(
                f"{name!r} is no plugin: give the name of a module, or the path of a .py file"
            )
        try:
            _plugins[recorded] = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise _missing(name, error) from error
            raise ValueError(
                f"no module {name!r} to import as a plugin; run from the folder that contains it, "
                "or give the path of its file"
            ) from None
    return recorded


def imported_plugins() -> tuple[str, ...]:
    """Return the plugins imported so far, as a run records them."""
    return tuple(_plugins)


def plugin_module(recorded: str) -> ModuleType:
    """Return an imported plugin by the name that ``import_plugin`` returned."""
    return _plugins[recorded]


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"the plugin {path} does not exist")
    name = f"alignmixup_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise _missing(str(path), error) from error
    return module


def _missing(plugin: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The plugin was found; something that it imports was not."""
    text = f"the plugin {plugin} imports a module that is not installed: {error}"
    return ModuleNotFoundError(text, name=error.name)
