"""Rows of a table: each names what differs from its recipe, and which accuracy it shows."""

import pytest

from alignmixup.cli import main
from alignmixup.contracts import RecipeKey, Result
from alignmixup.experiments.provenance import origin, recipe_settings
from alignmixup.recipes.catalog import find_recipe, recipe_names
from alignmixup.recipes.schema import changed, on_data
from alignmixup.report.folding import SHORT, fold
from alignmixup.report.measures import KINDS, kinds_in
from alignmixup.report.runs import runs_of
from alignmixup.report.summary import paper_tables, summarize
from alignmixup.report.tables import table
from alignmixup.training.summary import EPOCHS_FOR_MEDIAN

NAME = "cifar10-r18-alignmixup-fast"
KEY = RecipeKey("cifar10", "r18", "alignmixup", "fast")
SMALL = {"net.width": 4, "train.epochs": 1, "train.weight_decay": 1e-4}


def run(changes=None, *, seed=0, name=NAME, epoch=None, metric="top1_last", value=90.0, data=None):
    """A line as a run with these settings writes it, read back from JSON."""
    recipe = changed(find_recipe(name), {"train.seed": seed, **(changes or {})})
    recipe = on_data(recipe, data) if data else recipe
    where = origin(recipe, epoch or recipe.train.epochs)
    return Result.from_json(Result("accuracy", metric, value).stamped(**where).to_json())


def rows(*results, **more):
    made = table(results, "accuracy", paper_rows=False, recipe_settings=recipe_settings, **more)
    return [row[0] for row in made.rows]


def test_a_row_names_everything_that_differs_from_its_recipe():
    assert rows(run(SMALL)) == [
        "AlignMixup (fast, epochs=1, net.width=4, train.weight_decay=default, last epoch)"
    ]
    assert rows(run({"mixer.eps": 0.5, "train.lr": 0.2}), which="last") == [
        "AlignMixup (fast, mixer.eps=0.5, train.lr=0.2)"
    ]
    assert rows(run({"train.milestones": (3, 5)}), which="last") == [
        "AlignMixup (fast, train.milestones=[3, 5])"
    ]


@pytest.mark.parametrize("name", [NAME, "cifar10-r18-cutmix", "tiny-r18-alignmixup-ae-fast"])
def test_a_run_of_the_recipe_itself_names_nothing(name):
    (row,) = rows(run(name=name), which="last")
    assert "=" not in row


def test_seeds_and_free_settings_are_no_difference():
    plain = run({"train.device": "cpu", "train.eval_every": 25})
    assert rows(plain, run(seed=1), which="last") == ["AlignMixup (fast)"]


@pytest.mark.parametrize("seed", [0, 1])
def test_data_of_other_folders_are_another_row_though_their_names_end_alike(seed):
    """The same seed: one run hid the other. Another seed: both were averaged."""
    mine, yours = run(data="folder:/mine/pets@32"), run(data="folder:/yours/pets@32", seed=seed)
    assert mine.key == yours.key
    assert rows(mine, run(data="folder:/mine/pets@32", seed=2), which="last") == [
        "AlignMixup (fast)"
    ]
    assert rows(mine, yours, run(), which="last") == [
        "AlignMixup (fast)",
        'AlignMixup (fast, data.name="folder:/mine/pets@32")',
        'AlignMixup (fast, data.name="folder:/yours/pets@32")',
    ]


@pytest.mark.parametrize("name", ["folder:/a/\u7a7a@16", "shards:/a/my h\xfcndchen"])
def test_a_key_keeps_the_letters_of_every_alphabet(name):
    data = on_data(find_recipe(NAME), name).key.data
    assert all(letter in data for letter in name.rpartition("/")[2] if letter.isalnum())


def test_the_computation_that_auto_chose_is_no_difference():
    plain = run()
    on_gpu = {"train.precision": "bf16", "train.channels_last": True}
    assert rows(plain.stamped(trained={**plain.trained, **on_gpu}), which="last") == [
        "AlignMixup (fast)"
    ]
    mixed = plain.stamped(
        trained={**plain.trained, "train.precision": "bf16, float32 from epoch 2"}
    )
    assert "train.precision" in rows(mixed, which="last")[0]


def timed(seed, ms, hardware="H200"):
    spread = {"p20": ms - 0.1 * seed, "p80": ms + 1}
    cost = Result("cost", "ms_per_batch", ms, {"device": "cuda", **spread}, key=KEY, seed=seed)
    return cost.stamped(hardware=hardware)


def test_times_of_several_seeds_are_one_row_and_those_of_two_machines_two():
    """Each time was a row of its own, named after its percentiles."""
    seeds = [timed(0, 2.0), timed(1, 3.0), timed(2, 4.0)]
    assert table(seeds, "cost", paper_rows=False).rows == (
        ("AlignMixup (fast)", "3.0 \u00b1 1.0, n=3"),
    )
    assert table([*seeds, timed(3, 90.0, "x86_64")], "cost", paper_rows=False).rows == (
        ('AlignMixup (fast, hardware="H200")', "3.0 \u00b1 1.0, n=3"),
        ('AlignMixup (fast, hardware="x86_64")', "90.0"),
    )


