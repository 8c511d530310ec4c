"""Manifold mixup (Verma et al. 2019): interpolate the output of a layer drawn at each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed
from alignmixup.hooks import check_rows, tap
from alignmixup.mixers.base import Loss, Method
from alignmixup.mixers.sampling import probabilities, sample_pairs
from alignmixup.ops.blend import blend_with_partner
from alignmixup.outputs import Key, Selection
from alignmixup.registry import register_mixer
from alignmixup.wrappers import check_layer_name


@register_mixer
@dataclass(frozen=True)
class ManifoldMixup(Method):
    """Manifold mixup (Verma et al. 2019): interpolate the output of a layer drawn at each step.

    The original draws from the input and the outputs of the first two stages, with alpha 2 on CIFAR
    and 0.2 on Tiny-ImageNet and ImageNet. Nothing is aligned: class token and patches are mixed
    position by position.

    Args:
        layers: Names of the layers to draw from; ``"input"`` stands for the image.
        alpha: ``lam`` is drawn from Beta(alpha, alpha).
        lam_per_sample: Draw one ``lam`` per sample instead of one per batch.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.
        output: Index or name of the features in the output of layers that return a tuple, a dict or
            a ``ModelOutput``; None for layers that return a tensor.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.ManifoldMixup(layers=("input", "layer1", "layer2"))
        mixer(model, x, y).loss().backward()
        ```
    """

    layers: tuple[str, ...] = ("input", "layer1", "layer2")
    alpha: float = 2.0
    lam_per_sample: bool = False
    loss: Loss = "ce"
    output: Key | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        names: object = self.layers
        if not isinstance(names, tuple | list):
            raise ValueError(f"layers must be a tuple of names, such as ('layer1',), got {names!r}")
        for layer in self.layers:
            check_layer_name(layer)
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers must be one or more different names, got {self.layers}")

    @property
    def cases(self) -> Mapping[str, float]:
        return probabilities(dict.fromkeys(self.layers, 1.0))

    def tapped(self, net: nn.Module) -> Sequence[str]:
        return [layer for layer in self.layers if layer != "input"]

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        return sample_pairs(self.cases, self.alpha, self.lam_per_sample, batch_size, rng)

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        if draw.case == "input":
            x = blend_with_partner(x, draw.perm, draw.lam)
        with ExitStack() as taps:
            for layer in self.layers:
                # Tap every layer in every case: torch.compile ignores hooks added later.
                if layer != "input":
                    action = _mix_output if layer == draw.case else None
                    part = Selection(layer, self.output)
                    taps.enter_context(tap(net, part, action, layer, draw.perm, draw.lam))
            logits = net(x)
        return self._mixed(logits, y, draw)

    _clean = _mix  # "clean" can only be the name of a layer here


def _mix_output(output: Tensor, layer: str, perm: Tensor, lam: Tensor) -> Tensor:
    check_rows(output, layer, len(perm))
    return blend_with_partner(output, perm, lam)
