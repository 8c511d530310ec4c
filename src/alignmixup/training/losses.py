"""The losses of an epoch, kept on the device, and the check that they are finite."""

from __future__ import annotations

from collections import Counter, deque

import torch
from torch import Tensor

from alignmixup.device import is_gpu, to_host

# Steps on a GPU between two checks.
CHECK_EVERY = 100


class NonFiniteLoss(RuntimeError):
    """Training has diverged; the message names the step, the case and the last good checkpoint."""


class Losses:
    """The loss and the case of each step of an epoch so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.values: list[Tensor] = []
        self.cases: list[str] = []
        # Whether recent losses are finite, and the event after which that is known.
        self._pending: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def __len__(self) -> int:
        return len(self.values)

    def add(self, loss: Tensor, case: str) -> None:
        self.values.append(loss)
        self.cases.append(case)

    def mean(self) -> Tensor:
        return torch.stack(self.values).float().mean()

    def count_cases(self) -> dict[str, int]:
        return dict(Counter(self.cases))

    def is_check_due(self) -> bool:
        return self.device.type == "cpu" or len(self) % CHECK_EVERY == 0

    def find_non_finite(self) -> int | None:
        """Return the index of a loss that is not finite, without waiting for a GPU.

        A GPU is steps behind the host: what is computed now is read at one of the next calls.
        """
        if not is_gpu(self.device):
            return self.first_non_finite(len(self) - 1 if self.device.type == "cpu" else 0)
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            is_finite, _ = self._pending.popleft()
            if not bool(is_finite):
                return self.first_non_finite()
        is_finite = to_host(torch.stack(self.values[-CHECK_EVERY:]).isfinite().all())
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        self._pending.append((is_finite, ready))
        return None

    def first_non_finite(self, start: int = 0) -> int | None:
        """Return the first index from ``start`` on; waits for the last loss."""
        bad = torch.stack(self.values[start:]).isfinite().logical_not()
        return start + int(bad.nonzero()[0]) if bool(bad.any()) else None
