"""CIFAR-100 for 300 epochs instead of 2000: the paper's own remark on short schedules.

    alignmixup train cifar100-r18-alignmixup-300

The optimizer is that of the 2000 epochs and the learning rate falls at the same shares of the run:
75, 150 and 225 (the ``-fast`` recipes have another schedule: cosine, weight decay 5e-4). The text
prints the errors of manifold mixup and AlignMixup. Of the methods that mix images it says that they
are best at 300 epochs, so their figures are those of the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from alignmixup.recipes.classification import classification
from alignmixup.recipes.schema import Recipe
from alignmixup.registry import register_recipe


@register_recipe
def short_cifar100() -> Iterator[Recipe]:
    """The column of CIFAR-100 and R-18, and AlignMixup without alignment, for 300 epochs."""
    for recipe in classification():
        key = recipe.key
        is_printed = key.method != "cutout" and key.variant in ("", "unaligned")
        if (key.data, key.network) == ("cifar100", "r18") and is_printed:
            settings = dataclasses.replace(recipe.train, epochs=300, milestones=(75, 150, 225))
            yield dataclasses.replace(recipe, key=key.labeled("300"), train=settings)