def test_a_computation_that_the_recipe_names_is_no_difference():
    line = Result("accuracy", "top1_last", 90.0, key=KEY, epoch=300)
    named = {"recipe_settings": lambda key: {"train.epochs": 300, "train.precision": "bf16"}}
    for precision, text in (("bf16", ""), ("float32", ', train.precision="float32"')):
        trained = {"train.epochs": 300, "train.precision": precision}
        made = table(
            [line.stamped(trained=trained)], "accuracy", which="last", paper_rows=False, **named
        )
        assert made.rows[0][0] == f"AlignMixup (fast{text})"


def test_the_order_of_settings_is_no_difference():
    """Neither that of the settings nor that inside one: a later line replaces an earlier one."""
    trained = {"train.lr": 0.2, "mixer.weights": {"input": 2.0, "feat": 1.0}}
    turned = {"mixer.weights": {"feat": 1.0, "input": 2.0}, "train.lr": 0.2}
    lines = [run(value=value) for value in (80.0, 90.0)]
    lines = [
        line.stamped(trained={**line.trained, **each})
        for line, each in zip(lines, (trained, turned), strict=True)
    ]
    folded = fold(lines, KINDS["accuracy"][1], "last", (), recipe_settings)
    assert folded.num_repeated == 1
    assert [list(cell.values()) for cell in folded.cells.values()] == [[10.0]]


def test_a_detector_stands_under_its_own_data_and_network():
    """Not under those of its backbone, which its key names."""
    key, settings = RecipeKey("imagenet", "r50", "cutmix"), {"data": "voc07", "network": "ssd-r50"}
    task, metric = KINDS["detection"][1][0].task, KINDS["detection"][1][0].metric
    lines = [Result(task, metric, 50.0, settings, key, 0)]
    ((_, column),) = fold(lines, KINDS["detection"][1], "last", (), recipe_settings).cells
    assert (column.data, column.network) == ("voc07", "ssd-r50")
    lines = [Result("accuracy", "top1_last", 50.0, settings, key, 0)]
    ((_, column),) = fold(lines, KINDS["accuracy"][1], "last", (), recipe_settings).cells
    assert (column.data, column.network) == ("imagenet", "r50")


def test_the_majority_does_not_hide_what_differs():
    """Three short runs and one as the recipe says: the short ones are still named."""
    short = [run({"train.lr": 0.2}, seed=seed) for seed in range(3)]
    assert rows(*short, run(), which="last") == [
        "AlignMixup (fast)",
        "AlignMixup (fast, train.lr=0.2)",
    ]


def test_a_run_scored_before_its_end_says_so():
    assert rows(run(epoch=200), which="last") == ["AlignMixup (fast, epochs=200)"]


def test_style_weights_a_run_made_for_itself_are_no_difference():
    key = find_recipe("cifar10-r18-stylemix-fast").key
    settings = recipe_settings(key)
    line = Result("accuracy", "top1_last", 90.0, key=key, seed=0)
    made_here = {**settings, "mixer.weights": "small", "style_weights": {"sha256": "1"}}
    line = line.stamped(epoch=300, trained=made_here)
    assert rows(line, which="last") == ["StyleMix (fast)"]
    given = line.stamped(trained={**made_here, "mixer.weights": "reference"})
    assert rows(given, which="last") == ['StyleMix (fast, mixer.weights="reference")']


def test_a_run_on_other_data_is_compared_with_the_recipe_it_was_made_from():
    recipe = on_data(changed(find_recipe(NAME), SMALL), "shapes")
    where = origin(recipe, 1)
    line = Result("accuracy", "top1_last", 90.0).stamped(**where)
    assert rows(line, which="last") == [
        "AlignMixup (fast, epochs=1, net.width=4, train.weight_decay=default)"
    ]
    assert (line.key.name, line.base.name) == ("shapes-r18-alignmixup-fast", NAME)
    again = Result.from_json(line.to_json())
    assert (again.key, again.base) == (line.key, line.base)
    # The same key from another recipe, with another batch size.
    other = on_data(find_recipe("tiny-r18-alignmixup-fast"), "shapes")
    where = origin(other, 300)
    line = Result("accuracy", "top1_last", 90.0).stamped(**where)
    assert line.key.name == "shapes-r18-alignmixup-fast"
    assert rows(line, which="last") == ["AlignMixup (fast)"]


def test_a_trial_on_few_images_is_compared_with_its_recipe():
    assert rows(run({"data.limit": 20, "train.lr": 0.2}), which="last") == [
        "AlignMixup (fast, limit20, train.lr=0.2)"
    ]


def test_a_recipe_that_is_not_known_has_no_settings():
    assert recipe_settings(RecipeKey("mine", "r18", "mymix")) is None
    # The same name in other parts is another key.
    assert recipe_settings(RecipeKey("cifar10", "r18", "alignmixup-fast")) is None
    for name in recipe_names("cifar10-*"):
        assert recipe_settings(find_recipe(name).key) is not None


