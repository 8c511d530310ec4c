"""Randomness and progress of one step in a loop that somebody else runs.

A step's generator depends on the seed and on the number of the step alone. So all ranks draw the
same case, as a network in DistributedDataParallel needs it, and a resumed run repeats the draws of
an uninterrupted one without anything in its checkpoint.
"""

from __future__ import annotations

import hashlib
import math

import torch


def step_rng(seed: int, *step: int) -> torch.Generator:
    """Return the generator of a step, which may be numbered by several counters."""
    words = "/".join(str(number) for number in (seed, *step))
    digest = hashlib.blake2b(words.encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def share_done(step: int, num_steps: float) -> float:
    """Return the share of training that is done; 0 where its length is not known."""
    return min(step / num_steps, 1.0) if 0 < num_steps < math.inf else 0.0
