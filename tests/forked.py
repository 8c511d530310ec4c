"""Programs in processes of their own that are forked from one that has imported the package.

An import of torch costs two seconds of CPU; a server that has done it once forks the rest. It has
only imported, so that no thread of torch is lost in a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Forked", "finish", "start_team"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["alignmixup.experiments.run", "alignmixup.recipes.catalog"])


class Forked:
    """A Python program given as text, with ``sys.argv`` and environment of its own."""

    def __init__(self, program: str, args: list[str], environment: Mapping[str, str]) -> None:
        folder = Path(tempfile.mkdtemp())
        self.out, self.errors = folder / "out", folder / "errors"
        for path in (self.out, self.errors):
            path.touch()
        self._process = _CONTEXT.Process(
            target=_run, args=(program, args, dict(environment), self.out, self.errors)
        )
        self._process.start()

    def wait_for(self, line: str, seconds: float = 120) -> None:
        """Wait until the program has printed this line."""
        deadline = time.monotonic() + seconds
        while line not in self.out.read_text().splitlines():
            assert self._process.is_alive(), self.errors.read_text()
            assert time.monotonic() < deadline, f"no {line!r} in {seconds} s"
            time.sleep(0.05)

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def fail(self, seconds: float = 120) -> tuple[int | None, str]:
        """The exit code and what it printed to stderr; it may not take longer."""
        try:
            self._process.join(seconds)
        finally:
            self._process.kill()
            self._process.join()
        return self._process.exitcode, self.errors.read_text()

    def finish(self, seconds: float = 120) -> list[str]:
        """The lines it printed; it may neither fail nor take longer."""
        try:
            self._process.join(seconds)
        finally:
            self._process.kill()
            self._process.join()
        assert self._process.exitcode == 0, self.errors.read_text()
        return self.out.read_text().splitlines()


def start_team(program: str, *args: object, size: int = 2, port: int | None = None) -> list[Forked]:
    """Start the processes of a team as torchrun would; ``port`` is that of its store."""
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common["OMP_NUM_THREADS"] = "1"
    places = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return [Forked(program, [*map(str, args)], {**os.environ, **place}) for place in places]


def finish(processes: Sequence[Forked], seconds: float = 120) -> list[str]:
    """The last line each of them prints, if any; none of them may fail."""
    return [(process.finish(seconds) or [""])[-1] for process in processes]


def _run(
    program: str, args: list[str], environment: dict[str, str], out: Path, errors: Path
) -> None:
    os.environ.update(environment)
    sys.argv = ["-c", *args]
    for path, descriptor in ((out, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY), descriptor)
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
