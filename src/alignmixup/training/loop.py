"""A loop of steps that can be stopped and resumed: progress, checkpoints and signals.

For trainings that are simpler than a run: no epochs with evaluations, no mixer, no graphs. What a
step does is the caller's, who passes an iterator that takes one step for each item.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from alignmixup.training.checkpoint import Checkpoint, CheckpointWriter
from alignmixup.training.progress import Reporter, duration
from alignmixup.training.signals import Stopped, stop_signals

SAVE_EVERY = 600.0  # seconds between two checkpoints
SAY_EVERY = 60.0  # seconds between two lines where there is no terminal for a bar


def run_steps(
    steps: Iterable[str],
    num_steps: int,
    *,
    done: int,
    state: Callable[[], Checkpoint],
    path: Path | None,
    quiet: bool,
) -> None:
    """Take all steps, and save the state after each line, every ten minutes and at a signal.

    Args:
        steps: Takes one step for each item, which is a line to print, or empty.
        num_steps: Steps of the whole training.
        done: How many of them were taken before.
        state: Returns the state to save.
        path: File of the checkpoint; None saves nothing.
        quiet: Print nothing.

    Raises:
        Stopped: Ctrl-C or SIGTERM has ended the training before its last step, with a checkpoint.
    """
    begin = saved = said = time.monotonic()
    first = done
    writer = CheckpointWriter(path) if path is not None else None
    try:
        with Reporter(num_steps, done, quiet=quiet) as reporter, stop_signals(quiet=quiet) as stop:
            for line in steps:
                done += 1
                reporter.advance()
                now = time.monotonic()
                left = duration((now - begin) / (done - first) * (num_steps - done))
                if line:
                    reporter.epoch(f"{line}  about {left} left")
                elif now - said > SAY_EVERY and not sys.stderr.isatty():
                    reporter.say(f"step {done}/{num_steps}  about {left} left")
                    said = now
                if writer is not None and (line or stop or now - saved > SAVE_EVERY):
                    writer.save(state())
                    saved = now
                if stop and done < num_steps:
                    raise Stopped(stop[0], "stopped by a signal; the same command resumes")
    finally:
        if writer is not None:
            writer.close()
