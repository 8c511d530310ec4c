"""The demo: its sentences follow from its numbers, and Ctrl-C leaves a page of what is finished."""

import re

import pytest

from alignmixup.cli import main
from alignmixup.contracts import Result
from alignmixup.demo import claims, program
from alignmixup.demo.claims import MEASURES, headline, margin, sentences, table, values
from alignmixup.demo.setup import CLASSES, few_shapes, unseen_shapes
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
    verdicts = re.findall(r"\((better|worse|chance)\)", " ".join(sentences(found, 500)))
    rows = table(found, 500, []).rows
    assert verdicts == [re.search(r"\((.+)\)", cell)[1] for cell in rows[1][1:]]
    # Twice the images: a difference must be 1.4 times as large to count on 500 of them.
    assert margin(500) == pytest.approx(2**0.5 * margin(1000))


def test_what_is_not_measured_is_not_claimed():
    found = {"no mixing": {"test accuracy": 70.0}, "AlignMixup": {}}
    assert sentences(found, 500) == []
    assert headline(found, 500) == "No network with mixing has been measured yet."
    assert "not measured" in table(found, 500, []).rows[1]


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
    assert "the page of what is finished" in capsys.readouterr().err
