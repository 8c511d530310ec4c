"""One of several methods for each sample or each pair of a batch, as timm's modes choose them.

Every method mixes the whole batch, and each sample takes the image of its own method: shapes are
fixed and nothing waits for the device. A sample that is not mixed has lam = 1.

In pairs, sample i is the partner of its partner, and both have the same method, share and box.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, Mixer, fusible
from alignmixup.mixers.base import ImageMethod
from alignmixup.mixers.boxes import BoxDraw
from alignmixup.mixers.checks import check_batch, require
from alignmixup.mixers.sampling import CLEAN, sample_perm

Mode = Literal["batch", "pair", "elem"]


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceDraw(BoxDraw):
    """A draw per sample, with the number of the method of each."""

    method: Int[Tensor, " b"]


def check_mode(mode: str, mixers: Sequence[Mixer]) -> None:
    """Raise for methods that cannot be chosen per sample."""
    if mode == "batch":
        return
    for mixer in mixers:
        if not isinstance(mixer, ImageMethod):
            raise ValueError(
                f"mode={mode!r} takes methods with one lam per sample of images (InputMixup, "
                f"CutMix), got {type(mixer).__name__}: use mode='batch'"
            )
    losses = {mixer.loss: None for mixer in mixers if isinstance(mixer, ImageMethod)}
    if len(losses) > 1:
        raise ValueError(f"mode={mode!r} has one loss for all samples, got {list(losses)}")


def sample_each(
    mixers: Sequence[tuple[ImageMethod, float]],
    mode: Mode,
    is_reversed: bool,
    batch_size: int,
    rng: torch.Generator,
) -> ChoiceDraw:
    """Draw a method, a share and a box per sample or per pair.

    ``mixers`` are methods with their probabilities; what these lack to 1 is not mixed.
    """
    count = batch_size if mode == "elem" else (batch_size + 1) // 2
    each_has_its_own = [dataclasses.replace(m, lam_per_sample=True) for m, _ in mixers]  # type: ignore[type-var]
    draws = [mixer.draw(count, rng) for mixer in each_has_its_own]
    method, is_mixed = _choose([share for _, share in mixers], count, rng)
    each = torch.arange(count, device=rng.device)
    centers = [d.center if isinstance(d, BoxDraw) else d.lam.new_zeros(count, 2) for d in draws]
    lam = torch.where(is_mixed, torch.stack([d.lam for d in draws])[method, each], 1.0)
    center = torch.stack(centers)[method, each]
    order = torch.arange(batch_size, device=rng.device)
    if mode == "elem":
        perm = order.flip(0) if is_reversed else draws[0].perm
        return ChoiceDraw(mode, perm, lam, center=center, method=method)
    place = order if is_reversed else sample_perm(batch_size, rng)
    pair = torch.minimum(place, batch_size - 1 - place)
    perm = place.argsort()[batch_size - 1 - place]
    return ChoiceDraw(mode, perm, lam[pair], center=center[pair], method=method[pair])


def _choose(
    shares: Sequence[float], count: int, rng: torch.Generator
) -> tuple[Int[Tensor, " n"], Tensor]:
    """Draw the number of a method for each, and whether it mixes at all."""
    bounds = torch.tensor(shares, dtype=torch.float64, device=rng.device).cumsum(0)
    if len(shares) == 1 and shares[0] == 1:  # nothing to draw: one method is that method
        point = torch.zeros(count, dtype=torch.float64, device=rng.device)
    else:
        point = torch.rand(count, generator=rng, dtype=torch.float64, device=rng.device)
    is_last_open = bounds[-1] < 1 - 1e-9  # else rounding may leave a point beyond the last
    number = torch.searchsorted(bounds, point, right=True)
    return number.clamp(max=len(shares) - 1), (number < len(shares)) | ~is_last_open


def apply_each(
    mixers: Sequence[ImageMethod], net: nn.Module, x: Tensor, y: Tensor, draw: Draw
) -> Mixed:
    """Run the network on a batch whose samples are mixed by different methods."""
    check_batch(x, y, draw)
    draw = require(draw, ChoiceDraw, mixers[0]).to(x.device)
    images, lam = x, torch.ones_like(draw.lam)
    for number, mixer in enumerate(mixers):
        images, lam = _take(*mixer.mix_images(x, draw), images, lam, draw.method == number)
    return mixers[0]._mixed(net(images), y, draw, lam)


@fusible
def _take(
    shown: Float[Tensor, "b *rest"],
    share: Float[Tensor, " b"],
    images: Float[Tensor, "b *rest"],
    lam: Float[Tensor, " b"],
    is_own: Tensor,
) -> tuple[Float[Tensor, "b *rest"], Float[Tensor, " b"]]:
    own = is_own.view(-1, *[1] * (images.ndim - 1))
    return torch.where(own, shown, images), torch.where(is_own, share.to(lam.dtype), lam)


def mixing_share(mixer: Mixer) -> float:
    """Return the probability that a method mixes."""
    return 1 - mixer.cases.get(CLEAN, 0.0)
