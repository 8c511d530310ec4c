"""A frozen ResNet whose last map guides a mixer: the weights of torchvision's, from a file.

    torch.save or safetensors.torch.save_file(torchvision.models.resnet18(...).state_dict(), path)

The file decides the depth and the kind of block; a classifier in it is ignored. Batch norms are
folded into the convolutions before them. Images are pixels in [0, 1].
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from alignmixup.ops.blend import channel_values

# Mean and standard deviation that torchvision's ImageNet weights were trained with.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORM_EPS = 1e-5
_loaded: dict[tuple[object, ...], Guide] = {}


class Guide(nn.Module):
    """A ResNet of torchvision's names without its classifier, from a state dict."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.convs = nn.ParameterDict()
        found = re.compile(r"(layer([1-4])\.(\d+))\.conv1\.weight")
        blocks = [match for name in state if (match := found.fullmatch(name))]
        self.blocks = sorted({(int(m[2]), int(m[3]), m[1]) for m in blocks})
        if "conv1.weight" not in state or {stage for stage, _, _ in self.blocks} != {1, 2, 3, 4}:
            raise ValueError("conv1 or one of layer1 to layer4 of torchvision's ResNet is missing")
        self._fold(state, "conv1", "bn1")
        for _, _, name in self.blocks:
            for i in (1, 2, 3):
                if f"{name}.conv{i}.weight" in state:
                    self._fold(state, f"{name}.conv{i}", f"{name}.bn{i}")
            if f"{name}.downsample.0.weight" in state:
                self._fold(state, f"{name}.downsample.0", f"{name}.downsample.1")
        self.requires_grad_(False)

    def _fold(self, state: Mapping[str, Tensor], conv: str, norm: str) -> None:
        weight, *parts = (
            state[name].float()
            for name in (
                f"{conv}.weight",
                *(f"{norm}.{part}" for part in ("weight", "bias", "running_mean", "running_var")),
            )
        )
        gain, shift, mean, var = parts
        scale = gain / (var + NORM_EPS).sqrt()
        key = conv.replace(".", "/")  # a name of a parameter has no dots
        self.convs[f"{key}/weight"] = weight * scale.view(-1, 1, 1, 1)
        self.convs[f"{key}/bias"] = shift - mean * scale

    def forward(self, pixels: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b c n m"]:
        x = (pixels.float() - channel_values(MEAN, pixels)) / channel_values(STD, pixels)
        x = F.max_pool2d(self._conv(x, "conv1", stride=2).relu(), 3, stride=2, padding=1)
        for stage, index, name in self.blocks:
            x = self._block(x, name, stride=2 if stage > 1 and index == 0 else 1)
        return x

    def _block(self, x: Tensor, name: str, stride: int) -> Tensor:
        is_bottleneck = f"{name}.conv3/weight".replace(".", "/") in self.convs
        # As in torchvision, the 3 x 3 convolution of a bottleneck has the stride.
        strides = (1, stride, 1) if is_bottleneck else (stride, 1)
        out = x
        for i, step in enumerate(strides, 1):
            out = self._conv(out, f"{name}.conv{i}", step)
            out = out.relu() if i < len(strides) else out
        if f"{name}.downsample.0/weight".replace(".", "/") in self.convs:
            x = self._conv(x, f"{name}.downsample.0", stride)
        return (out + x).relu()

    def _conv(self, x: Tensor, name: str, stride: int) -> Tensor:
        key = name.replace(".", "/")
        weight, bias = self.convs[f"{key}/weight"], self.convs[f"{key}/bias"]
        return F.conv2d(x, weight, bias, stride, padding=weight.shape[-1] // 2)


def load_guide(path: str | Path, *, sha256: str = "", device: torch.device | str = "cpu") -> Guide:
    """Return the frozen network of a ``.safetensors`` file on ``device``; the file is read once.

    Raises a ``ValueError`` if ``sha256`` is given and differs.
    """
    file = Path(path)
    if not file.is_file() or file.suffix != ".safetensors":
        raise ValueError(
            f"the guide must be a .safetensors file with the weights of torchvision's ResNet, got "
            f"{str(path)!r}"
        )
    stat = file.stat()
    key = (str(file.resolve()), stat.st_mtime_ns, stat.st_size, sha256, torch.device(device))
    if key not in _loaded:
        content = file.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if sha256 and digest != sha256.lower():
            raise ValueError(f"{file} has sha256 {digest}, expected {sha256}")
        try:
            _loaded[key] = Guide(load(content)).to(device)
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{file} cannot be used as guide: {error}") from None
    return _loaded[key]
