"""The demo: three small networks on the built-in shapes, and a report as HTML and Markdown.

No mixing, input mixup and AlignMixup, everything else equal. The network has a flattened head, so
that alignment reaches the logits (before a pooled head it would change nothing).
"""

from __future__ import annotations

import html
from pathlib import Path

from alignmixup import datasets
from alignmixup.contracts import Mixer, RecipeKey
from alignmixup.evaluation.effect import alignment_effect
from alignmixup.experiments.data_record import Sets
from alignmixup.experiments.load import load_run
from alignmixup.experiments.run import train
from alignmixup.figures.correspondences import aligned_pair, draw_pairs
from alignmixup.figures.curves import training_curves
from alignmixup.figures.sources import different_pairs
from alignmixup.figures.style import save
from alignmixup.files import write_text
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.report.render import Table, to_html, to_markdown
from alignmixup.training import Summary, TrainSettings
from alignmixup.training.ledger import LEDGER, read_ledger

LAYER = "layer4"
METHODS: dict[str, tuple[str, Mixer]] = {
    "no mixing": ("baseline", NoMix()),
    "input mixup": ("input", InputMixup()),
    "AlignMixup": ("alignmixup", AlignMixup(LAYER)),
}


def demo(out: Path, *, epochs: int = 12, num_train: int = 5000, num_test: int = 1000) -> Path:
    """Train the three, write the report into ``out`` and return the page to open."""
    sets = Sets(datasets.shapes("train", num_train), datasets.shapes("test", num_test))
    summaries: dict[str, Summary] = {}
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, (method, mixer) in METHODS.items():
        print(f"{name}:")
        folder = out / "runs" / name.replace(" ", "-").lower()
        summaries[name] = train(recipe(method, mixer, epochs), folder, sets=sets).summary
        curves[name] = _curve(folder)
        print(f"  {summaries[name]}")
    run = load_run(out / "runs" / "alignmixup", device="cpu")
    effect = alignment_effect(run.model, LAYER, sets.test.images[:64].float() / 255)
    save(training_curves(curves, "Built-in shapes: test accuracy"), out / "curves.png")
    pairs = [
        aligned_pair(run.model, LAYER, sets.test, i, j) for i, j in different_pairs(sets.test, 5)
    ]
    title = f"Correspondences and features at {LAYER} (first three PCA axes)"
    save(draw_pairs(pairs, title), out / "pairs.png")
    return _write_page(out, _table(summaries, epochs, num_train), str(effect))


def recipe(method: str, mixer: Mixer, epochs: int) -> Recipe:
    """Return the recipe of one network of the demo, narrow enough for two cores."""
    return Recipe(
        key=RecipeKey("shapes", "r18-flatten", method, "demo"),
        data=DataSpec("shapes", flip=False),
        net=NetSpec("preact_resnet18", width=8, head="flatten"),
        mixer=mixer,
        train=TrainSettings(
            epochs=epochs,
            batch_size=64,
            lr=0.02,
            nesterov=True,
            weight_decay=5e-4,
            schedule="cosine",
            milestones=(),
            warmup_epochs=1.0 if epochs > 1 else 0.0,
            device="cpu",
        ),
    )


def _curve(folder: Path) -> list[tuple[int, float]]:
    events = [e for e in read_ledger(folder / LEDGER) if e["event"] == "epoch" and "test" in e]
    return [(int(str(e["epoch"])), float(e["test"]["top1"])) for e in events]  # type: ignore[index]


def _table(summaries: dict[str, Summary], epochs: int, num_train: int) -> Table:
    rows = [
        (name, f"{s.last:.1f}", f"{s.best:.1f}")
        for name, s in summaries.items()
        if s.last is not None
    ]
    return Table(
        title="Test top-1 (%) on the built-in shapes",
        columns=("Method", "last epoch", "best epoch (chosen on test)"),
        rows=tuple(rows),
        notes=(
            f"PreActResNet-18, width 8, flattened head, {epochs} epochs on {num_train} images, one "
            "seed. So few epochs say that everything works, not which method is better.",
        ),
    )


def _write_page(out: Path, table: Table, effect: str) -> Path:
    write_text(
        out / "report.md",
        f"{to_markdown(table)}\n\n{effect}.\n\n![curves](curves.png)\n\n![pairs](pairs.png)\n",
    )
    page = out / "report.html"
    write_text(
        page,
        "<!doctype html><meta charset='utf-8'><title>alignmixup demo</title>"
        "<style>body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "td,th{padding:.2em .8em;text-align:left}img{max-width:100%}</style>"
        f"<h1>alignmixup demo</h1>{to_html(table)}<p>{html.escape(effect)}.</p>"
        "<img src='curves.png' alt='test accuracy by epoch'>"
        "<h2>What is matched with what</h2><p>Each position of the left image is joined to the "
        "position of the right one it is assigned to most.</p>"
        "<img src='pairs.png' alt='aligned pairs'>",
    )
    return page
