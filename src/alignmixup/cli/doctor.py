"""The command ``doctor``: what this machine can do, as a short table or as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from alignmixup.cli.parsing import PROGRAM, WHOLE_WORDS, wrapped

if TYPE_CHECKING:
    from alignmixup.experiments.machine import Extra, Machine

LEAST_GIB = 2.0  # below it a warning: checkpoints of a sweep take a few hundred MB


@dataclass
class Doctor:
    """Show what this machine can do: Python, torch, GPU, extras, data sets, disk.

    It changes nothing and exits with 0. Lines that begin with '!' say what is
    missing and how to get it; nothing of that is needed for the demo."""

    json: bool = False
    """Print one JSON object, for a bug report."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""
    out: Path = Path("runs")
    """Folder of the runs, for the free disk space."""

    def __call__(self) -> None:
        from alignmixup.experiments.machine import inspect_machine

        machine = inspect_machine(self.data, self.out)
        if self.json:
            print(dumps(asdict(machine), indent=2))
            return
        lines = describe_machine(machine)
        width = max(len(name) for name, _ in lines) + 1
        for name, text in lines:
            print("\n".join(wrapped(f"{name:<{width}}", text, **WHOLE_WORDS)))


def describe_machine(machine: Machine) -> list[tuple[str, str]]:
    """Return the lines of the table: what, and what is found."""
    cuda = f"CUDA {machine.cuda}" if machine.cuda else "a build without CUDA"
    cores = f"{machine.cores} core{'s'[: machine.cores > 1]}, torch uses {machine.threads}"
    lines = [
        (PROGRAM, f"{machine.alignmixup}, Python {machine.python}, {machine.platform}, {cores}"),
        ("torch", f"{machine.torch}, {cuda}"),
        *_gpu_lines(machine),
        ("triton", machine.triton or "not installed; the plain torch solvers run instead"),
        ("torch.compile", _compile(machine)),
        ("training", f"{machine.training} (what 'auto' chooses)"),
    ]
    lines += [(f"[{name}]", _extra(name, extra)) for name, extra in machine.extras.items()]
    lines.append(("data", f"looked in {Path(machine.data_root).resolve()}; shapes is built in"))
    lines += [(f"  {name}", folder or _missing_data(name)) for name, folder in machine.data.items()]
    space = f"{machine.disk_free_gib:g} GiB free for {machine.run_folder}"
    return [*lines, ("disk", ("! only " if machine.disk_free_gib < LEAST_GIB else "") + space)]


def _gpu_lines(machine: Machine) -> list[tuple[str, str]]:
    if not machine.gpus and machine.cuda:
        return [("GPU", "! none that torch sees; check the driver with nvidia-smi")]
    if not machine.gpus:
        return [("GPU", "none; small runs train on the CPU, those of the paper need a GPU")]
    return [
        ("GPU", f"{gpu['name']}, capability {gpu['capability']}, {gpu['memory_gib']} GiB")
        for gpu in machine.gpus
    ]


def _compile(machine: Machine) -> str:
    if machine.gpus:
        return "on the GPU" if machine.triton else "! needs triton: pip install triton"
    if machine.compiler is None:
        return "not on the CPU: no C++ compiler found"
    return f"possible on the CPU ({machine.compiler}), off unless --train.compile"


def _extra(name: str, extra: Extra) -> str:
    if extra.missing:
        return f"! no {', '.join(extra.missing)}: pip install '{PROGRAM}[{name}]'"
    if extra.broken:
        return f"! {extra.broken}; install torch and torchvision from the same index"
    return ", ".join(f"{package} {found}" for package, found in extra.packages.items())


def _missing_data(name: str) -> str:
    from alignmixup import datasets

    if datasets.find(name).by_hand:
        return f"! not found; '{PROGRAM} data check {name}' says how to get it"
    return f"! not found: {PROGRAM} data fetch {name}"
