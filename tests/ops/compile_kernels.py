"""Compile the kernels for a GPU of compute capability 9.0 without one; print those that fail.

    python tests/ops/compile_kernels.py [--all]

For another version of Triton, ``pip install --target FOLDER --no-deps triton==3.5.1`` and run it
with ``PYTHONPATH=FOLDER``. A launch is replaced by a compilation, so a call on CPU tensors compiles
what it would launch.
"""

from __future__ import annotations

import inspect
import re
import sys
import time

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from alignmixup.ops.triton import align, auction, gridcut, joint, norm_relu, tiles

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
}
compiled: dict[str, str] = {}  # error by kernel and settings, empty if there is none


def compile_launch(kernel, *args, grid, warmup=False, **options):
    signature, constants, hints, options = described(kernel, args, options)
    key = f"{kernel.fn.__name__} {signature} {constants} {options}"
    if key in compiled:
        return
    begin = time.perf_counter()
    try:
        binary = for_gpu(kernel, signature, constants, hints, options)
        has_slices = "WIDTH" in kernel.arg_names
        compiled[key] = shared_slices(binary.asm["ttgir"]) if has_slices else ""
    except Exception as error:
        compiled[key] = f"{error} {error.__cause__ or ''}"
    if compiled[key]:
        print(f"FAILED {key}\n{compiled[key]}", flush=True)
    else:
        print(f"{kernel.fn.__name__} in {time.perf_counter() - begin:.1f} s", flush=True)


def described(kernel, args, options):
    """The types of the arguments, constants by place, hints by place, and the other options."""
    values = inspect.signature(kernel.fn).bind(
        *args, **{name: options.pop(name) for name in list(options) if name in kernel.arg_names}
    )
    signature, constants, hints = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            hints[(place,)] = [["tt.divisibility", 16]]  # as torch allocates
        else:
            signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                hints[(place,)] = [["tt.divisibility", 16]]
    return signature, constants, hints, options


def for_gpu(kernel, signature, constants, hints, options):
    """The kernel compiled for a GPU of compute capability 9.0."""
    source = ASTSource(kernel, signature, constexprs=constants, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def shared_slices(code: str) -> str:
    """Name a tile whose slices are shared by threads: slow, and it depends on Triton's version."""
    threads = dict(re.findall(r"(#\w+) = .*threadsPerWarp = \[(\d+, \d+, \d+)\]", code))
    for *shape, layout in re.findall(r"tensor<(\d+)x(\d+)x(\d+)x\w+, (#\w+)>", code):
        is_tile = int(shape[tiles.ROW_AXIS.value]) > 1  # and not a value for each column
        if is_tile and int(threads[layout].split(", ")[tiles.SLICE_AXIS.value]) > 1:
            return f"slices are shared by threads: {threads[layout]}, see ops/triton/tiles.py"
    return ""


def align_mix(
    n: int, c: int, dtype: torch.dtype, keep_partner: bool = False, half: bool = False
) -> None:
    x, perm, lam = torch.zeros(4, n, c, dtype=dtype), torch.arange(4), torch.zeros(4)
    last = "rows" if keep_partner else "columns"
    _, plan = align.align_mix(x, perm, lam, keep_partner, 0.1, 100, None, last, half)
    align.align_mix_backward(x, perm, lam, plan, keep_partner, half)


def norm_and_relu() -> None:
    vectors = [torch.zeros(64) for _ in range(4)]
    for b in (8, 256):  # programs of one block of rows, which is kept, and of four
        x = torch.zeros(b, 64, 4, 4, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        norm_relu.forward(x, *vectors[:2], 1e-5, phases=norm_relu.BOTH)
        norm_relu.backward(x, x, *vectors, 1e-5, phases=norm_relu.BOTH)


def blocks() -> None:
    costs = torch.zeros(2, 3, 4, 4)
    gridcut.cut(costs, torch.zeros(2, 3, 4), torch.zeros(2, 4, 3), 8, 2, 4)
    auction.auction(torch.zeros(2, 4, 4), torch.zeros(2, 4, 4, dtype=torch.bool), 0.8)
    unary, start = torch.zeros(2, 4, 16), torch.zeros(2, 3, 4, 16)
    real = torch.ones(2, 4, dtype=torch.bool)
    joint.assign(unary, torch.zeros(2, 4, 4), real, start, 0.3, 1.0, 0.8, True, 4, 2, True, True)


def main() -> None:
    JITFunction.run = compile_launch
    print("Triton", triton.__version__)
    align_mix(784, 64, torch.bfloat16)
    norm_and_relu()
    if "--all" in sys.argv:
        for n, c in ((16, 64), (49, 320), (100, 96), (196, 384), (784, 64), (1100, 32)):
            align_mix(n, c, torch.bfloat16, keep_partner=True)
            align_mix(n, c, torch.float32)
            align_mix(n, c, torch.float32, half=True)
        for n in (64, 100, 196, 784):
            align.solve(torch.zeros(4, n, n), 0.1, 100, 1e-4, "columns")
        blocks()
    failures = [error for error in compiled.values() if error]
    raise SystemExit(f"{len(failures)} of {len(compiled)} kernels fail" if failures else 0)


if __name__ == "__main__":
    main()
