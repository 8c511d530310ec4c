"""The rows of the paper's two ablation tables by the names that recipes give them.

    ablation-cifar100-ae-xAe               AlignMixup/AE, mixed layers {x, A, e}, aligned
    ablation-cifar100-ae-xAe-unaligned     its unaligned twin
    ablation-cifar100-iterations-10        AlignMixup with ten Sinkhorn iterations

The first word of such a name is the family's, the second the data, all on one network; what follows
is the row. Symbols of layers are those of ``paper``. A set of vectors has nothing to align: it has
one row, without a suffix, and its figure is in the column of the unaligned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from alignmixup.report import paper

__all__ = ["FAMILY", "ROWS", "AblationRow", "published"]

FAMILY = "ablation"

ARCHITECTURES: Mapping[str, str] = {
    "plain": "alignmixup",
    "ae": "alignmixup-ae",
    "vae": "alignmixup-vae",
}


@dataclass(frozen=True, slots=True)
class AblationRow:
    """A row as it is shown, and its printed cell; ``None`` where the paper has no such row."""

    label: str
    cell: paper.Published | None


def published(data: str, method: str) -> float | None:
    """Return the top-1 error that the paper prints for an ablation run, or ``None``."""
    if method in ROWS:
        cell = ROWS[method].cell
    else:  # what the ablations are held against
        cell = paper.cell(table="ablation", method=method, layers="")
    return cell.top1_error if cell is not None and cell.data == data else None


def _rows() -> Iterator[tuple[str, AblationRow]]:
    for architecture, method in ARCHITECTURES.items():
        printed = [figure.layers for figure in paper.find(table="ablation", method=method)]
        for layers in dict.fromkeys(["x", *printed]):  # {x} is not in the paper, but a recipe
            yield from _layer_set(architecture, method, layers)
    for figure in paper.find(table="iterations"):
        label = f"{paper.METHODS[figure.method]}, {figure.num_iters} iterations"
        yield f"iterations-{figure.num_iters}", AblationRow(label, figure)


def _layer_set(architecture: str, method: str, layers: str) -> Iterator[tuple[str, AblationRow]]:
    name = f"{architecture}-{layers.replace('-', '')}"
    label = f"{paper.METHODS[method]} {{{layers.replace('-', ', ')}}}"
    aligned, unaligned = (
        paper.cell(table="ablation", method=method, layers=layers, aligned=is_aligned)
        for is_aligned in (True, False)
    )
    yield name, AblationRow(label, aligned or unaligned)
    if aligned is not None:
        yield f"{name}-unaligned", AblationRow(f"{label}, unaligned", unaligned)


# In the paper's order.
ROWS: Mapping[str, AblationRow] = dict(_rows())
