"""One pair of images under every method that acts on images.

Each picture is what the mixer itself gave to a network, with the soft label it gave beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.contracts import ImageSet, Mixer
from alignmixup.figures.registry import register_figure
from alignmixup.figures.sources import different_pairs, floats, network_source, shown
from alignmixup.figures.style import Picture, gallery, save
from alignmixup.mixers.comixup import CoMixup
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.cutout import Cutout
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.puzzlemix import PuzzleMix
from alignmixup.mixers.saliencymix import SaliencyMix
from alignmixup.mixers.stylecutmix import StyleCutMix
from alignmixup.mixers.stylemix import StyleMix
from alignmixup.ops.adain import AdaIN, save_adain
from alignmixup.training.adain_fit import train_small_adain
from alignmixup.training.progress import Reporter

__all__ = [
    "FixedDraw",
    "Output",
    "Recorder",
    "method_pictures",
    "methods",
    "share_caption",
    "small_style_network",
    "with_others",
]

SHARE, CENTRE = 0.65, [0.5, 0.35]  # the anchor's share and the box in the gallery
# On ten untrained networks the output chosen showed 22 to 50 % of the lesser of the two; with a
# whole part of twenty inputs it showed both on none of them.
CO_OTHERS, CO_DRAWS = 2, 10
# Seconds of training, not minutes: enough to carry a style over, not to keep fine detail.
ADAIN_STEPS, ADAIN_WIDTH, ADAIN_BATCH = 300, 16, 16


@register_figure("methods", about="one pair of images under every method that mixes images")
def methods(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw one pair of images under every method that mixes images."""
    source = network_source(run, seed, data_root)
    pictures = method_pictures(source.net, source.images, seed=seed, adain_steps=ADAIN_STEPS)
    note = (
        f"Below each image: its soft label. Chosen, not drawn: lam = {SHARE}, CutMix's box, "
        "PuzzleMix's 8 x 8 grid, the shares of style.\n"
        f"Saliency of PuzzleMix and Co-Mixup: {source.what}. Co-Mixup got {CO_OTHERS} "
        "images more than\n"
        f"the pair and {CO_DRAWS} draws; of its outputs the one with most of both is shown. "
        f"Styles: a small AdaIN network after {ADAIN_STEPS} steps.\n"
        "Manifold mixup and AlignMixup mix features and show no image."
    )
    title = f"One pair of {source.images.name} images under every method"
    return save(gallery(pictures, title, note), out / "methods")


def method_pictures(
    net: nn.Module, images: ImageSet, *, seed: int = 0, adain_steps: int = ADAIN_STEPS
) -> list[Picture]:
    """Anchor, partner, then what each method gives to the network in the anchor's place.

    Nothing is drawn a second time for the picture: the method runs on ``net``, and what it shows to
    it last is the image. (PuzzleMix and Co-Mixup show the clean batch first, for its saliency.)
    """
    chosen = with_others(images, *different_pairs(images, 1, seed)[0], seed)
    device = next(net.parameters()).device
    x, y = floats(images, chosen).to(device), images.labels[chosen].to(device)
    names = images.class_names
    pictures = [
        Picture(title, shown(x[k]), names[int(y[k])])
        for k, title in enumerate(("anchor", "partner"))
    ]
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "adain.safetensors"
        save_adain(small_style_network(images, adain_steps, seed), weights)
        for title, method in _gallery(images, str(weights)).items():
            output = method.output(net, x, y, torch.Generator().manual_seed(seed))
            pictures.append(
                Picture(title, shown(output.image), share_caption(output.targets, names))
            )
    return pictures


def with_others(images: ImageSet, i: int, j: int, seed: int) -> list[int]:
    """The pair, then images of other classes up to a part of Co-Mixup.

    Of other classes, so that a label says how much of the anchor and of the partner is shown.
    """
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=rng).tolist()
    pair = {int(images.labels[i]), int(images.labels[j])}
    others = [k for k in order if int(images.labels[k]) not in pair]
    return [i, j, *others][: CoMixup.part_size]


