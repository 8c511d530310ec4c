"""The learning curve shows the evaluated epochs, and the authors' log where it belongs."""

import json

import pytest

from alignmixup.figures.by_name import draw_figure
from alignmixup.figures.curve import draw_curve, scored_epochs
from alignmixup.recipes.catalog import find_recipe
from alignmixup.report.authors_logs import LOGS


def write_run(folder, name, scored):
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(find_recipe(name).to_json()))
    events = [{"event": "start"}]
    for epoch in range(1, 5):
        test = {"test": {"top1": 10.0 * epoch}} if epoch in scored else {}
        events.append({"event": "epoch", "epoch": epoch, **test})
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "ledger.jsonl").write_text(lines)
    return folder


def test_only_evaluated_epochs_are_points(tmp_path):
    run = write_run(tmp_path / "run", "cifar100-r18-alignmixup-released", scored=(2, 4))
    assert scored_epochs(run) == [(2, 20.0), (4, 40.0)]


def test_the_curve_of_one_epoch_is_a_point_at_a_whole_number():
    axes = draw_curve([(1, 30.0)], (), "one").axes[0]
    assert axes.lines[0].get_marker() == "o"
    assert all(tick == round(tick) for tick in axes.get_xticks())
    long = [(epoch, 30.0) for epoch in range(200)]
    assert draw_curve(long, (), "long").axes[0].lines[0].get_marker() == ""


@pytest.mark.parametrize(
    ("name", "num_lines"),
    [
        ("cifar100-r18-alignmixup-released", 2),
        ("cifar100-r18-alignmixup-released-fast", 1),
        ("cifar100-r18-cutmix", 1),
    ],
)
def test_the_log_is_drawn_behind_runs_of_its_method_and_schedule(
    tmp_path, monkeypatch, name, num_lines
):
    drawn = []
    monkeypatch.setattr(
        "alignmixup.figures.curve.save",
        lambda figure, path, caption: drawn.append(figure) or [path],
    )
    run = write_run(tmp_path / "run", name, scored=(1, 2, 3, 4))
    draw_figure("curve", tmp_path / "out", run=run)
    assert len(drawn[0].axes[0].lines) == num_lines


@pytest.mark.parametrize("place", LOGS)
def test_a_log_has_the_length_of_the_recipe(place):
    data, network = place
    epochs = [epoch for epoch, _ in LOGS[place]]
    assert epochs == sorted(set(epochs))
    assert (epochs[0], epochs[-1]) == (1, find_recipe(f"{data}-{network}-alignmixup").train.epochs)


def test_a_run_is_needed_and_must_have_been_evaluated(tmp_path):
    with pytest.raises(ValueError, match="give one with --run"):
        draw_figure("curve", tmp_path)
    run = write_run(tmp_path / "run", "cifar10-r18-input", scored=())
    with pytest.raises(ValueError, match="has been evaluated yet"):
        draw_figure("curve", tmp_path, run=run)
