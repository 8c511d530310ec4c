"""A safetensors file with a checksum over all its bytes; loading it runs no code.

    length of the header | header in JSON | tensors, one after another

The checksum is the CRC-32 of the file with eight zeros in its own place, which is in the metadata
of the header. It detects what disks and networks do to a file; it is no signature.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CHECKSUM = "crc32"
ZEROS = "0" * 8
# The first bytes of the header, after its length; the checksum follows.
START = json.dumps({"__metadata__": {CHECKSUM: ""}}).encode()[:-3]
CHUNK = 1 << 20

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
class Run:
    """Tensors of one type and device, one after another in one; their names and shapes."""

    values: Tensor
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TensorFile:
    """What a file holds; ``is_checked`` says that it had a checksum, which is right."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    is_checked: bool


def joined(tensors: Mapping[str, Tensor]) -> list[Run]:
    """Concatenate the tensors on their device, one tensor per type, in row-major order.

    One copy to the host per type: a copy per tensor is hundreds of waits for the device, which
    delay the launches of the next steps.
    """
    check_tensors(tensors)
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.dtype, tensor.device), {})[name] = tensor.detach()
    return [
        Run(
            torch.cat([tensor.reshape(-1) for tensor in group.values()]),
            {name: tuple(tensor.shape) for name, tensor in group.items()},
        )
        # The widest first, so that each begins at a multiple of its own size.
        for _, group in sorted(kinds.items(), key=lambda kind: -kind[0][0].itemsize)
    ]


def check_tensors(values: Mapping[str, object]) -> None:
    """Raise for a value that a file cannot hold, such as the extra state of a module."""
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.dtype not in DTYPES:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            kept = ", ".join(str(dtype) for dtype in DTYPES)
            raise ValueError(f"a checkpoint cannot hold {name} of {kind}; it holds {kept}")


def write_tensors(file: BinaryIO, runs: list[Run], metadata: Mapping[str, str]) -> None:
    """Write runs on the CPU: length of the header, header in JSON, then their bytes in order.

    The writer of the safetensors library holds the GIL while it copies and writes, and training
    stops meanwhile; a plain ``write`` releases it, and so does the checksum.
    """
    pieces = [run.values.view(torch.uint8).numpy().data for run in runs]
    head = _header(runs, {CHECKSUM: ZEROS, **metadata})
    checksum = zlib.crc32(head)
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    file.write(_with_checksum(head, f"{checksum:08x}"))
    for piece in pieces:
        file.write(piece)


def _header(runs: list[Run], metadata: Mapping[str, str]) -> bytes:
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
    return struct.pack("<Q", len(text)) + text


def _with_checksum(head: bytes, checksum: str) -> bytes:
    """Replace the checksum in the bytes before the tensors."""
    start = 8 + len(START)
    return head[:start] + checksum.encode() + head[start + len(ZEROS) :]


def read_tensors(path: Path, *, tensors: bool = True) -> TensorFile:
    """Read a file into CPU memory; without ``tensors`` check it and read only its metadata.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ValueError: It is damaged.
    """
    while True:
        before = path.stat()
        try:
            return _read(path, tensors)
        except (SafetensorError, ValueError) as error:
            if os.path.samestat(before, path.stat()):
                raise ValueError(str(error)) from None
            # Training has replaced it meanwhile: what we have read is of two files.


def _read(path: Path, tensors: bool) -> TensorFile:
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        recorded = metadata.get(CHECKSUM)
        if recorded is not None and _checksum(path) != recorded:
            raise ValueError(f"its checksum is not {recorded}")
        found = {name: file.get_tensor(name) for name in (file.keys() if tensors else ())}
    return TensorFile(found, metadata, recorded is not None)


def _checksum(path: Path) -> str:
    """Return the checksum of the file as it is, that in its header replaced by zeros."""
    with path.open("rb") as file:
        length = file.read(8)
        head = length + file.read(struct.unpack("<Q", length)[0])
        value = zlib.crc32(_with_checksum(head, ZEROS))
        while chunk := file.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"
