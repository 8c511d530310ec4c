"""Several processes that train one network, each with its share of every batch.

    torchrun --nproc-per-node 4 --no-python alignmixup train imagenet-r50-alignmixup

All processes draw the same, so a step has the same case everywhere; a sample's partner is among the
samples of its own process. Each evaluates its share of the test images; rank 0 writes.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from alignmixup.device import is_gpu, own_gpu
from alignmixup.training import agreement, watch
from alignmixup.training.signals import check_stopped

T = TypeVar("T")

PART_BYTES = 2**26  # of a tensor that rank 0 sends
NEVER = 2**31 - 1  # passes between two that DistributedDataParallel times


@dataclass(frozen=True)
class Team:
    """The processes of a run: the rank of this one, and their number."""

    rank: int = 0
    size: int = 1

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def share(self, batch_size: int, accumulate: int = 1) -> slice:
        """Return this process's part of a batch, which it takes in ``accumulate`` parts.

        All parts are equal, or gradients would not average.
        """
        if batch_size % (self.size * accumulate):
            who = f"split over {self.size} processes" if self.size > 1 else "split"
            parts = f" in {accumulate} equal parts" if accumulate > 1 else ""
            raise ValueError(
                f"a batch of {batch_size} cannot be {who}{parts}: choose --train.batch-size as a "
                f"multiple of {self.size * accumulate}"
            )
        part = batch_size // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    @property
    def rows(self) -> slice:
        """The rows of a set that this process evaluates; shares may be uneven."""
        return slice(self.rank, None, self.size)

    def wrap(self, net: nn.Module, *, uses_all: bool) -> nn.Module:
        """Return the network with its gradients averaged over the processes.

        ``uses_all``: every step gives every parameter a gradient.
        """
        if self.size == 1:
            return net
        return wrapped(net, uses_all=uses_all)

    def no_sync(self, net: nn.Module) -> AbstractContextManager[object]:
        """Keep the gradients of a wrapped network local in this block, until a later backward."""
        if self.size == 1:
            return nullcontext()
        return cast(DistributedDataParallel, net).no_sync()

    def share_state(self, module: nn.Module) -> None:
        """Give every process the parameters and buffers of rank 0."""
        if self.size > 1:
            agreement.meet("share_state")
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), src=0)

    @contextmanager
    def state_of_rank_zero(self, module: nn.Module) -> Iterator[None]:
        """Give every process the state of rank 0 for this block, then its own back.

        Parameters are the same everywhere; batch statistics may differ.
        """
        own = [(t, t.detach().clone()) for t in module.buffers()] if self.rank else []
        self.share_state(module)
        try:
            yield
        finally:
            for tensor, value in own:
                tensor.copy_(value)

    def gather(self, value: Tensor, device: torch.device) -> list[Tensor]:
        """Return the CPU tensors of all processes, by rank; ``device`` is that of the run."""
        if self.size == 1:
            return [value]
        agreement.meet(f"gather of {list(value.shape)}")
        own = value.to(device)
        values = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(values, own)
        return [each.cpu() for each in values]

    def join_rows(self, own: Tensor) -> Tensor:
        """Return the rows of a whole set from the share of each process, which ``rows`` chose."""
        if self.size == 1:
            return own
        shapes = self._gather_objects(tuple(own.shape))
        longest, num_rows = max(shapes), [shape[0] for shape in shapes]
        if num_rows != [len(range(sum(num_rows))[r :: self.size]) for r in range(self.size)]:
            raise ValueError(f"the ranks have {num_rows} rows: pass those that Team.rows chooses")
        padded = own.new_zeros(longest)
        if len(own):
            padded[: len(own)] = own
        agreement.meet(f"join_rows of {list(longest[1:])}")
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        whole = own.new_empty((sum(num_rows), *longest[1:]))
        for rank, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
            whole[rank :: self.size] = part[: shape[0]]
        return whole

    def from_rank_zero(self, value: T) -> T:
        """Return the value that rank 0 has passed, in every process."""
        return self.from_rank(0, value)

    def from_rank(self, rank: int, value: T) -> T:
        """Return the value that this rank has passed, in every process."""
        if self.size == 1:
            return value
        # Pickled before the others wait for it, because this can fail.
        box = [pickle.dumps(value) if self.rank == rank else b""]
        agreement.meet(f"from_rank {rank}")
        dist.broadcast_object_list(box, src=rank)
        return value if self.rank == rank else cast(T, pickle.loads(box[0]))

    def share_bytes(self, own: Tensor, device: torch.device | str) -> None:
        """Give every process the bytes of rank 0's CPU tensor, in place of its own.

        They are sent in parts, which on a GPU leave ``device``, that of the run, its memory.
        """
        for part in torch.split(own.view(-1), PART_BYTES) if self.size > 1 else ():
            moved = part.to(device)
            agreement.meet("share_bytes")
            dist.broadcast(moved, src=0)
            if self.rank:
                part.copy_(moved)

    def agreed(self) -> AbstractContextManager[None]:
        """Raise the same error in every process if this block raises in one; all must enter it.

        The message names the rank, unless all have the same error. In the block the methods of the
        team raise, rather than wait, once a process has failed in it or has left it.
        """
        return nullcontext() if self.size == 1 else agreement.agreed(self.rank, self.size)

    def check_others(self) -> None:
        """Raise if another process has failed in an ``agreed`` block; call it in long loops.

        In the evaluation of an epoch it raises as well once a signal has come.
        """
        check_stopped(self.size)
        if self.size > 1:
            agreement.check_others()

    def _gather_objects(self, value: Any) -> list[Any]:
        agreement.meet("join_rows")
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def total(self, counts: Sequence[int], device: torch.device) -> list[int]:
        """Return the sums of whole numbers over the processes: exact in any order."""
        if self.size == 1:
            return list(counts)
        agreement.meet(f"total of {len(counts)} numbers")
        sums = torch.tensor(counts, dtype=torch.int64, device=device)
        dist.all_reduce(sums)
        return cast(list[int], sums.tolist())

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients of parameters outside the wrapped network."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.size == 1 or not gradients:
            return
        agreement.meet("average_gradients")
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        parts = torch.split(flat / self.size, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def any(self, flag: bool, device: torch.device) -> bool:
        """Return whether the flag is set in any process; all must call this together."""
        if self.size == 1:
            return flag
        agreement.meet("any")
        raised = torch.tensor(float(flag), device=device)
        dist.all_reduce(raised, dist.ReduceOp.MAX)
        return bool(raised)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a number over the processes."""
        if self.size == 1:
            return value
        agreement.meet(f"mean of {list(value.shape)}")
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    def wait(self) -> None:
        """Wait until all processes have come here."""
        if self.size > 1:
            agreement.meet("wait")
            dist.barrier()

    @contextmanager
    def rank_zero_first(self) -> Iterator[None]:
        """Let rank 0 run the block before the others, who find what it has written."""
        with self.guarded():
            if not self.is_rank_zero:
                self.wait()
            yield
            if self.is_rank_zero:
                self.wait()

    def guarded(self) -> AbstractContextManager[None]:
        """End this block with ``RankLost`` where another process ends, and report an own error.

        Within ``agreed``, which raises the error in all, it is a plain block.
        """
        return nullcontext() if self.size == 1 or agreement.is_open() else watch.guarded()


