"""Who may import whom, read from the source; and what ``import alignmixup`` must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "alignmixup"

# A package or module of alignmixup may import itself and these.
_BELOW = {
    "checking",
    "files",
    "registry",
    "contracts",
    "datasets",
    "device",
    "evaluation",
    "hooks",
    "mixers",
    "models",
    "ops",
    "outputs",
    "training",
    "wrappers",
}
MAY_IMPORT: dict[str, set[str]] = {
    "checking": set(),
    "files": set(),
    "naming": set(),
    "plugins": set(),
    "registry": {"naming", "plugins"},
    "results": set(),
    "fusion": set(),
    "losses": {"fusion"},
    "image_set": {"losses"},
    "draw": set(),
    "mixed": {"losses"},
    "contracts": {"checking", "draw", "fusion", "image_set", "losses", "mixed", "results"},
    "device": set(),
    "outputs": set(),
    "wrappers": {"outputs"},
    "hooks": {"outputs", "wrappers"},
    "ops": {"contracts", "files", "hooks", "outputs", "wrappers"},
    "mixers": {"contracts", "hooks", "ops", "outputs", "registry", "wrappers"},
    "integrations": {"contracts", "outputs", "training"},
    "models": {"checking", "registry", "contracts", "device", "hooks", "ops"},
    "datasets": {"checking", "files", "registry", "contracts", "device"},
    "training": {
        "checking",
        "files",
        "registry",
        "contracts",
        "device",
        "hooks",
        "ops",
        "wrappers",
    },
    "evaluation": _BELOW - {"evaluation"},
    "report": {"files", "registry", "contracts"},
    "recipes": {"checking", "registry", "contracts", "datasets", "mixers", "models", "training"},
    "experiments": _BELOW | {"recipes"},
    "figures": _BELOW | {"experiments", "recipes", "report"},
    "demo": _BELOW | {"experiments", "figures", "recipes", "report"},
    "cli": {
        "files",
        "registry",
        "contracts",
        "datasets",
        "demo",
        "experiments",
        "figures",
        "recipes",
        "report",
    },
    "__init__": _BELOW | {"experiments", "integrations", "recipes"},
    "__main__": {"cli"},
}

# Imported where they are needed, inside a function. Kernel files import triton at their top, and
# are themselves imported inside functions. An integration is imported by users of its library.
LAZY = {
    "altair",
    "vl_convert",
    "matplotlib",
    "triton",
    "accelerate",
    "lightning",
    "timm",
    "torchvision",
    "transformers",
    "pycocotools",
    "tensorboard",
    "trackio",
    "wandb",
    "submitit",
    "ray",
}
KERNELS = "ops.triton"

# What the contracts may stand on besides the standard library; the table has the rest.
TENSORS = {"torch", "jaxtyping", "alignmixup"}
STAND_ON = {
    **dict.fromkeys(("contracts", "image_set", "losses", "fusion"), TENSORS),
    "results": set[str](),
}


@dataclass(frozen=True)
class Import:
    """One import of a module: what it names, and whether it runs when the module is loaded."""

    target: str
    line: int
    is_eager: bool


@cache
def imports_of(source: str) -> list[Import]:
    """Every import in ``source``, also those inside functions and by ``import_module("...")``."""
    return list(_imports_of(source))


def _imports_of(source: str) -> Iterator[Import]:
    tree = ast.parse(source)
    deferred = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_typing(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        is_eager = id(node) not in deferred
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, is_eager)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield Import(f"{module}.{alias.name}", node.lineno, is_eager)
        elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from (Import(str(name), node.lineno, is_eager) for name in names)


def is_typing(node: ast.AST) -> bool:
    """Whether this is ``if TYPE_CHECKING:``, which never runs."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def called_name(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def forbidden(package: str, source: str) -> list[str]:
    """What a file of ``package`` imports against the table, as messages."""
    problems = []
    for found in imports_of(source):
        top, _, rest = found.target.partition(".")
        if top == "":
            problems.append(f"line {found.line}: relative import {found.target}")
        elif top == "alignmixup":
            target = rest.partition(".")[0]
            allowed = target == package or target in MAY_IMPORT[package]
            if not allowed:
                problems.append(f"line {found.line}: {package} must not import alignmixup.{target}")
    return problems


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def package_of(path: Path) -> str:
    return module_of(path).partition(".")[0]


FILES = sorted(PACKAGE.rglob("*.py"))


def test_the_table_knows_every_package_and_has_no_circle() -> None:
    assert {package_of(path) for path in FILES} <= MAY_IMPORT.keys()
    assert len(FILES) > 20
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        ready = {package for package, needs in MAY_IMPORT.items() if needs <= done} - done
        assert ready, f"a circle among {sorted(MAY_IMPORT.keys() - done)}"
        done |= ready


def test_packages_import_what_they_may() -> None:
    found = {path: forbidden(package_of(path), path.read_text()) for path in FILES}
    assert {path: problems for path, problems in found.items() if problems} == {}


