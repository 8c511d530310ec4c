"""What all packages share: draw, mixed batch, mixer, images in memory; keys and results.

Conventions that invite a sign error are fixed here, once:

* ``lam`` is the share of the **anchor**, sample i of the batch; its partner is sample ``perm[i]``.
* ``lam = 1`` gives the anchor back bit for bit.
* The rows of a transport plan are positions of the anchor, its columns positions of the partner.
* Images travel as floats in [0, 1]; normalization is the first layer of a network.
* A box is (x0, y0, x1, y1) in pixels, x1 and y1 exclusive.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Self, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from alignmixup.results import RecipeKey, Result

__all__ = [
    "Draw",
    "ImageSet",
    "Mixed",
    "Mixer",
    "RecipeKey",
    "Result",
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

P = ParamSpec("P")
R = TypeVar("R")

_is_fusing: ContextVar[bool] = ContextVar("is_fusing", default=False)


# What ``fusible`` has compiled, by the plain function.
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def fusible(function: Callable[P, R], *, combines: bool = False) -> Callable[P, R]:
    """Mark a function of tensors and modules that runs beside the network, once a step.

    In a step that compiles its network (``fusing``) it is compiled as well: ten launches of a few
    microseconds become one. Anywhere else it is the plain function.

    ``combines`` is for a function of many tensors, such as the weights of a network: on a GPU
    independent operations of the same kind are one launch.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or not _is_fusing.get():
            return function(*args, **kwargs)
        if function not in _compiled:
            together = combines and torch.cuda.is_available()
            _compiled[function] = torch.compile(
                function, dynamic=False, options={"combo_kernels": True} if together else None
            )
        compiled: Callable[P, R] = _compiled[function]
        return compiled(*args, **kwargs)

    return call


@contextmanager
def fusing(enabled: bool = True) -> Iterator[None]:
    """Compile what is ``fusible`` within this block."""
    token = _is_fusing.set(enabled)
    try:
        yield
    finally:
        _is_fusing.reset(token)


@dataclass(frozen=True, slots=True)
class Draw:
    """All randomness of one step, drawn once, outside the network.

    ``case`` names everything that changes the shape of the computation, so a step whose case is
    known is a fixed computation. A method with more randomness extends this class with further
    tensors; positions are fractions of the image, so a draw needs no image.

    Args:
        case: One of the mixer's ``cases``, such as ``"input"`` or ``"feat"``.
        perm: Permutation of the batch: the partner of sample ``i`` is sample ``perm[i]``.
        lam: Share of the anchor, sample ``i``: a scalar for the batch or one value per sample.

    Example:
        ```python
        draw = am.Draw("input", perm=torch.arange(8).flip(0), lam=torch.tensor(0.7))
        mixed = am.InputMixup().apply(model, x, y, draw)
        ```
    """

    case: str
    perm: Int[Tensor, " b"]
    lam: Float[Tensor, "*b"]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensor fields by name."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return the same case with other tensors, e.g. the buffers of a captured step."""
        return dataclasses.replace(self, **tensors)  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> Self:
        """Return the draw on ``device``; tensors that are already there are not copied."""
        return self.with_tensors({k: to_device(v, device) for k, v in self.tensors().items()})


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Move a tensor without waiting for the device, safe to forget the original at once.

    From pinned memory: a copy from pageable memory may be read by the GPU later, when the host has
    long put something else there.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def soft_targets(
    labels: Tensor, num_classes: int, *, multi_label: bool = False
) -> Float[Tensor, "b k"]:
    """Return labels as rows of class shares; integer labels become one-hot, soft ones pass.

    With ``multi_label`` a row has one value in [0, 1] per class and need not sum to 1; it may be
    made of integers.

    On the CPU an integer out of range, or a soft label that does not sum to 1, is a ``ValueError``.
    On a GPU the checks would wait for the device at each step: there an integer out of range fails
    in the device's own index assertion, and sums are not looked at.
    """
    is_checked = labels.device.type == "cpu" and not torch.compiler.is_compiling()
    if multi_label and labels.ndim == 2 and not labels.is_floating_point():
        labels = labels.float()
    if labels.is_floating_point():
        if labels.ndim != 2 or labels.shape[1] != num_classes:
            raise ValueError(
                f"soft labels must have shape [b, {num_classes}] to match the logits, "
                f"got {list(labels.shape)}"
            )
        if is_checked and labels.numel():
            (_check_range if multi_label else _check_sums)(labels)
        return labels
    if labels.ndim != 1:
        raise ValueError(
            f"integer labels must have shape [b], got {list(labels.shape)}; "
            "pass soft labels as floats"
        )
    labels = labels.long()  # torch has no comparison of uint16
    if is_checked and (problem := label_problem(labels, num_classes)):
        raise ValueError(f"{problem}; check the network's num_classes")
    rows = torch.zeros(len(labels), num_classes, device=labels.device)
    return rows.scatter_(1, labels.unsqueeze(1), 1.0)


