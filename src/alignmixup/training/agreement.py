"""Blocks that end alike in all processes of a run: an error in one is the same error in all.

In torch's store each process records the collectives it comes to, the blocks it leaves, and the
error it leaves one with. It enters a collective only after all others have come to the same one, so
none waits in a collective for a process that has failed or has returned.
"""

from __future__ import annotations

import itertools
import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from alignmixup.contracts import Skipped
from alignmixup.training import watch
from alignmixup.training.signals import EvaluationStopped
from alignmixup.training.watch import (
    RankLost,
    is_of_all,
    is_of_communication,
    marked_of_all,
    raise_if_lost,
)

CHECK_PERIOD = 0.5  # seconds between two looks at the others, for a process that is at work
LONGEST_PAUSE = 0.1  # seconds between two looks, for one that waits

# An error is raised in all processes as the first of these types that fits; others as RuntimeError.
KINDS: tuple[type[BaseException], ...] = (
    Skipped,
    EvaluationStopped,
    ValueError,
    OSError,
    RuntimeError,
)

_numbers = itertools.count()  # of blocks that are in no other
_open: list[Block] = []  # those this process is in, innermost last


class Block:
    """A block of code that all processes enter, each in its own way, and leave together."""

    def __init__(self, rank: int, size: int) -> None:
        self.numbers: Iterator[int] = itertools.count()  # of the collectives and blocks inside
        outer, numbers = (_open[-1].name, _open[-1].numbers) if _open else ("agreed", _numbers)
        self.name: str = f"{outer}/{next(numbers)}"
        self._rank, self._ranks, self._seen = rank, range(size), time.monotonic()
        self._store = dist.PrefixStore(self.name, _get_default_store())  # type: ignore[attr-defined]

    def meet(self, call: str) -> None:
        """Wait until all have come to this call; raise if one has failed or does something else."""
        place = f"call{next(self.numbers)}"
        self._store.set(f"{place}/{self._rank}", call)
        for _ in _pauses():
            # Read before the question whether all have come: one that has come may fail later.
            error, has_returned = _failure(), self._store.check(["returned"])
            if self._are_all_at(place):
                break
            if error is not None:
                raise error
            if has_returned:
                returned = self._store.get("returned").decode()
                raise ValueError(
                    f"rank {returned} has returned, while rank {self._rank} waits in {call}: all "
                    "ranks must call the same methods of the team"
                )
        calls = self._read(place)
        if len(set(calls)) > 1:
            who = ", ".join(f"rank {rank} calls {call}" for rank, call in enumerate(calls))
            raise ValueError(f"{who}: all ranks must call the same methods of the team")

    def failure(self) -> BaseException | None:
        """Return the first error in this block of any process, as all raise it."""
        if not self._store.check(["failed"]):
            return None
        kind, text = json.loads(self._store.get("failed"))
        return marked_of_all(KINDS[kind](text))

    def is_due(self) -> bool:
        """Return whether this process has not looked at the others for a while."""
        is_due = time.monotonic() - self._seen > CHECK_PERIOD
        self._seen = time.monotonic() if is_due else self._seen
        return is_due

    def leave(self, error: BaseException | None) -> None:
        """Wait until all have left the block; raise the error of all if there is one."""
        own = ""
        if error is None:
            self._store.compare_set("returned", "", str(self._rank))
        else:
            kind, own = _described(error)
            # A task is skipped because of its data or model, not because of a rank.
            has_no_rank = isinstance(error, Skipped) or is_of_all(error)
            text = own if has_no_rank else f"rank {self._rank}: {own}"
            self._store.compare_set("failed", "", json.dumps([kind, text]))
            own = f"{KINDS[kind].__name__}: {own}"
        self._store.set(f"left/{self._rank}", own)
        self._wait_until_all_have_left()
        errors, failure = self._read("left"), self.failure()
        self._store.set(f"done/{self._rank}", "")
        # Rank 0 may hold the store, which the others still read: it leaves last.
        for _ in _pauses():
            if self._rank > 0 or self._are_all_at("done"):
                break
        if error is not None and len(set(errors)) == 1:
            raise marked_of_all(error)
        if failure is not None:
            raise failure from error

    def _wait_until_all_have_left(self) -> None:
        failed_after: float | None = None
        for seconds in _pauses():
            outer, failure = _failure(), self.failure()
            if self._are_all_at("left"):
                return
            if outer is not None:
                raise outer
            if failure is None:
                continue
            failed_after = seconds if failed_after is None else failed_after
            if seconds - failed_after > watch.LIMIT:
                left = [self._store.check([f"left/{rank}"]) for rank in self._ranks]
                silent = ", ".join(str(rank) for rank in self._ranks if not left[rank])
                raise RankLost(f"{failure}; rank {silent} has not stopped in {watch.LIMIT:g} s")

    def _are_all_at(self, place: str) -> bool:
        return bool(self._store.check([f"{place}/{rank}" for rank in self._ranks]))

    def _read(self, place: str) -> list[str]:
        return [self._store.get(f"{place}/{rank}").decode() for rank in self._ranks]


@contextmanager
def agreed(rank: int, size: int) -> Iterator[None]:
    """Raise the same error in every process if this block raises in one; all must enter it."""
    meet("agreed")
    block = Block(rank, size)
    error: BaseException | None = None
    _open.append(block)
    try:
        yield
    except (Exception, EvaluationStopped) as raised:
        if isinstance(raised, RankLost) or is_of_communication(raised):
            raise
        error = raised
    finally:
        _open.pop()
    block.leave(error)


def is_open() -> bool:
    """Return whether this process is in a block."""
    return bool(_open)


def meet(call: str) -> None:
    """Wait until all processes are at this call, if it is in a block."""
    if _open:
        _open[-1].meet(call)


def check_others() -> None:
    """Raise if another process has failed in a block that this one is in; cheap to call often."""
    if _open and _open[-1].is_due() and (error := _failure()) is not None:
        raise error


def _failure() -> BaseException | None:
    return next((error for block in _open if (error := block.failure()) is not None), None)


def _pauses() -> Iterator[float]:
    """Yield the seconds since the start, ever more rarely; raise if a process has ended."""
    began = time.monotonic()
    while True:
        seconds = time.monotonic() - began
        yield seconds
        raise_if_lost()
        if seconds > watch.PATIENCE:
            raise RankLost(f"another process did not answer for {watch.PATIENCE / 3600:g} h")
        time.sleep(min(0.001 + seconds / 10, LONGEST_PAUSE))


def _described(error: BaseException) -> tuple[int, str]:
    """Return the place of an error's type in ``KINDS``, and its text; a bug with its line."""
    for number, kind in enumerate(KINDS):
        if isinstance(error, kind):
            plain = type(error) is kind
            return number, str(error) if plain else f"{type(error).__name__}: {error}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return KINDS.index(RuntimeError), f"{type(error).__name__}: {error} ({where})"
