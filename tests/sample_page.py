"""A small set of results, and a run folder with pictures, for tests of the report page."""

import base64
import io
import json
from pathlib import Path

from PIL import Image

from alignmixup.contracts import RecipeKey, Result
from alignmixup.report.artifacts import write_artifact

ERRORS = {"baseline": 5.0, "input": 4.2, "alignmixup": 3.1}
CLASSES = ["cat", "<b>dog</b>"]


def sample_results(data="cifar10"):
    """Three methods with three seeds and every evaluation, and one smoke test."""
    results = []
    for number, (method, error) in enumerate(ERRORS.items()):
        key = RecipeKey(data, "r18", method)
        for seed in range(3):
            # The seeds vary together, so that differences of methods vary less.
            value = 100 - error + 0.1 * seed + 0.01 * number * seed
            results += _scored(key, seed, 300, value)
    results += _scored(RecipeKey(data, "r18", "cutmix"), 0, 4, 60.0)
    return results


def recipe_settings(key):
    """Every recipe trains 300 epochs, so that a run of four is a smoke test."""
    return {"train.epochs": 300}


def _scored(key, seed, epochs, value):
    bins = {
        "edges": [0.0, 0.5, 1.0],
        "counts": [40, 60],
        "confidence": [0.4, 0.9],
        "accuracy": [0.5, 0.8],
    }
    scores = {"edges": [0.0, 0.5, 1.0], "id": [10, 90], "ood": [70, 30]}
    steps = [40.0, 70.0, 90.0]
    lines = [
        Result("accuracy", "top1_median10", value),
        Result("accuracy", "top1_last", value - 0.1),
        Result("calibration", "ece", 2.0 + seed, {"reliability": bins}),
        Result("ood", "auroc", 90.0 - seed, {"source": "uniform", "histogram": scores}),
        Result("pgd", "top1_error", 90.0, {"eps": 4 / 255, "errors_by_step": steps}),
        Result("pgd", "clean_error", 100 - value, {"eps": 4 / 255}),
        Result("cost", "ms_per_batch", 10.0 + seed),
    ]
    where = {"date": f"2026-01-0{seed + 1}T10:00:00", "trained": {"train.epochs": epochs}}
    return [line.stamped(key=key, seed=seed, epoch=epochs, **where) for line in lines]


def sample_run(folder: Path, data="cifar10") -> Path:
    """A run folder with a learning curve and all kinds of pictures."""
    folder.mkdir(parents=True)
    key = {"data": data, "network": "r18", "method": "alignmixup", "variant": ""}
    (folder / "run.json").write_text(json.dumps({"key": key}))
    events = [
        {"event": "epoch", "epoch": epoch, "test": {"top1": 50 + epoch}} for epoch in range(1, 9)
    ]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    first, second = png((200, 40, 40)), png((40, 40, 200))
    pair = {"first": first, "second": second, "names": CLASSES}
    about = {"run": "a run", "caption": "made up", "epoch": 8}
    strip = png((90, 90, 90), width=3 * 8)
    rows = {"aligned": strip, "unaligned": strip}
    plan = [[1000 if j == 3 - i else 0 for j in range(4)] for i in range(4)]
    write_artifact(
        folder,
        "interpolations",
        {**about, "shares": [0, 0.5, 1], "pairs": [{**pair, "rows": rows}]},
    )
    write_artifact(
        folder, "transport", {**about, "grid": [2, 2], "pairs": [{**pair, "plan": plan}]}
    )
    mistake = {"image": first, "true": "cat", "predicted": CLASSES[1], "confidence": 99.0}
    write_artifact(
        folder,
        "confusion",
        {**about, "classes": CLASSES, "counts": [[3, 1], [0, 4]], "mistakes": [mistake]},
    )
    write_artifact(folder, "localization", {"run": "a run", "left_out": "no image has a box"})
    return folder


def png(color, width=8) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (width, 8), color).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
