"""OneOf: mix each batch by one of several methods, as DeiT and timm switch input mixup and CutMix.

With probability ``prob`` a batch is mixed, by method m with a probability in proportion to its
weight; or a pair of samples, or a sample (``mode``). Labels are smoothed in every case. After the
share ``until`` of training nothing is mixed; labels are smoothed as before.

A case is named ``NAME/INNER``, with the name of the method's class, such as ``CutMix/cut``; a
second method of the same class is ``CutMix2``. Chosen per sample or pair, all methods are one case.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, Mixer
from alignmixup.hooks import tap
from alignmixup.mixers.adautomix import AdAutoMix
from alignmixup.mixers.base import ImageMethod
from alignmixup.mixers.checks import check_unit
from alignmixup.mixers.comixup import CoMixup
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.label_smoothing import check_smoothing, smoothed
from alignmixup.mixers.multimix import MultiMix
from alignmixup.mixers.nomix import NoMix
from alignmixup.mixers.per_sample import Mode, apply_each, check_mode, mixing_share, sample_each
from alignmixup.mixers.recursivemix import RecursiveMix
from alignmixup.mixers.sampling import CLEAN, clean_draw, probabilities, sample_case
from alignmixup.mixers.wrapper import check_mixers, within
from alignmixup.registry import register_mixer

Pairing = Literal["random", "reverse"]

# They mix other images than pairs of the batch: those of ``perm`` have no effect.
UNPAIRED = (AdAutoMix, CoMixup, MultiMix, RecursiveMix)


@register_mixer
@dataclass(frozen=True)
class OneOf(Mixer):
    """OneOf (Touvron et al. 2021; timm): mix each batch by one of several methods.

    Args:
        mixers: The methods; at most one may have parameters or state.
        weights: Weight of each method in the choice; None: all alike.
        prob: Probability that a batch is mixed.
        smoothing: Label smoothing, in every case.
        until: Share of training after which nothing is mixed any more; 1 for never.
        pairing: ``"random"`` leaves the partners to the methods; ``"reverse"`` pairs sample i with
            sample b - 1 - i of a batch of b, as timm does; for methods that mix pairs.
        mode: ``"batch"`` chooses a method for the batch; ``"pair"`` and ``"elem"`` choose one, a
            share and a box for each pair and each sample, with methods that mix images alone by one
            ``lam`` per sample: InputMixup and CutMix.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.OneOf((am.InputMixup(0.8), am.CutMix(prob=1.0)), weights=(0.5, 0.5))
        mixer(model, x, y).loss().backward()
        ```
    """

    mixers: tuple[Mixer, ...] = (InputMixup(alpha=0.8), CutMix(alpha=1.0, prob=1.0))
    weights: tuple[float, ...] | None = None
    prob: float = 1.0
    smoothing: float = 0.0
    until: float = 1.0
    pairing: Pairing = "random"
    mode: Mode = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mixers(self.mixers)
        check_smoothing(self.smoothing, self.mixers)
        weights = (1.0,) * len(self.mixers) if self.weights is None else self.weights
        is_usable = min(weights, default=-1) >= 0 and 0 < sum(weights) < math.inf  # NaN is not
        if len(weights) != len(self.mixers) or not is_usable:
            raise ValueError(
                f"weights must be one number >= 0 for each of {len(self.mixers)} mixers, finite "
                f"and not all zero, got {self.weights}"
            )
        check_unit(self, "prob", "until")
        check_mode(self.mode, self.mixers)
        held = [inner for mixer in self.mixers for inner in within(mixer)]
        if self.pairing == "reverse" and (own := [m for m in held if isinstance(m, UNPAIRED)]):
            raise ValueError(
                f"pairing='reverse' has no effect on {type(own[0]).__name__}, which does not mix "
                "pairs of the batch: use pairing='random'"
            )

    @classmethod
    def deit(cls) -> OneOf:
        """Return the switch of DeiT: alpha 0.8 and 1, smoothing 0.1, partners by reversal."""
        return cls(smoothing=0.1, pairing="reverse")

    @property
    def cases(self) -> Mapping[str, float]:
        """Every case with its probability, as an average over training."""
        if self.mode != "batch":
            share = self.until if self._per_sample() else 0.0
            return probabilities({self.mode: share, CLEAN: 1 - share})
        inner = {
            f"{name}/{case}": self.until * share * probability
            for name, share in self._choices().items()
            if name != CLEAN
            for case, probability in self._named()[name].cases.items()
        }
        return probabilities({**inner, CLEAN: 1 - self.until * self.prob})

    @property
    def trains_all(self) -> bool:
        # Parameters of one method have no gradient while another mixes.
        alone = self.module is None or len(self.cases) == len(self.mixers[0].cases)
        return alone and all(mixer.trains_all for mixer in self.mixers)

    @property
    def needs_network(self) -> bool:
        return any(mixer.needs_network for mixer in self.mixers)

    @property
    def module(self) -> nn.Module | None:
        return self._stateful().module

    @property
    def optimizer_group(self) -> Mapping[str, float]:
        return self._stateful().optimizer_group

    def tapped(self, net: nn.Module) -> Sequence[str]:
        return [layer for mixer in self.mixers for layer in mixer.tapped(net)]

    def attach(self, net: nn.Module, x: Tensor) -> Mixer:
        mixers = tuple(mixer.attach(net, x) for mixer in self.mixers)
        stateful = [type(mixer).__name__ for mixer in mixers if mixer.module is not None]
        if len(stateful) > 1:
            raise ValueError(
                f"OneOf takes one mixer with parameters or state, got {' and '.join(stateful)}"
            )
        return dataclasses.replace(self, mixers=mixers)

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        mixes = progress < self.until or self.until == 1
        if mixes and (mixers := self._per_sample()):
            is_reversed = self.pairing == "reverse"
            return sample_each(mixers, self.mode, is_reversed, batch_size, rng)
        choices = self._choices() if mixes else {CLEAN: 1.0}
        # A single choice draws nothing: OneOf of one mixer is that mixer.
        name = sample_case(choices, rng) if len(choices) > 1 else next(iter(choices))
        if name == CLEAN:
            return clean_draw(batch_size, rng)
        draw = self._named()[name].draw(batch_size, rng, progress)
        perm = draw.perm
        if self.pairing == "reverse":
            perm = torch.arange(batch_size, device=rng.device).flip(0)
        return dataclasses.replace(draw, case=f"{name}/{draw.case}", perm=perm)

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        name, _, case = draw.case.partition("/")
        if draw.case == CLEAN:
            losses = (getattr(inner, "loss", None) for inner in within(self.mixers[0]))
            mixer: Mixer = NoMix(loss=next(filter(None, losses), "ce"))
            case = CLEAN
        elif draw.case == self.mode and (mixers := self._per_sample()):
            mixed = apply_each([mixer for mixer, _ in mixers], net, x, y, draw)
            return smoothed(mixed, self.smoothing)
        elif case and name in self._named() and self.mode == "batch":
            mixer = self._named()[name]
        else:
            raise ValueError(
                f"the draw's case is {draw.case!r}, but this mixer has {list(self.cases)}: "
                "use its own draw()"
            )
        with ExitStack() as taps:
            for layer in self.tapped(net):  # of all methods: torch.compile ignores later hooks
                taps.enter_context(tap(net, layer, None))
            mixed = mixer.apply(net, x, y, dataclasses.replace(draw, case=case))
        return smoothed(mixed, self.smoothing)

    def _named(self) -> dict[str, Mixer]:
        """Return the methods by the names of their cases."""
        named: dict[str, Mixer] = {}
        count: Counter[str] = Counter()
        for mixer in self.mixers:
            kind = type(mixer).__name__
            count[kind] += 1
            named[kind if count[kind] == 1 else f"{kind}{count[kind]}"] = mixer
        return named

    def _choices(self) -> dict[str, float]:
        """Return the probability of each method while batches are mixed, and of a clean one."""
        weights = self.weights or (1.0,) * len(self.mixers)
        shares = {
            name: self.prob * weight / sum(weights)
            for name, weight in zip(self._named(), weights, strict=True)
        }
        return probabilities({**shares, CLEAN: 1 - self.prob})

    def _per_sample(self) -> list[tuple[ImageMethod, float]]:
        """Return the methods chosen per sample or pair, and the share of samples each mixes."""
        if self.mode == "batch":
            return []
        choices = self._choices()
        return [
            (mixer, choices[name] * mixing_share(mixer))
            for name, mixer in self._named().items()
            if isinstance(mixer, ImageMethod) and choices.get(name, 0) * mixing_share(mixer) > 0
        ]

    def _stateful(self) -> Mixer:
        """Return the method that has parameters or state, else the first."""
        found = (mixer for mixer in self.mixers if mixer.module is not None)
        return next(found, self.mixers[0])
