"""One program of a cooperating group, interpreted in a process of its own.

    python tests/exchange_ranks.py RANK GROUP BLOCK N M NUM_ITERS TOL FILE

The processes of a group share FILE: costs, words of the exchange, scalings and iteration counts.
The interpreter would run the programs of a launch one after another, and the first would wait
forever; here each process runs one of them.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

NUM_SAMPLES = 3


def shared(path: str, group: int, n: int, m: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return costs, words, scalings and iteration counts in the memory of the file."""
    padded = max(16, 1 << (m - 1).bit_length())
    sizes = (2 * 2 * group * padded, NUM_SAMPLES * n * m, NUM_SAMPLES * 2 * n, NUM_SAMPLES)
    memory = torch.from_file(path, shared=True, size=4 * sum(sizes), dtype=torch.uint8)
    words, costs, scalings, used = memory.split([4 * size for size in sizes])
    return (
        costs.view(torch.float32).view(NUM_SAMPLES, n, m),
        words.view(torch.int64),
        scalings.view(torch.float32).view(NUM_SAMPLES, 2, n),
        used.view(torch.int32),
    )


def main(rank: int, group: int, block: int, n: int, m: int, num_iters: int, tol: float) -> None:
    from triton.runtime.interpreter import interpreter_builder

    from alignmixup.ops.triton import sinkhorn_rows as rows
    from alignmixup.ops.triton.common import LOG2_E, padded

    costs, words, scalings, used = shared(sys.argv[-1], group, n, m)
    # A launch of one program that takes itself for program RANK of GROUP.
    interpreter_builder.set_grid_dim = lambda *_: setattr(
        interpreter_builder, "grid_dim", (group, 1, 1)
    )
    interpreter_builder.set_grid_idx = lambda *_: setattr(
        interpreter_builder, "grid_idx", (rank, 0, 0)
    )
    share = -(-n // group)
    kernel = rows._streamed_kernel if block else rows._shared_kernel
    kernel[(1,)](
        costs, costs, words, scalings, used, NUM_SAMPLES, LOG2_E / 0.1, num_iters, tol, 0,
        n=n, m=m, SHARE=share, BLOCK_N=block or padded(share), M=padded(m), PARTS=1, GROUP=group,
        STAGES=1, ONCE=num_iters == 0, HAS_TOL=tol > 0, WIDTH=16, PACK=1,
    )  # fmt: skip


if __name__ == "__main__":
    main(*(int(value) for value in sys.argv[1:7]), tol=float(sys.argv[7]))
