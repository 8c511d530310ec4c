"""A training loop by hand, to compare those of the frameworks with; a mixer that notes progress."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import alignmixup as am
from cases import TinyNet, images, labels

MIXER = am.AlignMixup("layer2", num_iters=5)
INSIDE = am.AlignMixup("net.layer2", num_iters=5)  # of a module with a TinyNet in ``net``
LR = 0.1


def data() -> TensorDataset:
    return TensorDataset(images(16), labels(16))


def batches(size: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(images(16).split(size), labels(16).split(size), strict=True)


def trained_by_hand(rngs: list[torch.Generator], accumulate: int = 1) -> TinyNet:
    """SGD over the batches in order, one generator a batch."""
    net = TinyNet()
    optimizer = torch.optim.SGD(net.parameters(), LR)
    for number, ((x, y), rng) in enumerate(zip(batches(), rngs, strict=True), start=1):
        (MIXER(net, x, y, rng).loss() / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net


def assert_same_weights(net: nn.Module, expected: nn.Module) -> None:
    for found, value in zip(net.parameters(), expected.parameters(), strict=True):
        # Steps change weights by 1e-2; sums over samples may be in another order.
        torch.testing.assert_close(found, value, atol=1e-4, rtol=0)


@dataclass(frozen=True)
class Scheduled(am.InputMixup):
    """Input mixup that notes the progress of each draw."""

    def draw(self, batch_size, rng, progress=0.0):
        SEEN.append(progress)
        return super().draw(batch_size, rng)


SEEN: list[float] = []
