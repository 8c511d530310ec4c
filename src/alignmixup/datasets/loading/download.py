"""Downloads that resume and are verified, and safe unpacking of archives.

A download is written to ``NAME.part`` and renamed when its checksum is right. An archive is
unpacked into a temporary folder and moved into place when complete; one with an absolute path, a
``..``, a link or a device raises, and nothing of it is kept.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import re
import shutil
import stat
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from alignmixup.files import make_folder

Progress = Callable[[int, int | None], None]
CHUNK = 1 << 20
TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Archive:
    """A file to download: its URL, its checksum ("sha256:..."), and the folder it unpacks to."""

    url: str
    checksum: str
    folder: str

    @property
    def filename(self) -> str:
        return self.url.rsplit("/", 1)[-1]


def download(url: str, target: Path, checksum: str, on_progress: Progress | None = None) -> Path:
    """Download ``url`` to ``target``; ``on_progress`` gets the bytes done and the total, if known.

    An existing file with the right checksum is not downloaded again. A broken connection or a full
    disk raises an ``OSError``; the next call resumes from ``.part``.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"cannot download {url!r}: give an http:// or https:// address")
    algorithm, _, expected = checksum.partition(":")
    if target.is_file() and _digest(target, algorithm) == expected:
        return target
    part = target.with_name(target.name + ".part")
    make_folder(target.parent)
    try:
        _transfer(url, part, on_progress)
    except (OSError, http.client.HTTPException, ValueError) as error:  # the last: a bad address
        raise OSError(_explain(error, url, part)) from error
    found = _digest(part, algorithm)
    if found != expected:
        part.unlink()
        raise ValueError(
            f"{url} has the {algorithm} {found}, not {expected}: it is damaged or another file; it "
            "was removed, fetch again"
        )
    os.replace(part, target)
    return target


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _transfer(url: str, part: Path, on_progress: Progress | None) -> None:
    done = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "alignmixup"} | ({"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(  # the scheme was checked by download()
            urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS
        )
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and done:  # the file is complete: check it
            return
        raise
    with response:
        if response.status != 206:
            done = 0  # the server sends the whole file
        elif not (response.headers["Content-Range"] or "").startswith(f"bytes {done}-"):
            raise OSError("the server sent another part of the file than requested")
        _copy(response, part, done, on_progress)


def _copy(response: Any, part: Path, done: int, on_progress: Progress | None) -> None:
    length = response.headers["Content-Length"]
    total = done + int(length) if length is not None else None
    with part.open("ab" if done else "wb") as file:
        while chunk := response.read(CHUNK):
            file.write(chunk)
            done += len(chunk)
            if on_progress is not None:
                on_progress(done, total)
    if total is not None and done < total:
        raise OSError(f"the connection closed after {done} of {total} bytes")


def _explain(error: Exception, url: str, part: Path) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        reason = f"the disk of {part.parent} is full"
    elif isinstance(error, urllib.error.HTTPError):
        reason = f"the server answered {error.code} {error.reason}"
    elif isinstance(error, urllib.error.URLError):
        reason = str(error.reason)
    else:
        reason = str(error) or type(error).__name__
    kept = part.stat().st_size if part.exists() else 0
    remedy = f"; {kept} bytes are kept in {part}, fetch again to resume" if kept else ""
    return f"could not fetch {url}: {reason}{remedy}"


def unpack(archive: Path, destination: Path) -> None:
    """Unpack a .zip or .tar.* into ``destination``, replacing existing files."""
    destination.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".unpack-", dir=destination))
    try:
        if zipfile.is_zipfile(archive):
            _unpack_zip(archive, staging)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(staging, filter=partial(_safe_tar_member, archive))
        _move_into(staging, destination)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{archive} is damaged ({error}): delete it and fetch again") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(
                f"the disk of {destination} is full: {archive} was not unpacked"
            ) from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _unpack_zip(archive: Path, staging: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        members = file.infolist()
        for member in members:
            mode = member.external_attr >> 16  # the Unix mode; 0 if the archive has none
            kind = stat.S_IFMT(mode)
            _check_member(archive, member.filename, kind in (0, stat.S_IFREG, stat.S_IFDIR))
        for member in members:
            file.extract(member, staging)


def _safe_tar_member(archive: Path, member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    _check_member(archive, member.name, member.isreg() or member.isdir())
    return tarfile.data_filter(member, path)


def _check_member(archive: Path, name: str, is_plain: bool) -> None:
    is_outside = name.startswith("/") or ".." in re.split(r"[/\\]", name)
    if is_outside or "\\" in name or re.match(r"[A-Za-z]:", name) or not is_plain:
        why = "is a link or a device" if not is_plain else "is outside the folder"
        raise ValueError(f"{archive} is unsafe: its member {name!r} {why}; nothing was unpacked")


def _move_into(staging: Path, destination: Path) -> None:
    """Move a tree into place: new folders as a whole, into existing ones file by file."""
    for entry in sorted(staging.iterdir()):
        target = destination / entry.name
        if entry.is_dir() and target.is_dir():
            _move_into(entry, target)
        else:
            os.replace(entry, target)