class Recorder(nn.Module):
    """A network that keeps the last images it was given."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.seen = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach().clone()
        logits: Tensor = self.net(x)
        return logits


@dataclass(frozen=True)
class Output:
    """An image as a network was given it, its soft label, and how much it shows of both inputs."""

    image: Float[Tensor, "3 h w"]
    targets: Float[Tensor, " k"]
    pair_share: float


@dataclass(frozen=True)
class FixedDraw:
    """A method, and what of its draw is set so that images can be compared.

    The batch is the pair, and the output in the anchor's place is shown. Co-Mixup has no such place
    and makes copies of two images alone, so it gets ``num_others`` beside them and ``num_draws``
    tries, and the output that shows most of both is the one to show.
    """

    mixer: Mixer
    chosen: Mapping[str, object] = field(default_factory=dict)
    num_others: int = 0
    num_draws: int = 1

    def output(self, net: nn.Module, x: Tensor, y: Tensor, rng: torch.Generator) -> Output:
        """What the method gives to the network for the images ``x``, the pair first."""
        outputs = (self._output(net, x, y, rng) for _ in range(self.num_draws))
        return max(outputs, key=lambda output: output.pair_share)

    def _output(self, net: nn.Module, x: Tensor, y: Tensor, rng: torch.Generator) -> Output:
        b = min(2 + self.num_others, len(x))
        draw = self.mixer.draw(b, rng)
        tensors = {name: torch.tensor(value) for name, value in self.chosen.items()}
        if not self.num_others:
            tensors["perm"] = torch.tensor([1, 0])
        recorder = Recorder(net)
        targets = self.mixer.apply(recorder, x[:b], y[:b], draw.with_tensors(tensors)).targets
        assert targets is not None
        shares = torch.minimum(targets[:, y[0]], targets[:, y[1]])
        k = int(shares.argmax()) if self.num_others else 0
        return Output(recorder.seen[k], targets[k], float(shares[k]))


def _gallery(images: ImageSet, weights: str) -> dict[str, FixedDraw]:
    """The methods by their titles; draws are set where chance would hide what a method does."""
    side = images.images.shape[-1]
    box = {"lam": SHARE, "center": CENTRE}
    # Content of the anchor, style of the partner: the case that tells the two apart.
    style = StyleMix(weights=weights, prob=1.0)
    lam = 0.9 * style.content_weight + 0.1 * (1 - style.content_weight)
    return {
        "Input mixup": FixedDraw(InputMixup(), {"lam": SHARE}),
        "Cutout": FixedDraw(Cutout(side // 2, images.mean)),
        "CutMix": FixedDraw(CutMix(prob=1.0), box),
        "SaliencyMix": FixedDraw(SaliencyMix(prob=1.0, saliency="per_sample"), {"lam": SHARE}),
        "PuzzleMix": FixedDraw(PuzzleMix(grids=(8,)), {"lam": SHARE}),
        "Co-Mixup": FixedDraw(CoMixup(), num_others=CO_OTHERS, num_draws=CO_DRAWS),
        "StyleMix": FixedDraw(style, {"content": 0.9, "style": 0.1, "joint": 0.5, "lam": lam}),
        "StyleCutMix": FixedDraw(
            StyleCutMix(weights=weights, prob=1.0), {**box, "style": 0.3, "gamma": 0.2}
        ),
    }


def small_style_network(images: ImageSet, steps: int, seed: int) -> AdaIN:
    """A small style network, trained on at most a thousand of the images; shows progress."""
    rng = torch.Generator().manual_seed(seed)
    some = images.images[torch.randperm(len(images), generator=rng)[:1000]]
    with Reporter(steps) as reporter:

        def on_step(done: int, total: int) -> None:
            reporter.advance()
            if done % max(1, total // 10) == 0:
                reporter.epoch(f"style network: step {done} of {total}")

        return train_small_adain(
            some,
            steps=steps,
            seed=seed,
            width=ADAIN_WIDTH,
            batch_size=ADAIN_BATCH,
            on_step=on_step,
        )


def share_caption(targets: Float[Tensor, " k"], names: tuple[str, ...]) -> str:
    """A soft label in words: ``cat 65%, dog 35%``."""
    order = targets.argsort(descending=True, stable=True).tolist()
    kept = [k for k in order if targets[k] >= 0.005]
    return ", ".join(f"{names[k]} {float(targets[k]):.0%}" for k in kept)