def test_heavy_libraries_are_imported_where_they_are_needed() -> None:
    found = {path: too_early(module_of(path), path.read_text()) for path in FILES}
    assert {path: problems for path, problems in found.items() if problems} == {}


def too_early(module: str, source: str) -> list[str]:
    """What a file imports when it is loaded though it should wait, as messages."""
    is_kernel = module.startswith(KERNELS)
    problems = []
    for found in imports_of(source):
        top, _, rest = found.target.partition(".")
        is_own = (is_kernel and top == "triton") or module == f"integrations.{top}"
        is_heavy = top in LAZY and not is_own
        loads_kernel = not is_kernel and top == "alignmixup" and rest.startswith(KERNELS)
        if found.is_eager and (is_heavy or loads_kernel):
            problems.append(f"line {found.line}: {found.target}")
    return problems


def test_commands_import_what_does_the_work_when_they_run() -> None:
    """So that ``--help`` and a misspelt word are answered at once."""
    files = [path for path in FILES if package_of(path) == "cli"]
    assert len(files) > 5
    for path in files:
        eager = [
            found.target
            for found in imports_of(path.read_text())
            if found.is_eager and found.target.startswith("alignmixup.")
        ]
        assert all(target.startswith("alignmixup.cli.") for target in eager), (path.name, eager)
    packages = MAY_IMPORT["demo"] | {"demo"} - {"contracts"}
    program = "import alignmixup, sys; before = set(sys.modules); import alignmixup.cli.program"
    program += "; print(*set(sys.modules) - before)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = set(run.stdout.split())
    assert "alignmixup.cli.program" in loaded, run.stderr
    assert loaded.isdisjoint({f"alignmixup.{name}" for name in packages} | {"matplotlib", "PIL"})


@pytest.mark.parametrize("module", STAND_ON)
def test_contracts_stand_on_torch_alone_and_results_on_nothing(module: str) -> None:
    found = imports_of((PACKAGE / f"{module}.py").read_text())
    tops = {each.target.partition(".")[0] for each in found}
    assert tops - sys.stdlib_module_names <= STAND_ON[module]


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("models", "from alignmixup.mixers import AlignMixup"),
        ("models", "import alignmixup.datasets"),
        ("models", "from alignmixup import mixing"),
        ("models", "import alignmixup"),
        ("models", "from alignmixup import AlignMixup"),
        ("training", "def step():\n    from alignmixup.mixers.alignmixup import AlignMixup"),
        (
            "training",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import alignmixup.models",
        ),
        ("ops", "from importlib import import_module\nimport_module('alignmixup.mixers')"),
        ("ops", "import importlib\nimportlib.import_module('alignmixup.mixers')"),
        ("contracts", "from alignmixup.ops.sinkhorn import sinkhorn"),
        ("report", "class A:\n    import alignmixup.models"),
        ("datasets", "from . import folder"),
        ("datasets", "from ..nets import build"),
    ],
)
def test_a_forbidden_import_is_caught(package: str, source: str) -> None:
    assert len(forbidden(package, source)) == 1


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("mixers", "from alignmixup.ops.sinkhorn import sinkhorn"),
        ("mixers", "from alignmixup.ops.blend import blend"),
        ("mixers", "from alignmixup import contracts"),
        ("recipes", "import alignmixup.mixers"),
        ("models", "import torch\nfrom alignmixup_plugins import nets"),
        ("models", "'from alignmixup.mixers import AlignMixup'"),
    ],
)
def test_an_allowed_import_is_not(package: str, source: str) -> None:
    assert forbidden(package, source) == []


def test_an_eager_import_is_told_from_a_lazy_one() -> None:
    source = (
        "import torch\ntry:\n    import triton\nexcept ImportError:\n    pass\n"
        "def draw():\n    import matplotlib\n    from alignmixup.ops.triton import align\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import timm\n"
        "from alignmixup.ops.triton.sinkhorn_small import solve\n"
    )
    expected = ["line 3: triton", "line 12: alignmixup.ops.triton.sinkhorn_small.solve"]
    assert sorted(too_early("sinkhorn", source), key=len) == expected
    assert too_early("ops.triton.align", source) == []


HEAVY = {
    "triton",
    "torch._dynamo",
    "matplotlib",
    "timm",
    "torchvision",
    "torchmetrics",
    "tyro",
    "rich",
    "PIL",
}


def test_importing_the_package_loads_nothing_heavy() -> None:
    """One process for all, each import after those above it: an import of torch takes seconds."""
    steps = ["", ".contracts", ".ops", ".mixers", ".datasets", ".report.tables"]
    program = "import sys\n" + "".join(
        f"import alignmixup{s}; print(*sys.modules)\n" for s in steps
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    loaded = dict(zip(steps, (set(line.split()) for line in run.stdout.splitlines()), strict=True))
    assert "alignmixup" in loaded[""]
    assert "alignmixup.datasets.loading.stream" in loaded[".datasets"]
    for step in steps[:-1]:
        assert loaded[step].isdisjoint(HEAVY), (step, sorted(loaded[step].intersection(HEAVY)))
    assert "rich" not in loaded[".report.tables"]  # only to render
