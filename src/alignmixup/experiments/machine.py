"""What this machine can do: versions, GPUs, compilers, extras, data sets and disk space.

The record is for a person (``alignmixup doctor``) and, as JSON, for a bug report. It names no user,
host or environment variable; folders are those that were named.
"""

from __future__ import annotations

import importlib
import platform
import re
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import torch

from alignmixup import datasets
from alignmixup.datasets.loading.decode import own_cores
from alignmixup.datasets.loading.layout import data_root
from alignmixup.device import compute_for, list_gpus, pick_device
from alignmixup.experiments.provenance import package_version
from alignmixup.training.settings import TrainSettings

# Extras for those who work on the package itself.
_OURS = {"test", "docs", "dev"}


@dataclass(frozen=True)
class Extra:
    """An extra: the versions of the packages it needs (None: missing), and what does not import."""

    packages: dict[str, str | None]
    broken: str | None

    @property
    def missing(self) -> list[str]:
        return [name for name, found in self.packages.items() if found is None]


@dataclass(frozen=True)
class Machine:
    """The facts of a machine, as ``alignmixup doctor`` shows them."""

    alignmixup: str
    python: str
    platform: str
    cores: int
    threads: int
    torch: str
    cuda: str | None
    gpus: list[dict[str, object]]
    triton: str | None
    compiler: str | None
    training: str
    extras: dict[str, Extra]
    data_root: str
    data: dict[str, str | None]
    run_folder: str
    disk_free_gib: float


def inspect_machine(root: Path | None = None, out: Path = Path("runs")) -> Machine:
    """Find out what this machine can do.

    Data sets are looked for in ``root``, free disk space in ``out``, which need not exist.
    """
    there = next(folder for folder in (out.resolve(), *out.resolve().parents) if folder.exists())
    data = datasets.locate(root)
    return Machine(
        alignmixup=package_version("alignmixup") or "source",
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cores=own_cores(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        gpus=[asdict(gpu) for gpu in list_gpus()],
        triton=package_version("triton"),
        compiler=next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None),
        training=str(compute_for(TrainSettings(), pick_device("auto"))),
        extras=_extras(),
        data_root=str(data_root(root)),
        data={name: None if path is None else str(path) for name, path in data.items()},
        run_folder=str(out),
        disk_free_gib=round(shutil.disk_usage(there).free / 2**30, 1),
    )


def _extras() -> dict[str, Extra]:
    """Read the extras and their packages from the installed metadata."""
    try:
        lines = requires("alignmixup") or []
    except PackageNotFoundError:  # run from a source tree that is not installed
        return {}
    packages: dict[str, dict[str, str | None]] = {}
    for line in lines:
        found = re.match(r"([\w.-]+).*\bextra == ['\"]([\w-]+)", line)
        if found is not None and found[2] not in _OURS:
            packages.setdefault(found[2], {})[found[1]] = package_version(found[1])
    return {name: Extra(needed, _broken(needed)) for name, needed in sorted(packages.items())}


def _broken(packages: dict[str, str | None]) -> str | None:
    """Say why torchvision, whose builds belong to one build of torch, does not import."""
    if packages.get("torchvision"):
        try:
            importlib.import_module("torchvision")
        except (ImportError, RuntimeError) as error:
            return f"torchvision does not import: {str(error).splitlines()[0]}"
    return None
