"""The kernels of the size classes: interpreted here, compiled on a GPU."""

from __future__ import annotations

import functools
import inspect
import math
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import exchange_ranks
from alignmixup.ops import _absorbed, _reference, backend, size_classes
from alignmixup.ops.align import _align_mix, align_mix
from alignmixup.ops.size_classes import (
    SIZE_CLASSES,
    HeldTiling,
    RowTiling,
    SizeClass,
    channel_unit,
    num_parts,
    size_class,
)
from triton_interpreter import interpret_kernels

pytest.importorskip("triton")
interpret_kernels()

from alignmixup.ops.triton import (  # noqa: E402
    align as _triton,
    cost as _triton_cost,
    exchange,
    product as _triton_product,
    sinkhorn_held as _triton_held,
    sinkhorn_large as _triton_large,
    sinkhorn_rows as _triton_rows,
    tiles,
)
from alignmixup.ops.triton.common import LOG2_E, padded  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HELD = HeldTiling(num_warps=4, lanes=8)
SHARED = RowTiling(group=1, block=0, num_warps=4)
STREAMED = RowTiling(group=1, block=8, num_warps=4)
Tiling = HeldTiling | RowTiling
PERM = torch.tensor([2, 0, 1], device=DEVICE)
LAM = torch.tensor([0.3, 0.85, 0.6], device=DEVICE)


def random_cost(*shape: int, scale: float = 1.0) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return (scale * torch.rand(*shape, generator=rng)).to(DEVICE)


def switch_on(monkeypatch: pytest.MonkeyPatch, is_on: bool = True, **changes: object) -> None:
    classes = tuple(replace(entry, is_on=is_on, **changes) for entry in SIZE_CLASSES)
    monkeypatch.setattr(size_classes, "SIZE_CLASSES", classes)


def solve(costs: Tensor, plan: Tensor, *args: object) -> Tensor:
    *settings, tiling = args
    entry = SizeClass(max_positions=1024, rows=tiling)
    return _triton._iterate(costs, plan, *settings, entry)


def check_against_reference(cost: Tensor, plan: Tensor, num_iters: int) -> None:
    """No further from float64 than twice what the float32 reference is, or a few roundings."""
    exact, _ = _reference.solve(cost.double(), 0.1, num_iters, None, "columns")
    plain, _ = _reference.solve(cost, 0.1, num_iters, None, "columns")
    size = max(cost.shape[-2:])
    error = (plan - exact).abs().max().item() * size
    assert error <= 2 * (plain - exact).abs().max().item() * size + 3e-6


# ---- iterations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tiling", [HELD, SHARED, STREAMED])
@pytest.mark.parametrize(
    ("n", "m", "num_iters", "scale"),
    [
        *((17, 20, 1, 20.0), (20, 20, 12, 1e6), (20, 20, 0, 1e4)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((20, 20, 0, 20.0), (20, 17, 24, 20.0), (9, 140, 3, 5.0))
        ),
    ],
)
def test_plans(tiling: Tiling, n: int, m: int, num_iters: int, scale: float) -> None:
    cost = random_cost(2, n, m, scale=scale)
    plan = cost.clone()  # the plan replaces the costs
    used = solve(plan[None], plan, 0.1, num_iters, None, tiling)
    check_against_reference(cost, plan, num_iters)
    assert used.tolist() == [num_iters] * 2


@pytest.mark.parametrize("tiling", [HELD, SHARED, STREAMED])
def test_partial_sums_of_a_cost(tiling: Tiling) -> None:
    cost = random_cost(2, 18, 18, scale=9.0)
    parts = torch.stack([0.25 * cost, 0.5 * cost, 0.25 * cost])
    plan = torch.empty_like(cost)
    solve(parts, plan, 0.1, 5, None, tiling)
    check_against_reference(cost, plan, 5)
    assert torch.equal(parts[1], 0.5 * cost)


