"""One pair of images under every registered method.

Each picture is what the mixer itself gave to a network, with the soft label it gave beside it. Of a
method that mixes features it is the decoded mix. A method that is registered appears by itself; it
is listed in ``fixed_draws`` only where its defaults would not show what it does.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.contracts import Draw, ImageSet, Mixer
from alignmixup.experiments.painters import Painter
from alignmixup.experiments.styling import shown_steps
from alignmixup.figures.by_name import register_figure
from alignmixup.figures.sources import Source, different_pairs, floats, shown, trained_source
from alignmixup.figures.style import Picture, gallery, save
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE, AlignMixupVAE
from alignmixup.mixers.attentivemix import AttentiveMix
from alignmixup.mixers.comixup import CoMixup
from alignmixup.mixers.cutout import Cutout
from alignmixup.mixers.layer_sets import Layer
from alignmixup.mixers.manifold_mixup import ManifoldMixup
from alignmixup.mixers.puzzlemix import PuzzleMix
from alignmixup.mixers.saliencymix import SaliencyMix
from alignmixup.mixers.sampling import CLEAN
from alignmixup.mixers.stylecutmix import StyleCutMix
from alignmixup.mixers.stylemix import StyleMix
from alignmixup.mixers.tokenmix import TokenMix
from alignmixup.models.autoencoder import AutoencodingClassifier
from alignmixup.ops.adain import AdaIN, save_adain
from alignmixup.registry import MIXERS
from alignmixup.training.adain_fit import train_small_adain

SHARE = 0.65  # of the anchor
# Set in every draw of the gallery that has them: the share, and the center of a box.
COMMON: Mapping[str, object] = {"lam": SHARE, "center": (0.5, 0.35)}
# On ten untrained networks the output chosen showed 22 to 50 % of the lesser of the two; with a
# whole part of twenty inputs it showed both on none of them.
CO_OTHERS, CO_DRAWS = 2, 10
MOST_SHARES = 4  # of a label that a caption names
MOST_DRAWS = 100  # until a case comes up that mixes
# Seconds of training, not minutes: enough to carry a style over, not to keep fine detail.
ADAIN_STEPS, ADAIN_WIDTH, ADAIN_BATCH = 300, 16, 16


@register_figure("methods", about="one pair of images under every method")
def methods(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw one pair of images under every method; mixed features are decoded."""
    source = trained_source(out, run, seed, data_root)
    drawn = method_pictures(source, seed=seed, adain_steps=ADAIN_STEPS)
    caption = (
        f"One pair of {source.images.name} images under every method; below each image its soft "
        f"label. Set, not drawn: lam = {SHARE}, the boxes' center, PuzzleMix's 8 x 8 grid, the "
        f"shares of style. Saliency and features: {source.what}. Co-Mixup got {CO_OTHERS} images "
        f"more than the pair and {CO_DRAWS} draws; of its outputs the one with most of both is "
        f"shown. Styles: a small AdaIN network after {ADAIN_STEPS} steps."
    )
    if source.painter is not None:
        caption += f" Features are mixed at {source.layer} and decoded."
    if any(picture.title.startswith("AlignMixup/") for picture in drawn.pictures):
        caption += " AlignMixup mixes them alike with and without an autoencoder."
    if drawn.left_out:
        why = "; ".join(f"{title} ({reason})" for title, reason in drawn.left_out.items())
        caption += f" Not shown: {why}."
    title = f"One pair of {source.images.name} images under every method"
    count = len(drawn.pictures)
    columns = min((7, 6, 5), key=lambda columns: -count % columns)  # the fewest empty places
    return save(gallery(drawn.pictures, title, columns), out / "methods", caption)


_LEARNED = "its mask is learned with the network"
_WRAPPER = "it changes the labels or the loss of another method"
# Methods without a picture by themselves, and why.
NO_IMAGE = {
    "AutoMix": _LEARNED,
    "SAMix": _LEARNED,
    "AdAutoMix": _LEARNED,
    "RecursiveMix": "it pastes the previous batch",
    "MultiMix": "it mixes all embeddings of a batch",
    "DenseMultiMix": "it mixes all embeddings of a batch",
    "RegMixup": "it shows the images of input mixup beside the clean ones",
    "OneOf": "it shows the images of other methods",
    "LabelSmoothing": _WRAPPER,
    "Decoupled": _WRAPPER,
}


@dataclass(frozen=True)
class Gallery:
    """Pictures, and by title why a method has none."""

    pictures: list[Picture]
    left_out: dict[str, str]


