"""Where a figure comes from: versions, hardware, commit, date and command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

__all__ = ["provenance"]


def provenance() -> dict[str, object]:
    """Where a figure comes from: versions, hardware, commit, date, command."""
    hardware = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        hardware = torch.cuda.get_device_name()
    try:
        ours = version("alignmixup")
    except PackageNotFoundError:  # run from a source tree that is not installed
        ours = "source"
    python = platform.python_version()
    return {
        "version": f"alignmixup {ours}, torch {torch.__version__}, Python {python}",
        "hardware": hardware,
        "commit": os.environ.get("ALIGNMIXUP_COMMIT") or _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
    }


def _commit() -> str:
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):  # an installed package is not in a checkout
        return ""
    return done.stdout.strip()


def _command() -> str:
    """The command line that is being run; nothing where we are a library in another program."""
    program = Path(sys.argv[0])
    is_ours = program.name == "alignmixup" or program.parent.name == "cli"
    return shlex.join(["alignmixup", *sys.argv[1:]]) if is_ours else ""
