"""Steps of a mixer by several processes, and by one process with their batches joined.

All processes draw the same for their own share. The joined draw is the one that has the same
partners and numbers for the joined batch: permutations shifted by the place of each share.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw
from alignmixup.training import Team, TrainSettings
from alignmixup.training.optim import make_optimizer
from alignmixup.training.steps import PlainStep, prepared
from alignmixup.training.sync_norm import sync_norms
from cases import ROWS, Row, TinyNet, draw_case, images, labels

SHARE = 4  # images of a process: the size of no tensor of a draw that is not one per image
STEPS = 2
EVERY = [(row, case) for row in ROWS for case in row.mixer.cases]

Weights = dict[str, Tensor]


def trained(
    row: Row,
    case: str,
    team: Team,
    num_shares: int,
    *,
    accumulate: int = 1,
    syncs: bool = False,
    partners: Literal["share", "batch"] = "share",
    compiles: bool = False,
) -> Weights:
    """The weights after two steps of SGD in float64; of network and mixer.

    Without ``syncs`` the network has group norms: it has no batch statistics.
    """
    net = TinyNet().double()
    if not syncs:
        _without_batch_statistics(net)
    batch_size = num_shares * SHARE
    mine = team.share(batch_size)
    num_copies = num_shares // team.size // accumulate
    mixer = row.attached(net, images(batch_size, dtype=torch.float64)[mine])
    if syncs and team.size > 1:
        sync_norms(net)
        if mixer.module is not None:
            sync_norms(mixer.module)
    settings = TrainSettings(
        batch_size=batch_size,
        lr=0.05,
        milestones=(),
        clip_norm=1.0,
        accumulate=accumulate,
        partners=partners,
        compile=compiles,
    )
    optimizer = make_optimizer(net, settings, mixer)
    module = prepared(team.wrap(net, uses_all=mixer.trains_all), settings)
    step = PlainStep(module, mixer, optimizer, settings, lambda x, y: (x, y), team=team)
    for number in range(STEPS):
        draw = draw_case(mixer, case, batch_size if partners == "batch" else SHARE, seed=number)
        if partners == "share":
            draw = joined(draw, num_copies)
        x, y = images(batch_size, seed=number, dtype=torch.float64), labels(batch_size)
        step((x[mine], y[mine]), draw)
    weights = {f"net.{name}": p.detach() for name, p in net.named_parameters()}
    if syncs:
        weights |= {f"net.{name}": b for name, b in net.named_buffers()}
    if mixer.module is not None:
        weights |= {f"mixer.{k}": p.detach() for k, p in mixer.module.named_parameters()}
    return weights


def joined(draw: Draw, num_copies: int) -> Draw:
    """The draw of one share as that of ``num_copies`` shares, one after the other."""
    tensors = {}
    for name, value in draw.tensors().items():
        if name in ("perm", "perms", "block_perm"):
            parts, dim = [value + SHARE * k for k in range(num_copies)], value.ndim - 1
        elif name == "start":  # Co-Mixup: restarts first
            parts, dim = [value] * num_copies, 1
        elif value.ndim and len(value) == SHARE:
            parts, dim = [value] * num_copies, 0
        else:
            parts, dim = [value], 0
        tensors[name] = torch.cat(parts, dim) if len(parts) > 1 else value
    return draw.with_tensors(tensors)


def _without_batch_statistics(net: nn.Module) -> None:
    for module in net.children():
        if isinstance(module, nn.Sequential):
            module[1] = nn.GroupNorm(1, module[1].num_features).double()
