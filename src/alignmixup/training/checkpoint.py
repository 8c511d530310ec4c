"""Checkpoints: one safetensors file, replaced atomically, so that loading runs no code.

It holds the weights (``model.*``), the optimiser's buffers (``optimizer.*``), the states of the
random generators (``rng.*``) and, as JSON in its header, how far training had come. A process
killed at any instant leaves either the old file or the new one.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

__all__ = [
    "CHECKPOINT",
    "Checkpoint",
    "CheckpointWriter",
    "load_checkpoint",
    "load_state",
    "load_weights",
    "named_state",
    "read_facts",
]

CHECKPOINT = "checkpoint.safetensors"

# What a network, an optimiser and a generator hold, as the format calls it.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name and the facts beside them."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, object]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names start with ``prefix.``, without it."""
        start = prefix + "."
        return {k.removeprefix(start): v for k, v in self.tensors.items() if k.startswith(start)}


class CheckpointWriter:
    """Writes checkpoints in the background; the training loop waits only for the one before.

    All is copied at once, the tensors on their own device, so training may go on changing it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        self.wait()
        facts = json.dumps(checkpoint.facts)  # now: what they hold may change like the tensors
        runs = _joined(checkpoint.tensors)
        ready = None
        if any(run.values.is_cuda for run in runs):
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        self._pending = self._thread.submit(self._write, runs, facts, ready)

    def wait(self) -> None:
        """Wait for the last write and raise what went wrong in it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, runs: list[_Run], facts: str, ready: torch.cuda.Event | None) -> None:
        partial = self.path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                _write_safetensors(file, _on_cpu(runs, ready), {"facts": facts})
            os.replace(partial, self.path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            size = sum(run.values.nbytes for run in runs)
            before = "the one before it is intact" if self.path.exists() else "there is none yet"
            raise OSError(
                f"cannot write the checkpoint {self.path} ({size / 1e6:.0f} MB): "
                f"{error.strerror}; {before}"
            ) from error


@dataclass(frozen=True)
class _Run:
    """Tensors of one type and device, one after another in one; their names and shapes."""

    values: Tensor
    shapes: Mapping[str, tuple[int, ...]]


def _joined(tensors: Mapping[str, Tensor]) -> list[_Run]:
    """Copy the tensors on their device, into one a type, in the order their numbers are read.

    One copy to the host a type, where each tensor had its own: hundreds of waits for the device,
    in the way of the steps that are being launched meanwhile.
    """
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            kept = ", ".join(str(dtype) for dtype in DTYPES)
            raise ValueError(f"a checkpoint cannot hold {name} of {tensor.dtype}; it holds {kept}")
        kinds.setdefault((tensor.dtype, tensor.device), {})[name] = tensor.detach()
    return [
        _Run(
            torch.cat([tensor.reshape(-1) for tensor in group.values()]),
            {name: tuple(tensor.shape) for name, tensor in group.items()},
        )
        # The widest first, so that each begins at a multiple of its own size.
        for _, group in sorted(kinds.items(), key=lambda kind: -kind[0][0].itemsize)
    ]


def _on_cpu(runs: list[_Run], ready: torch.cuda.Event | None) -> list[_Run]:
    """Copy to the host; from a GPU on a stream of its own: on the default one, training would wait.

    ``ready`` is the moment the runs are complete.
    """
    if ready is None:
        return runs
    device = next(run.values.device for run in runs if run.values.is_cuda)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        ready.wait()
        host = [_Run(_pinned(run.values), run.shapes) for run in runs]
    stream.synchronize()
    return host


def _pinned(values: Tensor) -> Tensor:
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def _write_safetensors(file: BinaryIO, runs: list[_Run], metadata: Mapping[str, str]) -> None:
    """Write runs on the CPU: length of the header, header in JSON, then their bytes in order.

    The library's own writer holds Python's lock for as long as it copies and writes, and training
    stands still meanwhile; a plain ``write`` gives the lock away.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for run in runs:
        for name, shape in run.shapes.items():
            end = offset + math.prod(shape) * run.values.itemsize
            header[name] = {
                "dtype": DTYPES[run.values.dtype],
                "shape": list(shape),
                "data_offsets": [offset, end],
            }
            offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the bytes that follow start at a multiple of eight
    file.write(struct.pack("<Q", len(text)) + text)
    for run in runs:
        file.write(run.values.view(torch.uint8).numpy().data)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint into CPU memory; a damaged file is an error that names it."""
    return _read(path, tensors=True)


def read_facts(path: Path) -> Mapping[str, Any]:
    """Read the facts of a checkpoint alone, from its header."""
    return _read(path, tensors=False).facts


def _read(path: Path, *, tensors: bool) -> Checkpoint:
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["facts"])
            names = file.keys() if tensors else []
            return Checkpoint({name: file.get_tensor(name) for name in names}, facts)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: is this the folder of a run?") from None
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged or no checkpoint of ours ({error}): restore it, or start the run "
            "in a new folder"
        ) from None


def load_weights(net: nn.Module, path: Path) -> Mapping[str, object]:
    """Load the weights of a checkpoint into ``net`` and return the facts beside them."""
    checkpoint = load_checkpoint(path)
    load_state(net, checkpoint, path)
    return checkpoint.facts


def load_state(net: nn.Module, checkpoint: Checkpoint, path: Path) -> None:
    """Load a checkpoint's weights into ``net``; ``path`` is where it was read, for the message."""
    try:
        net.load_state_dict(checkpoint.part("model"))
    except RuntimeError as error:
        raise ValueError(f"{path} holds the weights of another network: {error}") from None


def named_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's tensors under the names of the parameters they belong to."""
    names: dict[Tensor, str] = {p: name for name, p in net.named_parameters()}
    return {
        f"{key}.{names[parameter]}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
