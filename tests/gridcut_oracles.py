"""Slow and certain: exact cuts of small grids, and pictures with the saliency of a real network.

What the tests of ``gridcut``, PuzzleMix and Co-Mixup compare with; nothing here is shared with the
package.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow
from torch import Tensor, nn

from alignmixup.datasets.shapes import shapes

SCALE = 1_000_000  # costs as integers; energies here are near one


def brute_force_labels(unary: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Try every labelling of one grid [L, n, m]."""
    num_labels, n, m = unary.shape
    every = torch.tensor(list(itertools.product(range(num_labels), repeat=n * m))).view(-1, n, m)
    rows, columns = torch.meshgrid(torch.arange(n), torch.arange(m), indexing="ij")
    costs = unary[every, rows, columns].sum((1, 2))
    jumps = every.to(unary.dtype) / (num_labels - 1)
    costs = costs + (down * (jumps[:, 1:] - jumps[:, :-1]) ** 2).sum((1, 2))
    costs = costs + (right * (jumps[:, :, 1:] - jumps[:, :, :-1]) ** 2).sum((1, 2))
    return every[costs.argmin()]


def loop_energy(unary: Tensor, down: Tensor, right: Tensor, z: Tensor) -> float:
    """E(z) of one grid, edge by edge."""
    num_labels, n, m = unary.shape
    total = 0.0
    for row, column in itertools.product(range(n), range(m)):
        here = int(z[row, column])
        total += float(unary[here, row, column])
        if row + 1 < n:
            jump = (here - int(z[row + 1, column])) / (num_labels - 1)
            total += float(down[row, column]) * jump**2
        if column + 1 < m:
            jump = (here - int(z[row, column + 1])) / (num_labels - 1)
            total += float(right[row, column]) * jump**2
    return total


def ordered_energy(unary: Tensor, down: Tensor, right: Tensor, labels: Tensor) -> Tensor:
    """E(z) of a batch of grids [b, L, n, m] with labels [b, n, m]."""
    z = labels.to(unary.dtype) / (unary.shape[1] - 1)
    own = unary.gather(1, labels.unsqueeze(1)).sum((1, 2, 3))
    below = (down * (z[:, 1:] - z[:, :-1]) ** 2).sum((1, 2))
    return own + below + (right * (z[:, :, 1:] - z[:, :, :-1]) ** 2).sum((1, 2))


def max_flow_labels(unary: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """The exact minimum for one grid [L, n, m]: a minimum cut of the Ishikawa graph.

    Node (i, l) is on the source's side where z_i >= l, l = 1..L-1. An arc (i, a) -> (j, b), a >= b,
    of weight w h(a - b) with h(0) = 1 and h(k) = 2 is cut where z_i >= a and z_j < b; for
    z_i - z_j = d these arcs add up to d + 2 ((d - 1) + ... + 1) = d^2.
    """
    num_labels, n, m = unary.shape
    top, sites = num_labels - 1, n * m
    source, sink = sites * top, sites * top + 1
    number = np.arange(sites).reshape(n, m)
    above = np.concatenate([number[:-1].ravel(), number[:, :-1].ravel()])
    below = np.concatenate([number[1:].ravel(), number[:, 1:].ravel()])
    weight = np.concatenate([down.numpy().ravel(), right.numpy().ravel()]) / top**2
    arcs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for a, b in itertools.product(range(top), repeat=2):
        if a >= b:
            capacity = weight * (1 if a == b else 2)
            arcs.append((above * top + a, below * top + b, capacity))
            arcs.append((below * top + a, above * top + b, capacity))
    rise = np.diff(unary.numpy().reshape(num_labels, sites), axis=0)
    every = np.arange(sites)
    for level in range(top):
        node = every * top + level
        arcs.append((node, np.full(sites, sink), rise[level].clip(min=0)))
        arcs.append((np.full(sites, source), node, (-rise[level]).clip(min=0)))
        if level:
            arcs.append((node, node - 1, np.full(sites, 500.0)))  # z >= l + 1 implies z >= l
    rows, columns, values = (np.concatenate(part) for part in zip(*arcs, strict=True))
    capacities = np.round(values * SCALE).astype(np.int32)
    graph = coo_matrix((capacities, (rows, columns)), shape=(sink + 1, sink + 1)).tocsr()
    left = graph - maximum_flow(graph, source, sink).flow
    left.data = left.data.clip(min=0)
    left.eliminate_zeros()
    reached = np.zeros(sink + 1, dtype=np.int64)
    reached[breadth_first_order(left, source, return_predecessors=False)] = 1
    return torch.from_numpy(reached[:source].reshape(n, m, top).sum(2))


@dataclass(frozen=True)
class Pictures:
    """Drawings of shapes, and how salient each pixel is to a network that has begun to learn."""

    images: Tensor
    saliency: Tensor


@functools.cache
def salient_pictures(num_images: int = 256) -> Pictures:
    """Trained in float64: 40 steps in float32 end elsewhere on every kind of processor."""
    drawn = shapes("train", 512)
    images, labels = drawn.images.double() / 255, drawn.labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = small_network().double()
        optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
        for step in range(40):
            rows = torch.arange(64 * step, 64 * step + 64) % len(images)
            loss = F.cross_entropy(net(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    net.eval()
    seen = images[:num_images].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(net(seen), labels[:num_images]), seen)
    saliency = gradient.square().mean(1).sqrt()
    return Pictures(images[:num_images].float(), saliency.float())


def small_network() -> nn.Sequential:
    """Ten classes of 32 x 32 pictures; initialized from torch's own chance."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
