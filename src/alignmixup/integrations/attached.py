"""Methods with parameters or state (``mixer.module``) in a loop that somebody else runs.

The parameters belong in the optimizer of the loop, the state in its checkpoint. A module outside of
DistributedDataParallel has its gradients averaged here, at the end of each backward pass.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from alignmixup.contracts import Mixer
from alignmixup.training.distributed import Team
from alignmixup.training.optim import mixer_parameters


def processes() -> Team:
    """Return the processes of the loop: those of torch's process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        return Team(dist.get_rank(), dist.get_world_size())
    return Team()


def add_to(optimizer: torch.optim.Optimizer, mixer: Mixer) -> None:
    """Add the parameters of a mixer as a group of their own, with its ``optimizer_group``.

    Raises:
        ValueError: If the group has a setting that the optimizer does not know.
    """
    own = mixer_parameters(mixer)
    there = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not own or {id(p) for p in own} <= there:
        return
    if unknown := sorted(set(mixer.optimizer_group) - set(optimizer.defaults)):
        raise ValueError(
            f"{type(optimizer).__name__} has no setting {' and '.join(unknown)}, which "
            f"{type(mixer).__name__} has for its own parameters: leave it out of the mixer"
        )
    optimizer.add_param_group({"params": own, **mixer.optimizer_group})


def check_trained(optimizer: torch.optim.Optimizer, mixer: Mixer) -> None:
    """Raise if an optimizer that somebody else has made leaves out the parameters of a mixer."""
    there = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(id(p) not in there for p in mixer_parameters(mixer)):
        raise ValueError(
            f"the optimizer has no parameters of {type(mixer).__name__}: give it "
            "mixer.module.parameters() too"
        )


def clip_before_step(optimizer: torch.optim.Optimizer, mixer: Mixer, max_norm: float) -> None:
    """Clip the gradients of a mixer's parameters before each step of the optimizer.

    By their own norm, as this package's trainer does; for a loop that clips those of the network
    alone. A gradient scaler has unscaled them by then.
    """
    own = mixer_parameters(mixer)

    def clip(*step: object) -> None:
        nn.utils.clip_grad_norm_(own, max_norm)

    optimizer.register_step_pre_hook(clip)


def averaged(loss: Tensor, mixer: Mixer) -> Tensor:
    """Return the loss; its backward pass ends with the mean of the mixer's gradients.

    The mean is over the processes. What a former pass has averaged stays as it is, so that
    gradients can be accumulated.
    """
    team, own = processes(), mixer_parameters(mixer)
    if team.size > 1 and own and loss.requires_grad:
        average = partial(team.average_gradients, own)
        # After all gradients, and after DistributedDataParallel has started its own reductions.
        engine = Variable._execution_engine
        loss.register_hook(lambda gradient: engine.queue_callback(average))  # type: ignore[no-untyped-call]
    return loss
