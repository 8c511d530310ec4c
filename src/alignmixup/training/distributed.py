"""Several processes that train one network, each with its share of every batch.

    torchrun --nproc-per-node 4 --no-python alignmixup train imagenet-r50-alignmixup

All of them draw the same, so a step has the same case everywhere; a sample's partner is among the
samples of its own process. The first process, the leader, evaluates and writes; the others wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Team", "join_team"]

# The others wait as long as the leader evaluates.
PATIENCE = timedelta(hours=2)


@dataclass(frozen=True)
class Team:
    """The processes of a run: which one this is, and how many there are."""

    rank: int = 0
    size: int = 1

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def share(self, batch_size: int) -> slice:
        """This process's part of a batch; parts are of one size, or gradients would not average."""
        if batch_size % self.size:
            raise ValueError(
                f"a batch of {batch_size} cannot be shared by {self.size} processes: choose "
                "--train.batch-size as a multiple of their number"
            )
        part = batch_size // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def wrap(self, net: nn.Module, *, uses_all: bool) -> nn.Module:
        """The network with its gradients averaged over the processes.

        ``uses_all`` says that every step gives every parameter a gradient.
        """
        if self.size == 1:
            return net
        device = next(net.parameters()).device
        ids = [device] if device.type == "cuda" else None
        return DistributedDataParallel(
            net, device_ids=ids, find_unused_parameters=not uses_all, gradient_as_bucket_view=True
        )

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is up anywhere; all processes must ask together."""
        if self.size == 1:
            return flag
        raised = torch.tensor(float(flag), device=device)
        dist.all_reduce(raised, dist.ReduceOp.MAX)
        return bool(raised)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a number over the processes."""
        if self.size == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    def wait(self) -> None:
        """Wait until all are here."""
        if self.size > 1:
            dist.barrier()

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """Let the leader go through the block before the others, who find what it has made."""
        if not self.is_leader:
            self.wait()
        yield
        if self.is_leader:
            self.wait()


def join_team(device: torch.device) -> tuple[Team, torch.device]:
    """The team that torchrun started, if it did, and this process's own device."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Team(), device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
    return Team(dist.get_rank(), dist.get_world_size()), device