def wrapped(net: nn.Module, *, uses_all: bool) -> DistributedDataParallel:
    """Return the network in DistributedDataParallel, for captured steps too."""
    device = next(net.parameters()).device
    module = DistributedDataParallel(
        net,
        device_ids=[device] if is_gpu(device) else None,
        find_unused_parameters=not uses_all,
        gradient_as_bucket_view=True,
    )
    # By default it times one of a hundred passes by events, which a CUDA graph cannot hold.
    module._set_ddp_runtime_logging_sample_rate(NEVER)  # type: ignore[no-untyped-call]
    return module


def is_wrapped(net: nn.Module) -> bool:
    """Whether the gradients of the network are averaged over processes by torch."""
    return any(isinstance(module, DistributedDataParallel) for module in net.modules())


def num_launched() -> int:
    """Return the number of processes that torchrun has started together; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_team(device: torch.device) -> tuple[Team, torch.device]:
    """Return the processes that torchrun started, if it did, and the device of this one."""
    if num_launched() == 1:
        return Team(), device
    device = own_gpu(device)
    if not dist.is_initialized():
        backend = "nccl" if is_gpu(device) else "gloo"
        limit = timedelta(seconds=watch.PATIENCE)
        store, rank, size = next(rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
        # torchrun has one store for all attempts: old addresses and errors must not be read again.
        store = dist.PrefixStore(watch.attempt(), store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size)
        watch.start_watch(rank, size)
        atexit.register(leave_team)
    return Team(dist.get_rank(), dist.get_world_size()), device


def leave_team() -> None:
    """End the process group at exit, unless a wrapped network is still alive, as after an error.

    The reducer of one that outlives its group waits for a thread of the group, which may wait for
    the GIL.
    """
    gc.collect()
    alive = (issubclass(type(each), DistributedDataParallel) for each in gc.get_objects())
    if dist.is_initialized() and not any(alive):
        dist.destroy_process_group()
