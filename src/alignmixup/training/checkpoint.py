"""Checkpoints: one safetensors file, replaced atomically, and the one before it.

It holds the weights (``model.*``), their average (``ema.*``) and the state of the mixer
(``mixer.*``) where there is one, the buffers of the optimizer (``optimizer.*`` and
``mixer_optimizer.*``), the states of the random generators (``rng.*``) and, as JSON in its header,
the position in training. A process killed at any instant leaves either the old file or the new one.
Both have a checksum: a file that is damaged later is not used, but the one before it.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from alignmixup.checking import check_kind
from alignmixup.device import to_host
from alignmixup.training.tensor_file import CHECKSUM, Run, joined, read_tensors, write_tensors

V = TypeVar("V")

CHECKPOINT = "checkpoint.safetensors"

# What the facts of a run must be: its position. Others have facts of their own.
POSITION: Mapping[str, Any] = {
    "epoch": int,
    "step": int,
    "seconds": float,
    "cases": list[str],
    "ledger_length": int,
}


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name and the facts beside them."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, object]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names start with ``prefix.``, without it."""
        return _part(self.tensors, prefix)

    def numbers(self, prefix: str) -> dict[str, float]:
        """Return the numbers of the optimizer whose names start with ``prefix.``, without it."""
        return _part(cast(Mapping[str, float], self.facts.get("numbers", {})), prefix)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that are evaluated: their average where there is one."""
        return self.part("ema") or self.part("model")


def _part(values: Mapping[str, V], prefix: str) -> dict[str, V]:
    start = prefix + "."
    return {k.removeprefix(start): v for k, v in values.items() if k.startswith(start)}


class CheckpointWriter:
    """Writes checkpoints in the background; the training loop waits only for the previous one.

    ``save`` copies everything, tensors on their own device, so training may continue to change it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._is_whole: bool | None = None  # the file there; None: not looked at yet

    def save(self, checkpoint: Checkpoint) -> None:
        self.wait()
        facts = json.dumps(checkpoint.facts)  # now: they may change like the tensors
        runs = joined(checkpoint.tensors)
        ready = None
        if any(run.values.is_cuda for run in runs):
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        self._pending = self._thread.submit(self._write, runs, facts, ready)

    def wait(self) -> None:
        """Wait for the last write and raise its error, if any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def last_good(self) -> str:
        """Return what a run that has diverged can be resumed from, for its message."""
        self.wait()
        kept = "there is no checkpoint yet"
        if has_checkpoint(self.path):
            epoch = read_facts(self.path, POSITION)["epoch"]
            kept = f"the last good checkpoint is {self.path} (epoch {epoch})"
        return f"{kept}. Try a lower lr, warmup_epochs or clip_norm"

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, runs: list[Run], facts: str, ready: torch.cuda.Event | None) -> None:
        partial = self.path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                write_tensors(file, _on_cpu(runs, ready), {"facts": facts})
            self._keep()
            os.replace(partial, self.path)
            self._is_whole = True
        except OSError as error:
            with suppress(OSError):  # of a read-only folder
                partial.unlink(missing_ok=True)
            size = sum(run.values.nbytes for run in runs)
            kept = has_checkpoint(self.path)
            before = "the one before it is intact" if kept else "there is none yet"
            raise OSError(
                f"cannot write the checkpoint {self.path} ({size / 1e6:.0f} MB): "
                f"{error.strerror}; {before}"
            ) from error

    def _keep(self) -> None:
        """Make the file there the previous one, unless it is damaged.

        With a second name for it there is a whole file under the first one at every instant. Where
        a file can have only one name, it is the previous one for an instant.
        """
        if self._is_whole is None:
            self._is_whole = _is_whole(self.path)
        if not self._is_whole:
            return
        before = previous(self.path)
        before.unlink(missing_ok=True)
        try:
            os.link(self.path, before)
        except OSError:
            os.replace(self.path, before)


def _on_cpu(runs: list[Run], ready: torch.cuda.Event | None) -> list[Run]:
    """Copy to the host, from a GPU on a separate stream: on the default one, training would wait.

    ``ready`` is the event after which the runs are complete.
    """
    if ready is None:
        return runs
    device = next(run.values.device for run in runs if run.values.is_cuda)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        ready.wait()
        host = [Run(to_host(run.values), run.shapes) for run in runs]
    stream.synchronize()
    return host


def previous(path: Path) -> Path:
    """Return the file that holds the checkpoint before ``path``."""
    return path.with_suffix(f".previous{path.suffix}")


def has_checkpoint(path: Path) -> bool:
    """Whether ``load_checkpoint`` finds a file: this one or the one before it."""
    return path.exists() or previous(path).exists()


def remove_checkpoint(path: Path) -> None:
    """Delete the checkpoint and the one before it."""
    for file in (path, previous(path)):
        file.unlink(missing_ok=True)


def load_checkpoint(path: Path, facts: Mapping[str, Any] | None = None) -> Checkpoint:
    """Read a checkpoint into CPU memory; where it is damaged or missing, the one before it.

    Args:
        path: File of the checkpoint.
        facts: The facts it must have, with their types.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is damaged, and there is no previous one, or that is damaged, too.
    """
    return _read(path, facts or {}, tensors=True)


def read_facts(path: Path, facts: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Read only the facts that ``load_checkpoint`` would return."""
    return _read(path, facts or {}, tensors=False).facts


