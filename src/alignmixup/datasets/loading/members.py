r"""Images inside tar files, named like files: by a path that a file system cannot have.

    SHARD \0 NAME \0 OFFSET \0 SIZE \0 CRC      the bytes at OFFSET of SHARD; CRC-32 in hex, or "-"

A member is read by itself, with one seek: no order of reading is better than another.
"""

from __future__ import annotations

import os
import zlib
from typing import NamedTuple

SEPARATOR = "\0"
UNKNOWN = "-"  # a CRC-32; not empty, as numpy drops a separator at the end of bytes


class Member(NamedTuple):
    """Where an image is in a tar file."""

    shard: str
    name: str
    offset: int
    size: int
    crc: str = UNKNOWN

    @property
    def path(self) -> str:
        """The name of the member in the list of a ``FileSet``."""
        return SEPARATOR.join(map(str, self))

    @classmethod
    def of(cls, path: str) -> Member | None:
        """Read a path; None for one of a file."""
        if SEPARATOR not in path:
            return None
        shard, name, offset, size, crc = path.split(SEPARATOR)
        return cls(shard, name, int(offset), int(size), crc)

    def __str__(self) -> str:
        return f"{self.shard}: {self.name}"

    def read(self) -> bytes:
        """Return its bytes.

        Raises:
            FileNotFoundError: The shard is missing.
            ValueError: It is cut short, or its bytes are not those that were written.
        """
        try:
            with open(self.shard, "rb") as file:
                length = os.fstat(file.fileno()).st_size
                if self.offset + self.size > length:
                    raise ValueError(f"{self.shard} is cut short at {length} bytes: write it again")
                file.seek(self.offset)
                data = file.read(self.size)
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.shard} is missing") from None
        if self.crc != UNKNOWN and checksum(data) != self.crc:
            raise ValueError(f"{self} is damaged (its checksum differs): write the shard again")
        return data


def checksum(data: bytes) -> str:
    """The CRC-32 of these bytes, in hex."""
    return f"{zlib.crc32(data):08x}"


def shard_of(path: str) -> str:
    """The shard that a member is in; of a file its folder and name."""
    return path.partition(SEPARATOR)[0]
