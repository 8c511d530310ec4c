"""FMix (Harris et al. 2020): threshold a random low-frequency image; show lam of the anchor.

    S(ky, kx) = (a + i b) / max(f, 1 / max(H, W))^d     f = sqrt((ky / H)^2 + (kx / W)^2)
    g = irfft2(S),  M = 1 on the num largest of g,  x~ = M x + (1 - M) x',  lam = num / (H W)

a, b ~ N(0, 1) and num is lam0 H W, rounded up or down by a coin. The draw has noise for
ky = -16..15 and kx = 0..16, which is exact up to 32 x 32 pixels; in larger images the frequencies
above are zero, which changes less than 0.5 % of the pixels of a mask.

A soft mask falls linearly from 1 to 0 over 2 s ranks around num, s at most max_soft H W; its mean
is num / (H W) as well. The reformulated objective has lam0 ~ Beta(alpha + 1, alpha) and the label y
alone: in expectation the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, fusible
from alignmixup.mixers.base import Loss, Method
from alignmixup.mixers.boxes import paste_partner
from alignmixup.mixers.checks import check_nonnegative, image_size, require
from alignmixup.mixers.sampling import sample_normal, sample_perm, sample_share, sample_unit
from alignmixup.registry import register_mixer

Spectrum = Literal["isotropic", "released"]
LOWEST = 16  # |ky| and kx up to here


@dataclass(frozen=True, slots=True, eq=False)
class FourierDraw(Draw):
    """A draw with the noise of the spectrum (real and imaginary parts) and a coin in [0, 1).

    Row r of the noise is the frequency ky = r - 16, its columns are kx = 0..16.
    """

    noise: Float[Tensor, "32 17 2"]
    coin: Float[Tensor, ""]


@register_mixer
@dataclass(frozen=True)
class FMix(Method):
    """FMix (Harris et al. 2020): masks of arbitrary shape from low-frequency noise.

    There is one mask per batch.

    Args:
        alpha: The area of the anchor is ``lam`` from Beta(alpha, alpha).
        decay: Power by which the amplitude of a frequency falls.
        spectrum: ``"isotropic"`` is the paper; for ``"released"`` see that preset.
        correct_lam: Take the share of the labels from the mask; False takes the drawn ``lam``,
            which differs by less than one pixel.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.
        max_soft: Share of the pixels over which the mask falls on each side of its border; 0 is a
            sharp mask.
        reformulate: Train on the anchor's label alone, with ``lam`` from Beta(alpha + 1, alpha).

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.FMix(alpha=1.0)
        mixer(model, x, y).loss().backward()
        ```
    """

    case = "cut"
    has_one_lam = True
    needs_network = False

    alpha: float = 1.0
    decay: float = 3.0
    spectrum: Spectrum = "isotropic"
    correct_lam: bool = True
    loss: Loss = "ce"
    max_soft: float = 0.0
    reformulate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nonnegative(self, "decay")
        if not 0 <= self.max_soft <= 0.5:
            raise ValueError(f"max_soft must lie in [0, 0.5], got {self.max_soft}")

    @classmethod
    def released(cls) -> FMix:
        """Return the released code with its defect, which OpenMixup has as well.

        It indexes rows where it means real and imaginary parts. So the masks have only 0 and 1
        cycles along a row of pixels, and all non-negative frequencies along a column: regions are
        far smoother horizontally. Labels have the drawn share.
        """
        return cls(spectrum="released", correct_lam=False)

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        perm = sample_perm(batch_size, rng)
        lam = sample_share(self.alpha, None, rng, ahead=float(self.reformulate))
        noise = sample_normal((2 * LOWEST, LOWEST + 1, 2), rng)
        return FourierDraw("cut", perm, lam, noise, sample_unit((), rng))

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw = require(draw, FourierDraw, self)
        make = isotropic_spectrum if self.spectrum == "isotropic" else released_spectrum
        spectrum = make(draw.noise, self.decay, image_size(x))
        image = low_frequency_image(spectrum, x.shape[3])
        if self.max_soft:
            mask = soft_largest(image, draw.lam, draw.coin, self.max_soft)
            mixed, lam = blend_by_mask(x, draw.perm, mask)
        else:
            mixed, lam = paste_partner(x, draw.perm, ~largest(image, draw.lam, draw.coin))
        lam = lam if self.correct_lam else draw.lam
        return self._mixed(net(mixed), y, draw, torch.ones_like(lam) if self.reformulate else lam)


@fusible
def isotropic_spectrum(
    noise: Float[Tensor, "32 17 2"], decay: float, size: tuple[int, int]
) -> Float[Tensor, "h half 2"]:
    """Return the paper's spectrum: noise that falls with the frequency in all directions.

    The last axis has real and imaginary parts: the compiler has no complex numbers.
    """
    height, width = size
    spectrum = noise.new_zeros(height, width // 2 + 1, 2)
    right = min(width // 2, LOWEST) + 1
    down, up = min((height + 1) // 2, LOWEST), min(height // 2, LOWEST)
    spectrum[:down, :right] = noise[LOWEST : LOWEST + down, :right]
    spectrum[height - up :, :right] = noise[LOWEST - up : LOWEST, :right]
    ky = torch.fft.fftfreq(height, device=noise.device, dtype=noise.dtype)
    kx = torch.fft.rfftfreq(width, device=noise.device, dtype=noise.dtype)
    scale = _amplitude(ky[:, None] ** 2 + kx**2, decay, size)
    return spectrum * scale.unsqueeze(-1)


@fusible
def released_spectrum(
    noise: Float[Tensor, "32 17 2"], decay: float, size: tuple[int, int]
) -> Float[Tensor, "h half 2"]:
    """Return S[k1, k2] = p0[k1, k2] s(0, k1) + i p1[k1, k2] s(1 / H, k1), for k2 = 0 and 1 only.

    p0 and p1 are the noise of rows 0 and 1, s the amplitude.
    """
    height, width = size
    num = min(width // 2 + 1, LOWEST + 1, height)
    kx = torch.arange(num, device=noise.device, dtype=noise.dtype) / width
    s0, s1 = (_amplitude(kx**2 + ky**2, decay, size) for ky in (0.0, 1 / height))
    parts = noise[LOWEST, :num] * s0[:, None], noise[LOWEST + 1, :num] * s1[:, None]
    spectrum = noise.new_zeros(height, width // 2 + 1, 2)
    columns = min(2, width // 2 + 1)
    spectrum[:num, :columns] = torch.stack(parts, dim=-1)[:, :columns]
    return spectrum


def _amplitude(squared: Tensor, decay: float, size: tuple[int, int]) -> Tensor:
    # Relative to the largest: the mask does not change, and no decay overflows float32.
    return (squared.sqrt() * max(size)).clamp(min=1).pow(-decay)


def low_frequency_image(spectrum: Float[Tensor, "h half 2"], width: int) -> Float[Tensor, "h w"]:
    """Return irfft2 of a spectrum that need not be Hermitian, equal on every device."""
    half = torch.view_as_real(torch.fft.ifft(torch.view_as_complex(spectrum), dim=0))
    image: Tensor = torch.fft.irfft(torch.view_as_complex(real_edges(half, width)), n=width, dim=1)
    return image


@fusible
def real_edges(half: Float[Tensor, "h half 2"], width: int) -> Float[Tensor, "h half 2"]:
    """Return columns that are their own mirror image without imaginary part.

    numpy and torch drop it on a CPU; for cuFFT the result would be undefined.
    """
    column = torch.arange(half.shape[1], device=half.device).unsqueeze(1)
    is_edge = (column == 0) | (2 * column == width)
    is_imaginary = torch.arange(2, device=half.device) == 1
    return torch.where(is_edge & is_imaginary, 0.0, half)


@fusible
def largest(
    image: Float[Tensor, "h w"], lam: Float[Tensor, ""], coin: Float[Tensor, ""]
) -> Bool[Tensor, "h w"]:
    """Return where the lam h w largest values are, a number rounded up or down by the coin."""
    rank, num = _ranked(image, lam, coin)
    return rank < num


@fusible
def soft_largest(
    image: Float[Tensor, "h w"], lam: Float[Tensor, ""], coin: Float[Tensor, ""], max_soft: float
) -> Float[Tensor, "h w"]:
    """Return weights that fall from 1 to 0 over the ranks around the number of ``largest``.

    The ramp has 2 s ranks, symmetric about the number: it does not change the mean. Near lam = 0
    and 1 it is shorter, so that it does not leave the image.
    """
    rank, num = _ranked(image, lam, coin)
    s = torch.minimum(lam, 1 - lam).clamp(max=max_soft) * image.numel()
    s = torch.minimum(s.floor(), torch.minimum(num, image.numel() - num))
    ramp = 1 - (rank - (num - s)) / (2 * s - 1).clamp(min=1)
    return torch.where(s > 0, ramp.clamp(0, 1), (rank < num).to(ramp.dtype))


def _ranked(
    image: Float[Tensor, "h w"], lam: Float[Tensor, ""], coin: Float[Tensor, ""]
) -> tuple[Int[Tensor, "h w"], Float[Tensor, ""]]:
    """Return the rank of each pixel, the largest first, and the number of pixels to show."""
    wanted = lam * image.numel()
    num = torch.where(coin < 0.5, wanted.floor(), wanted.ceil())
    order = image.flatten().argsort(descending=True, stable=True)
    ranks = torch.arange(image.numel(), device=image.device)
    rank = torch.empty_like(order).scatter(0, order, ranks)
    return rank.view(image.shape), num


@fusible
def blend_by_mask(
    x: Float[Tensor, "b c h w"], perm: Int[Tensor, " b"], mask: Float[Tensor, "h w"]
) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, ""]]:
    """Return the images blended pixel by pixel, and the mean weight of the anchor."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mixed = torch.lerp(wide[perm], wide, mask.to(wide.dtype))  # exact at both ends
    return mixed.to(x.dtype), mask.mean()
