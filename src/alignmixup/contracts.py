"""What all packages share: draw, mixed batch, mixer, images in memory; keys and results.

Conventions that invite a sign error are fixed here, once:

* ``lam`` is the share of the **anchor**, sample i of the batch; its partner is sample ``perm[i]``.
* ``lam = 1`` gives the anchor back bit for bit.
* The rows of a transport plan are positions of the anchor, its columns positions of the partner.
* Images travel as floats in [0, 1]; normalization is the first layer of a network.
* A box is (x0, y0, x1, y1) in pixels, x1 and y1 exclusive.

Mixer is defined here; ``draw``, ``mixed``, ``fusion``, ``losses``, ``image_set`` and ``results``
have the rest, which other packages import from here.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alignmixup.checking import check_call, check_choices
from alignmixup.draw import Draw, to_device
from alignmixup.fusion import fusible, fusing
from alignmixup.image_set import ImageSet
from alignmixup.losses import (
    Criterion,
    label_problem,
    sigmoid_bce,
    soft_cross_entropy,
    soft_targets,
    softmax_bce,
    widened,
)
from alignmixup.mixed import Mixed
from alignmixup.results import RecipeKey, Result, Skipped

__all__ = [
    "Criterion",
    "Draw",
    "ImageSet",
    "Mixed",
    "Mixer",
    "RecipeKey",
    "Result",
    "Skipped",
    "check_draws",
    "check_mixed",
    "check_mixer",
    "fusible",
    "fusing",
    "label_problem",
    "sigmoid_bce",
    "soft_cross_entropy",
    "soft_targets",
    "softmax_bce",
    "to_device",
    "widened",
]


class NotAttached(ValueError):
    """A method with parameters or state is applied before ``attach``."""


class Mixer(ABC):
    """Base class of all mixup methods.

    ``draw`` holds all randomness and ``apply`` all arithmetic, so the same draw gives the same
    result. Concrete mixers are frozen dataclasses of settings. A subclass implements ``cases``,
    ``draw`` and ``apply``. Settings whose type hints are ``bool`` or ``Literal`` are checked; a
    ``__post_init__`` of your own calls ``super().__post_init__()`` for it.

    A method with parameters or state also implements ``attach``, which returns the mixer with its
    ``module``. ``apply`` writes the state in place, and none of it while gradients are off: the
    same draw and the same state give the same result and the same next state.

    Example:
        ```python
        from dataclasses import dataclass


        @dataclass(frozen=True)
        class HalfAndHalf(am.Mixer):
            cases = {"input": 1.0}

            def draw(self, batch_size, rng, progress=0.0):
                perm = torch.randperm(batch_size, generator=rng)
                return am.Draw("input", perm, torch.tensor(0.5))

            def apply(self, net, x, y, draw):
                return am.InputMixup().apply(net, x, y, draw)


        loss = HalfAndHalf()(model, x, y).loss()
        ```
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _make_loadable(cls)
        draw = vars(cls).get("draw")
        if callable(draw) and len(inspect.signature(draw).parameters) == 3:
            cls.draw = _ignoring_progress(draw)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Check switches and named choices by the type hints of a dataclass's fields."""
        check_choices(self)

    @property
    @abstractmethod
    def cases(self) -> Mapping[str, float]:
        """Every case ``draw`` can return, with its probability; the probabilities sum to one."""

    @property
    def trains_all(self) -> bool:
        """Whether each case gives every parameter of the network a gradient."""
        return True

    @property
    def needs_network(self) -> bool:
        """Whether mixing looks into the network; False: ``apply`` calls it once, on mixed images.

        Without the network a method also mixes in a data loader, by ``MixCollate``.
        """
        return True

    @property
    def module(self) -> nn.Module | None:
        """Parameters and state of an attached mixer; None for a method without.

        A sub-module ``teacher`` is a network, which the trainer scores beside the one it trains.
        """
        return None

    @property
    def optimizer_group(self) -> Mapping[str, float]:
        """How the parameters of ``module`` are trained, where not as the network's.

        Keys: ``lr``, ``min_lr`` (where the schedule ends), ``momentum`` and ``weight_decay``.
        """
        return {}

    def tapped(self, net: nn.Module) -> Sequence[str]:
        """Return the layers that the method reads or replaces in one of its cases.

        A mixer that holds others installs the hooks of all of them in every case, because
        torch.compile ignores hooks that are added later.

        Args:
            net: The network, as ``apply`` gets it.

        Returns:
            Names of layers; none by default.
        """
        return ()

    def attach(self, net: nn.Module, x: Tensor) -> Mixer:
        """Return the mixer with the parameters and state that it needs for this network.

        Call it before the optimizer is made, and give the optimizer ``module.parameters()`` too.

        Args:
            net: The network to train, on its device.
            x: A batch of images as the network gets them.

        Returns:
            The mixer itself, unless the method has parameters or state.
        """
        return self

    @abstractmethod
    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        """Draw all randomness of one step.

        What changes in the course of training is a tensor of the draw: a captured step would keep
        the first value of a number.

        Args:
            batch_size: Number of samples in the batch.
            rng: Source of randomness; a CPU generator never synchronizes with a GPU.
            progress: Share of training that is done, in [0, 1).

        Returns:
            The case, the partners and the shares of this step.
        """

    @abstractmethod
    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        """Run the network on the mixed batch.

        Args:
            net: Any module that returns logits ``[b, k]``.
            x: Images ``[b, c, h, w]``.
            y: Integer labels ``[b]`` or soft labels ``[b, k]``.
            draw: The randomness of this step, from this mixer's ``draw``.

        Returns:
            Logits, soft targets and further losses.

        Raises:
            ValueError: If images, labels, draw and network do not fit together.
        """

    def __call__(
        self,
        net: nn.Module,
        x: Tensor,
        y: Tensor,
        rng: torch.Generator | None = None,
        *,
        progress: float = 0.0,
    ) -> Mixed:
        """Draw and apply: the call for a training loop.

        Args:
            net: Any module that returns logits ``[b, k]``.
            x: Images ``[b, c, h, w]``. A batch of one image is its own partner: interpolation and
                CutMix leave it as it is, methods that align, resize or restyle change it.
            y: Integer labels ``[b]`` or soft labels ``[b, k]``.
            rng: Source of randomness; defaults to torch's global CPU generator.
            progress: Share of training that is done, in [0, 1); for methods with a schedule.

        Returns:
            Logits, soft targets and further losses; minimize its ``loss()``.

        Raises:
            ValueError: If ``rng`` is not a ``torch.Generator`` or ``progress`` is not in [0, 1], or
                see ``apply``.
        """
        if rng is not None and not isinstance(rng, torch.Generator):
            raise ValueError(
                f"rng must be a torch.Generator, got {rng!r}; torch.Generator().manual_seed(0) "
                "makes one"
            )
        if not 0 <= progress <= 1:
            raise ValueError(
                f"progress is the share of training that is done, from 0 to 1, got {progress}: "
                "divide the step by the number of steps"
            )
        if not hasattr(x, "__len__"):
            raise ValueError(f"images must be a tensor, got {type(x).__name__}: mixer(model, x, y)")
        draw = self.draw(len(x), rng or torch.default_generator, progress)
        try:
            return check_mixed(self, self.apply(net, x, y, draw))
        except RuntimeError as error:
            _explain_dtype(net, x, error)
            raise


