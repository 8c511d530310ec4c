"""The figures by name. One module a figure: it computes, draws and registers itself.

    @register_figure("toy", about="the alignment of 16 points in the plane")
    def toy(out, *, run=None, seed=0, data_root=None): ...

A figure is drawn from a trained run if one is named; else from the built-in shapes and a small
network, untrained or trained for the figure, which its title says.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

__all__ = ["FIGURES", "Figure", "draw_figure", "list_figures", "load_figures", "register_figure"]

Draw = Callable[..., list[Path]]


@dataclass(frozen=True)
class Figure:
    """A figure: the function that draws it, and a line that says what it shows."""

    draw: Draw
    about: str


FIGURES: dict[str, Figure] = {}


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
        there = FIGURES.get(name)
        if there and (there.draw.__module__, there.draw.__name__) != (
            draw.__module__,
            draw.__name__,
        ):
            raise ValueError(f"a figure {name!r} is registered already; choose another name")
        FIGURES[name] = Figure(draw, about)
        return draw

    return register


def load_figures() -> None:
    """Import the modules of this package, which register their figures."""
    for path in _modules():
        import_module(f"alignmixup.figures.{path.stem}")


def list_figures() -> dict[str, str]:
    """What each figure shows, by name; read from the source, so that help loads no torch."""
    found = {}
    for path in _modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "register_figure":
                found[ast.literal_eval(node.args[0])] = ast.literal_eval(node.keywords[0].value)
    return found | {name: figure.about for name, figure in FIGURES.items()}


def draw_figure(
    name: str,
    out: Path,
    *,
    run: Path | None = None,
    seed: int = 0,
    data_root: Path | None = None,
) -> list[Path]:
    """Draw a figure.

    Args:
        name: The name it is registered by.
        out: Folder of the pictures.
        run: Folder of a trained run.
        seed: Chooses points, pairs, the methods' random draws and untrained weights.
        data_root: Folder of the data sets of the run.

    Returns:
        The files written.

    Raises:
        ValueError: If there is no such figure, or it cannot be drawn from this run.
    """
    load_figures()
    if name not in FIGURES:
        raise ValueError(f"unknown figure {name!r}; choose from {', '.join(sorted(FIGURES))}")
    return FIGURES[name].draw(out, run=run, seed=seed, data_root=data_root)


def _modules() -> list[Path]:
    return [p for p in sorted(Path(__file__).parent.glob("*.py")) if p.stem[0] != "_"]