def _read(path: Path, facts: Mapping[str, Any], *, tensors: bool) -> Checkpoint:
    before = previous(path)
    try:
        checkpoint, is_checked = _read_file(path, facts, tensors)
        if not is_checked and before.exists() and _is_whole(before, checked=True):
            # A version that writes no checksum keeps no previous file.
            raise ValueError(_damage(path, "its checksum is missing"))
        return checkpoint
    except (OSError, ValueError) as error:
        if not before.exists():
            raise _with_remedy(error) from None
        try:
            checkpoint, _ = _read_file(before, facts, tensors)
        except (OSError, ValueError):
            also = ValueError(f"{error}; so is the one before it, {before.name}")
            raise _with_remedy(also) from None
        warnings.warn(f"{error}: the one before it is used, {before.name}", stacklevel=4)
        return checkpoint


def _read_file(path: Path, facts: Mapping[str, Any], tensors: bool) -> tuple[Checkpoint, bool]:
    """Read this file, and whether it has a checksum."""
    try:
        file = read_tensors(path, tensors=tensors)
        if file.metadata.keys() - {CHECKSUM} != {"facts"}:
            raise ValueError(f"its header has the keys {sorted(file.metadata)}")
        found = json.loads(file.metadata["facts"])
        _check_facts(found, facts)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    except ValueError as error:
        raise ValueError(_damage(path, error)) from None
    return Checkpoint(file.tensors, found), file.is_checked


def _damage(path: Path, why: object) -> str:
    return f"{path} is damaged or no checkpoint of alignmixup ({why})"


def _with_remedy(error: OSError | ValueError) -> OSError | ValueError:
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{error}: is this the folder of a run?")
    if isinstance(error, OSError):
        return error
    return ValueError(f"{error}: restore it, or start the run in a new folder")


def _check_facts(facts: object, kinds: Mapping[str, Any]) -> None:
    if not isinstance(facts, dict):
        raise ValueError(f"its facts must be an object, got {facts!r:.50}")
    for name, kind in kinds.items():
        if name not in facts:
            raise ValueError(f"it has no {name!r}")
        value = facts[name]
        check_kind(name, value, kind)
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {value}")


def _is_whole(path: Path, *, checked: bool = False) -> bool:
    """Whether the file can be read, and with ``checked`` whether it has a checksum."""
    try:
        _, is_checked = _read_file(path, {}, tensors=False)
    except (OSError, ValueError):
        return False
    return is_checked or not checked


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Turn errors about what a checkpoint holds into one that names its file."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (LookupError, TypeError, RuntimeError) as error:
        raise _with_remedy(ValueError(_damage(path, error))) from None


def load_weights(
    net: nn.Module, path: Path, facts: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Load the weights of a checkpoint, averaged if it has EMA, and return its facts."""
    checkpoint = load_checkpoint(path, facts)
    load_state(net, checkpoint.weights(), path)
    return checkpoint.facts


def load_state(net: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Load weights into ``net``; ``path`` is their file, for the error message."""
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{path} holds the weights of another network: {error}") from None
