"""The emulator of compiled kernels raises an error where a GPU could return anything."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_emulator import Array, Program

# Each of 64 threads stores its number and loads that of the other warp.
EXCHANGE = """
mov.u32 %r1, %tid.x;
mad.lo.u32 %r2, %r1, 4, global_smem;
xor.b32 %r3, %r2, 128;
st.shared.b32 [%r2], %r1;
{barrier}
ld.shared.b32 %r4, [%r3 + 0];
ld.param.b64 %rd1, [kernel_param_0];
mad.wide.u32 %rd2, %r1, 4, %rd1;
st.global.b32 [%rd2], {{ %r4 }};
"""
BRANCH = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, {limit}; @%p1 bra $END; $END:"


def run(body: str) -> Array:
    words = np.zeros(64, np.uint32)
    ptx = f".visible .entry kernel(\n)\n{{\n{body} ret;\n}}\n"
    Program(ptx, "kernel", num_threads=64).run([0], words)
    return words


def test_a_load_of_what_another_warp_stored_needs_a_barrier() -> None:
    assert run(EXCHANGE.format(barrier="bar.sync 0;")).tolist() == [k ^ 32 for k in range(64)]
    with pytest.raises(AssertionError, match="warps race"):
        run(EXCHANGE.format(barrier=""))


def test_all_threads_take_the_same_branch() -> None:
    run(BRANCH.format(limit=64))
    with pytest.raises(AssertionError, match="different branches"):
        run(BRANCH.format(limit=40))


def test_unknown_instructions_are_refused() -> None:
    for statement in ("sqrt.rn.f32 %r1, %r2;", "mul.hi.u32 %r1, %r2, %r3;"):
        with pytest.raises(NotImplementedError, match=statement.split()[0]):
            run(statement)
