"""A classifier that also reconstructs its images: encoder, embedding, classifier and decoder.

    A = F(x),   e = f(A),   logits = g(e),   x^ = D(e)                      (paper, Experiments)

f is a fully connected layer on all of A (a vector e), or a 2 x 2 convolution of stride 2 (a tensor
E). In the variational form f returns (mu, sigma), stacked along the channels, and g and D read
z = mu + sigma noise, or mu without noise.

f and g are linear, so mixing the vector e is the same as mixing logits, and as mixing A without
alignment. E is followed by a linear g on all of its positions, where alignment has an effect.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.hooks import evaluating
from alignmixup.models.decoder import ResidualDecoder, start_side

EmbeddingKind = Literal["vector", "tensor"]

# f reads all of A up to 512 x 8 x 8; the 2048 x 7 x 7 of ResNet-50 would need 51 M weights.
MOST_INPUTS = 512 * 8 * 8
REDUCED_CHANNELS = 128

# The most channels of the decoder's first map, by its side.
MOST_CHANNELS = {4: 512, 7: 256}


class Decoded(NamedTuple):
    """The output of ``net(x, decode=True)``.

    ``output`` and ``target`` are the reconstruction and the image in normalized space, where the
    loss is computed; ``image`` is the reconstruction in pixels, possibly slightly outside [0, 1].
    ``mean`` is the code, and ``deviation`` its sigma in the variational form.
    """

    image: Float[Tensor, "b 3 h w"]
    output: Float[Tensor, "b 3 h w"]
    target: Float[Tensor, "b 3 h w"]
    mean: Tensor
    deviation: Tensor | None


class AutoencodingClassifier(nn.Module):
    """A built-in network with an embedding, a classifier on it and, optionally, a decoder.

    ``normalize`` and everything up to the head are the modules of ``backbone``: a trained network
    keeps its weights, as ``encoder.stem``, ``encoder.layer1`` and so on. The output of ``encoder``
    is A, that of ``embed`` is e (or E, or the pair), for taps.

    ``net(x)`` returns logits. ``net(x, decode=True)`` runs the decoder instead of the classifier
    and returns a ``Decoded``; it is a flag of ``forward`` because a second method would bypass the
    wrappers of torch.compile and DistributedDataParallel. ``noise`` [b, ``code_dim``] samples the
    code of the variational form; without it the code is mu, in training and in evaluation.

    A vector has ``embedding_dim`` elements and reads A flattened, or ``pooled`` (then alignment
    before it has no effect). If A has more than 32,768 elements and more than 128 channels, a 1 x 1
    convolution first reduces it to 128 channels, or to ``reduced_channels``. A tensor has
    ``embedding_channels`` and half the side of A, rounded down: 2 x 2 from 4 x 4, 4 x 4 from 8 x 8,
    3 x 3 from 7 x 7.

    ``map_size`` averages the backbone's map down to that many rows and columns at the end of
    ``encoder``: A has that size in every case of a mixer and in evaluation.
    """

    def __init__(
        self,
        backbone: nn.Module,
        image_size: int,
        *,
        embedding: EmbeddingKind = "vector",
        variational: bool = False,
        pooled: bool = False,
        embedding_dim: int = 512,
        embedding_channels: int = 128,
        reduced_channels: int | None = None,
        map_size: int | None = None,
        decoder: bool = True,
        decoder_channels: int | None = None,
        decoder_blocks: int = 2,
    ) -> None:
        super().__init__()
        parts = dict(backbone.named_children())
        if list(parts)[:1] != ["normalize"] or list(parts)[-1:] != ["head"]:
            raise ValueError(
                f"an autoencoder needs a network whose children go from normalize to head, got a "
                f"{type(backbone).__name__} of {list(parts)}"
            )
        self.image_size = image_size
        self.variational = variational
        self.normalize = parts.pop("normalize")
        num_classes: int = parts.pop("head").get_submodule("linear").out_features  # type: ignore[assignment]
        self.encoder = nn.Sequential(OrderedDict(parts))
        shape = _map_shape(self.encoder, image_size)
        if map_size is not None:
            if map_size < 1 or shape[1] % map_size or shape[2] % map_size:
                raise ValueError(
                    f"map_size {map_size} must divide the sides of the map, {shape[1]} x {shape[2]}"
                )
            self.encoder.add_module("average", nn.AdaptiveAvgPool2d(map_size))
            shape = (shape[0], map_size, map_size)
        copies = 2 if variational else 1
        inner = _embedding(
            shape,
            embedding,
            pooled,
            copies * embedding_dim,
            copies * embedding_channels,
            reduced_channels,
        )
        self.embed: nn.Module = Variational(inner) if variational else inner
        channels, *sides = inner.out_shape
        self.code_shape = (channels // copies, *sides)
        self.classifier = nn.Linear(self.code_dim, num_classes)
        self.decoder: ResidualDecoder | None = None
        if decoder:
            if decoder_channels is None:
                decoder_channels = min(shape[0], MOST_CHANNELS[start_side(image_size)])
            self.decoder = ResidualDecoder(
                self.code_shape, image_size, channels=decoder_channels, num_blocks=decoder_blocks
            )

    @property
    def code_dim(self) -> int:
        """The number of elements of a code: of e, E or mu."""
        return torch.Size(self.code_shape).numel()

    def forward(
        self, x: Tensor, *, decode: bool = False, noise: Tensor | None = None
    ) -> Float[Tensor, "b k"] | Decoded:
        side = self.image_size
        if x.shape[2:] != (side, side):
            raise ValueError(
                f"this network was built for images of {side} x {side}, got {list(x.shape)}: "
                "build it with this image_size"
            )
        target = self.normalize(x)
        embedded = self.embed(self.encoder(target))
        mean, deviation = embedded.chunk(2, dim=1) if self.variational else (embedded, None)
        code = self._sample(mean, deviation, noise)
        if not decode:
            logits: Tensor = self.classifier(code.flatten(1))
            return logits
        if self.decoder is None:
            raise ValueError("this network was built with decoder=False: it cannot decode")
        output = self.decoder(code)
        image = output * self.normalize.std + self.normalize.mean
        return Decoded(image, output, target, mean, deviation)

    def _sample(self, mean: Tensor, deviation: Tensor | None, noise: Tensor | None) -> Tensor:
        if noise is None:
            return mean
        if deviation is None:
            raise ValueError("noise is for a network with variational=True; this one samples none")
        if noise.shape != (len(mean), self.code_dim):
            raise ValueError(
                f"noise must have shape {[len(mean), self.code_dim]} for this network's codes, got "
                f"{list(noise.shape)}: set the mixer's embedding_dim to {self.code_dim}"
            )
        return mean + deviation * noise.to(deviation.dtype).reshape(mean.shape)


def _map_shape(encoder: nn.Sequential, image_size: int) -> tuple[int, int, int]:
    """Return (channels, height, width) of A from a forward pass of one black image."""
    with torch.no_grad(), evaluating(encoder):
        black = next(encoder.parameters()).new_zeros(1, 3, image_size, image_size)
        _, channels, height, width = encoder(black).shape
    return channels, height, width


def _embedding(
    shape: tuple[int, int, int],
    kind: EmbeddingKind,
    pooled: bool,
    dim: int,
    channels: int,
    reduced_channels: int | None,
) -> VectorEmbedding | TensorEmbedding:
    if kind == "vector":
        return VectorEmbedding(shape, dim, pooled=pooled, reduced_channels=reduced_channels)
    if kind != "tensor":
        raise ValueError(f"unknown embedding {kind!r}; choose 'vector' or 'tensor'")
    if pooled or reduced_channels is not None:
        raise ValueError(
            f"pooled={pooled} and reduced_channels={reduced_channels} are options of a vector "
            "embedding: leave them out for a tensor"
        )
    return TensorEmbedding(shape, channels)


class VectorEmbedding(nn.Module):
    """f as a fully connected layer on the flattened A, or on its mean over positions."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dim: int,
        *,
        pooled: bool = False,
        reduced_channels: int | None = None,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        if dim < 1:
            raise ValueError(f"embedding_dim must be at least 1, got {dim}")
        if pooled and reduced_channels is not None:
            raise ValueError("a pooled embedding needs no reduced_channels: leave it out")
        is_large = channels * height * width > MOST_INPUTS and channels > REDUCED_CHANNELS
        if reduced_channels is None and not pooled and is_large:
            reduced_channels = REDUCED_CHANNELS
        self.pooled = pooled
        self.out_shape: tuple[int, ...] = (dim,)
        self.reduce: nn.Conv2d | None = None
        if reduced_channels is not None:
            if not 0 < reduced_channels <= channels:
                raise ValueError(
                    f"reduced_channels must lie in 1..{channels}, got {reduced_channels}"
                )
            self.reduce = nn.Conv2d(channels, reduced_channels, 1, bias=False)
            channels = reduced_channels
        self.linear = nn.Linear(channels if pooled else channels * height * width, dim)

    def forward(self, features: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d"]:
        if self.reduce is not None:
            features = self.reduce(features)
        flat = features.mean(dim=(2, 3)) if self.pooled else features.flatten(1)
        e: Tensor = self.linear(flat)
        return e


class TensorEmbedding(nn.Module):
    """f as a 2 x 2 convolution of stride 2; the last row and column of an odd side are ignored."""

    def __init__(self, shape: tuple[int, int, int], channels: int) -> None:
        super().__init__()
        if channels < 1:
            raise ValueError(f"embedding_channels must be at least 1, got {channels}")
        if min(shape[1:]) < 2:
            raise ValueError(
                f"a tensor embedding halves the map, and this encoder's is {shape[1]} x "
                f"{shape[2]}: use a vector embedding"
            )
        self.out_shape: tuple[int, ...] = (channels, shape[1] // 2, shape[2] // 2)
        self.conv = nn.Conv2d(shape[0], channels, 2, stride=2)

    def forward(self, features: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        E: Tensor = self.conv(features)
        return E


class Variational(nn.Module):
    """(mu, sigma) stacked along the channels, from an embedding of twice the size."""

    # Keeps log sigma in the prior term finite if softplus rounds to zero.
    LEAST_DEVIATION = 1e-4

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: Float[Tensor, "b c h w"]) -> Float[Tensor, "b *rest"]:
        mean, raw = self.inner(features).chunk(2, dim=1)
        # softplus, not exp: sigma itself is mixed, and a large step cannot overflow it.
        return torch.cat((mean, F.softplus(raw) + self.LEAST_DEVIATION), dim=1)
