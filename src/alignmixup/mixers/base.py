"""Shared by all methods: the template of ``apply``, checks, sampling, boxes, layer sets and pixels.

A method is a frozen dataclass that extends ``Method``: it has ``cases`` and ``draw`` as every
``Mixer``, and ``_mix`` for the arithmetic on a batch that has been validated. All randomness comes
from one ``torch.Generator``, on whose device the draws are made: with a CPU generator they are the
same for every device of the images, and never synchronize with a GPU.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from alignmixup.contracts import (
    Criterion,
    Draw,
    Mixed,
    Mixer,
    fusible,
    sigmoid_bce,
    soft_cross_entropy,
    soft_targets,
    softmax_bce,
)
from alignmixup.ops.blend import check_logits, mixed_targets

Loss = Literal["ce", "bce", "sigmoid_bce"]
LOSSES: dict[str, Criterion] = {
    "ce": soft_cross_entropy,
    "bce": softmax_bce,
    "sigmoid_bce": sigmoid_bce,
}
CLEAN = "clean"  # the case without mixing

D = TypeVar("D", bound=Draw)


class Method(Mixer):
    """Base class of the built-in mixers: ``apply`` validates the batch, ``_mix`` mixes it."""

    loss: Loss

    def __post_init__(self) -> None:
        """Check the settings that methods share, by name."""
        super().__post_init__()
        settings = vars(self)
        may_be_none = getattr(type(self), "alpha", None) is None  # where that is the default
        if "alpha" in settings and not (may_be_none and settings["alpha"] is None):
            check_alpha(settings["alpha"])
        if "mean" in settings:
            check_scale(settings["mean"], settings["std"])
        std = settings.get("saliency_std")
        if std is not None and not min(std) > 0:
            raise ValueError(f"saliency_std must be positive, got {std}")
        shares = ("prob", "adv_prob", "content_weight", "omega")
        check_unit(self, *(name for name in shares if name in settings))

    @property
    def is_multi_label(self) -> bool:
        """Whether targets have one value per class that need not sum to 1."""
        return self.loss == "sigmoid_bce"

    @property
    def known_cases(self) -> Collection[str]:
        """Cases that ``apply`` accepts; ``cases`` has those of positive probability."""
        return self.cases

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        check_batch(x, y, draw)
        if draw.case not in self.known_cases:
            raise ValueError(
                f"the draw's case is {draw.case!r}, but this mixer has {list(self.known_cases)}: "
                "use its own draw()"
            )
        mix = self._clean if draw.case == CLEAN else self._mix
        return mix(net, x, y, draw.to(x.device))

    def _clean(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        """Run the network on the batch without mixing."""
        return self._mixed(net(x), y, draw, torch.ones_like(draw.lam))

    @abstractmethod
    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        """Run the network on the mixed batch; ``draw`` is on the device of ``x``."""

    def _rows(self, y: Tensor, num_classes: int) -> Float[Tensor, "b k"]:
        """Return the labels as rows of targets; multi-label ones if the loss is for them."""
        return soft_targets(y, num_classes, multi_label=self.is_multi_label)

    def _mixed(
        self,
        logits: Tensor,
        y: Tensor,
        draw: Draw,
        lam: Float[Tensor, "*b"] | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Mixed:
        """Return the logits with the labels mixed by ``lam``, by default that of the draw."""
        check_logits(logits, len(y))
        share = draw.lam if lam is None else lam
        targets = mixed_targets(y, draw.perm, share, logits.shape[1], self.is_multi_label)
        return Mixed(logits, targets, extra or {}, LOSSES[self.loss])


class ImageMethod(Method):
    """Base class of methods that mix images alone, by one ``lam`` per batch or per sample.

    With ``lam_per_sample`` every tensor of a draw has one row per sample.
    """

    needs_network = False

    lam_per_sample: bool

    @abstractmethod
    def mix_images(self, x: Tensor, draw: Draw) -> tuple[Tensor, Float[Tensor, "*b"]]:
        """Return the mixed images and the share of the anchor in the labels."""

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        images, lam = self.mix_images(x, draw)
        return self._mixed(net(images), y, draw, lam)


# ---- checks --------------------------------------------------------------------------------------


def check_batch(x: Tensor, labels: Tensor, draw: Draw) -> None:
    """Raise a ``ValueError`` if images, labels and draw differ in batch size or device."""
    check_images(x)
    b = len(x)
    if not isinstance(labels, Tensor) or not labels.ndim:
        got = "a scalar" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"labels must be a tensor [b] or [b, k], got {got}")
    if len(labels) != b:
        raise ValueError(f"got {b} images but {len(labels)} labels")
    if labels.device != x.device:
        raise ValueError(
            f"images are on {x.device} but labels on {labels.device}: move the labels, "
            "y.to(x.device)"
        )
    check_draw(draw, b)


def check_draw(draw: Draw, batch_size: int) -> None:
    """Raise a ``ValueError`` for a draw of another batch, or with values that no draw has."""
    perm, lam, b = draw.perm, draw.lam, batch_size
    for name, value in (("perm", perm), ("lam", lam)):
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} of a draw must be a tensor, got {value!r}: use torch.tensor({value!r})"
            )
    if perm.shape != (b,):
        raise ValueError(f"the draw is for a batch of {len(perm)}, got {b} images")
    if perm.dtype not in (torch.int64, torch.int32):  # indexing by uint8 would be a mask
        raise ValueError(f"perm must be int64 or int32, got {perm.dtype}")
    low, high = value_range(perm)
    if low < 0 or high >= b:
        raise ValueError(f"perm must have values 0 to {b - 1}, got {low:.0f} to {high:.0f}")
    if lam.ndim and lam.shape != (b,):
        raise ValueError(f"lam must have shape [] or [{b}], got {list(lam.shape)}")
    low, high = value_range(lam)
    if not (low >= 0 and high <= 1):
        raise ValueError(f"lam must lie in [0, 1], got values from {low:.3g} to {high:.3g}")


def check_images(x: Tensor) -> None:
    """Raise a ``ValueError`` unless ``x`` is a batch of float images.

    Values are checked on the CPU only: on a GPU the check would synchronize at each step.
    """
    if not isinstance(x, Tensor) or not x.ndim:
        raise ValueError(f"images must be a tensor [b, c, h, w], got {type(x).__name__}")
    if not x.is_floating_point():
        raise ValueError(f"images must be floats, got {x.dtype}; divide uint8 images by 255")
    if not x.numel():
        raise ValueError(f"images must not be empty, got shape {list(x.shape)}: skip this batch")
    low, high = value_range(x)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(
            f"images must be finite, got values from {low:.3g} to {high:.3g}; check the loader"
        )


def value_range(x: Tensor) -> tuple[float, float]:
    """Return the extreme values of a tensor on the CPU; (0, 0) where reading is too slow."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return 0.0, 0.0
    low, high = torch.aminmax(x.detach())
    return float(low), float(high)