def method_pictures(source: Source, *, seed: int = 0, adain_steps: int = ADAIN_STEPS) -> Gallery:
    """Anchor, partner, then what each method gives to the network in the anchor's place.

    Nothing is drawn a second time for the picture: the method runs on the source's network, and
    what it shows to it last is the image. (PuzzleMix and Co-Mixup show the clean batch first, for
    its saliency.)
    """
    images, net, names = source.images, source.net, source.images.class_names
    _, x, y = pair_batch(source, seed)
    pictures = [
        Picture(title, shown(x[k]), names[int(y[k])])
        for k, title in enumerate(("anchor", "partner"))
    ]
    left_out = {}
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "adain.safetensors"
        save_adain(small_style_network(images, adain_steps, seed), weights)
        draws = fixed_draws(source, str(weights))
        for name, mixer_class in MIXERS.items():
            title = _title(mixer_class)
            if name in NO_IMAGE:
                left_out[title] = NO_IMAGE[name]
                continue
            try:
                fixed = draws.get(name) or FixedDraw(mixer_class(), COMMON)
                if set(fixed.mixer.cases) == {CLEAN}:
                    continue  # the baseline
                rng = torch.Generator().manual_seed(seed)
                output = fixed.output(net, x, y, rng, source.painter)
            except (ValueError, TypeError) as error:  # of another kind of network, say
                left_out[title] = str(error).partition(";")[0]
                continue
            pictures.append(
                Picture(title, shown(output.image), share_caption(output.targets, names))
            )
    return Gallery(pictures, left_out)


def _title(mixer_class: type) -> str:
    """A method's name as its docstring begins with it: ``CutMix (Yun et al. 2019): ...``."""
    return re.split(r"[(:]", mixer_class.__doc__ or mixer_class.__name__)[0].strip()


def pair_batch(source: Source, seed: int) -> tuple[tuple[int, int], Tensor, Tensor]:
    """The rows of a pair; it and images of other classes up to a part of Co-Mixup, and labels.

    Of other classes, so that a label says how much of the anchor and of the partner is shown.
    """
    images, device = source.images, next(source.net.parameters()).device
    ((i, j),) = different_pairs(images, 1, seed)
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=rng).tolist()
    pair = {int(images.labels[i]), int(images.labels[j])}
    others = [k for k in order if int(images.labels[k]) not in pair]
    chosen = [i, j, *others][: CoMixup.part_size]
    return (i, j), floats(images, chosen).to(device), images.labels[chosen].to(device)


@dataclass
class Seen:
    """The last images that a network was given, and its features at a layer, as mixed there."""

    images: Tensor = field(default_factory=lambda: torch.empty(0))
    features: Tensor = field(default_factory=lambda: torch.empty(0))


@contextmanager
def recorded(net: nn.Module, layer: str | None = None) -> Iterator[Seen]:
    """Keep what ``net`` is given within the block, and its features at ``layer``."""
    seen, handles = Seen(), []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.features = output.detach().clone()

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.images = args[0].detach().clone()
        if layer is not None:  # now, after the mixer's own hook: it sees what that returns
            handles.append(net.get_submodule(layer).register_forward_hook(look))

    handles.append(net.register_forward_pre_hook(before))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Output:
    """An image as a network was given it, its soft label, and how much it shows of both inputs."""

    image: Float[Tensor, "3 h w"]
    targets: Float[Tensor, " k"]
    pair_share: float


@dataclass(frozen=True)
class FixedDraw:
    """A method, and what of its draw is set so that images can be compared.

    Of ``chosen`` those are set that the draw has. The batch is the pair, and the output in the
    anchor's place is shown. Co-Mixup has no such place and makes copies of two images alone, so it
    gets ``num_others`` beside them and ``num_draws`` tries, and the output that shows most of both
    is the one to show.
    """

    mixer: Mixer
    chosen: Mapping[str, object] = field(default_factory=dict)
    num_others: int = 0
    num_draws: int = 1

    def output(
        self,
        net: nn.Module,
        x: Tensor,
        y: Tensor,
        rng: torch.Generator,
        painter: Painter | None = None,
    ) -> Output:
        """What the method gives to the network for the images ``x``, the pair first."""
        outputs = (self._output(net, x, y, rng, painter) for _ in range(self.num_draws))
        return max(outputs, key=lambda output: output.pair_share)

    def _output(
        self, net: nn.Module, x: Tensor, y: Tensor, rng: torch.Generator, painter: Painter | None
    ) -> Output:
        x, y = x[: 2 + self.num_others], y[: 2 + self.num_others]
        draw = self._draw(len(x), rng)
        with recorded(net, painter.layer if painter else None) as seen:
            targets = self.mixer.apply(net, x, y, draw).targets
        assert targets is not None
        shares = torch.minimum(targets[:, y[0]], targets[:, y[1]])
        k = int(shares.argmax()) if self.num_others else 0
        image = seen.images[k]
        if shares[k] > 0 and torch.equal(image, x[k]):
            if painter is None:
                raise ValueError("it mixes features, and there is no decoder of this network")
            with torch.no_grad():
                image = painter.paint(seen.features)[k].clamp(0, 1)
        return Output(image, targets[k], float(shares[k]))

    def _draw(self, batch_size: int, rng: torch.Generator) -> Draw:
        """A draw of a case that mixes, with what is set in it."""
        draws = (self.mixer.draw(batch_size, rng) for _ in range(MOST_DRAWS))
        draw = next((d for d in draws if d.case != CLEAN), None)
        if draw is None:
            raise ValueError(f"none of {MOST_DRAWS} draws mixes")
        if self.num_others:
            return draw
        fixed = {
            name: torch.tensor(self.chosen[name]).expand_as(tensor)
            for name, tensor in draw.tensors().items()
            if name in self.chosen
        }
        return draw.with_tensors({**fixed, "perm": torch.tensor([1, 0])})


