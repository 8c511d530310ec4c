"""The figures by name. One module a figure: it computes, draws and registers itself.

    @register_figure("toy", about="the alignment of 16 points in the plane")
    def toy(out, *, run=None, seed=0, data_root=None): ...

A figure is drawn from a trained run if one is named; else from the built-in shapes and a small
network, untrained or trained for the figure, which its title says.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

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
    draw: Draw = FIGURES[name]
    return draw(out, run=run, seed=seed, data_root=data_root)
