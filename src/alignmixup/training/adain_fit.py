"""Fit a small AdaIN network to an image set, and measure how far its classes are in style.

In two halves: the whole autoencoder learns to reconstruct; then the encoder is frozen, its layers
scaled to mean activation one (so that the terms below have a known scale), and the decoder learns
to produce images of a given style:

    |d(f(x)) - x|^2 + |f(d(t)) - t|^2 + sum_l |mean_l - mean'_l|^2 + |std_l - std'_l|^2

with t = adain(f(x), f(x')), the second and third term as in AdaIN's own training. All randomness is
from one generator: the same seed gives the same weights on the same machine.

The loop is short and has no checkpoint: a run keeps the result only when it is complete.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from alignmixup.contracts import ImageSet
from alignmixup.ops.adain import (
    AdaIN,
    WeightsFile,
    adain,
    find_weights,
    load_adain,
    save_adain,
    small_adain,
    style_statistics,
)

# Tried on CIFAR-10: a faster second half loses detail, a slower first half never finds it.
RECONSTRUCTION_RATE = 2e-3
STYLE_RATE = 5e-4
PIXELS = 10.0  # weight of the reconstruction beside the losses of style

OnStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class AdainFit:
    """The result of a fit, measured on images of the set.

    ``psnr`` is that of the reconstruction in decibels. ``style_gap`` is the distance of a stylized
    image to its target style over that of the plain image: 0 is perfect, 1 is no effect.
    """

    weights: WeightsFile
    psnr: float
    style_gap: float


def fit_adain(
    image_set: ImageSet,
    out_path: str | Path,
    steps: int = 4000,
    seed: int = 0,
    device: torch.device | str = "cpu",
    width: int = 32,
    on_step: OnStep | None = None,
    class_distances: bool = True,
) -> AdainFit:
    """Train a small AdaIN network on ``image_set`` and write it to ``out_path`` (.safetensors).

    With ``class_distances``, which needs an image of each class, the file also has the style
    distances for StyleCutMix's automatic gamma. ``on_step`` is called with the number of steps done
    and their total.
    """
    if class_distances:  # raise for an empty class before training
        _count_classes(image_set.labels, image_set.num_classes)
    net = train_small_adain(
        image_set.images, steps=steps, seed=seed, device=device, width=width, on_step=on_step
    )
    if class_distances:
        net.class_distances = _distances_of(net, image_set)
    shown = _batch(image_set.images[:512], device)
    metadata = {
        "data": f"{image_set.name}/{image_set.split}",
        "num_images": str(len(image_set)),
        "steps": str(steps),
        "seed": str(seed),
        "width": str(width),
    }
    save_adain(net, out_path, metadata)
    with torch.no_grad():
        error = F.mse_loss(net.decode(net.encode(shown), _size(shown)), shown)
    return AdainFit(
        find_weights(str(out_path)),
        -10 * math.log10(max(float(error), 1e-12)),
        style_gap(net, shown),
    )


def _distances_of(net: AdaIN, image_set: ImageSet) -> Float[Tensor, "k k"]:
    """Return the class distances; those of a small network, whose scale is arbitrary, over their
    mean, so that two classes are at distance one on average."""
    k = image_set.num_classes
    distances = class_style_distances(net, image_set.images, image_set.labels, k)
    if net.kind != "small" or k < 2:
        return distances
    mean = distances.sum() / (k * (k - 1))
    return distances / mean.clamp(min=1e-12)


def add_distances(
    weights: str, image_set: ImageSet, out_path: str | Path, device: torch.device | str = "cpu"
) -> WeightsFile:
    """Write ``weights`` of either kind to ``out_path`` with the class distances of the set."""
    found = find_weights(weights)
    net = copy.deepcopy(load_adain(weights, device=device))  # the loaded one is shared
    net.class_distances = _distances_of(net, image_set)
    where = {"distances": f"{image_set.name}/{image_set.split}", "from_sha256": found.sha256}
    save_adain(net, out_path, {**found.metadata, **where})
    return find_weights(str(out_path))


def train_small_adain(
    images: Tensor,
    *,
    steps: int = 4000,
    seed: int = 0,
    device: torch.device | str = "cpu",
    width: int = 32,
    batch_size: int = 64,
    on_step: OnStep | None = None,
) -> AdaIN:
    """Return a small network trained on ``images`` [n, 3, h, w], uint8 or in [0, 1]; frozen."""
    if steps < 2:
        raise ValueError(f"fitting needs at least 2 steps, one for each half, got {steps}")
    if images.ndim != 4 or images.shape[1] != 3 or len(images) < 2 or min(images.shape[2:]) < 4:
        raise ValueError(
            "fitting needs two or more images [n, 3, h, w] of at least 4 x 4 pixels, "
            f"got {list(images.shape)}"
        )
    rng = torch.Generator().manual_seed(seed)
    net = small_adain(width, rng).to(device)
    sampler = _Sampler(images, min(batch_size, len(images)), rng, device)
    half, tell = range(steps // 2), on_step or (lambda done, total: None)
    for step in _train(net, net, sampler, half, _reconstruction_loss, RECONSTRUCTION_RATE):
        tell(step + 1, steps)
    net.encoder.requires_grad_(requires_grad=False)
    _normalize_encoder(net, sampler())
    rest = range(len(half), steps)
    for step in _train(net, net.decoder, sampler, rest, _style_loss, STYLE_RATE):
        tell(step + 1, steps)
    return net.eval().requires_grad_(requires_grad=False)


@dataclass(frozen=True)
class _Sampler:
    images: Tensor
    batch_size: int
    rng: torch.Generator
    device: torch.device | str

    def __call__(self) -> Float[Tensor, "b 3 h w"]:
        chosen = torch.randint(len(self.images), (self.batch_size,), generator=self.rng)
        return _batch(self.images[chosen.to(self.images.device)], self.device)


def _batch(images: Tensor, device: torch.device | str) -> Float[Tensor, "b 3 h w"]:
    moved = images.to(device)
    return moved.float() if moved.is_floating_point() else moved.float() / 255


def _size(images: Tensor) -> tuple[int, int]:
    return (images.shape[2], images.shape[3])


def _train(
    net: AdaIN,
    part: nn.Module,
    sampler: _Sampler,
    steps: range,
    loss_of: Callable[[AdaIN, Tensor], Tensor],
    rate: float,
) -> Iterator[int]:
    """Take the steps, which train ``part`` of the network; yield each when it is done."""
    optimizer = torch.optim.Adam(part.parameters(), lr=rate)
    # Down to a tenth, so that the last steps are not noisy.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(steps), rate / 10)
    for step in steps:
        optimizer.zero_grad(set_to_none=True)
        loss_of(net, sampler()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        yield step


def _reconstruct(net: AdaIN, features: Tensor, like: Tensor) -> Tensor:
    """Decode without the clamp, whose gradient is zero outside [0, 1]; odd sides are cropped."""
    images: Tensor = net.decoder(features)
    return images[..., : like.shape[2], : like.shape[3]]


def _reconstruction_loss(net: AdaIN, images: Float[Tensor, "b 3 h w"]) -> Tensor:
    return F.mse_loss(_reconstruct(net, net.encode(images), images), images)


def _style_loss(net: AdaIN, images: Float[Tensor, "b 3 h w"]) -> Tensor:
    layers = net.encode_layers(images)
    features = layers[-1]
    partner = features.roll(1, 0)  # the batch was drawn at random, so any shift is a random pair
    wanted = adain(features, style_statistics(partner))
    shown = net.encode_layers(_reconstruct(net, wanted, images))
    content = F.mse_loss(shown[-1], wanted)
    style = torch.stack([_gap(a, b.roll(1, 0)) for a, b in zip(shown, layers, strict=True)]).sum()
    return F.mse_loss(_reconstruct(net, features, images), images) * PIXELS + content + style


def _gap(shown: Tensor, wanted: Tensor) -> Tensor:
    one, other = style_statistics(shown), style_statistics(wanted)
    return F.mse_loss(one.mean, other.mean) + F.mse_loss(one.std, other.std)


@torch.no_grad()
def style_gap(net: AdaIN, images: Float[Tensor, "b 3 h w"]) -> float:
    """Return the distance of stylized images to their style, over that of the plain images."""
    layers = net.encode_layers(images)
    targets = [layer.roll(1, 0) for layer in layers]
    stylized = net.decode(adain(layers[-1], style_statistics(targets[-1])), _size(images))
    after = [_gap(a, b) for a, b in zip(net.encode_layers(stylized), targets, strict=True)]
    before = [_gap(a, b) for a, b in zip(layers, targets, strict=True)]
    return float(torch.stack(after).sum() / torch.stack(before).sum())


@torch.no_grad()
def _normalize_encoder(net: AdaIN, images: Float[Tensor, "b 3 h w"]) -> None:
    """Scale each layer to mean activation one; the next layer undoes the scale.

    Per layer, not per filter as in the reference's VGG: some filters here are nearly zero, and
    scaling them up would let noise define the style.
    """
    convs = [layer for layer in net.encoder if isinstance(layer, nn.Conv2d)]
    after = [*convs[1:], next(m for m in net.decoder if isinstance(m, nn.Conv2d))]
    for conv, following, layer in zip(convs, after, net.encode_layers(images), strict=True):
        scale = layer.mean().clamp(min=1e-6)
        conv.weight /= scale
        if conv.bias is not None:
            conv.bias /= scale
        following.weight *= scale


@torch.no_grad()
def class_style_distances(
    net: AdaIN,
    images: Tensor,
    labels: Int[Tensor, " n"],
    num_classes: int,
    batch_size: int = 256,
) -> Float[Tensor, "k k"]:
    """Return the mean squared differences of the average styles (means, deviations) of classes."""
    device = next(net.parameters()).device
    counts = _count_classes(labels, num_classes)
    total = torch.zeros(num_classes, 1, dtype=torch.float64, device=device)
    for start in range(0, len(images), batch_size):
        chunk, classes = images[start : start + batch_size], labels[start : start + batch_size]
        styles = [style_statistics(layer) for layer in net.encode_layers(_batch(chunk, device))]
        vectors = torch.cat([t for s in styles for t in (s.mean, s.std)], dim=1).flatten(1).double()
        shown = torch.zeros(num_classes, vectors.shape[1], dtype=torch.float64, device=device)
        total = total + shown.index_add_(0, classes.long().to(device), vectors)
    average = total / counts.to(device).unsqueeze(1)
    return torch.stack([(row - average).square().mean(1) for row in average]).float()


def _count_classes(labels: Int[Tensor, " n"], num_classes: int) -> Int[Tensor, " k"]:
    counts = torch.bincount(labels.long(), minlength=num_classes)
    if (counts == 0).any():
        empty = (counts == 0).nonzero().flatten().tolist()
        raise ValueError(
            f"classes {empty} have no image, so there is no style to measure: use more images"
        )
    return counts
