"""Reliability diagrams: they are those of the results, and bars are what came in."""

import dataclasses
import re
from itertools import pairwise

import numpy as np
import pytest

from alignmixup.contracts import RecipeKey, Result
from alignmixup.datasets import shapes
from alignmixup.evaluation.tasks.calibration import Reliability
from alignmixup.experiments.run import Sets, train
from alignmixup.experiments.scoring import evaluate
from alignmixup.figures import reliability as figures, sources
from alignmixup.figures.reliability import ReliabilityPanel, draw_reliability, reliability_panels
from alignmixup.figures.style import BLUE, VERMILLION, use_style
from alignmixup.mixers.nomix import NoMix
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.training import TrainSettings

BINS = Reliability(
    edges=(0.0, 0.25, 0.5, 0.75, 1.0),
    counts=(0, 3, 10, 7),
    confidence=(0.0, 0.4, 0.6, 0.9),
    accuracy=(0.0, 0.5, 0.3, 0.9),
)


@pytest.fixture(scope="module")
def images():
    return shapes("test", 50)


@pytest.fixture(scope="module")
def run(images, tmp_path_factory):
    recipe = Recipe(
        key=RecipeKey("shapes", "r18", "baseline", "small"),
        data=DataSpec("shapes"),
        net=NetSpec("wrn16_8", width=1),
        mixer=NoMix(),
        train=TrainSettings(epochs=1, batch_size=16, milestones=(), device="cpu"),
    )
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(recipe, folder, sets=Sets(shapes("train", 32), images), quiet=True)
    return folder


def test_the_panels_are_those_of_the_results(run, images):
    done = evaluate(run, images, tasks=["calibration", "temperature"], device="cpu")
    plain, scaled = reliability_panels(done.results)
    assert sum(plain.bins.counts) == 50
    assert sum(scaled.bins.counts) == 25
    share = np.array(plain.bins.counts) / 50
    gap = np.abs(np.array(plain.bins.confidence) - np.array(plain.bins.accuracy))
    ece = 100 * float((share * gap).sum())
    assert done.value("calibration", "ece") == pytest.approx(ece)
    assert f"ECE {ece:.2f} %" in plain.note
    assert f"OE {done.value('calibration', 'oe'):.2f} %" in plain.note
    assert f"temperature {done.value('temperature', 'temperature'):.2f}" in scaled.title
    # Of repeated measurements the newest is drawn.
    old = dataclasses.replace(done.results[0], date="1999", value=99.0)
    assert reliability_panels([*done.results, old])[0] == plain
    with pytest.raises(ValueError, match="evaluate calibration first"):
        reliability_panels([])


@pytest.mark.parametrize("held_out", [0.5, 0.2])
def test_a_title_counts_the_images_that_are_shown(run, images, held_out):
    """Whether the images are named, as those that somebody passed, or not."""
    options = {"temperature": {"held_out": held_out}}
    tasks = ["calibration", "temperature"]
    done = evaluate(run, images, tasks=tasks, options=options, device="cpu")
    unnamed = [
        dataclasses.replace(r, settings={k: v for k, v in r.settings.items() if k != "images"})
        for r in done.results
    ]
    for results in (done.results, unnamed):
        for panel in reliability_panels(results):
            (count,) = re.findall(r"(\d+) (?:of shapes/test|images$)", panel.title)[:1]
            assert int(count) == sum(panel.bins.counts), panel.title


def test_a_run_is_drawn_from_its_record_or_else_measured(run, images, tmp_path, monkeypatch):
    monkeypatch.setattr(sources.datasets, "load", lambda name, split, root: images)
    seen = []
    monkeypatch.setattr(
        figures, "draw_reliability", lambda *of: seen.append(of) or draw_reliability(*of)
    )
    lines = (run / "results.jsonl").read_text().splitlines()
    kept = [line for line in lines if "reliability" not in line]
    (run / "results.jsonl").write_text("\n".join(kept) + "\n")
    written = figures.reliability(tmp_path, run=run)
    assert [p.name for p in written] == [f"reliability.{end}" for end in ("png", "pdf", "txt")]
    assert written[0].stat().st_size > 10_000
    evaluate(run, images, tasks=["calibration"], device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(figures, "evaluate", lambda *_, **__: pytest.fail("measured again"))
        figures.reliability(tmp_path, run=run)
    (measured, _), (recorded, _) = seen
    assert recorded[0].title == f"as trained\nshapes/test, {len(images)} images"
    assert recorded[0].note == measured[0].note
    assert list(recorded[0].bins.counts) == list(measured[0].bins.counts)
    assert "small" in written[2].read_text()


def test_recorded_diagrams_are_of_one_epoch_and_of_the_runs_own_images():
    def diagram(task, epoch, **settings):
        more = {"reliability": dataclasses.asdict(BINS), "temperature": 1.0, **settings}
        return Result(task, "ece", 5.0, more, epoch=epoch, date="2026-01-01")

    own = [diagram("calibration", 20), diagram("temperature", 20)]
    others = [diagram("calibration", 20, images="shapes/test"), diagram("temperature", 10)]
    assert figures._recorded([*own, *others]) == own
    assert figures._recorded(own[:1] + others) == own[:1]  # no temperature of another network
    assert figures._recorded(others) == others[:1]
    assert figures._recorded([Result("accuracy", "top1", 50.0)]) == []


def bars(axes):
    return [
        (round(p.get_x(), 6), round(p.get_y(), 6), round(p.get_height(), 6)) for p in axes.patches
    ]


def test_bars_are_accuracies_and_gaps_and_empty_bins_have_none():
    panel = ReliabilityPanel("all", BINS, "ECE 1.00 %")
    figure = draw_reliability([panel, panel], "two")
    top, other, bottom, _ = figure.axes
    assert bars(top) == bars(other)
    # Of each filled bin: its accuracy from the ground, then the gap to its confidence.
    assert bars(top) == [
        (0.25, 0, 0.5),
        (0.25, 0.5, -0.1),
        (0.5, 0, 0.3),
        (0.5, 0.3, 0.3),
        (0.75, 0, 0.9),
        (0.75, 0.9, 0),
    ]
    from matplotlib.colors import to_hex

    gaps = [to_hex(p.get_facecolor()) for p in top.patches[1::2]]
    assert gaps[:2] == [BLUE, VERMILLION]  # not sure enough, too sure
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in top.lines[1:]]
    assert dots == [(0.4, 0.5), (0.6, 0.3), (0.9, 0.9)]
    assert [p.get_height() for p in bottom.patches] == [0, 3, 10, 7]
    assert [t.get_text() for t in bottom.texts] == ["0", "3", "10", "7"]
    assert "ECE 1.00 %" in top.get_title()


@pytest.mark.parametrize("name", ["two-column", "one-column", "two-column-wide"])
def test_papers_have_diagrams_without_text_that_overlaps(name):
    panel = ReliabilityPanel("as trained\n10,000 images", BINS, "ECE 1.00 %, OE 1.00 %")
    with use_style(name, ("pdf",)) as style:
        figure = draw_reliability([panel, panel], "two")
        figure.draw_without_rendering()
        assert figure.get_figwidth() == pytest.approx(style.width)
        tops = [axes.get_window_extent() for axes in figure.axes[:2]]
        assert min(box.height for box in tops) > 0.6 * figure.dpi
        titles = [axes.title.get_window_extent() for axes in figure.axes[:2]]
        assert titles[0].x1 < titles[1].x0
        for counts in figure.axes[2:]:
            boxes = [text.get_window_extent() for text in counts.texts]
            assert all(a.x1 <= b.x0 for a, b in pairwise(boxes))