def check_mixer(mixer: object) -> None:
    """Raise a ``ValueError`` for something that is not a mixer, such as a class or a name."""
    if not isinstance(mixer, Mixer):
        raise ValueError(f"mixer must be a mixer, such as alignmixup.CutMix(), got {mixer!r}")


def check_mixed(mixer: Mixer, mixed: object) -> Mixed:
    """Return what ``apply`` of a mixer has returned.

    Raises:
        ValueError: It is not a ``Mixed``, or its logits and targets differ in shape: a loss might
            broadcast them.
    """
    if not isinstance(mixed, Mixed):
        raise ValueError(
            f"{type(mixer).__name__}.apply must return a Mixed(logits, targets), got "
            f"{'None' if mixed is None else type(mixed).__name__}"
        )
    logits, targets = mixed.logits, mixed.targets
    if logits is not None and targets is not None and logits.shape != targets.shape:
        raise ValueError(
            f"{type(mixer).__name__}.apply returned logits {list(logits.shape)} and targets "
            f"{list(targets.shape)}: both must be [b, k], the targets one row of class shares per "
            "image (alignmixup.contracts.soft_targets)"
        )
    return mixed


_CALLS = (
    ("attach", "net", "x"),
    ("draw", "batch_size", "rng", "progress"),
    ("draw", "batch_size", "rng"),
    ("apply", "net", "x", "y", "draw"),
)


