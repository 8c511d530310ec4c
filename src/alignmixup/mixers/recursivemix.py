"""RecursiveMix (Yang et al. 2022): paste the previous mixed batch, shrunk, into this one.

    lam = 1 - area of the box,  T = lam y + (1 - lam) T-
    L = CE(z, T) + omega (1 - lam) CE(z_roi, softmax(z-))

x-, T-, z-: images, targets and logits of the previous step. z_roi: a second linear layer on the
features of the pasted region, which must say what the whole image said then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, fusible, soft_cross_entropy
from alignmixup.hooks import peek
from alignmixup.mixers.base import LOSSES, Loss
from alignmixup.mixers.boxes import BoxDraw, paste, shown_share
from alignmixup.mixers.checks import check_integers, image_size, require
from alignmixup.mixers.layouts import channels_first
from alignmixup.mixers.sampling import sample_unit
from alignmixup.mixers.stateful import Stateful, probe
from alignmixup.ops.blend import blend, check_logits
from alignmixup.registry import register_mixer
from alignmixup.wrappers import check_layer_name

HISTORY_LIMIT = 64 * 2**20  # bytes; a larger history is not saved with a run


@dataclass(frozen=True, slots=True, eq=False)
class RecursiveDraw(BoxDraw):
    """A box, and the number of restarts of the history so far."""

    restart: Int[Tensor, ""]


@register_mixer
@dataclass(frozen=True)
class RecursiveMix(Stateful):
    """RecursiveMix (Yang et al. 2022): paste the previous mixed batch, shrunk, into this one.

    Sample i gets the previous sample i; there are no partners in the batch. The first step, and one
    after a batch of another size, do not mix. A run saves its history up to 64 MB; with a larger
    one a resumed run starts without. Each process has a history of its own, and a resumed run that
    of rank 0.

    Args:
        layer: Layer whose output ``[b, c, h, w]`` the second linear layer reads: the last map.
        alpha: Largest area of the box; the area is uniform from 0 up to it.
        omega: Weight of the loss of the pasted region.
        restarts: Number of times that the history is dropped during training; 0 keeps it.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.RecursiveMix("layer4").attach(model, x)
        parameters = [*model.parameters(), *mixer.module.parameters()]
        mixer(model, x, y).loss().backward()
        ```
    """

    case = "history"
    has_one_lam = True

    layer: str = "layer4"
    alpha: float = 0.5
    omega: float = 0.5
    restarts: int = 0
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_name(self.layer)
        check_integers(self, 0, "restarts")
        if self.alpha > 1:
            raise ValueError(f"alpha is an area and must be at most 1, got {self.alpha}")

    @classmethod
    def released(cls, layer: str = "layer4", *, epochs: int) -> RecursiveMix:
        """Return the settings of the authors' code, which drops the history at each epoch."""
        return cls(layer, restarts=epochs)

    def tapped(self, net: nn.Module) -> Sequence[str]:
        return (self.layer,)

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        area = self.alpha * sample_unit((), rng)
        # An epoch starts at a product that may round to slightly below an integer.
        restart = torch.tensor(int(progress * self.restarts + 1e-6), device=rng.device)
        perm = torch.arange(batch_size, device=rng.device)
        center = sample_unit((2,), rng)
        return RecursiveDraw("history", perm, 1 - area, center=center, restart=restart)

    def _build(self, net: nn.Module, x: Tensor) -> nn.Module:
        output, logits = probe(net, x, self.layer)
        features = channels_first(net, self.layer, output, x)
        if features.ndim != 4:
            raise ValueError(
                f"layer {self.layer!r} returns {list(features.shape)}; RecursiveMix needs maps "
                "[b, c, h, w]: choose a layer that returns them"
            )
        return History(x, features.shape[1], logits)

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw, state = require(draw, RecursiveDraw, self), self.module
        assert isinstance(state, History)
        rows, columns = box_bounds(draw.center, draw.lam, image_size(x))
        is_same_size = x.shape == state.images.shape
        targets = self._rows(y, state.targets.shape[1])
        images, lam, before = x, torch.ones_like(draw.lam), torch.zeros_like(targets)
        if is_same_size:
            is_valid = state.restart == draw.restart
            images, lam = paste_history(x, state.images, rows, columns, is_valid)
            targets, before = blend(targets, state.targets, lam), state.logits
        with peek(net, self.layer) as peeked:
            logits = net(images)
        check_logits(logits, len(x))
        if logits.shape[1] != targets.shape[1]:
            raise ValueError(
                f"the mixer is attached to a network of {targets.shape[1]} classes, but this one "
                f"has {logits.shape[1]}: call mixer.attach(model, x) for each network"
            )
        features = channels_first(net, self.layer, peeked.output, x)
        loss = (
            self.omega
            * (1 - lam)
            * region_loss(state.roi_head, features, rows, columns, image_size(x), before)
        )
        state.write(images, targets, logits, draw.restart, is_valid=is_same_size)
        return Mixed(logits, targets, {"region": loss}, LOSSES[self.loss])


class History(nn.Module):
    """The previous mixed batch, its targets and logits, and the layer for its region."""

    images: Tensor
    targets: Tensor
    logits: Tensor
    restart: Tensor

    def __init__(self, x: Tensor, num_channels: int, logits: Tensor) -> None:
        super().__init__()
        self.roi_head = nn.Linear(num_channels, logits.shape[1], dtype=logits.dtype)
        is_saved = x.nbytes <= HISTORY_LIMIT
        rows = torch.zeros_like(logits, dtype=torch.float32)
        for name, value in (
            ("images", torch.zeros_like(x).detach()),
            ("targets", rows),
            ("logits", rows.clone()),
            ("restart", torch.tensor(-1)),  # that of the history; -1: there is none
        ):
            self.register_buffer(name, value, persistent=is_saved)

    @torch.no_grad()
    def write(
        self, images: Tensor, targets: Tensor, logits: Tensor, restart: Tensor, *, is_valid: bool
    ) -> None:
        """Keep a step, or forget the history after a batch of another size."""
        if not is_valid:
            self.restart.fill_(-1)
            return
        _write(
            (self.images, self.targets, self.logits, self.restart),
            (images, targets, logits, restart),
        )

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the history if it has the size of the batches, as in all but another phase."""
        saved, own = state.get(prefix + "images"), self.state_dict()
        if saved is None or saved.shape != self.images.shape:
            for name in ("images", "targets", "logits", "restart"):
                state.pop(prefix + name, None)
                if name in own:
                    state[prefix + name] = own[name]
        super()._load_from_state_dict(state, prefix, *args)


def _copy(places: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


_write = fusible(_copy, combines=True)

Bounds = tuple[Tensor, Tensor]


@fusible
def box_bounds(
    center: Float[Tensor, "2"], lam: Float[Tensor, ""], size: tuple[int, int]
) -> tuple[Bounds, Bounds]:
    """Return first and last (exclusive) row, and column, of the box of CutMix, clipped."""
    side = (1 - lam).sqrt()
    bounds = []
    for axis, length in enumerate(size):
        middle = (center[axis] * length).floor()
        half = (length * side).floor().div(2, rounding_mode="floor")
        bounds.append(((middle - half).clamp(0, length), (middle + half).clamp(0, length)))
    return bounds[0], bounds[1]


def inside(bounds: Bounds, length: int) -> Tensor:
    """Return which of ``length`` positions lie within the bounds."""
    position = torch.arange(length, device=bounds[0].device)
    return (position >= bounds[0]) & (position < bounds[1])


@fusible
def paste_history(
    x: Float[Tensor, "b c h w"],
    history: Float[Tensor, "b c h w"],
    rows: Bounds,
    columns: Bounds,
    is_valid: Bool[Tensor, ""],
) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, ""]]:
    """Return the batch with the whole history in the box, and the share of the batch itself."""
    box = inside(rows, x.shape[2]).unsqueeze(1) & inside(columns, x.shape[3])
    box = box & is_valid
    return paste(x, shrunk(history, rows, columns), box), shown_share(box)


def shrunk(
    images: Float[Tensor, "b c h w"], rows: Bounds, columns: Bounds
) -> Float[Tensor, "b c h w"]:
    """Return the whole images resized (nearest) to the box, in the place of the box."""
    for axis, (low, high) in ((2, rows), (3, columns)):
        length = images.shape[axis]
        position = torch.arange(length, device=images.device)
        size = (high - low).clamp(min=1).long()
        source = (position - low.long()).clamp(min=0) * length // size
        images = images.index_select(axis, source.clamp(max=length - 1))
    return images


@fusible
def region_loss(
    head: nn.Linear,
    features: Float[Tensor, "b c h w"],
    rows: Bounds,
    columns: Bounds,
    size: tuple[int, int],
    before: Float[Tensor, "b k"],
) -> Float[Tensor, ""]:
    """Return the cross-entropy of ``head`` on the region against the logits ``before``."""
    logits = head(region_mean(features, rows, columns, size).to(head.weight.dtype))
    return soft_cross_entropy(logits, before.softmax(1).to(logits.dtype))


def region_mean(
    features: Float[Tensor, "b c h w"], rows: Bounds, columns: Bounds, size: tuple[int, int]
) -> Float[Tensor, "b c"]:
    """RoIAlign of one box to 1 x 1 (aligned, adaptive sampling) as w_y' F w_x, in fixed shapes."""
    wide = features if features.dtype == torch.float64 else features.float()
    down, across = (
        cell_weights(bounds, length, cells).to(wide.dtype)
        for bounds, length, cells in zip((rows, columns), size, features.shape[2:], strict=True)
    )
    # A weighted sum, not a product of matrices: one pass over the map where it is compiled.
    return (wide * (down.unsqueeze(1) * across)).sum((2, 3))


def cell_weights(bounds: Bounds, length: int, cells: int) -> Float[Tensor, " cells"]:
    """The share of each cell of one axis in the mean over the samples of RoIAlign.

    The interval has ceil(its length in cells) samples, at the middles of equal parts; each is
    interpolated linearly between the two nearest cells.
    """
    scale = cells / length
    low, extent = bounds[0] * scale - 0.5, (bounds[1] - bounds[0]) * scale
    num_samples = extent.ceil().clamp(min=1)
    s = torch.arange(cells, device=low.device, dtype=low.dtype)
    at = (low + (s + 0.5) * extent / num_samples).clamp(0, cells - 1)
    weight = (1 - (at.unsqueeze(1) - s).abs()).clamp(min=0)
    return (weight * (s < num_samples).unsqueeze(1)).sum(0) / num_samples