def is_number(value: object) -> bool:
    """Return whether a setting is a number, which a string of digits is not."""
    return isinstance(value, int | float)


def check_alpha(alpha: float) -> None:
    if not (is_number(alpha) and 0 < alpha < math.inf):
        raise ValueError(
            f"alpha must be positive and finite, got {alpha!r}; use NoMix for no mixing"
        )


def check_nonnegative(mixer: Mixer, *names: str) -> None:
    """Raise a ``ValueError`` if one of these settings is negative or infinite."""
    for name in names:
        value = getattr(mixer, name)
        if not (is_number(value) and 0 <= value < math.inf):
            raise ValueError(f"{name} must be >= 0 and finite, got {value!r}")


def check_unit(mixer: Mixer, *names: str) -> None:
    """Raise a ``ValueError`` if one of these settings is not in [0, 1]."""
    for name in names:
        value = getattr(mixer, name)
        if not (is_number(value) and 0 <= value <= 1):
            raise ValueError(f"{name} must lie in [0, 1], got {value!r}")


def check_integers(mixer: Mixer, least: int, *names: str) -> None:
    """Raise a ``ValueError`` if one of these settings is not an integer from ``least`` up."""
    for name in names:
        value = getattr(mixer, name)
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def check_grids(grids: tuple[int, ...], least: int) -> None:
    """Raise a ``ValueError`` unless ``grids`` are different numbers of blocks to draw from."""
    if not isinstance(grids, tuple | list) or not all(isinstance(n, int) for n in grids):
        raise ValueError(f"grids must be a tuple of integers, such as (2, 4), got {grids!r}")
    if not grids or len(set(grids)) < len(grids) or min(grids) < least:
        raise ValueError(f"grids must be different integers >= {least}, got {grids}")


def require(draw: Draw, kind: type[D], mixer: Mixer) -> D:
    """Return ``draw`` if it has the extra fields of ``kind``; raise a ``ValueError`` otherwise."""
    if not isinstance(draw, kind):
        raise ValueError(
            f"{type(mixer).__name__} needs a {kind.__name__}, got a {type(draw).__name__}: "
            "use the mixer's own draw()"
        )
    return draw


# ---- sampling ------------------------------------------------------------------------------------


