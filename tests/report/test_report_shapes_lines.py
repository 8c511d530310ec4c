"""The tables of docs/alignment.md are what the lines in results/shapes.jsonl say."""

from pathlib import Path

import pytest

from alignmixup.report.reading import read_results

ROOT = Path(__file__).parents[2]
LINES = read_results([ROOT / "results" / "shapes.jsonl"])
PAGE = (ROOT / "docs" / "alignment.md").read_text(encoding="utf-8")

POSE = ["overlap_kept", "overlap_other", "appearance", "object_match", "pose_at_half"]
PLANS = ["aligned", "unaligned", "oracle", "random", "uniform"]
HEADS = {
    "pooled head": "pooled head",
    "flattened head": "flattened head",
    "AE, f reads the pooled A": "AE pooled f",
    "AE, f reads the flattened A": "AE flattened f",
}


def printed(row):
    """The cells of the row that begins with this name, each with its figures by seed."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row} | ")]
    return [cell.strip().split(", ") for cell in line.strip("| ").split("|")[1:]]


def check(cell, values):
    """Each value rounds to what is printed; a figure that stands alone is that of all seeds."""
    figures = cell * len(values) if len(cell) == 1 else cell
    assert len(figures) == len(values)
    for figure, value in zip(figures, values, strict=True):
        unit = 10.0 ** -len(figure.partition(".")[2])
        assert value == pytest.approx(float(figure), abs=0.5 * unit + 1e-4 * (unit > 1e-6))


@pytest.mark.parametrize("plan", PLANS)
def test_the_table_of_poses(plan):
    for metric, cell in zip(POSE, printed(plan), strict=True):
        found = {
            r.seed: r.value
            for r in LINES
            if (r.task, r.metric, r.key.name) == ("pose", metric, "shapes-r18-baseline")
            and r.settings["plan"] == plan
            and r.settings.get("kept_share", 0) == 0
        }
        check(cell, [found[seed] for seed in (0, 1, 2)])


@pytest.mark.parametrize("row", HEADS)
def test_the_table_of_heads(row):
    layers = (("layer3", "encoder.layer3"), ("layer4", "encoder"))
    for names, cell in zip(layers, printed(row), strict=True):
        found = {
            r.seed: r.value
            for r in LINES
            if (r.task, r.metric, r.settings.get("network"))
            == ("alignment_effect", "logits", HEADS[row])
            and r.settings["layer"] in names
        }
        check(cell, [found[seed] for seed in (0, 1)])


def test_what_is_said_of_the_networks():
    own = [r for r in LINES if r.key.name == "shapes-r18-baseline"]
    top1 = [r.value for r in own if r.metric == "top1_last"]
    assert f"top-1 {', '.join(map(str, top1))};" in PAGE
    error, mean_image = (
        [r.value for r in own if r.metric == m] for m in ("error", "mean_image_error")
    )
    first, second, third = (f"{100 * a / b:.0f}" for a, b in zip(error, mean_image, strict=True))
    said = f"reconstruction error {first}, {second} and {third} % of"
    assert said in " ".join(PAGE.split())


def test_no_line_names_a_place_on_a_machine():
    assert not [r for r in LINES if "/" in r.command or "/" in str(dict(r.settings))]
