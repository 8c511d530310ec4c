"""How much does alignment change, on this model and with these settings?

A plan with an exact marginal keeps the mean over positions (see ``align``): before average pooling
and a linear layer it changes the features and nothing after them. With ``last="columns"``, as in
the authors' code, that holds for feat and not for feat'. This measures both on the user's own
model, before GPU time is spent on it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignmixup.contracts import Mixer
from alignmixup.device import fork_rng
from alignmixup.evaluation.forward import model_dtype
from alignmixup.hooks import keeping_modes, tap
from alignmixup.mixers.alignmixup import AlignMixup, mix_features, to_resolution
from alignmixup.mixers.checks import check_images
from alignmixup.mixers.layouts import PrefixTokens
from alignmixup.mixers.wrapper import within
from alignmixup.ops.align import Keep, exact_side, to_positions
from alignmixup.ops.blend import check_logits
from alignmixup.ops.cost import pairwise_cost
from alignmixup.ops.sinkhorn import Side, sinkhorn
from alignmixup.wrappers import logits_module

NEXT_TO_NOTHING = 1e-3
KEEPS: dict[str, Keep] = {"feat": "anchor", "feat'": "partner"}
# The marginal that keeps the mean over positions.
NEEDED: dict[str, Side] = {"feat": "columns", "feat'": "rows"}


@dataclass(frozen=True, slots=True)
class Change:
    """What alignment changes in one case and one mode, as |aligned - unaligned| / |unaligned|.

    ``features`` is the change of the layer's output, ``pooled`` that of its mean over positions.
    ``plan_entropy`` is 0 for a one-to-one matching and 1 for a plan that matches nothing;
    ``marginal_error`` is how far the plan's marginals are from uniform, mean over the batch.
    ``is_exact``: the marginal that keeps the mean over positions is the one updated last.
    """

    case: str
    is_training: bool
    is_exact: bool
    features: float
    pooled: float
    logits: float
    plan_entropy: float
    marginal_error: float


@dataclass(frozen=True, slots=True)
class Effect:
    """How much alignment changes at one layer, each as |aligned - unaligned| / |unaligned|.

    The figures are those of evaluation mode, in the case that changes most.

    Args:
        layer: Name of the layer.
        features: Relative change of the features.
        pooled: Relative change of their mean over positions.
        logits: Relative change of the logits.
        plan_entropy: 0 for a one-to-one matching, 1 for a plan that matches nothing.
        marginal_error: Distance of the plan's marginals from uniform, mean over the batch.
        changes: The same for every case (feat, feat') in evaluation and in training mode.

    Example:
        ```python
        effect = am.alignment_effect(model, "layer3", x)
        if effect.is_next_to_nothing:
            print("choose an earlier layer:", effect)
        ```
    """

    layer: str
    features: float
    pooled: float
    logits: float
    plan_entropy: float
    marginal_error: float
    changes: tuple[Change, ...]

    @property
    def is_exact(self) -> bool:
        """Whether every case keeps the mean over positions, whatever the weights."""
        return all(change.is_exact for change in self.changes)

    @property
    def is_next_to_nothing(self) -> bool:
        """Whether no case changes the logits by more than 0.1 %, in either mode."""
        return all(change.logits < NEXT_TO_NOTHING for change in self.changes)

    def __str__(self) -> str:
        return (
            f"alignment at {self.layer} changes the features by {self.features:.2%}, their mean "
            f"over positions by {self.pooled:.2g} and the logits by {self._logits(False)}; in "
            f"training mode the logits by {self._logits(True)}{self._verdict()}"
        )

    def _logits(self, is_training: bool) -> str:
        chosen = [change for change in self.changes if change.is_training == is_training]
        return " and ".join(f"{change.logits:.2g} ({change.case})" for change in chosen)

    def _verdict(self) -> str:
        if self.is_exact:
            follows = ", which is next to nothing: an aligned case trains as an unaligned one"
            return follows if self.is_next_to_nothing else ""
        off = max((c for c in self.changes if not c.is_exact), key=lambda c: c.marginal_error)
        return (
            f"; the plan of {off.case} does not keep the mean over positions (its marginals are "
            f"off by {off.marginal_error:.2g}), and this error grows with the size of the features"
        )


@torch.no_grad()
def alignment_effect(
    model: nn.Module,
    mixer: Mixer | str,
    x: Tensor,
    *,
    lam: float = 0.5,
    keep: Keep | None = None,
    eps: float | None = None,
    num_iters: int | None = None,
    last: Side | None = None,
) -> Effect:
    """Measure how much alignment changes on a model: mix a batch with and without it and compare.

    Each sample is mixed with the next one, in evaluation and in training mode, without gradients.
    The model is left unchanged (modes, running statistics, random state); wrappers such as
    ``torch.compile`` and DistributedDataParallel are bypassed.

    Args:
        model: Any module that returns logits.
        mixer: The mixer whose settings are measured, in both directions, also inside of
            ``LabelSmoothing``, ``Decoupled`` or ``OneOf``; or the name of a layer, measured with
            AlignMixup's defaults in one direction.
        x: Images, two or more.
        lam: Share of the anchor.
        keep: Measure only this direction; with a name of a layer, ``"anchor"`` by default.
        eps: Entropic regularization for a name of a layer; a mixer has its own.
        num_iters: Sinkhorn iterations, likewise.
        last: The marginal of the plan that is exact, likewise.

    Returns:
        The relative change of features, pooled features and logits; ``print`` shows a sentence.

    Raises:
        ValueError: If the mixer aligns nothing, the batch has one sample, ``lam`` is not in [0, 1],
            or the layer does not exist or has another shape.

    Example:
        ```python
        print(am.alignment_effect(model, am.AlignMixup.released("layer4"), x))
        ```
    """
    if len(x) < 2:
        raise ValueError(f"alignment needs two samples or more, got a batch of {len(x)}")
    check_images(x)
    if not 0 <= lam <= 1:
        raise ValueError(f"lam must lie in [0, 1], got {lam}")
    settings = {"eps": eps, "num_iters": num_iters, "last": last}
    chosen = _feature_mixer(mixer, {k: v for k, v in settings.items() if v is not None}, keep)
    net = logits_module(model)
    x = x.to(model_dtype(net) or x.dtype)  # images of numpy are float64
    changes = tuple(
        change
        for is_training in (False, True)
        for change in _changes(net, chosen, x, lam, is_training)
    )
    most = max((c for c in changes if not c.is_training), key=lambda change: change.logits)
    return Effect(
        chosen.layer,
        most.features,
        most.pooled,
        most.logits,
        most.plan_entropy,
        most.marginal_error,
        changes,
    )


def _feature_mixer(
    mixer: Mixer | str, settings: dict[str, object], keep: Keep | None
) -> AlignMixup:
    """The settings to measure, with the cases to measure as its weights."""
    if keep not in (None, "anchor", "partner"):
        raise ValueError(f"keep must be 'anchor' or 'partner', got {keep!r}")
    if not isinstance(mixer, Mixer):
        weights = {case: 1.0 for case, kept in KEEPS.items() if kept == (keep or "anchor")}
        return AlignMixup(mixer, weights=weights, **settings)  # type: ignore[arg-type]
    if settings:
        raise ValueError(f"{sorted(settings)} are settings of the mixer: change them there")
    held = (getattr(each, "feature_mixer", None) for each in within(mixer))
    found: AlignMixup | None = next(filter(None, held), None)
    if found is None:
        raise ValueError(f"this mixer aligns no features, so there is nothing to measure: {mixer}")
    if keep is None:
        return found
    return dataclasses.replace(found, weights={c: 1.0 for c, kept in KEEPS.items() if kept == keep})


def _changes(
    net: nn.Module, mixer: AlignMixup, x: Tensor, lam: float, is_training: bool
) -> Iterator[Change]:
    """What each case of the mixer changes, in one mode."""
    perm = torch.arange(len(x), device=x.device).roll(1)
    share = torch.tensor(lam, device=x.device, dtype=torch.float64)
    prefix, part = mixer.prefix(net), mixer.selection(net)

    def forward(settings: AlignMixup, case: str) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's output as it is and as mixed, and the logits."""
        seen: list[Tensor] = []

        def mix(output: Tensor) -> Tensor:
            seen.extend((output, mix_features(output, settings, case, perm, share, prefix)))
            return seen[1].clone()  # an activation in place may follow

        mode = _unchanged(net, is_training, x.device)
        # A module that has compiled itself and run would not see a tap that comes now.
        eager = torch.compiler.set_stance("force_eager")
        with mode, eager, tap(net, part, mix):
            logits = net(x)
        check_logits(logits, len(x))
        return seen[0], to_positions(seen[1]).double(), logits.double()

    _, without, plain_logits = forward(dataclasses.replace(mixer, aligned=False), "feat")
    for case in mixer.cases:
        if case not in KEEPS:
            continue
        output, with_plan, logits = forward(mixer, case)
        side = mixer.last or exact_side(KEEPS[case], mixer.num_iters)
        entropy, marginal_error = _plan_figures(output, mixer, side, perm, prefix)
        yield Change(
            case,
            is_training,
            is_exact=mixer.num_iters > 0 and side == NEEDED[case],
            features=_change(with_plan, without),
            pooled=_change(with_plan.mean(1), without.mean(1)),
            logits=_change(logits, plain_logits),
            plan_entropy=entropy,
            marginal_error=marginal_error,
        )


def _plan_figures(
    output: Tensor, mixer: AlignMixup, side: Side, perm: Tensor, prefix: PrefixTokens
) -> tuple[float, float]:
    """Entropy and marginal error of the plans between these features, in float64."""
    A = to_positions(to_resolution(output, mixer.resolution))
    A = (A[:, prefix.of(output) :] if output.ndim == 3 else A).double()
    cost = pairwise_cost(A.transpose(1, 2), A[perm].transpose(1, 2))
    transport = sinkhorn(cost, eps=mixer.eps, num_iters=mixer.num_iters, tol=mixer.tol, last=side)
    r = A.shape[1]
    entropy = float(transport.entropy.mean() / math.log(r) - 1) if r > 1 else 0.0
    return entropy, float(transport.marginal_error.mean())


@contextmanager
def _unchanged(net: nn.Module, is_training: bool, device: torch.device) -> Iterator[None]:
    """Run a forward in this mode; afterwards modes, buffers and random state are as before.

    A network in training mode keeps the modes it has: parts may be frozen.
    """
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in net.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    # Each forward starts from one random state, so that dropout is the same in all.
    with keeping_modes(net), fork_rng(device):
        if not (is_training and net.training):
            net.train(is_training)
        try:
            yield
        finally:
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer.copy_(value)


def _change(aligned: Tensor, unaligned: Tensor) -> float:
    scale = float(unaligned.norm())
    return float((aligned - unaligned).norm()) / scale if scale else 0.0
