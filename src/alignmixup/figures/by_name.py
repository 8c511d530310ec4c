"""The figures by name. One module a figure: it computes, draws and registers itself.

    @register_figure("toy", about="the alignment of 16 points in the plane")
    def toy(out, *, run=None, seed=0, data_root=None): ...

A figure is drawn from a trained run if one is named; else from the built-in shapes and a small
network, untrained or trained for the figure, which its caption says.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from pathlib import Path

from alignmixup.checking import check_call, check_seed
from alignmixup.figures.style import FORMATS, use_style
from alignmixup.files import make_folder
from alignmixup.registry import FIGURES

Draw = Callable[..., list[Path]]

_about: dict[str, str] = {}


def register_figure(name: str, *, about: str) -> Callable[[Draw], Draw]:
    """Register a function as the figure of that name.

    Args:
        name: What to type after ``alignmixup figure``.
        about: One line for the help.

    Returns:
        A decorator for a function ``(out, *, run, seed, data_root)`` that returns the files it
        wrote.

    Raises:
        ValueError: If another function has the name.
    """

    def register(draw: Draw) -> Draw:
        FIGURES.add(name, draw)
        _about[name] = about
        return draw

    return register


def list_figures() -> dict[str, str]:
    """What each figure shows, by name; read from the source, so that help loads no torch."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "register_figure":
                found[ast.literal_eval(node.args[0])] = ast.literal_eval(node.keywords[0].value)
    return found | _about


def draw_figure(
    name: str,
    out: Path,
    *,
    run: Path | None = None,
    seed: int = 0,
    data_root: Path | None = None,
    style: str = "screen",
    num_pairs: int | None = None,
) -> list[Path]:
    """Draw a figure.

    Args:
        name: The name it is registered by.
        out: Folder of the pictures, which are PNG and PDF; or one file, whose extension (png, pdf,
            svg) is the format.
        run: Folder of a trained run.
        seed: Chooses points, pairs, the methods' random draws and untrained weights.
        data_root: Folder of the data sets of the run.
        style: One of ``figures.style.STYLES``: for a screen, or the width of a paper's column.
        num_pairs: Pairs of images, in figures that show several; None: as many as the figure's
            default.

    Returns:
        The files written.

    Raises:
        ValueError: If there is no such figure or style, or it cannot be drawn from this run, or it
            has no number of pairs.
    """
    check_seed(seed)
    draw: Draw = FIGURES[name] if num_pairs is None else _with_pairs(name, num_pairs)
    check_call(f"the figure {name!r}", draw, "out", named=("run", "seed", "data_root"))
    extension = out.suffix.removeprefix(".")
    if not extension or out.is_dir():
        is_new = not out.exists()
        make_folder(out)  # now: drawing may train a network first
        try:
            with use_style(style):
                return draw(out, run=run, seed=seed, data_root=data_root)
        finally:
            if is_new and not any(out.iterdir()):
                out.rmdir()
    if extension not in FORMATS:
        raise ValueError(
            f"--out must be a folder or a file of one of {', '.join(FORMATS)}; {out} is neither"
        )
    make_folder(out.parent)
    with use_style(style, (extension,)):
        written = draw(out.parent, run=run, seed=seed, data_root=data_root)
    return _renamed(written, out)


def _with_pairs(name: str, num_pairs: int) -> Draw:
    """The figure with this many pairs; an error where it takes none."""
    draw: Draw = FIGURES[name]
    if "num_pairs" not in inspect.signature(draw).parameters:
        taking = [n for n, d in FIGURES.items() if "num_pairs" in inspect.signature(d).parameters]
        raise ValueError(
            f"--pairs is an option of {' and '.join(sorted(taking))}; {name} has none: leave it out"
        )
    if num_pairs < 1:
        raise ValueError(f"--pairs must be at least 1, got {num_pairs}")
    return functools.partial(draw, num_pairs=num_pairs)


def _renamed(written: list[Path], out: Path) -> list[Path]:
    """Give the one picture among the files the name of ``out``, and its caption likewise."""
    pictures = [path for path in written if path.suffix == out.suffix]
    if len(pictures) != 1:
        raise ValueError(
            f"--out names one file, {out}, but the figure has {len(pictures)}, which are in "
            f"{out.parent}: name a folder"
        )
    stem = pictures[0].stem
    return [
        path.replace(path.with_stem(out.stem)) if path.stem == stem else path for path in written
    ]
