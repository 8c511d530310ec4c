"""Watch over the other processes of a run: one that dies ends all, with its reason.

Every process counts up a beat in a TCP store and reads that of the next rank. A process that fails
writes its reason there first; one that is killed stops counting. The others then raise, and one
that waits in a collective without end, as NCCL's do, is ended by its watch.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

PERIOD = 2.0  # seconds between two beats
LIMIT = 30.0  # seconds without a beat after which a rank is taken for dead
# The others wait while rank 0 decodes a data set. Nobody waits so long for a process that has died.
PATIENCE = 7200.0  # seconds
GRACE = 5.0  # seconds that a process has to raise, before its watch ends it

FAILED = "failed"  # key of the first failure
STORE = "rank 0, or torchrun, which has the store of the processes,"

_watches: list[Watch] = []  # of this process, at most one


class RankLost(RuntimeError):
    """Another process of the run has ended; the message names its rank and the reason."""


class Watch:
    """The watch of one process, in two threads; it acts within blocks of ``active`` alone."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.size, self.lost = rank, size, ""
        self._store, self._num_active, self._num_rounds = store, 0, 0
        self._is_lost = threading.Event()
        self._store.set(f"where{rank}", f"pid {os.getpid()} on {socket.gethostname()}")
        self._store.set(f"beat{rank}", "0")
        atexit.register(self._leave)
        for act in (self._run, self._end):
            threading.Thread(target=act, name="watch", daemon=True).start()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Fail with the others in this block, and tell them why where this process fails."""
        self._num_active += 1
        try:
            yield
        except BaseException as error:
            if is_of_all(error):
                raise
            if is_of_communication(error):
                raise RankLost(self._find_lost(error)) from error
            self._post(f"rank {self.rank} failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._num_active -= 1
            raised = sys.exc_info()[1]
            is_outermost = self._num_active == 0
            if self.rank == 0 and is_outermost and raised is not None and not is_of_all(raised):
                time.sleep(2 * PERIOD)  # it may hold the store, where the others read the reason

    def _run(self) -> None:
        """Beat, and look at the next rank, until one is lost.

        Rounds are counted, not seconds: all processes may be stopped for a while, as by Ctrl-Z.
        """
        beat, seen, silent, leaving = 0, "", 0, 0
        following = (self.rank + 1) % self.size
        while not self.lost:
            time.sleep(PERIOD)
            beat += 1
            try:
                self._store.set(f"beat{self.rank}", str(beat))
                if self._store.check([FAILED]):
                    self.lost = self._read(FAILED)
                latest = self._beat(following)
                has_left = self._store.check([f"left{following}"])
            except RuntimeError:  # torch's errors of the store are of this type
                self.lost = self.lost or f"{STORE} has ended"
                break
            self._num_rounds = beat
            # At the end of a run the others may leave while this process still closes its block.
            leaving = leaving + 1 if has_left and self._num_active else 0
            seen, silent = latest, silent + 1 if latest == seen else 0
            if leaving * PERIOD > GRACE:
                self._post(f"rank {following} ({self._where(following)}) has exited")
            elif not has_left and silent * PERIOD > LIMIT:
                self._post(self._silent(following, LIMIT))
        self._is_lost.set()

    def _end(self) -> None:
        """End this process if it is in a block some time after another is lost.

        It does not touch the store, whose calls never return where its machine is unreachable.
        """
        seen, silent = 0, 0
        while not self._is_lost.wait(PERIOD):
            seen, silent = self._num_rounds, silent + 1 if self._num_rounds == seen else 0
            if silent * PERIOD > LIMIT:
                self.lost = f"{STORE} is unreachable for {LIMIT:g} s"
                self._is_lost.set()
        time.sleep(GRACE)
        if self._num_active:
            print(f"error: {self.lost}", file=sys.stderr, flush=True)
            os._exit(1)

    def _find_lost(self, error: BaseException) -> str:
        """Return who has ended, after a collective has failed: whose beat has stopped."""
        try:
            before = [self._beat(rank) for rank in range(self.size)]
            if not self._is_lost.wait(4 * PERIOD):
                for rank in range(self.size):
                    if self._beat(rank) == before[rank] and rank != self.rank:
                        self._post(self._silent(rank, 4 * PERIOD))
                self._is_lost.wait(2 * PERIOD)
        except RuntimeError:
            self._is_lost.wait(LIMIT)
        return self.lost or f"a collective failed: {str(error).splitlines()[0]}"

    def _silent(self, rank: int, seconds: float) -> str:
        where = self._where(rank)
        return f"rank {rank} ({where}) has ended: killed, or unreachable for {seconds:g} s"

    def _post(self, message: str) -> None:
        """Write the failure, unless one has been written: the first is the cause."""
        with suppress(RuntimeError):  # there is no store any more, which every watch sees
            self._store.compare_set(FAILED, "", message)

    def _leave(self) -> None:
        with suppress(RuntimeError):
            self._store.set(f"left{self.rank}", "1")

    def _beat(self, rank: int) -> str:
        return self._read(f"beat{rank}")

    def _where(self, rank: int) -> str:
        return self._read(f"where{rank}")

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def guarded() -> AbstractContextManager[None]:
    """Return the ``active`` block of this process's watch, if it has one."""
    return _watches[0].active() if _watches else nullcontext()


def raise_if_lost() -> None:
    """Raise if the watch of this process has seen another end."""
    if _watches and _watches[0].lost:
        raise RankLost(_watches[0].lost)


def start_watch(rank: int, size: int) -> None:
    """Start the watch of this process with a connection of its own to torchrun's store."""
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=LIMIT),
        wait_for_workers=False,
    )
    _watches.append(Watch(PrefixStore(f"watch/{attempt()}", store), rank, size))


def attempt() -> str:
    """Return a name of this start of the processes, which torchrun may start again."""
    return f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def is_of_communication(error: BaseException) -> bool:
    """Whether this comes from a collective: of NCCL a type of torch's, of gloo any RuntimeError."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error).lower()


def marked_of_all(error: BaseException) -> BaseException:
    """Return the error, marked as one that all processes raise: none needs to hear of it."""
    error.__dict__["is_of_all"] = True
    return error


def is_of_all(error: BaseException) -> bool:
    """Whether all processes raise this error."""
    return "is_of_all" in error.__dict__