def label_problem(labels: Int[Tensor, " n"], num_classes: int) -> str:
    """Return what is wrong with integer labels, empty if nothing is."""
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    return f"labels must lie in 0..{num_classes - 1}, got {wrong[0]}" if len(wrong) else ""


def _check_sums(labels: Float[Tensor, "b k"]) -> None:
    """Raise where a row is no distribution: the losses are those of one class a sample."""
    off = (labels.detach().double().sum(1) - 1).abs()
    if not float(off.max()) <= max(1e-3, torch.finfo(labels.dtype).eps):
        worst = int(off.argmax())
        raise ValueError(
            f"soft labels must sum to 1 in each row, got {float(labels[worst].double().sum()):.4g} "
            f"in row {worst}; divide each row by its sum, or set loss='sigmoid_bce' for "
            "multi-label targets"
        )


def _check_range(labels: Float[Tensor, "b k"]) -> None:
    """Raise where a value of multi-label targets is no probability."""
    low, high = (float(value) for value in torch.aminmax(labels.detach()))
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"multi-label targets must lie in [0, 1], got values from {low:.4g} to {high:.4g}"
        )


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in float32 or better: half precision has too few digits for a loss."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@fusible
def soft_cross_entropy(logits: Float[Tensor, "b k"], targets: Float[Tensor, "b k"]) -> Tensor:
    """Mean over the batch of -sum_k t_k log softmax(z)_k, in float32 or better."""
    wide = widened(logits)
    return -(targets * wide.log_softmax(dim=1)).sum(dim=1).mean()


@fusible
def softmax_bce(logits: Float[Tensor, "b k"], targets: Float[Tensor, "b k"]) -> Tensor:
    """Binary cross-entropy of softmax(z) against soft targets, mean over batch and classes.

    The loss of the manifold mixup, PuzzleMix and Co-Mixup code. log(1 - p_k) is formed from
    log p_k by expm1, so that a confident prediction does not round to log 0.
    """
    wide = widened(logits)
    log_p = wide.log_softmax(dim=1)
    # 1 - p_k = -expm1(log p_k); the clamp keeps the gradient finite where p_k rounds to one.
    tiny = torch.finfo(wide.dtype).eps
    log_q = torch.log(-torch.expm1(log_p.clamp(max=-tiny)))
    return -(targets * log_p + (1 - targets) * log_q).mean()


@fusible
def sigmoid_bce(logits: Float[Tensor, "b k"], targets: Float[Tensor, "b k"]) -> Tensor:
    """Binary cross-entropy of sigmoid(z), for classes that do not exclude each other.

    Mean over batch and classes, in float32 or better.
    """
    wide = widened(logits)
    return F.binary_cross_entropy_with_logits(wide, targets.to(wide.dtype))


Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Mixed:
    """The result of a mixer: logits against soft targets, and any further losses.

    A case that trains no classifier (the reconstruction of ``AlignMixupAE``) has ``extra`` alone.

    Args:
        logits: Output of the network for the mixed batch, ``[b, k]``, or None.
        targets: Class shares of each mixed sample, ``[b, k]``, or None.
        extra: Further loss terms by name; ``loss`` adds all of them.
        criterion: Function of ``(logits, targets)`` that ``loss`` uses by default.

    Example:
        ```python
        mixed = am.AlignMixup("layer4")(model, x, y)
        loss = mixed.loss()

        weight = torch.linspace(0.5, 1.5, 10)  # class weights
        loss = mixed.loss(torch.nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1))
        loss.backward()
        ```
    """

    logits: Float[Tensor, "b k"] | None
    targets: Float[Tensor, "b k"] | None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    criterion: Criterion = soft_cross_entropy

    def loss(self, criterion: Criterion | None = None) -> Tensor:
        """Return the value to minimize: the classification loss, if any, plus all of ``extra``.

        Args:
            criterion: Your own function of ``(logits, targets)``, such as
                ``nn.CrossEntropyLoss(weight=...)``; defaults to that of the mixer.

        Returns:
            A scalar tensor with a gradient.

        Raises:
            ValueError: If there are neither logits nor extra losses.
        """
        terms = list(self.extra.values())
        if self.logits is not None and self.targets is not None:
            terms.insert(0, (criterion or self.criterion)(self.logits, self.targets))
        if not terms:
            raise ValueError("this Mixed has neither logits nor extra losses: nothing to minimize")
        return torch.stack(terms).sum() if len(terms) > 1 else terms[0]

    def accuracy_under_mixing(self, top: int = 1) -> Tensor:
        """Return the share of the label mass that the predicted classes hit, mean over the batch.

        Without mixing it is the accuracy. A sample mixed of two classes in shares 0.7 and 0.3 gives
        0.7 or 0.3 to a prediction of one of them, so 1 cannot be reached with ``top=1``; it can
        with ``top=2``.

        Args:
            top: Number of classes with the largest logits that count as predicted.

        Returns:
            A scalar tensor in [0, 1] without a gradient.

        Raises:
            ValueError: If there are no logits, or fewer classes than ``top``.
        """
        if self.logits is None or self.targets is None:
            raise ValueError("this Mixed has no logits: there is no prediction to compare")
        num_classes = self.logits.shape[1]
        if not 1 <= top <= num_classes:
            raise ValueError(f"top must be from 1 to {num_classes}, the classes, got {top}")
        predicted = self.logits.detach().topk(top, dim=1).indices
        mass = self.targets.sum(1)
        hit = self.targets.gather(1, predicted).sum(1)
        # A multi-label sample without any class has no mass to hit.
        return torch.where(mass > 0, hit / mass, 0).sum() / (mass > 0).sum().clamp(min=1)