def test_short_runs_show_their_last_epoch_and_say_so():
    """Lines of older runs have a median of ten epochs for ten epochs: it is not shown."""
    short = [
        run({"train.epochs": 10}, metric=metric, value=value)
        for metric, value in (("top1_last", 90.0), ("top1_median10", 70.0), ("top1_best", 91.0))
    ]
    long = [
        run(metric=metric, value=value)
        for metric, value in (("top1_median10", 95.0), ("top1_last", 96.0), ("top1_best", 97.0))
    ]
    made = table([*short, *long], "accuracy", paper_rows=False, recipe_settings=recipe_settings)
    assert made.rows == (
        ("AlignMixup (fast)", "5.00 (2.95)"),
        ("AlignMixup (fast, epochs=10, last epoch)", "10.00 (2.95)"),
    )
    assert any("fewer than 30 epochs" in note for note in made.notes)
    assert any("differs from its recipe" in note for note in made.notes)
    best = table(short, "accuracy", which="best", paper_rows=False, recipe_settings=recipe_settings)
    assert best.rows == (("AlignMixup (fast, epochs=10)", "9.00 (2.95)"),)
    assert not any("fewer than 30" in note for note in best.notes)


def test_clean_statistics_are_a_row_and_a_run_of_their_own():
    """They had no row in this table, and the run stood in the list twice."""
    saved = [run(metric="top1_median10", value=95.0), run(metric="top1_last", value=96.0)]
    scored = run(metric="top1", value=97.0)
    trained = {**scored.trained, "statistics": "clean"}
    clean = scored.stamped(trained=trained, settings={"num_images": 10, "amp_dtype": None})
    more = {"paper_rows": False, "recipe_settings": recipe_settings}
    made = table([*saved, clean], "accuracy", **more)
    assert made.rows == (
        ("AlignMixup (fast)", "5.00 (2.95)"),
        ('AlignMixup (fast, statistics="clean", last epoch)', "3.00 (2.95)"),
    )
    last = table([*saved, clean], "accuracy", which="last", **more)
    assert [row[1] for row in last.rows] == ["4.00 (2.95)", "3.00 (2.95)"]
    assert rows(*saved, run(metric="top1_best"), clean, which="best") == ["AlignMixup (fast)"]
    listed = [item.name for item in runs_of([*saved, clean], recipe_settings)]
    assert listed == [NAME, f"{NAME} (clean statistics)"]


def test_every_column_has_its_unit():
    results = [
        Result(m.task, m.metric.format(which="last"), 50.0, {"source": "isun"}, KEY, 0, epoch=1)
        for _, measures in KINDS.values()
        for m in measures
    ]
    assert set(kinds_in(results)) == set(KINDS)
    for kind in KINDS:
        made = table(results, kind)
        for column in made.columns[1:]:
            assert column.endswith(("(%)", "(M)", "(ms)")), column


@pytest.mark.parametrize(("data", "name"), [("cifar10", "CIFAR-10"), ("shapes", "shapes")])
def test_a_column_of_accuracies_is_named_by_its_data_and_logs_are_quoted_where_there_are(
    data, name
):
    line = Result("accuracy", "top1_last", 50.0, key=RecipeKey(data, "r18", "cutmix"), seed=0)
    made = table([line], "accuracy", which="last", paper_rows=False)
    assert made.columns[1].startswith(name)
    assert any("the authors' own logs" in note for note in made.notes) == (data == "cifar10")


def test_the_papers_detection_accuracy_comes_before_odins():
    results = [
        Result("ood", metric, 50.0, {"source": "isun"}, KEY, 0)
        for metric in ("det_acc_best", "auroc", "det_acc_half")
    ]
    columns = table(results, "ood").columns
    assert columns[1] == "Det Acc at 0.5 (%)"
    assert "Det Acc at the best threshold (%)" in columns[2:]


def test_report_from_the_command_line_names_the_differences(tmp_path, capsys):
    lines = [run(SMALL), run(SMALL, metric="top1_best")]
    (tmp_path / "results.jsonl").write_text("".join(line.to_json() + "\n" for line in lines))
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for word in ("net.width=4", "1 of 300", "train.weight_decay=default"):
        assert word in said


def test_runs_and_tables_agree_on_what_is_short():
    assert SHORT == EPOCHS_FOR_MEDIAN


def test_a_paper_gets_a_table_per_data_set_and_source():
    places = [("cifar10", "isun"), ("cifar10", "cifar100"), ("cifar100", "isun")]
    results = [
        Result("ood", "auroc", 50.0 + i, {"source": source}, RecipeKey(data, "r18", "cutmix"), 0)
        for i, (data, source) in enumerate(places)
    ]
    summary = summarize(results, "median10", lambda key: None)
    made = paper_tables(summary, "median10", lambda key: None)
    titles = [table.title.partition(", ")[2] for table in made]
    assert titles == ["CIFAR-10 R-18, iSUN", "CIFAR-10 R-18, CIFAR-100", "CIFAR-100 R-18, iSUN"]
    assert [len(table.columns) for table in made] == [2, 2, 2]
    values = [dict(table.rows)["CutMix"] for table in made]
    assert [value.split()[0] for value in values] == ["50.0", "51.0", "52.0"]
