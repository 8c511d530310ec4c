"""Checkpoints: one safetensors file, replaced atomically; loading it runs no code.

It holds the weights (``model.*``), their average (``ema.*``) and the state of the mixer
(``mixer.*``) where there is one, the buffers of the optimizer (``optimizer.*`` and
``mixer_optimizer.*``), the states of the random generators (``rng.*``) and, as JSON in its header,
the position in training. A process killed at any instant leaves either the old file or the new one.
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

from alignmixup.device import to_host

CHECKPOINT = "checkpoint.safetensors"

# The types of networks, optimizers and generators, by their names in the format.
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

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that are evaluated: their average where there is one."""
        return self.part("ema") or self.part("model")


class CheckpointWriter:
    """Writes checkpoints in the background; the training loop waits only for the previous one.

    ``save`` copies everything, tensors on their own device, so training may continue to change it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        self.wait()
        facts = json.dumps(checkpoint.facts)  # now: they may change like the tensors
        runs = _joined(checkpoint.tensors)
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
        if self.path.exists():
            kept = (
                f"the last good checkpoint is {self.path} (epoch {read_facts(self.path)['epoch']})"
            )
        return f"{kept}. Try a lower lr, warmup_epochs or clip_norm"

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
    """Concatenate the tensors on their device, one tensor per type, in row-major order.

    One copy to the host per type: a copy per tensor is hundreds of waits for the device, which
    delay the launches of the next steps.
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
    """Copy to the host, from a GPU on a separate stream: on the default one, training would wait.

    ``ready`` is the event after which the runs are complete.
    """
    if ready is None:
        return runs
    device = next(run.values.device for run in runs if run.values.is_cuda)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        ready.wait()
        host = [_Run(to_host(run.values), run.shapes) for run in runs]
    stream.synchronize()
    return host


def _write_safetensors(file: BinaryIO, runs: list[_Run], metadata: Mapping[str, str]) -> None:
    """Write runs on the CPU: length of the header, header in JSON, then their bytes in order.

    The writer of the safetensors library holds the GIL while it copies and writes, and training
    stops meanwhile; a plain ``write`` releases it.
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
    """Read a checkpoint into CPU memory; raises a ``ValueError`` for a damaged file."""
    return _read(path, tensors=True)


def read_facts(path: Path) -> Mapping[str, Any]:
    """Read only the facts of a checkpoint, from its header."""
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
            f"{path} is damaged or no checkpoint of alignmixup ({error}): restore it, or start the "
            "run in a new folder"
        ) from None


def load_weights(net: nn.Module, path: Path) -> Mapping[str, object]:
    """Load the weights of a checkpoint, averaged if it has EMA, and return its facts."""
    checkpoint = load_checkpoint(path)
    load_state(net, checkpoint.weights(), path)
    return checkpoint.facts


def load_state(net: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Load weights into ``net``; ``path`` is their file, for the error message."""
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{path} holds the weights of another network: {error}") from None


def optimizer_tensors(
    net: nn.Module, optimizer: torch.optim.Optimizer, part: str = "optimizer"
) -> dict[str, Tensor]:
    """Return the optimizer's tensors of the parameters of ``net``, under their names."""
    names: dict[Tensor, str] = {p: name for name, p in net.named_parameters()}
    return {
        f"{part}.{key}.{names[parameter]}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and parameter in names
    }


def load_optimizer(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint: Checkpoint,
    part: str = "optimizer",
) -> None:
    """Restore what ``optimizer_tensors`` returned."""
    parameters = dict(net.named_parameters())
    # Adam's count of steps stays on the CPU unless the update runs on the GPU as a whole.
    is_on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    for name, value in checkpoint.part(part).items():
        key, parameter = name.split(".", 1)
        owner = parameters[parameter]
        # A buffer has the memory layout of its parameter.
        like = owner if value.shape == owner.shape else value
        device = owner.device if key != "step" or is_on_device else value.device
        buffer = torch.empty_like(like, dtype=value.dtype, device=device)
        optimizer.state[owner][key] = buffer.copy_(value)
