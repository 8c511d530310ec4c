"""Painters: images from the features of a layer.

    A = F(x),   x^ = D(A)   or   D(f(A))

F is a trained network up to the layer, which is frozen; D the residual decoder; f the paper's fully
connected embedding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.hooks import evaluating, peek
from alignmixup.models.autoencoder import (
    MOST_CHANNELS,
    AutoencodingClassifier,
    Decoded,
    VectorEmbedding,
)
from alignmixup.models.decoder import ResidualDecoder, start_side

LEAST_CHANNELS = 64  # with fewer, images of narrow encoders are blurred

Kind = Literal["map", "vector", "own"]


@dataclass(frozen=True)
class Reconstruction:
    """The squared error on held-out images, mean over normalized pixel values.

    ``mean_image_error`` is that of predicting the mean of them all.
    """

    error: float
    mean_image_error: float
    num_images: int

    def __str__(self) -> str:
        return (
            f"reconstruction error {self.error:.4f} on {self.num_images} test images, "
            f"{self.error / self.mean_image_error:.0%} of the mean image's "
            f"{self.mean_image_error:.4f}"
        )


class Painter(Protocol):
    """A network with a decoder of its features at ``layer``."""

    net: nn.Module
    layer: str

    def features(self, x: Float[Tensor, "b 3 h w"]) -> Tensor:
        """Return the features of images in [0, 1], in evaluation mode."""

    def paint(self, features: Tensor) -> Float[Tensor, "b 3 h w"]:
        """Return images of these features, possibly slightly outside [0, 1]."""


class LayerDecoder(nn.Module):
    """A frozen network and a decoder of its features at one layer.

    ``image_size`` is the side of the images; features are maps [b, c, h, w], or tokens [b, n, c] of
    a square.
    """

    def __init__(
        self,
        net: nn.Module,
        layer: str,
        image_size: int,
        *,
        kind: Kind = "map",
        channels: int | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.layer = layer
        device = next(net.parameters()).device
        black = torch.zeros(1, 3, image_size, image_size, device=device)
        _, *sides = _as_map(features_at(net, layer, black), layer).shape
        shape = cast(tuple[int, int, int], tuple(sides))
        most = MOST_CHANNELS[start_side(image_size)]
        width = channels or min(max(shape[0], LEAST_CHANNELS), most)
        self.embed: nn.Module = nn.Identity()
        code_shape: tuple[int, ...] = shape
        if kind == "vector":
            self.embed = VectorEmbedding(shape, 512)
            code_shape = (512,)
        self.decoder = ResidualDecoder(code_shape, image_size, channels=width)

    def features(self, x: Tensor) -> Tensor:
        return features_at(self.net, self.layer, x)

    def paint(self, features: Tensor) -> Float[Tensor, "b 3 h w"]:
        return _to_pixels(self.net, self._decode(features))

    def forward(self, x: Tensor, *, decode: bool = True) -> Decoded:
        features = self.features(x)
        output = self._decode(features)
        target = self.net.get_submodule("normalize")(x)
        return Decoded(_to_pixels(self.net, output), output, target, features, None)

    def _decode(self, features: Tensor) -> Tensor:
        output: Tensor = self.decoder(self.embed(_as_map(features, self.layer)))
        return output


def _as_map(features: Tensor, layer: str) -> Float[Tensor, "b c h w"]:
    """Return maps unchanged, and tokens as the map they come from."""
    if features.ndim == 4:
        return features
    side = round(features.shape[1] ** 0.5) if features.ndim == 3 else 0
    if side == 0 or side * side != features.shape[1]:
        raise ValueError(
            f"layer {layer!r} returns {list(features.shape)}; a decoder reads maps [b, c, h, w] or "
            "tokens [b, n, c] of a square: name a layer that returns one of these"
        )
    return features.transpose(1, 2).reshape(len(features), -1, side, side)


def _to_pixels(net: nn.Module, output: Tensor) -> Tensor:
    """Convert normalized images to pixels."""
    return output * net.get_buffer("normalize.std") + net.get_buffer("normalize.mean")


class OwnDecoder:
    """The decoder of an autoencoding classifier, which reads e or E (mu if variational)."""

    layer = "encoder"

    def __init__(self, net: nn.Module) -> None:
        if not isinstance(net, AutoencodingClassifier) or net.decoder is None:
            raise ValueError(
                f"a {type(net).__name__} has no decoder of its own: train one with "
                "'alignmixup decoder RUN'"
            )
        self.net: nn.Module = net
        self._embed, self._decoder = net.embed, net.decoder
        self._is_variational = net.variational

    def features(self, x: Tensor) -> Tensor:
        return features_at(self.net, self.layer, x)

    def paint(self, features: Tensor) -> Float[Tensor, "b 3 h w"]:
        code = self._embed(features)
        if self._is_variational:
            code = code.chunk(2, dim=1)[0]
        return _to_pixels(self.net, self._decoder(code))


@torch.no_grad()
def features_at(net: nn.Module, layer: str, x: Tensor) -> Tensor:
    """Return the output of ``layer`` for images in [0, 1], in evaluation mode, without gradient."""
    with evaluating(net), peek(net, layer) as peeked:
        net(x)
    return peeked.output


@torch.no_grad()
def reconstruction(painter: Painter, batches: Iterable[tuple[Tensor, ...]]) -> Reconstruction:
    """Return the error on these images, and that of predicting the mean of them all."""
    deviation = painter.net.get_buffer("normalize.std").double()
    device = deviation.device
    error = first = second = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    for x, *_ in batches:
        x = x.to(device)
        painted = painter.paint(painter.features(x))
        error = error + ((painted - x) / deviation).square().sum()
        z = x / deviation
        first, second = first + z.sum(0), second + z.square().sum(0)
        count += len(x)
    spread = second / count - (first / count).square()
    return Reconstruction(float(error / (count * spread.numel())), float(spread.mean()), count)