class NotAttached(ValueError):
    """A method with parameters or state is applied before ``attach``."""


class Mixer(ABC):
    """Base class of all mixup methods.

    ``draw`` holds all randomness and ``apply`` all arithmetic, so the same draw gives the same
    result. Concrete mixers are frozen dataclasses of settings. A subclass implements ``cases``,
    ``draw`` and ``apply``.

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
        draw = vars(cls).get("draw")
        if callable(draw) and len(inspect.signature(draw).parameters) == 3:
            cls.draw = _ignoring_progress(draw)  # type: ignore[method-assign]

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
            x: Images ``[b, c, h, w]``.
            y: Integer labels ``[b]`` or soft labels ``[b, k]``.
            rng: Source of randomness; defaults to torch's global CPU generator.
            progress: Share of training that is done, in [0, 1); for methods with a schedule.

        Returns:
            Logits, soft targets and further losses; minimize its ``loss()``.

        Raises:
            ValueError: If ``rng`` is not a ``torch.Generator``, or see ``apply``.
        """
        if rng is not None and not isinstance(rng, torch.Generator):
            raise ValueError(
                f"rng must be a torch.Generator, got {rng!r}; torch.Generator().manual_seed(0) "
                "makes one"
            )
        if not hasattr(x, "__len__"):
            raise ValueError(f"images must be a tensor, got {type(x).__name__}: mixer(model, x, y)")
        draw = self.draw(len(x), rng or torch.default_generator, progress)
        try:
            return self.apply(net, x, y, draw)
        except RuntimeError as error:
            _explain_dtype(net, x, error)
            raise


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


@dataclass(frozen=True)
class ImageSet:
    """A labeled set of images of one size, in memory.

    Args:
        name: Name of the data set, as results show it.
        split: ``"train"`` or ``"test"``.
        images: Pixels, uint8 ``[n, 3, h, w]``.
        labels: Class of each image, ``[n]``.
        class_names: Names of the classes, in the order of the labels.
        mean: Channel means of the source in [0, 1], for the normalization layer of a network.
        std: Channel standard deviations of the source, likewise.
        boxes: One tensor ``[k, 4]`` of boxes ``(x0, y0, x1, y1)`` per image, if known.

    Raises:
        ValueError: If shapes, types or label range do not fit together.

    Example:
        ```python
        images = torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8)
        labels = torch.arange(20) % 2
        pets = am.ImageSet("pets", "test", images, labels, ("cat", "dog"), (0.5,) * 3, (0.25,) * 3)
        print(len(pets), pets.num_classes)
        ```
    """

    name: str
    split: str
    images: UInt8[Tensor, "n 3 h w"]
    labels: Int[Tensor, " n"]
    class_names: tuple[str, ...]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    boxes: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        where = f"{self.name}/{self.split}"
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[1] != 3:
            raise ValueError(
                f"{where}: images must be uint8 [n, 3, h, w], "
                f"got {self.images.dtype} {list(self.images.shape)}"
            )
        if len(self.images) != len(self.labels):
            raise ValueError(f"{where}: {len(self.images)} images but {len(self.labels)} labels")
        if problem := label_problem(self.labels, len(self.class_names)):
            raise ValueError(f"{where}: {problem}; add class_names, or correct the labels")
        if self.boxes is not None and len(self.boxes) != len(self.images):
            raise ValueError(f"{where}: {len(self.images)} images but boxes for {len(self.boxes)}")

    def __repr__(self) -> str:
        rows, columns = self.images.shape[2:]
        return (
            f"ImageSet({self.name!r}, {self.split!r}, {len(self)} images of {rows} x {columns}, "
            f"{self.num_classes} classes{', boxes' if self.boxes is not None else ''})"
        )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)
