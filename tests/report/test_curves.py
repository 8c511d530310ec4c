"""Learning curves on disk: ledgers, CSV files, and the authors' logs beside them."""

import json

import pytest

from alignmixup.contracts import RecipeKey, Result
from alignmixup.report.charting import Palette
from alignmixup.report.curves import MAX_POINTS, Curve, read_curves, run_folders
from alignmixup.report.page_charts import curve_charts

KEY = RecipeKey("cifar100", "r18", "alignmixup", "released")


def run(folder, record, num_epochs=3):
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record))
    events = [{"event": "start"}, {"event": "epoch", "epoch": 1}]  # not every epoch is evaluated
    events += [
        {"event": "epoch", "epoch": e, "test": {"top1": e / 10}} for e in range(2, num_epochs + 2)
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "ledger.jsonl").write_text(lines + '{"event": "ep')  # killed while it wrote
    return folder


def key(data="pets", method="input"):
    return {"key": {"data": data, "network": "r18", "method": method, "variant": ""}}


def test_the_curve_of_a_run_is_in_its_ledger(tmp_path):
    run(tmp_path / "a", key())
    (curve,) = read_curves([tmp_path], [])
    assert curve.points == ((2, 0.2), (3, 0.3), (4, 0.4))
    assert (curve.data, curve.network, curve.method) == ("pets", "r18", "input")
    assert curve.label == "Input mixup (a)"


def test_a_long_curve_is_thinned_and_keeps_its_end(tmp_path):
    run(tmp_path / "a", key(), num_epochs=5 * MAX_POINTS)
    (curve,) = read_curves([tmp_path], [])
    assert MAX_POINTS // 2 < len(curve.points) <= MAX_POINTS
    assert curve.points[-1][0] == 5 * MAX_POINTS + 1


def test_a_run_of_an_older_version_has_a_curve(tmp_path):
    old = {"name": "old", "data": {"name": "cifar10"}, "net": {"name": "x"}, "mixer": {"kind": "M"}}
    run(tmp_path / "a", old)
    (curve,) = read_curves([tmp_path], [])
    assert (curve.data, curve.network, curve.method) == ("cifar10", "x", "M")


def test_a_damaged_run_is_left_out_with_a_warning(tmp_path):
    run(tmp_path / "a", [1, 2])
    with pytest.warns(UserWarning, match=r"run\.json is damaged"):
        assert read_curves([tmp_path], []) == []


def test_csv_files_belong_to_the_recipe_they_are_named_after(tmp_path):
    (tmp_path / f"{KEY.name}-50-seed0.csv").write_text("epoch,top1\n1,\n5,20.5\n")
    (tmp_path / "other.csv").write_text("epoch,top1\n1,3\n")
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    results = [
        Result("accuracy", "top1_last", 1.0, key=KEY),
        Result("accuracy", "top1_last", 1.0, key=RecipeKey("cifar100", "r18", "alignmixup")),
    ]
    ours, theirs = read_curves([tmp_path], results)
    assert ours.points == ((5, 20.5),)
    assert ours.label == "AlignMixup (released, 50-seed0)"
    assert theirs.is_published
    assert theirs.points[-1] == (2000, 81.54)


def test_a_folder_named_twice_is_read_once(tmp_path):
    folder = run(tmp_path / "a", key())
    assert run_folders([tmp_path, folder, tmp_path / "a" / "ledger.jsonl"]) == [folder]


def test_csv_files_of_a_folder_named_twice_are_read_once(tmp_path):
    (tmp_path / f"{KEY.name}.csv").write_text("epoch,top1\n5,20.5\n")
    results = [Result("accuracy", "top1_last", 1.0, key=KEY)]
    twice = read_curves([tmp_path, tmp_path / ".." / tmp_path.name], results)
    assert twice == read_curves([tmp_path], results)


@pytest.mark.parametrize(
    "content",
    [b"epoch,top1\n1.5,50\n", b"epoch,top1\n1,nan\n", b"epoch,top1\n,5\n", b"\xe4,top1\n"],
)
def test_a_damaged_csv_file_is_left_out_with_a_warning(tmp_path, content):
    (tmp_path / f"{KEY.name}.csv").write_bytes(content)
    with pytest.warns(UserWarning, match=rf"{KEY.name}\.csv is damaged"):
        assert read_curves([tmp_path], [Result("accuracy", "top1_last", 1.0, key=KEY)]) == []


def test_csv_files_of_other_names_are_not_read(tmp_path):
    (tmp_path / "members.csv").write_bytes("näme;epoch\n".encode("latin-1"))
    assert read_curves([tmp_path], [Result("accuracy", "top1_last", 1.0, key=KEY)]) == []


@pytest.mark.parametrize(("num_curves", "is_crowded"), [(6, False), (7, True)])
def test_many_curves_of_one_color_are_thin_and_named_by_pointing(num_curves, is_crowded):
    """Thirty thick lines of one method were a blot."""
    points = tuple((epoch, 50.0 + epoch) for epoch in range(1, 20))
    curves = [Curve(f"run {i}", "input", "pets", "r18", points) for i in range(num_curves)]
    (chart,) = curve_charts(curves, Palette(["input"]))
    (line,) = (layer for layer in chart.spec["layer"] if layer["mark"]["type"] == "line")
    assert (line["mark"]["strokeWidth"] < 1) == is_crowded
    assert ("strokeDash" in line["encoding"]) != is_crowded
    assert ("Point at a curve" in chart.caption) == is_crowded
