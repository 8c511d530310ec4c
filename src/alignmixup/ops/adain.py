"""AdaIN (Huang and Belongie 2017): style transfer by an encoder and a decoder.

    adain(f, g) = std(g) (f - mean(f)) / std(f) + mean(g)      per-channel statistics over space

There are two kinds of weights. "reference": VGG-19 up to relu4_1, its filters scaled to mean
activation one, and the mirrored decoder, as in the files ``vgg_normalised.pth`` and ``decoder.pth``
of the pytorch-AdaIN project. "small": three convolutions each in encoder and decoder, trained by
``training/adain_fit.py`` on any image set at its own resolution. Both are frozen and take images in
[0, 1].

``weights`` is either

* a ``.safetensors`` file written by ``save_adain`` (tensors ``encoder.N.*``, ``decoder.N.*`` and
  optionally ``class_distances``; the kind is in the metadata), or
* a folder with ``vgg_normalised`` and ``decoder``, each ``.pth`` or ``.safetensors``: key ``N.*``
  of a file becomes ``encoder.N.*`` or ``decoder.N.*``; layers after relu4_1 are ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from alignmixup.files import replacing

METADATA_KEY = "alignmixup-adain"
REFERENCE_SIZE = 224
REFERENCE_TAPS = (3, 10, 17, 30)  # relu1_1, relu2_1, relu3_1, relu4_1
SMALL_TAPS = (1, 3, 5)
# pytorch-AdaIN spells the encoder with an s; StyleMix has the decoder as ".pth.tar".
ENCODER_FILES, DECODER_FILES = ("vgg_normalised", "vgg_normalized"), ("decoder",)
SUFFIXES = (".safetensors", ".pth", ".pth.tar")
SMALLEST = 3  # reflection padding needs two pixels after halving


@dataclass(frozen=True, slots=True)
class StyleStatistics:
    """Mean and standard deviation of each channel over space."""

    mean: Float[Tensor, "b c 1 1"]
    std: Float[Tensor, "b c 1 1"]

    def of(self, perm: Int[Tensor, " b"]) -> StyleStatistics:
        """Return the statistics of each sample's partner."""
        return StyleStatistics(self.mean[perm], self.std[perm])


def style_statistics(features: Float[Tensor, "b c h w"]) -> StyleStatistics:
    """Return the statistics of features in at least float32; unbiased variance plus 1e-5."""
    wide = features.to(torch.promote_types(features.dtype, torch.float32))
    # A single position has no unbiased variance; its variance is 1e-5.
    correction = 1 if wide[0, 0].numel() > 1 else 0
    var, mean = torch.var_mean(wide, (2, 3), correction=correction, keepdim=True)
    return StyleStatistics(mean, (var + 1e-5).sqrt())


def adain(
    content: Float[Tensor, "b c h w"], style: StyleStatistics, own: StyleStatistics | None = None
) -> Float[Tensor, "b c h w"]:
    """Return ``content`` in another style; ``own`` are its own statistics if already computed."""
    own = own or style_statistics(content)
    return style.std * (content - own.mean) / own.std + style.mean


class AdaIN(nn.Module):
    """An encoder and a decoder; ``taps`` are the encoder layers of the style loss.

    Images are resized to ``input_size`` for the encoder and back after the decoder; None keeps
    their size.
    """

    class_distances: Tensor | None

    def __init__(
        self,
        kind: str,
        encoder: nn.Sequential,
        decoder: nn.Sequential,
        taps: tuple[int, ...],
        input_size: int | None,
    ) -> None:
        super().__init__()
        self.kind, self.taps, self.input_size = kind, taps, input_size
        self.encoder, self.decoder = encoder, decoder
        self.register_buffer("class_distances", None)

    def encode(self, images: Float[Tensor, "b 3 h w"], input_size: int | None = None) -> Tensor:
        """Return the features of images in [0, 1]; ``input_size`` overrides that of the network."""
        features: Tensor = self.encoder(self._resized(images, input_size))
        return features

    def encode_layers(self, images: Float[Tensor, "b 3 h w"]) -> list[Tensor]:
        """Return the features at every tap."""
        layers, features = [], self._resized(images, None)
        for index, layer in enumerate(self.encoder):
            features = layer(features)
            if index in self.taps:
                layers.append(features)
        return layers

    def decode(
        self,
        features: Float[Tensor, "b c p q"],
        size: tuple[int, int],
        input_size: int | None = None,
    ) -> Tensor:
        """Return float32 images of ``size`` in [0, 1]; ``input_size`` as in ``encode``."""
        side = input_size or self.input_size
        seen = size if side is None else (side, side)
        # Halving rounds up, so an odd side is decoded longer: crop, as in training, then resize.
        images: Tensor = self.decoder(features)[..., : seen[0], : seen[1]].float()
        if images.shape[2:] != size:
            images = F.interpolate(images, size, mode="bilinear", align_corners=False)
        return images.clamp(0, 1)

    def _resized(self, images: Tensor, size: int | None) -> Tensor:
        side = size or self.input_size
        if side is None and min(images.shape[2:]) < SMALLEST:
            raise ValueError(
                f"the style network needs images of at least {SMALLEST} x {SMALLEST} pixels, got "
                f"{list(images.shape)}; set input_size to enlarge them"
            )
        if side is None or images.shape[2:] == (side, side):
            return images.float()
        return F.interpolate(images.float(), (side, side), mode="bilinear", align_corners=False)