def fixed_draws(source: Source, weights: str) -> dict[str, FixedDraw]:
    """By registered name: the settings of methods whose defaults would not show what they do.

    ``weights`` are those of a style network.
    """
    cutout = Cutout(source.images.images.shape[-1] // 2, source.images.mean)
    salient = SaliencyMix(prob=1.0, saliency="per_sample")
    cut, style = StyleCutMix(weights=weights, prob=1.0), StyleMix(weights=weights, prob=1.0)
    # Content of the anchor, style of the partner: the case that tells the two apart.
    lam = 0.9 * style.content_weight + 0.1 * (1 - style.content_weight)
    # Aligned features: in the other cases these are input mixup, or manifold mixup of a vector.
    feat = {"feat": 1.0}
    code = source.net.code_shape if isinstance(source.net, AutoencodingClassifier) else (512,)
    layers: tuple[Layer, ...] = ("A", "e" if len(code) == 1 else "E")
    coded = AlignMixupAE(source.layer, layers=layers, weights=feat)
    sampled = AlignMixupVAE(
        source.layer, layers=layers, weights=feat, embedding_dim=math.prod(code)
    )
    return {
        "AlignMixup": FixedDraw(AlignMixup(source.layer, weights=feat), COMMON),
        "AlignMixupAE": FixedDraw(coded, COMMON),
        "AlignMixupVAE": FixedDraw(sampled, COMMON),
        "AttentiveMix": FixedDraw(AttentiveMix(layer=source.layer), COMMON),
        "CoMixup": FixedDraw(CoMixup(), num_others=CO_OTHERS, num_draws=CO_DRAWS),
        "Cutout": FixedDraw(cutout),
        "ManifoldMixup": FixedDraw(ManifoldMixup((source.layer,)), COMMON),
        "PuzzleMix": FixedDraw(PuzzleMix(grids=(8,)), COMMON),
        "SaliencyMix": FixedDraw(salient, COMMON),
        "StyleCutMix": FixedDraw(cut, {**COMMON, "style": 0.3, "gamma": 0.2}),
        "StyleMix": FixedDraw(style, {"content": 0.9, "style": 0.1, "joint": 0.5, "lam": lam}),
        "TokenMix": FixedDraw(TokenMix(grid=8, score="area")),
    }


def small_style_network(images: ImageSet, steps: int, seed: int) -> AdaIN:
    """A small style network, trained on at most a thousand of the images; shows progress."""
    rng = torch.Generator().manual_seed(seed)
    some = images.images[torch.randperm(len(images), generator=rng)[:1000]]
    with shown_steps() as on_step:
        return train_small_adain(
            some, steps=steps, seed=seed, width=ADAIN_WIDTH, batch_size=ADAIN_BATCH, on_step=on_step
        )


def share_caption(targets: Float[Tensor, " k"], names: tuple[str, ...]) -> str:
    """A soft label in words: ``cat 65%, dog 35%``; of many classes the largest shares."""
    order = targets.argsort(descending=True, stable=True).tolist()
    kept = [k for k in order if targets[k] >= 0.005]
    parts = [f"{names[k]} {float(targets[k]):.0%}" for k in kept]
    if len(kept) > MOST_SHARES:
        rest = float(targets[kept[MOST_SHARES - 1 :]].sum())
        parts = [*parts[: MOST_SHARES - 1], f"others {rest:.0%}"]
    return ", ".join(parts)
