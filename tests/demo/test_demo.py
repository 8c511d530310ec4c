"""The demo: its sentences follow from its numbers, and Ctrl-C leaves a page of what is finished."""

import re

import pytest

from alignmixup.cli import main
from alignmixup.contracts import Result
from alignmixup.demo import claims, program
from alignmixup.demo.claims import MEASURES, confidences, headline, margin, table, values
from alignmixup.demo.setup import CLASSES, Size, few_shapes, unseen_shapes
from alignmixup.demo.story import write_story
from alignmixup.training.signals import Stopped
from small_demo import shrink_demo


@pytest.fixture
def small(monkeypatch):
    shrink_demo(monkeypatch)


def scores(accuracy, ece):
    base = {"error under attack": 60.0, "unseen shapes detected": 55.0}
    first = {"test accuracy": 70.0, "calibration error": 20.0, **base}
    return {
        "no mixing": first,
        "input mixup": {"test accuracy": accuracy, "calibration error": ece, **base},
    }


@pytest.mark.parametrize(
    ("accuracy", "ece", "said"),
    [
        (80.0, 5.0, "better in test accuracy and calibration error; no different beyond chance"),
        (60.0, 5.0, "better in calibration error; worse in test accuracy; no different"),
        (71.0, 19.0, "With input mixup the network was no different beyond chance in test"),
    ],
)
def test_the_headline_follows_from_the_numbers(accuracy, ece, said):
    found = scores(accuracy, ece)
    assert said in headline(found, 500)
    row = table(found, 500).rows[1]
    verdicts = [re.search(r"\((better|worse|chance)\)", cell)[1] for cell in row[1:]]
    for measure, verdict in zip(MEASURES, verdicts, strict=True):
        part = next(p for p in headline(found, 500).split("; ") if measure.name in p)
        assert verdict in part
    # Twice the images: a difference must be 1.4 times as large to count on 500 of them.
    assert margin(500) == pytest.approx(2**0.5 * margin(1000))


def test_what_is_not_measured_is_not_claimed():
    found = {"no mixing": {"test accuracy": 70.0}, "AlignMixup": {}}
    assert headline(found, 500) == "No network with mixing has been measured yet."
    assert "not measured" in table(found, 500).rows[1]


def test_a_folder_that_is_named_like_a_page_holds_the_page(tmp_path):
    (tmp_path / "demo.html" / "runs").mkdir(parents=True)
    page = write_story(tmp_path / "demo.html", Size(), {}, {}, ["no mixing"])
    assert page == tmp_path / "demo.html" / "report.html"
    assert "stopped before it had finished: no mixing" in page.read_text(encoding="utf-8")


def test_mean_confidence_and_accuracy_are_those_of_the_bins():
    bins = {"counts": [1, 3], "confidence": [0.2, 0.9], "accuracy": [0.0, 1.0]}
    line = Result("calibration", "ece", 10.0, {"reliability": bins})
    said = confidences({"no mixing": [line], "AlignMixup": [line], "input mixup": []})
    assert said.count("72.5 and 75.0 % with") == 2
    assert "input mixup" not in said
    assert confidences({"no mixing": []}) == ""


def test_the_newest_value_counts():
    lines = [
        Result("accuracy", "top1", value, {}).stamped(date=date)
        for value, date in ((50.0, "2026-01-02"), (40.0, "2026-01-01"))
    ]
    assert values(lines) == {MEASURES[0].name: 50.0}
    assert claims.values([]) == {}


def test_the_shapes_are_of_four_classes_and_the_others_unseen():
    few, unseen = few_shapes("train", 30), unseen_shapes(30)
    assert (len(few), few.class_names) == (30, CLASSES)
    assert set(few.labels.tolist()) == {0, 1, 2, 3}
    assert len(few.boxes) == 30
    assert not set(CLASSES) & set(unseen.class_names)


@pytest.mark.slow
def test_the_demo_writes_its_page(small, tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "demo"), "--epochs", "1"]) == 0
    shown = capsys.readouterr()
    page = tmp_path / "demo" / "report.html"
    assert page.as_uri() in shown.out
    assert "training with AlignMixup, about" in shown.err
    text = page.read_text()
    for part in ("no mixing", "input mixup", "AlignMixup", "What this does not show", "<table"):
        assert part in text
    assert "before it had finished" not in text
    # The story has the charts and pictures; they are not repeated below it.
    sections = dict(re.findall(r"<h2>([^<]*)</h2>(.*?)</section>", text, re.DOTALL))
    assert "test accuracy by epoch" in sections["Learning curves"]
    assert sections["Confidence"].count("<figure") == 3
    assert 'data-kind="interpolations"' in sections["Aligned features"]
    assert text.count('data-kind="transport"') == 1
    assert text.count("test accuracy by epoch.</figcaption>") == 1
    assert sections["What mixing changed"].count("<li>") == 0
    assert "not measured" not in text
    # What is there is not measured again.
    lines = len((tmp_path / "demo/runs/alignmixup/results.jsonl").read_text().splitlines())
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    again = (tmp_path / "demo/runs/alignmixup/results.jsonl").read_text().splitlines()
    assert len(again) == lines


def test_ctrl_c_leaves_a_page_of_what_is_finished(small, tmp_path, capsys, monkeypatch):
    def train(recipe, folder, **settings):
        if "alignmixup" in recipe.name:
            raise Stopped(2, "stopped by a signal")
        return plain(recipe, folder, **settings)

    plain = program.train
    monkeypatch.setattr(program, "train", train)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 130
    text = (tmp_path / "demo" / "report.html").read_text()
    assert "stopped before it had finished: AlignMixup, decoded pictures" in text
    assert "input mixup" in text
    assert "Aligned features" not in text
    assert "test accuracy by epoch" in text
    said = capsys.readouterr().err
    assert "the page of what is finished" in said
    assert (tmp_path / "demo" / "report.html").as_uri() in said
    assert "the same command continues" in said


def test_ctrl_c_before_the_first_epoch_leaves_a_page_without_empty_sections(
    small, tmp_path, monkeypatch
):
    def stop(recipe, folder, **settings):
        raise Stopped(2, "stopped by a signal")

    monkeypatch.setattr(program, "train", stop)
    assert main(["demo", "--out", str(tmp_path)]) == 130
    titles = re.findall(r"<h2>([^<$]*)</h2>", (tmp_path / "report.html").read_text())
    assert titles == ["What mixing changed", "What this does not show", "Next"]
