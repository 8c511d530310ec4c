"""Networks for weakly supervised localization: ACoL and ADL, on VGG-16 and ResNet-50.

A plain classifier uses the most discriminative part of an object. Both methods hide that part in
training, so that the rest is learned as well; the objective stays classification.

ACoL (Zhang et al. 2018): two classifiers read one map F. With M_A the map of the true class of the
first, scaled to [0, 1] by its minimum and maximum, the second reads F where M_A <= delta, and zero
elsewhere; both are trained. The map of a class is max(M_A, M_B), each in [0, 1].

ADL (Choe and Shim 2019): a layer without weights between two others. With a = mean_c F the
attention, it multiplies F either by the drop mask [a <= gamma max a] or by the importance map
sigmoid(a), at random in each step; in eval mode it is the identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, Mixer, soft_cross_entropy, soft_targets
from alignmixup.models.normalize import Rgb
from alignmixup.models.resnet import ResNet50
from alignmixup.models.vgg_gap import VGGGAP
from alignmixup.registry import register_mixer, register_model

Body = Literal["vgg", "resnet50"]


@dataclass(frozen=True, slots=True)
class ACoLOutput:
    """The logits of both classifiers, their maps of one class, and what B does not see."""

    logits: Float[Tensor, "b k"]
    logits_b: Float[Tensor, "b k"]
    map_a: Float[Tensor, "b h w"]
    map_b: Float[Tensor, "b h w"]
    erased: Tensor  # [b, h, w] bool


@register_model("acol_vgg", layer="body", initialize=True, pretrained="vgg16")
class ACoL(nn.Module):
    """Images in [0, 1] to the logits of the first classifier, through ``body`` and two branches.

    Train it with ``ErasingLoss``, which passes the labels. ``threshold`` is delta. The VGG body
    ends at conv5_3, the ResNet-50 body at ``layer4`` with stride 1; both have 14 x 14 from 224 x
    224.
    """

    def __init__(
        self,
        num_classes: int,
        mean: Rgb,
        std: Rgb,
        *,
        body: Body = "vgg",
        width: int = 64,
        threshold: float = 0.6,
    ) -> None:
        super().__init__()
        if body not in ("vgg", "resnet50"):
            raise ValueError(f"unknown body {body!r}; choose 'vgg' or 'resnet50'")
        if not 0 < threshold < 1:
            raise ValueError(f"threshold must lie in (0, 1), got {threshold}")
        self.num_classes = num_classes
        self.threshold = threshold
        # The body keeps its own names, so that pretrained weights are loaded into it as usual.
        self.body: VGGGAP | ResNet50
        if body == "vgg":
            self.body, channels = VGGGAP(1, mean, std, width=width), 8 * width
            self.body.conv6 = nn.Sequential()
        else:
            self.body = ResNet50(1, mean, std, width=width, last_stride=1)
            channels = 32 * width
        self.body.head = _KeepMap()  # type: ignore[assignment]
        self.branch_a = _branch(channels, 16 * width, num_classes)
        self.branch_b = _branch(channels, 16 * width, num_classes)

    @overload
    def forward(self, x: Tensor, classes: None = None) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, classes: Tensor) -> ACoLOutput: ...

    def forward(self, x: Tensor, classes: Tensor | None = None) -> Tensor | ACoLOutput:
        """Return the logits; with ``classes``, also run the second branch with their map erased.

        Training calls this too, so that wrappers of the network see the whole step.
        """
        features: Tensor = self.body(x)
        maps_a: Tensor = self.branch_a(features)
        if classes is None:
            return maps_a.mean(dim=(2, 3))
        return self._erase(features, maps_a, classes)

    def _erase(self, features: Tensor, maps_a: Tensor, classes: Tensor) -> ACoLOutput:
        rows = torch.arange(len(features), device=features.device)
        map_a = _unit(maps_a[rows, classes].detach())  # no gradient flows through the mask
        erased = map_a > self.threshold
        maps_b = self.branch_b(features.masked_fill(erased.unsqueeze(1), 0.0))
        map_b = _unit(maps_b[rows, classes].detach())
        return ACoLOutput(maps_a.mean((2, 3)), maps_b.mean((2, 3)), map_a, map_b, erased)

    def class_maps(
        self, x: Float[Tensor, "b 3 h w"], classes: Int[Tensor, " b"] | None
    ) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b h w"]]:
        """Return the logits and the fused map of ``classes``, or of the predicted ones."""
        features: Tensor = self.body(x)
        maps_a: Tensor = self.branch_a(features)
        chosen = maps_a.mean(dim=(2, 3)).argmax(dim=1) if classes is None else classes
        out = self._erase(features, maps_a, chosen)
        return out.logits, torch.maximum(out.map_a, out.map_b)

    def load_torchvision(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load torchvision's vgg16 or resnet50 into the body; the branches are kept."""
        self.body.load_torchvision({k: v for k, v in state_dict.items() if k[:3] != "fc."})


class _KeepMap(nn.Module):
    """A head that returns the map unchanged."""

    def forward(self, features: Tensor) -> Tensor:
        return features


