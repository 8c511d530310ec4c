"""Every seed of a test run, moved by ``ALIGNMIXUP_TEST_SEED``: do the tests hold for other chance?

A test states its seeds as usual, ``torch.Generator().manual_seed(0)``. With
``ALIGNMIXUP_TEST_SEED=3`` all generators of torch and numpy that are seeded in this process start
``3 * STRIDE`` further on, those of the package included. Equal seeds stay equal and different ones
different, so that whatever a test says of seeds still holds. Without the variable nothing changes.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

STRIDE = 1_000_003
TEST_SEED = int(os.environ.get("ALIGNMIXUP_TEST_SEED", "0"))


class _Kind(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class _MovedGenerator(torch._C.Generator, metaclass=_Kind):
    """torch's generator; also an instance of it is whatever torch itself made."""

    def manual_seed(self, seed: int) -> torch.Generator:
        return super().manual_seed((seed + TEST_SEED * STRIDE) % 2**63)


def seed_everywhere(seed: int) -> None:
    """``torch.manual_seed`` without the stack traces it keeps for every kind of missing device."""
    torch.default_generator.manual_seed((seed + TEST_SEED * STRIDE) % 2**63)
    if torch.cuda.is_available():
        torch.manual_seed(seed)


def move_seeds() -> None:
    """Move the seeds of torch and numpy by ``TEST_SEED``; 0 leaves torch and numpy untouched."""
    if not TEST_SEED:
        return
    set_global, make_numpy = torch.manual_seed, np.random.default_rng

    def manual_seed(seed: int) -> torch._C.Generator:
        return set_global((int(seed) + TEST_SEED * STRIDE) % 2**63)

    def default_rng(seed: Any = None) -> np.random.Generator:
        return make_numpy(seed + TEST_SEED * STRIDE if isinstance(seed, int) else seed)

    torch.Generator = _MovedGenerator  # type: ignore[misc]
    torch.manual_seed = torch.random.manual_seed = manual_seed
    np.random.default_rng = default_rng