@pytest.mark.parametrize("tiling", [HELD, SHARED, STREAMED])
def test_tol_stops_each_sample_where_the_reference_stops_it(tiling: Tiling) -> None:
    cost = random_cost(4, 16, 16) * torch.tensor([0, 0.5, 3.0, 30.0], device=DEVICE)[:, None, None]
    plan = cost.clone()
    used = solve(plan[None], plan, 0.1, 15, 1e-2, tiling)
    expected, expected_used = _reference.solve(cost.double(), 0.1, 15, 1e-2, "columns")
    assert used.unique().numel() > 1
    assert torch.equal(used, expected_used)
    torch.testing.assert_close(plan.double() * 16, expected * 16, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tiling", [HELD, SHARED, STREAMED, None])
def test_tol_stops_a_sample_whose_scalings_have_just_been_absorbed(tiling: Tiling | None) -> None:
    """After iteration 28: the first is in the log domain, and 27 linear ones are safe here."""
    cost = random_cost(1, 8, 8, scale=30.0)
    errors = []
    for num_iters in (27, 28):
        exact, _ = _reference.solve(cost.double(), 0.1, num_iters, None, "columns")
        errors.append((exact.sum(2) - 1 / 8).abs().sum().item())
    tol = sum(errors) / 2
    assert errors[0] > tol > errors[1] + 1e-5
    plan = cost.clone()
    if tiling is None:
        padded_cost = torch.nn.functional.pad(cost, (0, 24))
        used = _triton_large.solve(padded_cost, plan, 0.1, 40, tol)
    else:
        used = solve(plan[None], plan, 0.1, 40, tol, tiling)
    assert used.tolist() == [28]
    torch.testing.assert_close(plan.double() * 8, exact * 8, atol=1e-5, rtol=0)


# ---- a group of programs -------------------------------------------------------------------------


def solve_by_groups(cost: Tensor, eps: float, num_iters: int, group: int) -> Tensor:
    """The cooperative algorithm in torch: each member has rows, all exchange column sums."""
    n, m = cost.shape
    shares = cost.split(-(-n // group))
    S = [(C - C.amin(1, keepdim=True)) / -eps for C in shares]
    highest = torch.stack([s.amax(0) for s in S]).amax(0)
    T = [s - highest for s in S]

    def log_step(T: list[Tensor], v: Tensor | float) -> list[Tensor]:
        T = [t - math.log(n) - (t + v).logsumexp(1, keepdim=True) for t in T]
        top = torch.stack([t.amax(0) for t in T]).amax(0)
        total = sum((t - top).exp().sum(0) for t in T)
        return [t - math.log(m) - top - total.log() for t in T]

    T = log_step(T, highest)
    remaining = num_iters - 1
    a, b = [t.new_ones(len(t), 1) for t in T], cost.new_ones(m)
    while remaining > 0:
        T = [t + x.log() + b.log() for t, x in zip(T, a, strict=True)]
        a, b = [torch.ones_like(x) for x in a], torch.ones_like(b)
        K = [t.exp() for t in T]
        steps = min(
            _absorbed._safe_steps(torch.cat([k.sum(1, keepdim=True) for k in K])), remaining
        )
        if steps == 0:
            T, remaining = log_step(T, 0.0), remaining - 1
        for _ in range(steps):
            a = [(1 / n) / (k * b).sum(1, keepdim=True) for k in K]
            b = (1 / m) / sum((k * x).sum(0) for k, x in zip(K, a, strict=True))
        remaining -= steps
    return torch.cat([x * t.exp() * b for t, x in zip(T, a, strict=True)])


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_the_model_of_a_group_agrees_with_the_reference(group: int, scale: float) -> None:
    cost = random_cost(1, 50, 40, scale=scale)
    check_against_reference(cost, solve_by_groups(cost[0], 0.1, 60, group)[None], 60)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize(
    ("group", "block", "n", "m", "num_iters", "tol", "scale"),
    [
        (2, 0, 20, 18, 12, 0.0, 20.0),
        (2, 0, 21, 18, 0, 0.0, 20.0),
        (3, 4, 20, 18, 30, 0.0, 20.0),
        (2, 4, 19, 37, 60, 1e-3, 3.0),
        (4, 0, 30, 17, 60, 0.3, 30.0),
        (2, 4, 12, 12, 10, 0.0, 1e6),
        (3, 0, 2, 17, 4, 0.0, 5.0),  # the last program has no rows
        (3, 4, 2, 17, 4, 0.0, 5.0),
    ],
)
def test_programs_in_parallel_exchange_their_sums(
    tmp_path: Path,
    group: int,
    block: int,
    n: int,
    m: int,
    num_iters: int,
    tol: float,
    scale: float,
) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(4 * (4 * group * 64 + exchange_ranks.NUM_SAMPLES * (n * m + 2 * n + 1))))
    costs, _, _, used = exchange_ranks.shared(str(path), group, n, m)
    cost = random_cost(3, n, m, scale=scale) * torch.tensor([0.5, 1.0, 2.0])[:, None, None]
    costs.copy_(cost)
    settings = (group, block, n, m, num_iters, tol, path)
    programs = [
        subprocess.Popen(
            [sys.executable, exchange_ranks.__file__, str(rank), *map(str, settings)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(group)
    ]
    try:
        assert [program.wait(240) for program in programs] == [0] * group
    finally:
        for program in programs:
            program.kill()
    exact, exact_used = _reference.solve(cost.double(), 0.1, num_iters, tol or None, "columns")
    assert torch.equal(used, exact_used)
    torch.testing.assert_close(costs.double() * m, exact * m, atol=1e-5, rtol=0)


class Together:
    """The programs of a launch, in turns: each runs until it has to wait for the others.

    Called instead of the kernel's function, for one program after another; the last call runs all.
    """

    def __init__(self, function: Callable[..., None], num_programs: int) -> None:
        functools.update_wrapper(self, function)
        self.__globals__, self.__signature__ = function.__globals__, inspect.signature(function)
        self.function = function
        self.turns = [threading.Semaphore(0) for _ in range(num_programs)]
        self.running = list(range(num_programs))
        self.errors: list[BaseException] = []
        self.num_waits = 0

    def __call__(self, **args: object) -> None:
        if self.builder.grid_idx[0] < len(self.turns) - 1:
            return
        threads = [threading.Thread(target=self.run, args=(k, args)) for k in self.running]
        for thread in threads:
            thread.start()
        self.next_after(-1)
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    @property
    def builder(self) -> Any:
        return sys.modules["triton.runtime.interpreter"].interpreter_builder

    def run(self, number: int, args: dict[str, object]) -> None:
        self.turns[number].acquire()
        self.current = number
        self.builder.set_grid_idx(number, 0, 0)
        try:
            with np.errstate(divide="ignore"):  # logarithms of the padding
                self.function(**args)
        except BaseException as error:
            self.errors.append(error)
        self.running.remove(number)
        self.next_after(number)

    def next_after(self, number: int) -> None:
        if self.running:
            self.turns[min([k for k in self.running if k > number] or self.running)].release()

    def wait(self) -> None:
        number, self.num_waits = self.current, self.num_waits + 1
        self.next_after(number)
        self.turns[number].acquire()
        self.current = number
        assert not self.errors, "another program has failed"
        assert self.num_waits < 2000, "programs wait for each other"


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize(
    ("group", "block", "n", "m", "num_iters", "tol", "scale"),
    [
        (2, 0, 7, 5, 4, None, 20.0),
        (3, 0, 7, 5, 6, 1e-2, 3.0),
        (2, 0, 7, 5, 0, None, 20.0),
        (3, 0, 2, 5, 3, None, 1e4),  # the last program has no rows
        (2, 2, 7, 5, 4, None, 20.0),
        (3, 2, 7, 5, 6, 1e-2, 3.0),
        (2, 2, 7, 5, 0, None, 20.0),
        (3, 2, 2, 5, 3, None, 1e4),
    ],
)
def test_programs_in_turns_exchange_their_sums(
    monkeypatch: pytest.MonkeyPatch,
    group: int,
    block: int,
    n: int,
    m: int,
    num_iters: int,
    tol: float | None,
    scale: float,
) -> None:
    """Two groups, of which the first has two of three samples."""
    kernel = _triton_rows._streamed_kernel if block else _triton_rows._shared_kernel
    together = Together(kernel.rewrite(), 2 * group)
    loaded = exchange._loaded

    def loaded_in_turn(*args: object) -> object:
        if group == 2:  # words of the next exchange may be there, or else of the last one
            together.wait()
        words = loaded(*args)
        if group == 3:
            together.wait()
        return words

    monkeypatch.setitem(kernel.rewritten_fn, kernel.fn, together)
    monkeypatch.setattr(exchange, "_loaded", loaded_in_turn)
    cost = random_cost(3, n, m, scale=scale) * torch.tensor([0.5, 1.0, 2.0])[:, None, None]
    parts = torch.stack([0.25 * cost, 0.5 * cost, 0.25 * cost])
    plan = torch.full_like(cost, torch.nan)
    words = torch.zeros(2 * 2 * group * padded(m), dtype=torch.int64)
    scalings, used = torch.full((3, 2, n), torch.nan), torch.full((3,), -1, dtype=torch.int32)
    share = -(-n // group)
    kernel[(2 * group,)](
        parts, plan, words, scalings, used, 3, LOG2_E / 0.1, num_iters, tol or 0.0,
        parts.stride(0), n=n, m=m, SHARE=share, BLOCK_N=block or padded(share), M=padded(m),
        PARTS=3, GROUP=group, STAGES=1, ONCE=num_iters == 0, HAS_TOL=tol is not None, WIDTH=16,
        PACK=1,
    )  # fmt: skip
    exact, exact_used = _reference.solve(cost.double(), 0.1, num_iters, tol, "columns")
    assert torch.equal(used, exact_used)
    torch.testing.assert_close(plan.double() * m, exact * m, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("n", "m", "is_large"), [(260, 20, True), (220, 40, True), (20, 260, False)]
)
def test_costs_with_few_columns_are_left_to_the_other_kernels(
    monkeypatch: pytest.MonkeyPatch, n: int, m: int, is_large: bool
) -> None:
    """A program has a thread for each sum at most, or threads would read a sum at other times."""
    tilings, streamed = [], _triton_rows.solve

    def recorded(*args: object) -> Tensor:
        tilings.append(args[-1])
        return streamed(*args)

    monkeypatch.setattr(_triton_rows, "solve", recorded)
    cost = random_cost(1, n, m, scale=3.0)
    plan, _ = _triton.solve(cost, 0.1, 3, None, "columns")
    check_against_reference(cost, plan, 3)
    assert bool(tilings) != is_large
    assert all(_triton_rows.can_exchange(tiling, m) for tiling in tilings)


@pytest.mark.parametrize(
    ("num_warps", "lanes"), [(4, 8), (4, 16), (8, 16), (8, 32), (16, 32)]
)  # of the size classes and their benchmark
def test_each_thread_has_as_many_entries_of_a_tile_as_any_other(num_warps: int, lanes: int) -> None:
    for m in range(1, 257):
        rows, width = tiles.tile_shape(m, num_warps, lanes)
        M, threads = padded(m), 32 * num_warps
        assert rows * M % threads == 0
        assert M % width == 0
        assert rows & (rows - 1) == 0  # a power of two, as tl.arange wants
        assert threads // rows == min(lanes, M // math.gcd(m, 4))  # these share a row


# ---- align_mix -----------------------------------------------------------------------------------


def random_features(b: int, n: int, c: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(1000 * n + c)
    return torch.randn(b, n, c, generator=rng).relu().to(DEVICE, dtype)


def relative_error(one: Tensor, other: Tensor) -> float:
    assert torch.isfinite(one).all()
    return ((one.double() - other).norm() / other.norm()).item()


@pytest.mark.parametrize(
    ("keep", "last"),
    [
        ("anchor", "columns"),
        ("partner", "rows"),
        pytest.param("anchor", "rows", marks=pytest.mark.slow),
        pytest.param("partner", "columns", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("tiling", [HELD, pytest.param(STREAMED, marks=pytest.mark.slow)])
def test_features_and_gradients(
    monkeypatch: pytest.MonkeyPatch, keep: str, last: str, tiling: Tiling
) -> None:
    switch_on(monkeypatch, rows=tiling)
    x = random_features(3, 35, 20).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    settings = {"keep": keep, "last": last, "num_iters": 6}
    mixed = align_mix(x, PERM, LAM, backend="triton", **settings)
    exact = align_mix(exact_x, PERM, LAM.double(), backend="reference", **settings)
    assert relative_error(mixed, exact) < 1e-5
    grad = torch.randn(exact.shape, generator=torch.Generator().manual_seed(5)).to(mixed)
    mixed.backward(grad)
    exact.backward(grad.double())
    assert relative_error(x.grad, exact_x.grad) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_costs_of_features_far_from_the_origin(dtype: torch.dtype) -> None:
    # |a|^2 is about 2000 and distances are about 200: a cost must be good to a hundredth of eps.
    n, c, eps = 20, 200, 0.1
    features = (random_features(3, n, c) + 3).to(dtype)
    entry = replace(SIZE_CLASSES[0], cost_parts=1)
    costs = _triton_cost.pair_costs(features, PERM, exchanged=False, entry=entry)[0]
    a = features.double()
    exact = torch.cdist(a, a[PERM]) ** 2
    assert a.square().sum(-1).mean() > 1800
    assert (costs - exact).abs().max() < 1e-2 * eps


@pytest.mark.parametrize("last", ["columns", "rows"])
@pytest.mark.parametrize("is_on", [False, True])
def test_the_plan_has_the_strides_of_a_traced_one(
    monkeypatch: pytest.MonkeyPatch, last: str, is_on: bool
) -> None:
    switch_on(monkeypatch, is_on, rows=HELD)
    features, args = random_features(3, 66, 4), (False, 0.1, 1, 0.0, last, "triton")
    results = _align_mix(features, PERM, LAM, *args)
    with FakeTensorMode() as mode:
        traced = _align_mix(*(mode.from_tensor(t) for t in (features, PERM, LAM)), *args)
    for result, fake in zip(results, traced, strict=True):
        assert (result.shape, result.stride()) == (fake.shape, fake.stride())


def test_the_table_decides_which_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_on in (False, True):
        switch_on(monkeypatch, is_on)
        assert (size_class(100) is not None) == is_on
    assert size_class(32) is None
    chosen = [size_class(n).max_positions for n in (33, 64, 65, 128, 129, 196, 209, 256, 257, 1024)]
    assert chosen == [64, 64, 128, 128, 208, 208, 256, 256, 1024, 1024]


@pytest.mark.parametrize(
    ("version", "hip", "reason"),
    [
        ("3.2.0", None, "its cooperative launch needs Triton 3.3 or newer, got 3.2.0"),
        ("3.6.0", "6.4", "its cooperative launch is untested on ROCm"),
        ("3.3.0+git12", None, ""),
        ("3.10.1", None, ""),
    ],
)
def test_kernels_without_a_cooperative_launch_are_left_out(
    monkeypatch: pytest.MonkeyPatch, version: str, hip: str | None, reason: str
) -> None:
    """Triton 3.2, which torch 2.6 has, does not know the option."""
    monkeypatch.setattr(backend, "version", lambda name: version)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(backend, "NO_COOPERATION", backend._no_cooperation())
    x = torch.rand(2, 8, 4, 4).to(memory_format=torch.channels_last)
    assert (backend.refuse_norm_relu(torch.nn.BatchNorm2d(8), x) or "") == reason
    assert (size_class(100) is None) == bool(reason)


# ---- memory --------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """The largest number of bytes that were alive at a time, by the tensors of torch."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.alive: list[tuple[weakref.ref[Tensor], int, int]] = []
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                memory = tensor.untyped_storage()
                self.alive.append((weakref.ref(tensor), memory.data_ptr(), memory.nbytes()))
        self.alive = [entry for entry in self.alive if entry[0]() is not None]
        sizes = {where: size for _, where, size in self.alive if where not in self.given}
        self.peak = max(self.peak, sum(sizes.values()))
        return result


@pytest.mark.parametrize(
    ("b", "n", "c", "limit"),
    # In feature tensors, the output included. The plan, in float32, has 2 n / c of them.
    [(128, 100, 96, 3.2), (128, 100, 1000, 1.3), (64, 196, 384, 2.2), (16, 784, 768, 3.2)],
)
def test_the_plan_is_the_only_large_tensor_beside_the_output(
    monkeypatch: pytest.MonkeyPatch, b: int, n: int, c: int, limit: float
) -> None:
    switch_on(monkeypatch)
    launches = type("Launches", (), {"__getitem__": lambda self, grid: lambda *_, **__: None})()
    for module, name in (
        (_triton_cost, "_cost_kernel"),
        (_triton_held, "_held_kernel"),
        (_triton_rows, "_shared_kernel"),
        (_triton_rows, "_streamed_kernel"),
        (_triton_product, "_mix_kernel"),
    ):
        monkeypatch.setattr(module, name, launches)  # memory alone
    features = torch.empty(b, n, c, dtype=torch.bfloat16)
    perm, lam = torch.arange(b), torch.ones(b)
    with Allocations(features, perm, lam) as allocations:
        out, plan = _triton.align_mix(features, perm, lam, False, 0.1, 100, None, "columns")
    scratch = 2**21
    assert allocations.peak / features.nbytes < limit
    assert allocations.peak <= max(out.nbytes, features.nbytes) + plan.nbytes + scratch


def test_partial_sums_never_take_more_than_the_features() -> None:
    for entry in SIZE_CLASSES:
        entry = replace(entry, cost_parts=4)
        for n in (65, 100, 196, 784):
            for c in (1, 64, 384, 1000, 4096):
                parts = num_parts(entry, n, c, torch.bfloat16)
                assert 1 <= parts <= 4
                # Several have 128 channels each at least, in no more memory than the features.
                assert parts == 1 or (parts * n * 4 <= c * 2 and parts * 128 <= c)
    assert num_parts(replace(SIZE_CLASSES[0], cost_parts=4), 100, 1000, torch.bfloat16) == 4
    assert num_parts(replace(SIZE_CLASSES[0], cost_parts=4), 33, 300, torch.bfloat16) == 2


def test_the_threads_of_an_sm_have_its_registers() -> None:
    """65,536 of them, at most 255 a thread: no more are asked for than there are, nor fewer."""
    for entry in SIZE_CLASSES:
        for num_warps in (1, 2, 4, 8, 16, 32):
            rows = replace(entry.rows, num_warps=num_warps)
            threads = 32 * num_warps * (rows.per_sm if isinstance(rows, RowTiling) else 1)
            assert rows.max_registers <= 255
            assert rows.max_registers * threads <= 65536
            assert rows.max_registers == 255 or (rows.max_registers + 1) * threads > 65536


def test_loads_are_as_wide_as_the_channels_allow() -> None:
    """The largest power of two up to 16 that divides them; without a class Triton's own choice."""
    for c in range(1, 100):
        unit = channel_unit(SIZE_CLASSES[0], c)
        assert unit in (1, 2, 4, 8, 16)
        assert c % unit == 0
        assert unit == 16 or c % (2 * unit)
        assert channel_unit(None, c) == 1


# ---- on a GPU ------------------------------------------------------------------------------------

GPU_SIZES = [
    *((128, 100, 96), (128, 100, 1000), (64, 196, 384), (16, 784, 768)),
    *((150, 81, 33), (150, 49, 320), (64, 256, 384)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("b", "n", "c"), GPU_SIZES)
@pytest.mark.parametrize("keep", ["anchor", "partner"])
def test_full_batches(monkeypatch: pytest.MonkeyPatch, b: int, n: int, c: int, keep: str) -> None:
    switch_on(monkeypatch)
    rng = torch.Generator().manual_seed(0)
    x = random_features(b, n, c, torch.bfloat16).requires_grad_()
    perm = torch.randperm(b, generator=rng).to(DEVICE)
    lam = torch.rand(b, generator=rng).to(DEVICE)
    exact_x = x.detach().float().requires_grad_()
    mixed = align_mix(x, perm, lam, keep=keep, backend="triton")
    exact = align_mix(exact_x, perm, lam, keep=keep, backend="reference")
    assert relative_error(mixed, exact.double()) < 3e-3  # the rounding of a bf16 output
    mixed.backward(mixed.detach())
    exact.backward(mixed.detach().float())
    assert relative_error(x.grad, exact_x.grad.double()) < 3e-3
    for _ in range(10):  # a difference would be a race
        assert torch.equal(align_mix(x, perm, lam, keep=keep, backend="triton"), mixed)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "m"),
    [
        *((n, n) for n in (33, 49, 64, 65, 100, 128, 196, 225, 256, 400, 784, 1024)),
        *((3, 300), (2, 200), (500, 70), (200, 20), (1000, 64)),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_full_batches_of_costs(
    monkeypatch: pytest.MonkeyPatch, n: int, m: int, scale: float
) -> None:
    switch_on(monkeypatch)
    cost = random_cost(150 if n <= 256 else 40, n, m, scale=scale)
    plan, used = _triton.solve(cost, 0.1, 100, None, "columns")
    check_against_reference(cost, plan, 100)
    assert used.unique().tolist() == [100]


@pytest.mark.gpu
@pytest.mark.parametrize(("b", "n", "c"), GPU_SIZES[:4])
def test_a_captured_graph_replays_it(
    monkeypatch: pytest.MonkeyPatch, b: int, n: int, c: int
) -> None:
    switch_on(monkeypatch)
    x = random_features(b, n, c, torch.bfloat16)
    perm, lam = torch.randperm(b, device=DEVICE), torch.rand(b, device=DEVICE)
    align_mix(x, perm, lam, backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = align_mix(x, perm, lam, backend="triton")
    for _ in range(3):
        x.copy_(x.flip(0) * 1.1)
        perm.copy_(perm.roll(1))
        graph.replay()
        assert torch.equal(captured, align_mix(x, perm, lam, backend="triton"))


@pytest.mark.gpu
@pytest.mark.parametrize(("b", "n", "c"), GPU_SIZES[:4])
def test_the_peak_is_the_output_and_the_plan(
    monkeypatch: pytest.MonkeyPatch, b: int, n: int, c: int
) -> None:
    switch_on(monkeypatch)
    features = random_features(b, n, c, torch.bfloat16)
    perm, lam = torch.randperm(b, device=DEVICE), torch.rand(b, device=DEVICE)
    _triton.align_mix(features, perm, lam, False, 0.1, 10, None, "columns")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, plan = _triton.align_mix(features, perm, lam, False, 0.1, 10, None, "columns")
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= out.nbytes + plan.nbytes + 2**22  # words, scalings, rounding of allocations