def _branch(channels: int, hidden: int, num_classes: int) -> nn.Sequential:
    """Return two 3 x 3 convolutions and one 1 x 1 to a map per class, whose mean is the logit."""
    return nn.Sequential(
        nn.Conv2d(channels, hidden, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(hidden, hidden, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(hidden, num_classes, 1),
    )


def _unit(maps: Float[Tensor, "b h w"]) -> Float[Tensor, "b h w"]:
    """Scale each map to [0, 1]; a constant one becomes zero."""
    low, high = maps.amin(dim=(1, 2), keepdim=True), maps.amax(dim=(1, 2), keepdim=True)
    return torch.where(high > low, (maps - low) / (high - low), torch.zeros_like(maps))


@register_mixer
@dataclass(frozen=True, slots=True)
class ErasingLoss(Mixer):
    """The loss of ACoL: the sum of the losses of both classifiers, without mixing.

    It replaces the mixer in a training loop.

    Raises:
        ValueError: If the network is not an ``ACoL``.

    Example:
        ```python
        from alignmixup.models.wsol import ACoL

        net = ACoL(10, mean=(0.5,) * 3, std=(0.25,) * 3, width=4)
        am.ErasingLoss()(net, x, y).loss().backward()
        ```
    """

    @property
    def cases(self) -> Mapping[str, float]:
        return {"clean": 1.0}

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        return Draw("clean", torch.arange(batch_size), torch.ones(()))

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        # Call the wrapper (compiled, distributed), not the network inside.
        inside = next((m for m in net.modules() if isinstance(m, ACoL)), None)
        if inside is None:
            raise ValueError(f"ErasingLoss trains an ACoL network, got {type(net).__name__}")
        targets = soft_targets(y, inside.num_classes)
        out: ACoLOutput = net(x, targets.argmax(dim=1))
        return Mixed(out.logits, targets, {"erased": soft_cross_entropy(out.logits_b, targets)})


class ADL(nn.Module):
    """Drop the most attended part of a map, or emphasize it, at random; identity in eval mode.

    ``drop_rate`` is the probability of dropping, ``threshold`` is gamma. The choice of step i is a
    function of ``seed`` and i, a counter in a buffer: a resumed run repeats the uninterrupted one,
    and there is no host sync.
    """

    steps: Tensor

    def __init__(self, drop_rate: float = 0.75, threshold: float = 0.8, *, seed: int = 0) -> None:
        super().__init__()
        if not 0 <= drop_rate <= 1:
            raise ValueError(f"drop_rate must lie in [0, 1], got {drop_rate}")
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold must lie in (0, 1], got {threshold}")
        self.drop_rate = drop_rate
        self.threshold = threshold
        self.seed = seed
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, features: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        if not self.training:
            return features
        attention = features.mean(dim=1, keepdim=True)
        importance = attention.sigmoid()
        kept = attention <= self.threshold * attention.amax(dim=(2, 3), keepdim=True)
        is_drop = _chance(self.seed, self.steps) < self.drop_rate
        self.steps += 1
        return features * torch.where(is_drop, kept.to(features.dtype), importance)

    def extra_repr(self) -> str:
        return f"drop_rate={self.drop_rate}, threshold={self.threshold}, seed={self.seed}"


def _chance(seed: int, step: Tensor) -> Float[Tensor, ""]:
    """Return a number in [0, 1), splitmix64 of seed and step.

    int64 tensors wrap around; a right shift copies the sign, which is masked out.
    """
    z = step + (seed * 0x2545F4914F6CDD1D + 1) % 2**62
    z = z * _signed(0x9E3779B97F4A7C15)
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    z = z ^ (z >> 31 & (1 << 33) - 1)
    return (z >> 40 & (1 << 24) - 1).float() / 2**24


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


# Positions of the layer: VGG after the third and fourth pool and after conv5_3, ResNet-50 after its
# last two stages.
ADL_LAYERS: Mapping[str, tuple[str, ...]] = {
    "VGGGAP": ("features.16", "features.23", "features.29"),
    "ResNet50": ("layer3", "layer4"),
}


def add_adl(
    net: nn.Module,
    layers: Sequence[str] | None = None,
    *,
    drop_rate: float = 0.75,
    threshold: float = 0.8,
    seed: int = 0,
) -> nn.Module:
    """Insert an ADL after each of ``layers`` of ``net``, in place, and return ``net``.

    ``layers`` defaults to those of VGG-GAP or ResNet-50. Load pretrained weights first: they do not
    have the buffers of the new layers. The names of weights do not change.
    """
    chosen = ADL_LAYERS.get(type(net).__name__) if layers is None else tuple(layers)
    if not chosen:
        raise ValueError(
            f"no default layers for a {type(net).__name__}: pass layers=; there are defaults for "
            f"{', '.join(ADL_LAYERS)}"
        )
    modules = dict(net.named_modules())
    for number, name in enumerate(chosen):
        if name not in modules:
            raise ValueError(f"the net has no layer {name!r}; there are {', '.join(modules)}")
        target, adl = modules[name], ADL(drop_rate, threshold, seed=seed + number)
        if isinstance(target, nn.Sequential):
            target.append(adl)
        elif list(target.parameters()):
            raise ValueError(
                f"{name!r} has weights and is no nn.Sequential, so their names would change: "
                "name the nn.Sequential that it ends, or a layer without weights"
            )
        else:
            parent, _, last = name.rpartition(".")
            setattr(modules[parent], last, nn.Sequential(target, adl))
    return net


register_model("adl_vgg", layer="conv6", initialize=True, pretrained="vgg16", finish=add_adl)(
    VGGGAP
)
register_model(
    "adl_resnet50", layer="layer4", initialize=True, pretrained="resnet50", finish=add_adl
)(ResNet50)