def check_draws(mixer: Mixer, batch_size: int) -> None:
    """Draw twice from the same generator.

    Raises:
        ValueError: ``draw`` returns something else than a ``Draw``, or draws from elsewhere too: a
            resumed run would not repeat the draws, and processes would draw differently. Or a
            method takes other arguments than it is called with.
    """
    name, drawn = type(mixer).__name__, []
    for method, *arguments in _CALLS:
        check_call(f"{name}.{method}", getattr(mixer, method), *arguments)
    if not isinstance(mixer.cases, Mapping):
        raise ValueError(
            f"{name}.cases must be a dict of the probability of each case, got {mixer.cases!r}"
        )
    for _ in range(2):
        draw = mixer.draw(batch_size, torch.Generator().manual_seed(0))
        if not isinstance(draw, Draw):
            raise ValueError(
                f"{name}.draw must return a Draw(case, perm, lam), got {type(draw).__name__}"
            )
        drawn.append({"case": draw.case} | {k: v.tolist() for k, v in draw.tensors().items()})
    if str(drawn[0]) != str(drawn[1]):  # as text: NaN is not itself
        differing = [key for key in drawn[0] if str(drawn[0][key]) != str(drawn[1].get(key))]
        raise ValueError(
            f"{name}.draw gave another {' and '.join(differing)} from the same rng: draw all of it "
            "from rng, as torch.rand((), generator=rng) does"
        )


def _make_loadable(cls: type[Mixer]) -> None:
    """Let torch.load read the settings of a mixer, which are plain values, from a checkpoint.

    Of classes of one name it takes any: ``slots=True`` makes a second class, and so does a cell of
    a notebook that runs again. The last one stays.
    """
    others = [
        known
        for known in torch.serialization.get_safe_globals()
        if not isinstance(known, type)
        or (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__)
    ]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*others, cls])


def _ignoring_progress(draw: Callable[..., Draw]) -> Callable[..., Draw]:
    """Wrap a ``draw`` without the argument ``progress``, as older mixers have it."""

    def with_progress(
        self: Mixer, batch_size: int, rng: torch.Generator, progress: float = 0.0
    ) -> Draw:
        return draw(self, batch_size, rng)

    with_progress.__doc__ = draw.__doc__
    return with_progress


def _explain_dtype(net: object, x: Tensor, error: RuntimeError) -> None:
    """Raise a ``ValueError`` where images and weights are of types that do not multiply.

    Autocast converts all but float64, which numpy's images often are.
    """
    if not isinstance(net, nn.Module):
        return  # a function of images, whose weights are not known
    weights = {p.dtype for p in net.parameters() if p.is_floating_point()}
    types = {x.dtype, *weights}
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in types:
        return
    if weights and x.dtype not in weights and not isinstance(error, torch.OutOfMemoryError):
        kinds = " and ".join(sorted(str(dtype) for dtype in weights))
        raise ValueError(
            f"images are {x.dtype} but the network's weights are {kinds}: convert one of them, "
            "for instance x.float()"
        ) from error
