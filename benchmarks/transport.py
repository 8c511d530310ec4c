"""Pack a run folder into small files that can be moved one by one, and unpack it again.

    python benchmarks/transport.py pack runs/RUN parts/          # parts/RUN.000, ..., RUN.json
    python benchmarks/transport.py unpack parts/ runs/           # runs/RUN, checked

The manifest has the SHA-256 of every file of the run and of every part. ``unpack`` writes into a
temporary folder and renames it only after every checksum agrees, so a part that is missing or
damaged never leaves a run that looks whole. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

PART_BYTES = 15 * 2**20


def pack(run: Path, out: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write the parts and the manifest of ``run`` into ``out``; return them."""
    if not (run / "run.json").is_file():
        raise ValueError(f"{run} is not a run folder: it has no run.json")
    files = sorted(path for path in run.rglob("*") if path.is_file())
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for path in files:
            tar.add(path, arcname=path.relative_to(run).as_posix())
    content = stream.getvalue()
    out.mkdir(parents=True, exist_ok=True)
    parts = []
    for number, start in enumerate(range(0, len(content), part_bytes)):
        part = out / f"{run.name}.{number:03d}"
        part.write_bytes(content[start : start + part_bytes])
        parts.append(part)
    manifest = {
        "run": run.name,
        "files": {path.relative_to(run).as_posix(): sha256(path) for path in files},
        "parts": {part.name: sha256(part) for part in parts},
    }
    where = out / f"{run.name}.json"
    where.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    return [*parts, where]


def unpack(parts: Path, out: Path) -> list[Path]:
    """Unpack every run whose manifest lies in ``parts``; return their folders."""
    manifests = sorted(parts.glob("*.json"))
    if not manifests:
        raise ValueError(f"{parts} has no manifest (*.json): pack writes one beside its parts")
    return [_unpack(json.loads(path.read_text(encoding="utf-8")), parts, out) for path in manifests]


def _unpack(manifest: dict[str, dict[str, str]], parts: Path, out: Path) -> Path:
    target = out / Path(str(manifest["run"])).name
    if target.exists():
        raise ValueError(f"{target} exists: move it away, or choose another folder")
    content = b""
    for name, digest in manifest["parts"].items():
        part = parts / Path(name).name
        if not part.is_file() or sha256(part) != digest:
            raise ValueError(f"{part} is missing or damaged: move it again")
        content += part.read_bytes()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".unpacking-") as temporary:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            tar.extractall(temporary, filter="data")
        for name, digest in manifest["files"].items():
            if sha256(Path(temporary) / name) != digest:
                raise ValueError(f"{name} of {target.name} does not have its checksum")
        shutil.copytree(temporary, f"{target}.partial", dirs_exist_ok=True)
    os.replace(f"{target}.partial", target)
    return target


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    try:
        done = {"pack": pack, "unpack": unpack}[args.action](args.source, args.out)
    except ValueError as error:
        raise SystemExit(f"transport: {error}") from None
    for path in done:
        print(path)


if __name__ == "__main__":
    main()
