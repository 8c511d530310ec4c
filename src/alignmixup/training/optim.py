"""Optimizers, parameter groups, learning-rate schedules and the average of weights (EMA).

    step     lr * decay^(number of milestones passed)
    cosine   lr * (1 + cos(pi t)) / 2,  t from 0 at the end of the warm-up to 1 at the end
    linear   lr * (the line between the two nearest points)

During ``warmup_epochs`` the share of lr rises linearly from zero in all schedules. With ``min_lr``
the rate is min_lr + (lr - min_lr) * (share of lr), so that a warm-up starts at min_lr. On a GPU the
learning rate of a group is a tensor: a captured step reads the value of its own moment.

An optimizer is a function of parameter groups and settings, registered under the name that
``train.optimizer`` has:

    @register_optimizer("my_sgd")
    def my_sgd(groups, settings):
        return torch.optim.SGD(groups, momentum=settings.momentum)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alignmixup.contracts import Mixer
from alignmixup.registry import OPTIMIZERS, register_optimizer
from alignmixup.training.settings import TrainSettings

Groups = list[dict[str, Any]]
Named = list[tuple[str, nn.Parameter]]


def make_optimizer(
    net: nn.Module, settings: TrainSettings, mixer: Mixer | None = None
) -> Optimizer:
    """Return the optimizer over all parameters, in groups where rates or weight decay differ.

    The parameters of an attached mixer are the last group, with its ``optimizer_group``.
    """
    named = list(net.named_parameters())
    device = named[0][1].device
    groups = [
        {"params": [p for _, p in part], "lr": rate, "weight_decay": decay}
        for rated, rate in _by_rate(named, settings)
        for part, decay in _by_decay(rated, settings)
    ]
    if mixer is not None and (own := mixer_parameters(mixer)):
        shared = {"lr": settings.lr, "weight_decay": settings.weight_decay}
        groups.append({"params": own, **shared, **mixer.optimizer_group})
    for group in groups:
        group["base_lr"] = group["lr"]
        group.setdefault("min_lr", settings.min_lr)
        if named[0][1].is_cuda:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
    return _made(settings.optimizer, groups, settings)


def _made(name: str, groups: Groups, settings: TrainSettings) -> Optimizer:
    """Call a registered optimizer, which may be a user's."""
    try:
        optimizer: object = OPTIMIZERS[name](groups, settings)
    except TypeError as error:
        # With its trace, which has the place in the user's code.
        raise ValueError(
            f"the optimizer {name!r} fails ({error}): it must be a function that is called with "
            "(groups, settings) and returns torch.optim.SGD(groups, ...) or the like"
        ).with_traceback(error.__traceback__) from error
    if not isinstance(optimizer, Optimizer) or any(
        "base_lr" not in group for group in optimizer.param_groups
    ):
        raise ValueError(
            f"the optimizer {name!r} must return a torch.optim.Optimizer of the groups that it is "
            f"given, got {type(optimizer).__name__}: torch.optim.SGD(groups, ...)"
        )
    return optimizer


def mixer_parameters(mixer: Mixer) -> list[nn.Parameter]:
    """Return the parameters of a mixer that are trained; none of a teacher's are."""
    parameters = [] if mixer.module is None else mixer.module.parameters()
    return [parameter for parameter in parameters if parameter.requires_grad]


@register_optimizer("sgd")
def sgd(groups: Groups, settings: TrainSettings) -> Optimizer:
    """SGD with momentum; fused on a GPU."""
    _, is_cuda = _parameters(groups)
    optimizer = torch.optim.SGD(
        groups, momentum=settings.momentum, nesterov=settings.nesterov, fused=is_cuda
    )
    if is_cuda:
        # From the start, where SGD would begin each at its first gradient, which is the same: the
        # fused update refuses a step in which some parameters (a decoder) see their first one.
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


