"""CIFAR-100 for 300 epochs in place of 2000: the paper's own remark on short schedules.

    alignmixup train cifar100-r18-alignmixup-300

The optimizer is that of the 2000 epochs, the learning rate falls at the same shares of the run: 75,
150 and 225 (the ``-fast`` recipes have another: cosine, weight decay 5e-4). The text prints the
errors of manifold mixup and AlignMixup; of the methods that mix images it says that they are best
at 300 epochs, so theirs are those of the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from alignmixup.recipes.classification import classification
from alignmixup.recipes.schema import Row
from alignmixup.report import paper

__all__ = ["short_cifar100"]

EPOCHS = 300
MILESTONES = (75, 150, 225)
ROWS = (
    *("baseline", "input", "cutmix", "manifold", "puzzlemix", "comixup", "saliencymix"),
    *("stylemix", "stylecutmix", "alignmixup", "alignmixup-ae"),
    *("alignmixup-unaligned", "alignmixup-ae-unaligned"),
)


def short_cifar100() -> Iterator[Row]:
    """The column of CIFAR-100 and R-18, and the unaligned twins of ours, for 300 epochs."""
    methods = {f"cifar100-r18-{method}": method for method in ROWS}
    for row in classification():
        recipe = row.recipe
        if recipe.name not in methods:
            continue
        settings = dataclasses.replace(recipe.train, epochs=EPOCHS, milestones=MILESTONES)
        printed = paper.cell(table="cls-300", method=methods[recipe.name])
        yield Row(dataclasses.replace(recipe, name=f"{recipe.name}-300", train=settings), printed)