def probabilities(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the cases of positive weight with their probabilities."""
    total = sum(weights.values())
    return {case: weight / total for case, weight in weights.items() if weight > 0}


def mixed_or_clean(case: str, prob: float) -> dict[str, float]:
    """Return the cases of a method that mixes a batch with this probability."""
    return probabilities({case: prob, CLEAN: 1 - prob})


def check_weights(weights: Mapping[str, float], known: tuple[str, ...]) -> None:
    """Raise a ``ValueError`` for an unknown case or weights that cannot be drawn from."""
    unknown = sorted(set(weights) - set(known))
    if unknown:
        raise ValueError(f"unknown cases {unknown}; choose from {list(known)}")
    if any(w < 0 for w in weights.values()) or not 0 < sum(weights.values()) < math.inf:
        raise ValueError(f"case weights must be >= 0, finite and not all zero, got {dict(weights)}")


def sample_case(weights: Mapping[str, float], rng: torch.Generator) -> str:
    """Draw one case; ``weights`` need not sum to one."""
    total = sum(weights.values())
    point = float(torch.rand((), generator=rng, device=rng.device, dtype=torch.float64)) * total
    for case, weight in weights.items():
        point -= weight
        if point < 0:
            return case
    return [case for case, weight in weights.items() if weight > 0][-1]  # after rounding


def sample_perm(batch_size: int, rng: torch.Generator) -> Tensor:
    """Draw the partner of each sample: a permutation of the batch."""
    return torch.randperm(batch_size, generator=rng, device=rng.device)


def sample_share(
    alpha: float, size: int | None, rng: torch.Generator, *, ahead: float = 0.0
) -> Tensor:
    """Draw shares of the anchor from Beta(alpha + ahead, alpha): a scalar, or ``size`` of them."""
    shape = (2,) if size is None else (2, size)
    # Two gammas make a beta; torch.distributions.Beta takes no generator, hence the private op.
    # In float64: with a small alpha both gammas underflow float32, and 0 / 0 is NaN.
    concentration = torch.full(shape, alpha, dtype=torch.float64, device=rng.device)
    if ahead:
        concentration[0] += ahead
    g = torch._standard_gamma(concentration, generator=rng)
    return (g[0] / g.sum(0)).float()


def sample_unit(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Draw uniformly from [0, 1), e.g. positions as fractions of the image."""
    return torch.rand(shape, generator=rng, device=rng.device, dtype=torch.float32)


def sample_normal(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Draw from the standard normal distribution."""
    return torch.randn(shape, generator=rng, device=rng.device, dtype=torch.float32)


def sample_pairs(
    weights: Mapping[str, float],
    alpha: float,
    lam_per_sample: bool,
    batch_size: int,
    rng: torch.Generator,
) -> Draw:
    """Draw a case, the partners, and one share per batch or per sample."""
    case = sample_case(weights, rng)
    perm = sample_perm(batch_size, rng)
    return Draw(case, perm, sample_share(alpha, batch_size if lam_per_sample else None, rng))


def clean_draw(batch_size: int, rng: torch.Generator) -> Draw:
    """Return a draw without randomness: each sample is its own partner."""
    perm = torch.arange(batch_size, device=rng.device)
    return Draw(CLEAN, perm, torch.ones((), device=rng.device, dtype=torch.float32))


# ---- boxes ---------------------------------------------------------------------------------------
# A box stays on the device and becomes a mask by comparison. There is no slice of random size, so
# the step has fixed shapes and needs no synchronization.


@dataclass(frozen=True, slots=True, eq=False)
class BoxDraw(Draw):
    """A draw with the center of a box, (row, column) in [0, 1): one per batch or per sample."""

    center: Float[Tensor, "*boxes 2"]


def box_mask(
    center: Float[Tensor, "*b 2"],
    height: Tensor | int,
    width: Tensor | int,
    size: tuple[int, int],
) -> Bool[Tensor, "*b h w"]:
    """Return [c - length // 2, c + length // 2) in rows and columns, clipped at the border.

    The center c is the pixel floor(fraction * side).
    """
    rows, columns = size
    in_rows = _span((center[..., 0] * rows).floor(), height, rows)
    in_columns = _span((center[..., 1] * columns).floor(), width, columns)
    return in_rows.unsqueeze(-1) & in_columns.unsqueeze(-2)


def _span(center: Tensor, length: Tensor | int, side: int) -> Tensor:
    half = length // 2 if isinstance(length, int) else length.div(2, rounding_mode="floor")
    positions = torch.arange(side, device=center.device, dtype=center.dtype)
    low, high = (center - half).unsqueeze(-1), (center + half).unsqueeze(-1)
    return (positions >= low) & (positions < high)


def share_mask(
    center: Float[Tensor, "*b 2"], lam: Float[Tensor, "*lam"], size: tuple[int, int]
) -> Bool[Tensor, "*b h w"]:
    """Return the box of CutMix: 1 - lam of the image before clipping, in its aspect ratio."""
    side = (1 - lam).sqrt()
    height, width = ((length * side).floor() for length in size)
    return box_mask(center, height, width, size)


def shown_share(mask: Bool[Tensor, "*b h w"]) -> Float[Tensor, "*b"]:
    """Return the share of the image outside the box, after clipping."""
    return 1 - mask.float().mean((-2, -1))


def paste(
    x: Float[Tensor, "b c h w"], other: Float[Tensor, "b c h w"], box: Bool[Tensor, "*b h w"]
) -> Float[Tensor, "b c h w"]:
    """Return ``other`` inside the box and ``x`` outside; one box per batch or per sample."""
    return torch.where(box.expand(len(x), *box.shape[-2:]).unsqueeze(1), other, x)


@fusible
def paste_partner(
    x: Float[Tensor, "b c h w"], perm: Int[Tensor, " b"], mask: Bool[Tensor, "*b h w"]
) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "*b"]]:
    """Return the partner inside the mask and ``x`` outside, and the share of ``x``."""
    return paste(x, x[perm], mask), shown_share(mask)


def image_size(x: Tensor) -> tuple[int, int]:
    """Return rows and columns of a batch of images; raise a ``ValueError`` if it has none."""
    if x.ndim != 4:
        raise ValueError(f"images must be [b, c, h, w], got {list(x.shape)}")
    return x.shape[2], x.shape[3]


# ---- layer sets ----------------------------------------------------------------------------------

Layer = Literal["x", "A", "e", "E"]
# x: the image. A: the features. e, E: the embedding, a vector or a tensor. A tensor has two cases,
# one per direction of alignment: the positions of the anchor are kept, or (primed) those of the
# partner. Without alignment both are the same computation, but remain two cases, so that an
# unaligned mixer draws each layer as often as the aligned one.
_CASES: dict[str, tuple[str, ...]] = {
    "x": ("input",),
    "A": ("feat", "feat'"),
    "e": ("embed",),
    "E": ("embed", "embed'"),
}


def cases_of(layers: tuple[Layer, ...], *, clean: bool) -> tuple[str, ...]:
    """Return the cases of a layer set, preceded by the clean case if ``clean``."""
    mixed = tuple(case for layer in layers for case in _CASES[layer])
    return (CLEAN, *mixed) if clean else mixed


def check_layers(layers: tuple[str, ...]) -> None:
    """Raise a ``ValueError`` for an invalid layer set."""
    if not layers or set(layers) - set(_CASES) or len(set(layers)) < len(layers):
        raise ValueError(f"layers must be different ones of {list(_CASES)}, got {layers}")
    if {"e", "E"} <= set(layers):
        raise ValueError(f"an embedding is a vector 'e' or a tensor 'E', got layers={layers}")


# ---- pixels --------------------------------------------------------------------------------------

Scale = tuple[float, ...] | None
TOLERANCE = 0.02  # bilinear resizing and 16-bit storage leave pixels slightly outside [0, 1]


def to_pixels(x: Float[Tensor, "b c h w"], mean: Scale, std: Scale) -> Float[Tensor, "b c h w"]:
    """Return x * std + mean; raise a ``ValueError`` if images on the CPU are not in [0, 1]."""
    if mean is not None and std is not None:
        if x.shape[1] != len(mean):
            raise ValueError(f"mean and std have {len(mean)} values for {x.shape[1]} channels")
        bands = zip(x.unbind(1), mean, std, strict=True)
        x = torch.stack([band * s + m for band, m, s in bands], dim=1)
    low, high = value_range(x)
    if low < -TOLERANCE or high > 1 + TOLERANCE:
        raise ValueError(
            f"this method needs pixels in [0, 1], got values from {low:.3g} to {high:.3g}; pass "
            "images before normalization, or set mean and std to those of the loader"
        )
    return x


def from_pixels(x: Float[Tensor, "b c h w"], mean: Scale, std: Scale) -> Float[Tensor, "b c h w"]:
    """Undo ``to_pixels``."""
    if mean is None or std is None:
        return x
    bands = zip(x.unbind(1), mean, std, strict=True)
    return torch.stack([(band - m) / s for band, m, s in bands], dim=1)


def check_scale(mean: Scale, std: Scale) -> None:
    """Raise a ``ValueError`` for a mean without a std, or a std that is not positive."""
    if (mean is None) != (std is None):
        raise ValueError(f"set both mean and std or neither, got mean={mean}, std={std}")
    if mean is None or std is None:
        return
    are_tuples = isinstance(mean, Sequence) and isinstance(std, Sequence)
    if not are_tuples or len(mean) != len(std) or min(std) <= 0:
        raise ValueError(
            f"mean and std must have one value per channel, std positive, got {mean} and {std}"
        )
