"""Runs the program again and again, kills it at random instants, lets it end, and counts.

    python killing.py KIND OUT KILLS SEED

KIND is ``train``, ``sweep`` or ``torchrun``. OUT/whole is not killed, OUT/killed is. It prints one
JSON object: how often the program was killed before its end, and the exit
status of the first and the last run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

SMALL = ["--net.width", "4", "--train.batch-size", "16", "--train.device", "cpu"]
SMALL += ["--train.warmup-epochs", "0", "--dataset", "shapes"]
RECIPES = ["cifar10-r18-alignmixup-fast", "cifar10-r18-input-fast"]


def command(kind: str, out: Path) -> list[str]:
    """The words behind ``alignmixup``."""
    if kind == "sweep":
        tasks = ["--tasks", "accuracy", "calibration", "--workers", "2"]
        return ["sweep", *RECIPES, "--out", str(out), *tasks, "--train.epochs", "4", *LIMIT, *SMALL]
    epochs = ["--train.epochs", "8" if kind == "train" else "6"]
    return ["train", RECIPES[0], "--out", str(out), *epochs, "--limit", "64", *SMALL]


LIMIT = ["--data.limit", "64"]


def start(kind: str, out: Path) -> int:
    """Start it in a session of its own; return the process at the head of it.

    A training is forked from here, where all is imported and nothing computed; the other kinds
    start processes of their own.
    """
    args = command(kind, out)
    if kind != "train":
        module = ["-m", "alignmixup"]
        if kind == "torchrun":
            module = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
            module += [str(random.randrange(20000, 60000)), "-m", "alignmixup"]
        with open(out.with_suffix(".err"), "ab") as log:
            words = [sys.executable, *module, *args]
            child = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        child.returncode = 0  # we wait for it by its number
        return child.pid
    child = os.fork()
    if child:
        return child
    log = os.open(out.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from alignmixup.cli.program import main

    os._exit(main(args))


def run(kind: str, out: Path, seconds: float | None = None) -> int:
    """Let it run to its end, or kill it and all it has started; return its status."""
    child = start(kind, out)
    if seconds is not None:
        time.sleep(seconds)
        for process in [child, *descendants(child)]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def descendants(process: int) -> list[int]:
    """The processes started by this one, and by those; torchrun's have sessions of their own."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            number, rest = stat.parent.name, stat.read_text().rpartition(")")[2].split()
            parents[int(number)] = int(rest[1])
    found, new = [], [process]
    while new:
        new = [number for number, parent in parents.items() if parent in new]
        found += new
    return found


def main(kind: str, out: Path, kills: int, seed: int) -> None:
    import alignmixup.experiments.run
    import alignmixup.recipes.catalog  # noqa: F401

    rng = random.Random(seed)
    random.seed(os.getpid())
    begin = time.monotonic()
    first = run(kind, out / "whole")
    length = time.monotonic() - begin
    killed = 0
    for _ in range(kills):
        status = run(kind, out / "killed", rng.uniform(0.1, 1.0) * length)
        is_done = status == 0 or (kind != "sweep" and (out / "killed" / "results.jsonl").exists())
        killed += not is_done
        if is_done:  # the kill came too late: begin anew, and kill earlier
            shutil.rmtree(out / "killed")
            length *= 0.7
    last = run(kind, out / "killed")
    print(json.dumps({"killed": killed, "first": first, "last": last}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
