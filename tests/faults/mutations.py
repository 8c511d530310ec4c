"""Damage to files: what disks, networks and editors do to them, a repeatable choice of it."""

from __future__ import annotations

import random
from collections.abc import Iterator

__all__ = ["COUNT", "damaged"]

COUNT = 60  # mutations of a file


def damaged(data: bytes, seed: int = 0, count: int = COUNT) -> Iterator[tuple[str, bytes]]:
    """Yield ``count`` damaged versions of a file, each with what was done to it.

    Half of the places lie in the first 2 kB, where a file has its header.
    """
    rng = random.Random(seed)
    kinds = (_flip, _flip, _cut, _zero, _drop, _double, _other)
    for number in range(count):
        end = min(len(data), 2000) if number % 2 else len(data)
        kind = kinds[number % len(kinds)]
        place = rng.randrange(end)
        changed = kind(data, place, rng)
        if changed != data:
            yield f"{kind.__name__[1:]} at {place}", changed


def _flip(data: bytes, place: int, rng: random.Random) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def _cut(data: bytes, place: int, rng: random.Random) -> bytes:
    return data[:place]


def _zero(data: bytes, place: int, rng: random.Random) -> bytes:
    return data[:place] + bytes(len(data[place : place + 512])) + data[place + 512 :]


def _drop(data: bytes, place: int, rng: random.Random) -> bytes:
    return data[:place] + data[place + rng.randrange(1, 64) :]


def _double(data: bytes, place: int, rng: random.Random) -> bytes:
    return data[:place] + data[place // 2 : place] + data[place:]


def _other(data: bytes, place: int, rng: random.Random) -> bytes:
    return data[:place] + rng.randbytes(16) + data[place + 16 :]
