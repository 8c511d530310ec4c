"""Where the values of a run go while it trains: the console, TensorBoard, trackio, W&B.

A run's ledger (``training.ledger``, JSON lines) is the source of truth and always written; it is
not one of these. A logger shows the same values elsewhere. One that cannot start is an error before
the first step; one that fails later is switched off with a warning, and training continues.

Adding a logger is one class:

    @register_logger("name")
    class MyLogger(Logger):
        def __init__(self, folder): ...        # of the run; import what may be missing here
        def log(self, values, epoch): ...
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from alignmixup.checking import check_call
from alignmixup.registry import LOGGERS, register_logger
from alignmixup.training.progress import Reporter

PROJECT = "alignmixup"


class Logger:
    """Receives the values of a run; extend it and override what is needed.

    All calls come from one process, that of rank 0. A run that is resumed, or that has phases,
    calls ``start`` and ``finish`` again.

    Example:
        ```python
        class LastValues(am.Logger):
            def log(self, values, epoch):
                self.epoch, self.values = epoch, dict(values)


        logger = LastValues()
        logger.log({"train/mixed_loss": 2.3, "test/top1": 10.0}, epoch=1)
        assert logger.values["test/top1"] == 10.0
        ```
    """

    def start(self, settings: Mapping[str, Any]) -> None:
        """Begin, before the first step.

        ``settings`` has ``settings`` (of training), ``cases``, ``steps`` (an epoch), ``compute``,
        ``epochs`` (first and end) and ``position`` (epoch and step where the run is resumed); and
        ``recipe``, where there is one.
        """

    def step(self) -> None:
        """Note that a step has been launched; do not wait for the device here."""

    def say(self, text: str) -> None:
        """Show a line of text to a person."""

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        """Take the values of an epoch, counted from 1.

        They are ``train/mixed_loss``, ``train/lr`` and ``train/seconds`` and, in an epoch that is
        evaluated, ``test/top1`` and the like; with EMA also ``test_raw/top1``, without averaging,
        and ``test_teacher/top1`` of a mixer that has a teacher.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """End, however training has ended."""


class Loggers(Logger):
    """Several loggers as one; one that fails after its start is switched off with a warning."""

    def __init__(self, loggers: Iterable[Logger], about: Mapping[str, Any] | None = None) -> None:
        """``about`` is added to the settings of ``start``."""
        self._loggers, self._about = list(loggers), dict(about or {})
        self._started: list[Logger] = []
        self._is_new = True

    def start(self, settings: Mapping[str, Any]) -> None:
        for logger in self._loggers:
            try:
                logger.start({**self._about, **settings})
                self._started.append(logger)
            except Exception as error:
                message = f"the logger {type(logger).__name__} cannot start: {error}"
                if self._is_new:
                    self.finish()
                    if isinstance(logger, Loggers):  # the error names the one inside
                        raise
                    raise RuntimeError(message) from error
                warnings.warn(message, stacklevel=2)  # in a later phase of the run
        self._is_new = False

    def step(self) -> None:
        self._each("step")

    def say(self, text: str) -> None:
        self._each("say", text)

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        self._each("log", values, epoch)

    def finish(self) -> None:
        self._each("finish")
        self._started = []

    def _each(self, method: str, *args: object) -> None:
        for logger in list(self._started):
            try:
                getattr(logger, method)(*args)
            except Exception as error:
                self._started.remove(logger)
                warnings.warn(
                    f"the logger {type(logger).__name__} failed ({error}) and is switched off; "
                    "training continues, and the ledger has every value",
                    stacklevel=2,
                )


def make_loggers(
    chosen: Iterable[str | Logger],
    folder: Path,
    *,
    quiet: bool = False,
    about: Mapping[str, Any] | None = None,
) -> Loggers:
    """Return the loggers of the run in ``folder``: those chosen, and the console unless quiet."""
    if isinstance(chosen, str):
        raise ValueError(f"loggers must be a list of names: write [{chosen!r}]")
    names = dict.fromkeys([*chosen, *([] if quiet else ["console"])])
    return Loggers([_made(each, folder) for each in names], about)


