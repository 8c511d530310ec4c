"""What all tests share: threads, seeds, a deterministic hypothesis, shape checks, the gpu marker,
registries restored after each test, and fixtures of several packages.

The shapes in the signatures of ``alignmixup.ops`` and ``alignmixup.mixers`` are checked while the
tests of these packages run (and nowhere else). A test that is about bad input, or that lets
torch.compile trace the code, carries the marker ``unchecked_shapes``: there the check would answer
first, or stand in the way of the tracer.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import jaxtyping
import pytest
import torch
import torch.distributed as dist

from kept_registries import kept_registries
from seeds import TEST_SEED, move_seeds, seed_everywhere

if TYPE_CHECKING:
    from alignmixup.contracts import ImageSet

PACKAGE = Path(__file__).parents[1] / "src" / "alignmixup"
CHECKED_PACKAGES = ("ops", "mixers")

# A module whose source holds one of these words is not checked.
LEFT_OUT = {
    "import triton": "a kernel's signature is not Python's",
    "import Self": "beartype takes Self only where it decorates the whole class; the hook does not",
    "custom_op": "torch reads the operator's schema from a signature that the check has wrapped",
    "@contextmanager": "torch.compile does not inline a context manager that is wrapped",
}

CONFIG = torch._dynamo.config
RECOMPILE_LIMIT = "recompile_limit" if hasattr(CONFIG, "recompile_limit") else "cache_size_limit"

TORCH_WARNINGS = (
    ".torch.jit.script_method. is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    r"\s*Online softmax is disabled on the fly",
    "TensorFloat32 tensor cores for float32 matrix multiplication",
)


def checked_modules() -> list[str]:
    """The modules of the checked packages that state shapes, where a check of them is possible."""
    names = []
    for package in CHECKED_PACKAGES:
        for path in sorted((PACKAGE / package).glob("*.py")):
            source = path.read_text()
            if "jaxtyping" in source and not any(word in source for word in LEFT_OUT):
                names.append(f"alignmixup.{package}.{path.stem}")
    return names


# Before anything imports these packages. The check is off until a test of theirs runs.
jaxtyping.install_import_hook(checked_modules(), "beartype.beartype")
jaxtyping.config.update("jaxtyping_disable", True)

# The tensors here are tiny: two workers on two cores beat one worker with two threads.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

# A shell that starts `make test &` has Ctrl-C ignored there, and in every process that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

move_seeds()
hypothesis.settings.register_profile(
    "repeatable", deadline=None, derandomize=not TEST_SEED, database=None, max_examples=25
)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        # Warnings of torch 2.11 about its own compiler, not about our code.
        marks = [pytest.mark.filterwarnings(f"ignore:{message}") for message in TORCH_WARNINGS]
    else:
        marks = [pytest.mark.skip(reason="needs a CUDA device")]
    for item in items:
        if item.get_closest_marker("gpu"):
            for mark in marks:
                item.add_marker(mark)


def pytest_collection_finish() -> None:
    """Leave what is alive now, a million objects of modules and tests, out of later collections."""
    draw_named_shapes_once()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def draw_named_shapes_once() -> None:
    """Keep the sets that runs know by the name "shapes"; each run gets a copy of its own."""
    module = importlib.import_module("alignmixup.datasets.shapes")
    draw, drawn = module.shapes, functools.cache(module.shapes)

    def shapes(split: str, *args: int, **settings: int) -> ImageSet:
        if args or settings or split not in module.DEFAULT_COUNTS:
            return draw(split, *args, **settings)
        kept = drawn(split, module.DEFAULT_COUNTS[split])
        return dataclasses.replace(kept, images=kept.images.clone(), labels=kept.labels.clone())

    module.shapes = shapes


def pytest_unconfigure(config: pytest.Config) -> None:
    """Where this process ends as usual, let it free its objects; pytest collects them first."""
    if not hasattr(config, "workerinput"):
        gc.unfreeze()


@pytest.fixture(autouse=True)
def _forget_plugins() -> Iterator[None]:
    """What a test registers or imports as a plugin is unknown to the next test."""
    with kept_registries():
        yield


@pytest.fixture
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data set with the name "shapes" has 64 images to train with and 40 to test."""
    module = importlib.import_module("alignmixup.datasets.shapes")
    monkeypatch.setattr(module, "DEFAULT_COUNTS", {"train": 64, "test": 40})


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a step fuses is traced whole, or fails, and runs without generated code."""
    trace = functools.partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr("alignmixup.fusion._compiled", {})
    monkeypatch.setattr(torch, "compile", trace)
    torch.compiler.reset()
    # The check of shapes, though it is off, is one function around all of ours.
    with torch._dynamo.config.patch(**{RECOMPILE_LIMIT: 99}):
        yield


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """A group of this process alone. It ends after the wrapped networks of the tests.

    A reducer that outlives its group waits for a thread of the group that may wait for the GIL.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Give torch's own generator the same state before every test, in whatever order they run."""
    seed_everywhere(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    package = item.path.relative_to(Path(__file__).parent).parts[0]
    is_checked = package in CHECKED_PACKAGES and not item.get_closest_marker("unchecked_shapes")
    jaxtyping.config.update("jaxtyping_disable", not is_checked)
    try:
        return (yield)
    finally:
        jaxtyping.config.update("jaxtyping_disable", True)
