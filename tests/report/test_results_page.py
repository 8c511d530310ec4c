"""The tables of results/README.md are what the lines beside it say."""

import re
from pathlib import Path

import pytest

from alignmixup.contracts import RecipeKey
from alignmixup.report import paper
from alignmixup.report.reading import read_results

RESULTS = Path(__file__).parents[2] / "results"
LINES = read_results([RESULTS / "cifar10.jsonl"])
PAGE = (RESULTS / "README.md").read_text(encoding="utf-8")
METHODS = {
    "no mixing": "baseline",
    "input mixup": "input",
    "CutMix": "cutmix",
    "manifold mixup": "manifold",
    "AlignMixup": "alignmixup",
    "AlignMixup/AE": "alignmixup-ae",
}
FAILED = ("4e4fbb9", "abff3f8")  # commits of the runs without warm-up
ACCURACY = [("accuracy", f"top1_{which}") for which in ("median10", "last", "best")]
SCORES = [(task, "top1_error") for task in ("fgsm", "pgd", "strong_attack")]
SCORES += [("calibration", "ece"), ("calibration", "oe"), ("calibration", "nll")]
SCORES += [("temperature", "ece")]
OOD = ["det_acc_half", "det_acc_best", "auroc", "aupr_id", "aupr_ood"]
SOURCES = ["tiny-crop", "tiny-resize", "uniform", "gaussian"]


def section(epochs):
    """The part of the page about the runs of this length."""
    start = PAGE.index(f"## CIFAR-10, PreActResNet-18, {epochs} epochs")
    return PAGE[start : PAGE.index("\n## ", start)]


def measured(method, epochs, task, metric, source=None):
    found = [
        r.value
        for r in LINES
        if (r.key, r.epoch, r.task, r.metric)
        == (RecipeKey("cifar10", "r18", METHODS[method], "fast"), epochs, task, metric)
        and r.settings.get("source") == source
        and r.commit not in FAILED
    ]
    return found[0] if found else None


def check(text, value):
    if text == "-":
        assert value is None
        return
    digits = len(text.partition(".")[2])
    assert value == pytest.approx(float(text), abs=0.5 * 10**-digits + 1e-6)


@pytest.mark.parametrize("epochs", [200, 300])
def test_every_cell_is_a_line(epochs):
    rows = re.findall(r"^\| (.+) \|$", section(epochs), re.M)
    cells = [row.split(" | ") for row in rows if row.split(" | ")[0] in METHODS]
    assert len(cells) == 3 * len({method for method, *_ in cells})
    for method, *values in cells:
        if len(values) == len(SOURCES):
            for source, text in zip(SOURCES, values, strict=True):
                for metric, number in zip(OOD, text.split(" / "), strict=True):
                    check(number, measured(method, epochs, "ood", metric, source))
            continue
        columns = ACCURACY if len(values) == len(ACCURACY) else SCORES
        for (task, metric), number in zip(columns, values, strict=True):
            check(number, measured(method, epochs, task, metric))


def test_what_is_said_of_the_paper_is_in_the_paper():
    errors = {
        method: paper.cell_beside(RecipeKey("cifar10", "r18", method)).value
        for method in ("alignmixup", "manifold", "puzzlemix", "comixup", "alignmixup-ae")
    }
    assert list(errors.values()) == [2.95, 2.95, 2.93, 2.89, 2.83]
    said = section(300)
    for words in ("error of 2.95 %", "manifold mixup has 2.95", "PuzzleMix 2.93", "Co-Mixup 2.89"):
        assert words in " ".join(said.split())
    short = {f.method: f.value for f in paper.find(table="cls-300")}
    assert (short["alignmixup"], short["manifold"]) == (21.38, 21.64)
    assert "21.38" in said
    assert "21.64" in said


def test_prose_is_wrapped():
    assert not [x for x in PAGE.splitlines() if len(x) > 100 and not x.startswith("|")]
