"""What a recipe's name says: the data, the network and the method, which are a table's places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alignmixup.report import ablation, paper

__all__ = ["RecipeName", "parse_recipe"]


@dataclass(frozen=True, slots=True)
class RecipeName:
    """The parts of ``cifar10-r18-alignmixup-fast``; the suffix is what no other part explains.

    ``ablation-cifar100-ae-xAe-fast`` has the family for its data, the data for its network, and for
    its method the row of the paper's table, ``ae-xAe``.
    """

    data: str
    network: str
    method: str
    suffix: str = ""


def parse_recipe(name: str) -> RecipeName:
    """Split a recipe's name; a network or method the paper does not know may stand in it too."""
    data, _, rest = name.rpartition("/")[2].partition("-")
    network, rest = _take(rest, paper.NETWORKS)
    network = {"vgg": "vgg-gap"}.get(network, network)  # recipes have its short name
    known = {**paper.METHODS, **ablation.ROWS} if data == ablation.FAMILY else paper.METHODS
    method, suffix = _take(rest, known)
    if not (data and network and method):
        raise ValueError(
            f"recipe name {name!r} does not read as data-network-method, "
            "such as cifar10-r18-alignmixup"
        )
    return RecipeName(data, network, method, suffix)


def _take(text: str, known: Iterable[str]) -> tuple[str, str]:
    """Split the longest known name off the front, or else the first word."""
    for name in sorted(known, key=len, reverse=True):
        if text == name or text.startswith(name + "-"):
            return name, text[len(name) + 1 :]
    head, _, tail = text.partition("-")
    return head, tail