def small_adain(width: int = 32, rng: torch.Generator | None = None) -> AdaIN:
    """Build the small network: ``width`` channels at full and twice as many at half resolution.

    ``rng`` initializes the weights; without it they remain on the meta device.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1 channel, got {width}")
    with torch.device("meta"):
        encoder = nn.Sequential(
            *_reflected(3, width), *_reflected(width, 2 * width, 2), *_reflected(2 * width)
        )
        decoder = nn.Sequential(
            *_reflected(2 * width),
            nn.Upsample(scale_factor=2, mode="nearest"),
            *_reflected(2 * width, width),
            *_reflected(width, 3)[:1],
        )
        net = AdaIN("small", encoder, decoder, SMALL_TAPS, input_size=None)
    if rng is None:
        return net
    net = net.to_empty(device=rng.device)
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    for conv in convs:
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu", generator=rng)
        nn.init.zeros_(_bias(conv))
    with torch.no_grad():  # pixels are near 0.5: without this shift many filters never activate
        _bias(convs[0]).copy_(-0.5 * convs[0].weight.sum((1, 2, 3)))
        _bias(convs[-1]).fill_(0.5)
    return net


def _bias(conv: nn.Conv2d) -> Tensor:
    assert conv.bias is not None
    return conv.bias


def _reflected(channels: int, out: int | None = None, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels, out or channels, 3, stride, padding=1, padding_mode="reflect")
    return [conv, nn.ReLU()]


def reference_adain() -> AdaIN:
    """Build the reference network on the meta device, with the module indices of its files."""

    def block(channels: int, out: int) -> list[nn.Module]:
        return [nn.ReflectionPad2d(1), nn.Conv2d(channels, out, 3), nn.ReLU()]

    def halve() -> nn.Module:
        return nn.MaxPool2d(2, 2, ceil_mode=True)

    def double() -> nn.Module:
        return nn.Upsample(scale_factor=2, mode="nearest")

    with torch.device("meta"):
        encoder = nn.Sequential(nn.Conv2d(3, 3, 1), *block(3, 64), *block(64, 64), halve())
        encoder.extend([*block(64, 128), *block(128, 128), halve(), *block(128, 256)])
        encoder.extend([*block(256, 256), *block(256, 256), *block(256, 256), halve()])
        encoder.extend(block(256, 512))
        decoder = nn.Sequential(*block(512, 256), double(), *block(256, 256), *block(256, 256))
        decoder.extend([*block(256, 256), *block(256, 128), double(), *block(128, 128)])
        decoder.extend([*block(128, 64), double(), *block(64, 64), *block(64, 3)[:-1]])
        return AdaIN("reference", encoder, decoder, REFERENCE_TAPS, REFERENCE_SIZE)


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """Identity of the weights, recorded with every result that depends on them.

    ``sha256`` is that of the file, or of the encoder and decoder files concatenated.
    """

    path: str
    kind: str
    sha256: str
    metadata: Mapping[str, str]


def find_weights(weights: str | Path) -> WeightsFile:
    """Return the identity of ``weights``; reads the whole file for its checksum."""
    files = _files(weights)
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    metadata = {} if len(files) > 1 else _metadata(files[0])
    kind = metadata.pop("kind", "reference")
    return WeightsFile(str(weights), kind, digest.hexdigest(), metadata)


def _files(weights: str | Path) -> list[Path]:
    """Return one file of ``save_adain``, or the encoder and decoder files of the reference."""
    if not weights:
        raise ValueError(
            "style mixing needs the weights of an AdaIN network: pass a file of `alignmixup "
            "adain` (fit_adain), or a folder with vgg_normalised.pth and decoder.pth"
        )
    path = Path(weights)
    if path.is_dir():
        return [_one_of(path, stems) for stems in (ENCODER_FILES, DECODER_FILES)]
    if not path.is_file():
        raise FileNotFoundError(f"no AdaIN weights at '{path}'; train them with fit_adain")
    return [path]


def _one_of(folder: Path, stems: tuple[str, ...]) -> Path:
    candidates = [folder / f"{stem}{suffix}" for stem in stems for suffix in SUFFIXES]
    for path in candidates:
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder} contains none of {[path.name for path in candidates]}")


def _metadata(path: Path) -> dict[str, str]:
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path} is not a .safetensors file; for the reference weights pass the folder of "
            "vgg_normalised.pth and decoder.pth"
        )
    try:
        with safe_open(path, framework="pt") as file:
            what = (file.metadata() or {}).get(METADATA_KEY)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no .safetensors file: {error}") from None
    if what is None:
        raise ValueError(f"{path} is not an AdaIN network: it was not written by save_adain")
    metadata: dict[str, str] = json.loads(what)
    return metadata


# One module per file and device, shared by all mixers.
_loaded: dict[tuple[object, ...], AdaIN] = {}


def load_adain(
    weights: str | Path, *, sha256: str = "", device: torch.device | str = "cpu"
) -> AdaIN:
    """Return the frozen network of ``weights`` on ``device``, cached until the file changes.

    Raises a ``ValueError`` if ``sha256`` is given and differs.
    """
    files = _files(weights)
    seen = [(str(p.resolve()), p.stat().st_mtime_ns, p.stat().st_size) for p in files]
    key = (*seen, sha256, torch.device(device))
    if key not in _loaded:
        found = find_weights(weights)
        if sha256 and found.sha256 != sha256.lower():
            raise ValueError(f"{weights} has sha256 {found.sha256}, expected {sha256}")
        net = _read(files, found).to(device)
        _loaded[key] = net.eval().requires_grad_(requires_grad=False)
    return _loaded[key]


def _read(files: list[Path], found: WeightsFile) -> AdaIN:
    tensors: dict[str, Tensor] = {}
    if len(files) > 1:
        net = reference_adain()
        for path, prefix in zip(files, ("encoder", "decoder"), strict=True):
            tensors |= {f"{prefix}.{name}": t for name, t in _tensors(path).items()}
    else:
        tensors = _tensors(files[0])
        first = tensors.get("encoder.0.bias")
        width = 1 if first is None else len(first)  # a missing tensor raises below
        net = small_adain(width) if found.kind == "small" else reference_adain()
    net.class_distances = tensors.get("class_distances")
    wanted = {name: tensors[name] for name in net.state_dict() if name in tensors}
    missing = sorted(set(net.state_dict()) - set(wanted))
    if missing:
        raise ValueError(f"{found.path} lacks tensors of the {found.kind} network: {missing[:6]}")
    try:
        net.load_state_dict(wanted, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{found.path} does not fit the {found.kind} network: {error}") from error
    return net


def _tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file in float32."""
    try:
        if path.suffix == ".safetensors":
            loaded: object = load_file(path)
        else:  # weights_only: executes no code of the file
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, EOFError, RuntimeError) as error:
        raise ValueError(
            f"{path} is damaged, or contains more than a state dict: download it again, or save "
            "the state dict only"
        ) from error
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} must contain a state dict, got {type(loaded).__name__}")
    return {name: t.float() for name, t in loaded.items() if isinstance(t, Tensor)}


def save_adain(net: AdaIN, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a network of either kind to one ``.safetensors`` file."""
    if Path(path).suffix != ".safetensors":
        raise ValueError(f"name a .safetensors file to write to, got {str(path)!r}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in net.state_dict().items()}
    # One key: the order of several keys, and with it the checksum, is not deterministic.
    what = json.dumps({"kind": net.kind, **(metadata or {})})
    with replacing(Path(path)) as partial:
        save_file(tensors, partial, {METADATA_KEY: what})