@register_optimizer("adamw")
def adamw(groups: Groups, settings: TrainSettings) -> Optimizer:
    """AdamW with betas (momentum, 0.999); fused and capturable on a GPU."""
    parameters, is_cuda = _parameters(groups)
    for group in groups:
        if "momentum" in group:
            group["betas"] = (group.pop("momentum"), 0.999)
    optimizer = torch.optim.AdamW(
        groups, betas=(settings.momentum, 0.999), fused=is_cuda, capturable=is_cuda
    )
    if is_cuda:
        # From the start: made inside a captured step, it would be made anew at every replay.
        for parameter in parameters:
            state = optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
    return optimizer


def _parameters(groups: Groups) -> tuple[list[nn.Parameter], bool]:
    parameters = [parameter for group in groups for parameter in group["params"]]
    return parameters, parameters[0].is_cuda


def _by_rate(named: Named, settings: TrainSettings) -> list[tuple[Named, float]]:
    """All parameters with their rate, the classifier's last where it has its own."""
    if settings.classifier_lr is None:
        return [(named, settings.lr)]
    head = [pair for pair in named if pair[0].startswith(settings.classifier)]
    rest = [pair for pair in named if not pair[0].startswith(settings.classifier)]
    if not head:
        raise ValueError(
            f"classifier_lr is set, but no parameter's name starts with "
            f"{settings.classifier!r}; set train.classifier to one of "
            f"{sorted({name.split('.')[0] for name, _ in named})}"
        )
    return [(rest, settings.lr), (head, settings.classifier_lr)]


def _by_decay(named: Named, settings: TrainSettings) -> list[tuple[Named, float]]:
    """The parameters with their weight decay, those without it last."""
    if settings.decay_vectors:
        return [(named, settings.weight_decay)]
    others = [pair for pair in named if pair[1].ndim > 1]
    vectors = [pair for pair in named if pair[1].ndim <= 1]
    parts = ((others, settings.weight_decay), (vectors, 0.0))
    return [(part, decay) for part, decay in parts if part]


def set_learning_rate(optimizer: Optimizer, share: float) -> None:
    """Set every group to ``share`` of the way from its ``min_lr`` to its own initial rate."""
    for group in optimizer.param_groups:
        least = group["min_lr"]
        rate = least + (group["base_lr"] - least) * share
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def learning_rate_share(settings: TrainSettings, progress: float) -> float:
    """Return the share of the initial learning rate after ``progress`` epochs, a fraction too."""
    warmup = settings.warmup_epochs
    if progress < warmup:
        return progress / warmup
    if settings.schedule == "cosine":
        t = (progress - warmup) / (settings.epochs - warmup)
        return (1 + math.cos(math.pi * min(t, 1.0))) / 2
    if settings.schedule == "linear":
        return _interpolate(settings.points, progress)
    passed = sum(progress >= milestone for milestone in settings.milestones)
    return settings.decay**passed


def _interpolate(points: Sequence[tuple[float, float]], progress: float) -> float:
    """The value at ``progress`` of the line through ``points``, constant before and after them."""
    done = sum(epoch <= progress for epoch, _ in points)
    if done in (0, len(points)):
        return points[max(done - 1, 0)][1]
    (begin, first), (end, last) = points[done - 1 : done + 1]
    return first + (last - first) * (progress - begin) / (end - begin)


class EMA:
    """An exponential moving average of a network's weights and batch statistics, as a network.

        average = decay * average + (1 - decay) * weights                      after each step

    Counters are copied. The update is two ``foreach`` calls that do not wait for the device, so it
    is captured as part of the step. The first weights still count for ``decay ** steps``.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.net.eval()  # a module's own may return nothing
        self.share = 1 - decay
        ours, theirs = ([*each.parameters(), *each.buffers()] for each in (self.net, net))
        # Of both networks: first what is averaged, then what is copied.
        self._averaged = [[t for t in each if t.is_floating_point()] for each in (ours, theirs)]
        self._copied = [[t for t in each if not t.is_floating_point()] for each in (ours, theirs)]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        ours, theirs = self._averaged
        torch._foreach_lerp_(ours, theirs, self.share)
        ours, theirs = self._copied
        if ours:
            torch._foreach_copy_(ours, theirs)
