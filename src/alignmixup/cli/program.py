"""The table of commands, and ``main``, which runs one of them.

Errors for people are one line; ``--debug`` anywhere shows the whole trace.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from alignmixup.cli.bench import Bench
from alignmixup.cli.detection import Detect
from alignmixup.cli.doctor import Doctor
from alignmixup.cli.material import Adain, parse_data
from alignmixup.cli.measuring import Report, parse_evaluate
from alignmixup.cli.parsing import (
    PROGRAM,
    WHOLE_WORDS,
    Call,
    Parse,
    listing,
    read_words,
    take_plugins,
    wrapped,
)
from alignmixup.cli.pictures import Decoder, parse_figure
from alignmixup.cli.recipes import Recipes
from alignmixup.cli.training import Demo, parse_sweep, parse_train
from alignmixup.cli.using import Export, Predict

PACKAGE = Path(__file__).parents[1]
# Errors that a sentence explains; any other one is a defect, unless it comes from a user's code.
EXPECTED = (ValueError, OSError, ImportError, RuntimeError, SyntaxError)


@dataclass(frozen=True)
class Command:
    """A line of the overview: what to type behind the name, what comes of it, and who reads it.

    ``reader`` is the class that has the name of the command, or a function of the words behind it.
    """

    arguments: str
    about: str
    reader: type[Any] | Parse

    def parse(self, args: list[str]) -> Call:
        """Read the words behind the name."""
        if not isinstance(self.reader, type):
            return self.reader(args)
        call: Call = read_words(self.reader, self.reader.__name__.lower(), args)
        return call


# In the order of the overview.
COMMANDS: dict[str, Command] = {
    "doctor": Command(
        "[--json]", "what this machine can do: torch, GPU, extras, data sets", Doctor
    ),
    "demo": Command("", "train small networks on built-in data, write a report to look at", Demo),
    "recipes": Command(
        "[PATTERN]", "the rows of the paper's tables by name, with the published number", Recipes
    ),
    "train": Command("RECIPE [--out DIR]", "train a recipe, or resume the run in DIR", parse_train),
    "sweep": Command(
        "RECIPE... [--workers N]", "train several recipes at a time and evaluate them", parse_sweep
    ),
    "evaluate": Command("RUN [--tasks ..]", "evaluate a trained run", parse_evaluate),
    "predict": Command("RUN IMAGES...", "classify image files with a trained run", Predict),
    "export": Command("RUN PATH [--format ..]", "write a run's network for use elsewhere", Export),
    "detect": Command(
        "RUN --data voc|coco", "fine-tune a detector from a run's backbone and score it", Detect
    ),
    "report": Command(
        "RUN... [--out DIR]",
        "a page and tables of results, ours beside the published figures",
        Report,
    ),
    "figure": Command(
        "NAME [--run DIR]", "draw a figure; 'figure --help' lists them", parse_figure
    ),
    "decoder": Command(
        "RUN [--layer ..]",
        "train a decoder for a finished run, to see what its features hold",
        Decoder,
    ),
    "adain": Command(
        "DATASET --out FILE", "train the style network of StyleMix and StyleCutMix", Adain
    ),
    "data": Command(
        "list|check|fetch|shard", "list, check, download or pack data sets", parse_data
    ),
    "bench": Command("[PATTERN]", "time one training step of each method", Bench),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    _prepare_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    is_debug = "--debug" in args
    args = [a for a in args if a != "--debug"]
    try:
        args, plugins = take_plugins(args)
        with warnings.catch_warnings():
            warnings.showwarning = _say
            _import(plugins)
            _parse(args)()
    except KeyboardInterrupt as stop:
        # ``Stopped`` has a number; with several processes its message is rank 0's.
        number = getattr(stop, "number", None)
        if str(stop) or number is None:
            _say(str(stop) or "interrupted")
        return 128 + int(number or signal.SIGINT)
    except Exception as error:
        place = _place_in_user_code(error)
        if is_debug or not (place or isinstance(error, EXPECTED)):
            raise
        _say(f"{_sentence(error)}{place}")
        return 1
    return 0


class _Nowhere(io.TextIOBase):
    """In place of a stream that is closed."""

    def write(self, text: str) -> int:
        return len(text)


class _WhileRead:
    """A stream whose reader may leave, as ``head`` does: the rest is lost, and the work goes on."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._without_reader():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._without_reader():
            self._stream.flush()

    @contextmanager
    def _without_reader(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _prepare_streams() -> None:
    """Print '?' for what the encoding of a stream lacks, and nothing into one that is closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _Nowhere())
        elif isinstance(stream, io.TextIOWrapper):
            # In the locale C; in UTF-8 it prints names of files that are no text as they are.
            is_escaped = stream.errors == "surrogateescape" and stream.encoding.lower() != "utf-8"
            if stream.errors == "strict" or is_escaped:
                stream.reconfigure(errors="replace")
            setattr(sys, name, _WhileRead(stream))


def _place_in_user_code(error: Exception) -> str:
    """File and line of the last call outside of this package and of what is installed."""
    installed = [f"{folder}{os.sep}" for folder in (PACKAGE, sys.prefix, sys.base_prefix)]
    places = [
        f" ({frame.filename}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", *installed))
        and {"site-packages", "dist-packages"}.isdisjoint(Path(frame.filename).parts)
    ]
    return places[-1] if places else ""


def _sentence(error: Exception) -> str:
    """The text of an error; that of the system without its number."""
    if not isinstance(error, EXPECTED):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _say(message: Warning | str, *where: object, **line: object) -> None:
    """Print an error or a warning, without the line of code it comes from.

    It is one line, which on a terminal is broken between words. It is lost where stderr cannot be
    written: a warning ends no training because the disk of its log is full.
    """
    text = f"{PROGRAM}: {message}"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(textwrap.fill(line, width, **WHOLE_WORDS) for line in text.splitlines())
    with suppress(OSError):
        print(text, file=sys.stderr)


def _import(plugins: Sequence[str]) -> None:
    from alignmixup.registry import import_plugin

    for plugin in plugins:
        import_plugin(plugin)


def _parse(args: list[str]) -> Call:
    from alignmixup.registry import suggestion

    command, rest = (args[0], args[1:]) if args else ("--help", [])
    if command in ("--help", "-h"):
        return lambda: print(_overview())
    if command == "--version":
        return lambda: print(version(PROGRAM))
    after = [word for word in rest if word in COMMANDS]
    if command.startswith("-") and after:
        raise ValueError(f"flags come after the command: {PROGRAM} {after[0]} {command} ...")
    if command not in COMMANDS:
        raise ValueError(f"unknown command {command!r}{suggestion(command, [*COMMANDS])}")
    return COMMANDS[command].parse(rest)


def _overview() -> str:
    abouts = {f"{name} {command.arguments}": command.about for name, command in COMMANDS.items()}
    usage = f"usage: {PROGRAM} COMMAND ...\n"
    anywhere = {
        "--plugin MODULE": "(or FILE.py) imports your mixers, models, data sets, tasks and recipes "
        "first",
        "--debug": "shows the trace of an error",
    }
    title = "\n".join(
        wrapped("", f"{PROGRAM} COMMAND --help describes each, with examples. Anywhere:")
    )
    return f"{listing(usage, abouts)}\n\n{listing(title, anywhere)}"
