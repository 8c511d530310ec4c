"""PuzzleMix (Kim et al. 2020): cut two images into blocks, keep and show what is salient.

The image is n x n blocks; z_i in {0, 1/2, 1} (for three labels) is the anchor's share in block i.

    min_z  sum_i (1 - z_i) u_i + z_i u'_i - eta/n^2 log p(z_i)
         + sum_ij beta' (z_i - z_j)^2 + gamma beta' |color jump between i and j|

with u, u' the saliency of the two images, p binomial of mean lam, beta' = beta / (16 n). Then the
salient blocks of each image are transported to the blocks where it is shown. lam is the prior of
the mask; the label is the mean of the mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed
from alignmixup.mixers.base import Loss, Method
from alignmixup.mixers.checks import check_grids, check_integers, check_nonnegative, require
from alignmixup.mixers.pixels import Scale, from_pixels, to_pixels
from alignmixup.mixers.sampling import sample_case, sample_perm, sample_share, sample_unit
from alignmixup.ops.backend import Backend
from alignmixup.ops.gradient_saliency import block_saliency, gradient_saliency
from alignmixup.ops.gridcut import cut_ordered
from alignmixup.ops.puzzle import puzzle_energy, repeat_blocks, transport
from alignmixup.registry import register_mixer

ADVERSARIAL = "+adv"  # suffix of the name of a case


@dataclass(frozen=True, slots=True, eq=False)
class PuzzleDraw(Draw):
    """A draw with the randomness of the adversarial option.

    ``coins`` decide whether anchor and partner get noise, and ``strength`` scales it. ``seed`` is
    its random seed: the noise has the shape of the images, which the draw does not know.
    """

    coins: Float[Tensor, " 2"]
    strength: Float[Tensor, ""]
    seed: Tensor


@register_mixer
@dataclass(frozen=True)
class PuzzleMix(Method):
    """PuzzleMix (Kim et al. 2020): masks by a cut on saliency, then transport, both on blocks.

    The defaults are the paper's for CIFAR. Images must be square and in [0, 1], unless ``mean`` and
    ``std`` are set to those of the loader; on the CPU a pixel out of range raises an error. Each
    step runs the network twice: for the saliency, and for the mixed batch.

    Args:
        alpha: The prior ``lam`` is drawn from Beta(alpha, alpha).
        grids: Numbers of blocks along a side, one drawn per batch; each must divide the image side.
        num_labels: Number of shares a block can have, 3 for 0, 1/2 and 1.
        eta: Weight of the prior.
        beta: Weight of equal neighbors.
        gamma: Weight of color jumps between neighbors.
        neigh_size: Side in pixels of the patches whose mean colors are compared at a block's edge;
            must divide the block where it is smaller.
        use_transport: Move salient blocks into view after the cut.
        t_size: Side in pixels of the blocks that are moved, -1 for the blocks of the mask. The cost
            is (side / t_size)^4 numbers per image: use -1 for large images.
        t_eps: Cost of moving a block.
        clean_lam: Weight of the loss on the clean batch, whose forward pass the saliency needs
            anyway.
        adv_prob: Probability of adversarial noise, for image and partner each.
        adv_eps: Largest change of a pixel by that noise.
        mean: Channel means your loader normalizes by; None for images in [0, 1].
        std: Channel standard deviations your loader normalizes by; None for images in [0, 1].
        saliency_std: For images in [0, 1] and a network that divides by it: take the saliency of
            the normalized input, as the authors' code does.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.
        backend: ``"auto"`` uses fused kernels on a GPU and ``"reference"`` elsewhere.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.PuzzleMix()
        mixer(model, x, y).loss().backward()
        ```
    """

    alpha: float = 1.0
    grids: tuple[int, ...] = (2, 4, 8, 16)
    num_labels: int = 3
    eta: float = 0.2
    beta: float = 1.2
    gamma: float = 0.5
    neigh_size: int = 4
    use_transport: bool = True
    t_size: int = 4
    t_eps: float = 0.8
    clean_lam: float = 0.0
    adv_prob: float = 0.0
    adv_eps: float = 10 / 255
    mean: Scale = None
    std: Scale = None
    saliency_std: Scale = None
    loss: Loss = "bce"
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_grids(self.grids, least=2)
        check_integers(self, 2, "num_labels")
        check_integers(self, 1, "neigh_size")
        check_nonnegative(self, "clean_lam", "eta", "beta", "gamma", "t_eps", "adv_eps")
        if not isinstance(self.t_size, int) or (self.t_size < 1 and self.t_size != -1):
            raise ValueError(
                "t_size must be an integer >= 1, or -1 for the blocks of the mask, got "
                f"{self.t_size!r}"
            )
        if self.std is not None and self.saliency_std is not None:
            raise ValueError(
                "saliency_std is for images in [0, 1] and excludes std, got "
                f"{self.saliency_std} and {self.std}"
            )

    @classmethod
    def tiny_imagenet(cls) -> Self:
        """Return the authors' Tiny-ImageNet settings: clean loss, blocks of the mask moved."""
        return cls(clean_lam=1.0, t_size=-1)

    @classmethod
    def imagenet(cls) -> Self:
        """Return the authors' 300-epoch ImageNet settings: cross-entropy, 2-pixel patches."""
        return cls(neigh_size=2, t_size=-1, loss="ce")

    @property
    def cases(self) -> Mapping[str, float]:
        noisy = 1 - (1 - self.adv_prob) ** 2
        kinds = {"": 1 - noisy, ADVERSARIAL: noisy}
        return {
            f"{n}{kind}": share / len(self.grids)
            for n in self.grids
            for kind, share in kinds.items()
            if share > 0
        }

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        case = sample_case(self.cases, rng)
        perm = sample_perm(batch_size, rng)
        lam = sample_share(self.alpha, None, rng)
        if self.adv_prob == 0:
            return Draw(case, perm, lam)
        seed = torch.randint(1 << 62, (), generator=rng, device=rng.device)
        coins = (
            self._coins(rng)
            if case.endswith(ADVERSARIAL)
            else torch.zeros(2, device=rng.device, dtype=torch.float32)
        )
        return PuzzleDraw(case, perm, lam, coins, sample_unit((), rng), seed)

    def _coins(self, rng: torch.Generator) -> Tensor:
        """Draw two coins of probability ``adv_prob``, given that at least one is 1."""
        p = self.adv_prob
        outcome = sample_case({"10": p * (1 - p), "01": (1 - p) * p, "11": p * p}, rng)
        return torch.tensor(
            [float(coin) for coin in outcome], device=rng.device, dtype=torch.float32
        )

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        num_blocks = int(draw.case.removesuffix(ADVERSARIAL))
        for n in self.grids:  # check all grids in the first step, whichever is drawn
            self._check_size(x, n)
        pixels = to_pixels(x, self.mean, self.std)
        noise, seen = None, x
        if draw.case.endswith(ADVERSARIAL):
            noise = _uniform_noise(require(draw, PuzzleDraw, self).seed, x, self.adv_eps)
            disturbed = (pixels + noise).clamp(0, 1)
            noise, seen = disturbed - pixels, from_pixels(disturbed, self.mean, self.std)
        saliency = gradient_saliency(
            net, seen, y, clean_lam=self.clean_lam, loss=self.loss, std=self.saliency_std
        )
        with torch.no_grad():
            mask = self.mask(pixels, saliency.maps, draw, num_blocks)
            noise = None if noise is None else self._sharpen(noise, saliency.scaled)
        pair = torch.stack([x, x[draw.perm]])
        if noise is not None:
            pair = self._disturb(pair, noise, draw)
        mixed, share = self._compose(pair, saliency.maps, mask, draw.perm)
        mixed = torch.empty_like(x).copy_(mixed)  # keeps channels_last
        return self._mixed(net(mixed), y, draw, share, saliency.extra)

    def mask(
        self, pixels: Float[Tensor, "b c h w"], maps: Float[Tensor, "b h w"], draw: Draw, n: int
    ) -> Float[Tensor, "b n n"]:
        """Return the anchor's share in each of n x n blocks."""
        energy = puzzle_energy(
            pixels,
            maps,
            draw.perm,
            draw.lam,
            num_blocks=n,
            num_labels=self.num_labels,
            eta=self.eta,
            beta=self.beta,
            gamma=self.gamma,
            neigh_size=self.neigh_size,
        )
        cut = cut_ordered(energy.unary, energy.down, energy.right, backend=self.backend)
        return cut.labels.to(energy.unary.dtype) / (self.num_labels - 1)

    def _compose(
        self, pair: Float[Tensor, "2 b c h w"], maps: Tensor, mask: Tensor, perm: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Transport the blocks of both images, apply the mask, and return the anchor's share."""
        side, n = maps.shape[-1], mask.shape[-1]
        if self.use_transport:
            t_side = self.t_size if 0 < self.t_size < side // n else side // n
            salient = block_saliency(maps, t_side)
            grid = repeat_blocks(mask, side // n // t_side)
            moved = transport(
                pair.flatten(0, 1),
                torch.cat([salient, salient[perm]]),
                torch.cat([grid, 1 - grid]) > 0,
                self.t_eps,
                self.backend,
            )
            pair = moved.view_as(pair)
        wide = pair.to(mask.dtype)
        # lerp is exact at both ends: a block of one image is copied bit for bit.
        mixed = torch.lerp(wide[1], wide[0], repeat_blocks(mask, side // n).unsqueeze(1))
        return mixed.to(pair.dtype), mask.mean((1, 2))

    def _check_size(self, x: Tensor, n: int) -> None:
        if x.ndim != 4 or x.shape[2] != x.shape[3]:
            raise ValueError(f"PuzzleMix needs square images [b, c, h, h], got {list(x.shape)}")
        side = x.shape[2]
        if side % n:
            raise ValueError(
                f"{n} blocks do not divide images of {side} pixels: choose other grids than "
                f"{self.grids}"
            )
        block = side // n
        if block > self.neigh_size and block % self.neigh_size:
            raise ValueError(
                f"neigh_size {self.neigh_size} does not divide a block of {block} pixels "
                f"({n} blocks in {side}): choose a divisor, or other grids"
            )
        if self.use_transport and 0 < self.t_size < block and block % self.t_size:
            raise ValueError(
                f"t_size {self.t_size} does not divide a block of {block} pixels ({n} blocks in "
                f"{side}): choose a divisor, or -1 for the blocks of the mask"
            )

    def _sharpen(self, noise: Tensor, gradient: Tensor) -> Tensor:
        """Take one step up the loss from random noise, at most ``adv_eps`` in each pixel."""
        stepped = noise + (self.adv_eps + 2 / 255) * gradient.sign()
        return stepped.clamp(-self.adv_eps, self.adv_eps)

    def _disturb(self, pair: Tensor, noise: Tensor, draw: Draw) -> Tensor:
        """Add the noise to the images whose coin is 1; the others are unchanged."""
        draw = require(draw, PuzzleDraw, self)
        both = torch.stack([noise, noise[draw.perm]]) * draw.strength
        flat = to_pixels(pair.flatten(0, 1), self.mean, self.std) + both.flatten(0, 1)
        noisy = from_pixels(flat.clamp(0, 1), self.mean, self.std).view_as(pair)
        return torch.where(draw.coins.view(2, 1, 1, 1, 1) > 0, noisy, pair)


def _uniform_noise(seed: Tensor, x: Tensor, eps: float) -> Tensor:
    """Return noise in [-eps, eps] that depends on the seed only, equal on all devices.

    splitmix64 of each pixel's index: a generator would be randomness outside the draw.
    """
    z = torch.arange(x.numel(), device=x.device) * -0x61C8864680B583EB + seed
    z = (z ^ _shift(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shift(z, 27)) * -0x6B2FB644ECCEEE15
    z = z ^ _shift(z, 31)
    # Integers up to 2^24: float16 overflows and bfloat16 rounds them.
    wide = torch.promote_types(x.dtype, torch.float32)
    unit = _shift(z, 40).to(wide) * 2.0**-24
    return ((2 * unit - 1) * eps).view_as(x).to(x.dtype)


def _shift(bits: Tensor, places: int) -> Tensor:
    """Shift right and fill with zeros; torch's shift of signed integers copies the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
