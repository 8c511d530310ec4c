"""The kernel of 33 to 208 positions as Triton compiles it for a GPU, emulated on a CPU.

    python tests/ops/test_held_compiled.py FILE

replaces the costs of cases in FILE by plans and numbers of iterations. A process of its own
compiles: the kernels of this one may be interpreted. The interpreter sees no mistake of the
compiler, which once did not carry the second name of a variable through a loop, and no missing
barrier.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ptx_emulator import Program
from torch import Tensor

from alignmixup.ops import _reference
from alignmixup.ops.backend import NO_COOPERATION

EPS = 0.1


class Case(NamedTuple):
    n: int
    m: int
    num_iters: int
    tol: float | None = None
    parts: int = 1
    tiling: tuple[int, int, bool] = (4, 8, False)  # fields of HeldTiling

    def costs(self) -> Tensor:
        """Costs [parts, b, n, m] of three sizes; scalings of the largest are absorbed often."""
        rng = torch.Generator().manual_seed(0)
        costs = torch.rand(self.parts, 3, self.n, self.m, generator=rng)
        return costs * (torch.tensor([0.3, 3.0, 1e3]) / self.parts)[:, None, None]


QUICK = {
    "3 iterations": Case(20, 20, 3),
    "40 iterations": Case(20, 20, 40),
    "shared sums, tol, two parts": Case(20, 33, 40, tol=1e-2, parts=2, tiling=(4, 8, True)),
}
SLOW = {
    "no iteration": Case(20, 20, 0),
    "1 iteration": Case(20, 20, 1),
    "tol": Case(20, 20, 40, tol=1e-2),
    "shared sums": Case(20, 20, 40, tiling=(4, 8, True)),
    "odd": Case(33, 33, 40),
    "odd, tol": Case(33, 33, 40, tol=1e-2),
    "odd, no iteration": Case(17, 33, 0),
    "more columns than threads": Case(20, 130, 3),
    "100 positions": Case(100, 100, 40),
    "100 positions, shared sums": Case(100, 100, 40, tiling=(8, 16, True)),
    "196 positions": Case(196, 196, 40, tiling=(8, 32, False)),
    "196 positions, shared sums": Case(196, 196, 40, tiling=(8, 32, True)),
    "196 positions, tol": Case(196, 196, 40, tol=1e-2, tiling=(8, 32, True)),
    "208 positions, few warps, shared sums": Case(208, 208, 3, tiling=(4, 8, True)),
    "odd, shared sums": Case(203, 201, 3, tiling=(8, 32, True)),
}
CASES = {**QUICK, **SLOW}
Results = dict[str, tuple[Tensor, Tensor]]  # plan and numbers of iterations by case


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Results]:
    pytest.importorskip("triton")
    if NO_COOPERATION:  # and Triton 3.2 describes a kernel in other words
        pytest.skip(NO_COOPERATION)

    @functools.cache
    def emulated(are_slow: bool) -> Results:
        folder = tmp_path_factory.mktemp("compiled")
        cases = SLOW if are_slow else QUICK
        torch.save({name: case.costs() for name, case in cases.items()}, folder / "cases.pt")
        environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
        words = [sys.executable, __file__, folder / "cases.pt"]
        run = subprocess.run(words, capture_output=True, text=True, timeout=600, env=environment)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
        return torch.load(folder / "cases.pt")

    return emulated


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_plans(name: str, results: Callable[[bool], Results]) -> None:
    """No further from float64 than twice what the float32 reference is, or a few roundings."""
    plan, used = results(name in SLOW)[name]
    case = CASES[name]
    cost, settings = case.costs().sum(0), (EPS, case.num_iters, case.tol, "columns")
    exact, exact_used = _reference.solve(cost.double(), *settings)
    plain, _ = _reference.solve(cost, *settings)
    assert used.tolist() == exact_used.tolist()
    error, limit = ((x - exact).abs().max().item() * case.m for x in (plan, plain))
    assert error <= 2 * limit + 3e-6


# ---- in the process that compiles ----------------------------------------------------------------


def emulate_launch(
    kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any
) -> None:
    """Compile the kernel for a GPU, and run its programs one after another on CPU tensors."""
    from compile_kernels import described, for_gpu

    binary = for_gpu(kernel, *described(kernel, args, options))
    program = Program(binary.asm["ptx"], kernel.fn.__name__, 32 * options["num_warps"])
    tensors = {x.data_ptr(): x.view(torch.int32).flatten() for x in args if isinstance(x, Tensor)}
    pieces = [np.pad(x.numpy().view(np.uint32), (0, -len(x) % 4)) for x in tensors.values()]
    words = np.concatenate(pieces)
    starts = np.cumsum([0, *map(len, pieces)])
    addresses = {pointer: 4 * int(start) for pointer, start in zip(tensors, starts, strict=False)}
    params = [addresses[x.data_ptr()] if isinstance(x, Tensor) else x for x in args]
    for number in range(grid[0]):
        program.run(params, words, number)
    for x, start in zip(tensors.values(), starts, strict=False):
        x.copy_(torch.from_numpy(words[start : start + len(x)].view(np.int32)))


def main(path: str) -> None:
    from triton.runtime.jit import JITFunction

    from alignmixup.ops.size_classes import HeldTiling
    from alignmixup.ops.triton import sinkhorn_held

    JITFunction.run = emulate_launch
    results = {}
    for name, costs in torch.load(path).items():
        case = CASES[name]
        plan = costs[0] if case.parts == 1 else torch.full_like(costs[0], torch.nan)
        settings = (EPS, case.num_iters, case.tol, HeldTiling(*case.tiling))
        results[name] = plan, sinkhorn_held.solve(costs, plan, *settings)
    torch.save(results, path)


if __name__ == "__main__":
    main(sys.argv[1])
