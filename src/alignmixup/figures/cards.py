"""One picture for each method's card: what the method does to a pair of images, step by step.

Every image is what the mixer gave to the network, its caption the soft label the mixer gave beside
it; saliency, features and stylised images are those of the same networks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from alignmixup.figures import card_features as features, card_images as images
from alignmixup.figures.by_name import register_figure
from alignmixup.figures.card_pair import Card, Pair
from alignmixup.figures.sources import network_source
from alignmixup.figures.style import gallery, save

CARD_STEPS = 2000  # of the style network: a minute on one core
BLOCK_STEPS = 60  # of the methods that learn their masks

CARDS: Mapping[str, Callable[[Pair], Card]] = {
    "input_mixup": images.input_mixup,
    "manifold_mixup": features.manifold_mixup,
    "cutout": images.cutout,
    "cutmix": images.cutmix,
    "resizemix": images.resizemix,
    "fmix": images.fmix,
    "gridmix": images.gridmix,
    "smoothmix": images.smoothmix,
    "saliencymix": images.saliencymix,
    "attentivemix": features.attentivemix,
    "snapmix": features.snapmix,
    "puzzlemix": images.puzzlemix,
    "comixup": images.comixup,
    "stylemix": images.stylemix,
    "alignmixup": features.alignmixup,
    "multimix": features.multimix,
    "recursivemix": features.recursivemix,
    "automix": features.automix,
    "samix": features.samix,
    "adautomix": features.adautomix,
    "transmix": features.transmix,
    "tokenmix": features.tokenmix,
    "regmixup": images.regmixup,
    "oneof": images.oneof,
    "decoupled": images.decoupled,
}


@register_figure("cards", about="a picture of each method by itself")
def cards(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw every card into the folder ``methods``; print which this network does not allow."""
    source = network_source(run, seed, data_root, head="pool")
    pair = Pair.of(source, seed, CARD_STEPS, BLOCK_STEPS)
    written = []
    for number, (name, make) in enumerate(CARDS.items(), start=1):
        print(f"card {number} of {len(CARDS)}: {name}", file=sys.stderr)
        try:
            card = make(pair)
        except ValueError as error:  # a network without such a layer, say
            print(f"{name} is not drawn: {error}", file=sys.stderr)
            continue
        note = card.note.format(network=source.what, steps=CARD_STEPS, block_steps=BLOCK_STEPS)
        figure = gallery(card.pictures, card.title, card.columns)
        written += save(figure, out / "methods" / name, f"{card.title}. {note}")
    return written