def _made(chosen: str | Logger, folder: Path) -> Logger:
    if not isinstance(chosen, str):
        return chosen
    check_call(f"the logger {chosen!r}", LOGGERS[chosen], "folder")
    logger: Logger = LOGGERS[chosen](folder)
    return logger


def scalars(epoch: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an epoch of the ledger, by the names that loggers have for them."""
    named = {"train/mixed_loss": "loss", "train/lr": "lr", "train/seconds": "seconds"}
    values = {name: epoch[key] for name, key in named.items()}
    for part in ("test", "test_raw", "test_teacher"):
        values |= {f"{part}/{name}": value for name, value in epoch.get(part, {}).items()}
    return values


@register_logger("console")
class Console(Logger):
    """A progress bar on a terminal, elsewhere one line an epoch."""

    def __init__(self, folder: Path | None = None) -> None:
        self._reporter = Reporter(1, quiet=True)

    def start(self, settings: Mapping[str, Any]) -> None:
        first, end = settings["epochs"]
        epoch, step = settings["position"]
        steps = settings["steps"]
        self._num_epochs = settings["settings"]["epochs"]
        # Every method names a step without mixing "clean".
        self._mark = "" if set(settings["cases"]) == {"clean"} else " (mixed)"
        done = (epoch - first) * steps + step
        self._reporter = Reporter((end - first) * steps, done)
        self._reporter.__enter__()

    def step(self) -> None:
        self._reporter.advance()

    def say(self, text: str) -> None:
        self._reporter.say(text)

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        loss = f"loss {values['train/mixed_loss']:.4f}{self._mark}"
        line = f"epoch {epoch}/{self._num_epochs}  {loss}"
        if "test/top1" in values:
            line += f"  test top-1 {values['test/top1']:.2f} %"
        if "test_raw/top1" in values:
            line += f" (without EMA {values['test_raw/top1']:.2f} %)"
        if "test_teacher/top1" in values:
            line += f" (teacher {values['test_teacher/top1']:.2f} %)"
        self._reporter.epoch(f"{line}  {values['train/seconds']:.1f} s")

    def finish(self) -> None:
        self._reporter.__exit__(None, None, None)


@register_logger("tensorboard")
class TensorBoard(Logger):
    """Writes RUN/tensorboard; ``tensorboard --logdir RUN`` shows it."""

    def __init__(self, folder: Path) -> None:
        module = _import("torch.utils.tensorboard", "TensorBoard", "logging")
        self._open, self._folder = module.SummaryWriter, folder / "tensorboard"

    def start(self, settings: Mapping[str, Any]) -> None:
        # Values of epochs after the last checkpoint of a run that was killed are dropped.
        self._writer = self._open(self._folder, purge_step=settings["position"][0] + 1)

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, epoch)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


@register_logger("trackio")
class Trackio(Logger):
    """Logs to trackio's local database; ``trackio show --project alignmixup`` shows it."""

    def __init__(self, folder: Path) -> None:
        self._trackio, self._folder = _import("trackio", "trackio", "trackio"), folder

    def start(self, settings: Mapping[str, Any]) -> None:
        name = f"{self._folder.name}-{_run_id(self._folder)[:8]}"
        self._trackio.init(project=PROJECT, name=name, config=dict(settings), resume="allow")

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        self._trackio.log(dict(values), step=epoch)

    def finish(self) -> None:
        self._trackio.finish()


@register_logger("wandb")
class WandB(Logger):
    """Logs to Weights & Biases; WANDB_PROJECT and WANDB_MODE=offline are respected."""

    def __init__(self, folder: Path) -> None:
        self._wandb, self._folder = _import("wandb", "W&B", "wandb"), folder

    def start(self, settings: Mapping[str, Any]) -> None:
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=self._folder.name,
            dir=str(self._folder),
            id=_run_id(self._folder),
            resume="allow",
            config=dict(settings),
        )

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        self._run.log(dict(values), step=epoch)

    def finish(self) -> None:
        self._run.finish()


def _run_id(folder: Path) -> str:
    """Return the same id for a run that is resumed, another one if its folder was deleted."""
    path = folder / "tracking_id.txt"
    if not path.exists():
        path.write_text(uuid.uuid4().hex, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _import(module: str, name: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ImportError(f"{name} is not installed: pip install 'alignmixup[{extra}]'") from None
