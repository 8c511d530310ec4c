"""Grids and summaries: rows by length, smoke tests, and what several seeds allow to say."""

from dataclasses import replace

import pytest

from alignmixup.contracts import RecipeKey, Result
from alignmixup.report.grids import Cell, GridRow, claims_of, make_grids, shared_variant
from alignmixup.report.measures import Measure
from alignmixup.report.page_charts import _attacked
from alignmixup.report.runs import is_smoke_test, runs_of, short_labels
from alignmixup.report.summary import comparison_table, paper_tables, summarize


def line(method, value, seed=0, epochs=300, task="accuracy", metric="top1_median10", **more):
    key = RecipeKey("cifar10", "r18", method)
    fields = {"trained": {"train.epochs": epochs}, "epoch": epochs, **more}
    return Result(task, metric, value, key=key, seed=seed, **fields)


SMOKE = line("cutmix", 60.0, epochs=10, metric="top1_last")


def of_300(key):
    return {"train.epochs": 300}


def only_grid(results, kind="accuracy"):
    (grid,) = make_grids(results, kind, recipe_settings=of_300)
    return grid


def measured(grid):
    return [row for row in grid.rows if row.is_measured]


@pytest.mark.parametrize(
    ("epochs", "recipe", "is_smoke"),
    [
        (10, 300, True),
        (29, 300, True),
        (30, 300, False),
        (199, 2000, True),
        (200, 2000, False),
        (300, 300, False),
        (8, 8, False),  # a short recipe is not a smoke test
        (1, None, False),  # nor is a run of an unknown one
        (None, 300, False),
    ],
)
def test_a_smoke_test_is_far_shorter_than_its_recipe(epochs, recipe, is_smoke):
    assert is_smoke_test(epochs, recipe) is is_smoke


def test_grids_come_by_data_and_then_by_network():
    places = [("cifar100", "r18"), ("cifar10", "wrn16-8"), ("cifar10", "r18")]
    lines = [line("input", 96.0).stamped(key=RecipeKey(*place, "input")) for place in places]
    grids = make_grids(lines, "accuracy", recipe_settings=of_300)
    assert [(grid.data, grid.network) for grid in grids] == places[::-1]
    assert [grid.place for grid in grids] == [
        "CIFAR-10, R-18",
        "CIFAR-10, WRN16-8",
        "CIFAR-100, R-18",
    ]


def test_a_variant_is_its_labels_and_then_its_settings():
    settings = (("train.lr", "0.2"), ("mixer.last", '"rows"'), ("last epoch", ""))
    row = GridRow("cutmix", ("fast",), settings, 300, 300, "", {})
    assert row.name_without(()) == "CutMix (fast, train.lr=0.2, mixer.last=rows, last epoch)"
    assert row.name_without(["fast"]) == "CutMix (train.lr=0.2, mixer.last=rows, last epoch)"
    assert replace(row, labels=(), settings=()).name_without(()) == "CutMix"
    assert (row.num_seeds, row.is_measured) == (0, False)


def test_a_row_is_measured_by_any_of_its_columns_and_a_grid_has_any_source():
    lines = [
        line("input", 50.0, task="fgsm", metric="top1_error"),
        line("input", 50.0, task="strong_attack", metric="top1_error"),
        line("cutmix", 50.0, task="pgd", metric="top1_error"),
    ]
    grid = only_grid(lines, "robustness")
    assert {row.method for row in measured(grid)} == {"input", "cutmix"}
    assert not grid.has_sources
    # The paper prints FGSM alone: its own row of that method is needed no more, others are.
    assert [row.is_measured for row in grid.rows if row.method == "input"] == [True]
    assert any(row.method == "manifold" and not row.is_measured for row in grid.rows)
    beside = (measured(grid)[0], replace(measured(grid)[1], source="isun"))
    assert replace(grid, rows=beside).has_sources


def test_words_that_two_rows_share_are_said_once():
    cell = {Measure("accuracy", "top1_last"): Cell({0: 50.0}, None)}
    one = GridRow("cutmix", ("fast",), (("train.lr", "0.2"),), 300, 300, "", cell)
    two = replace(one, method="input", settings=())
    assert shared_variant([one, two]) == ("fast",)
    assert shared_variant([one]) == ()
    assert shared_variant([one, replace(two, cells={})]) == ()


def test_runs_of_different_length_have_rows_of_their_own():
    grid = only_grid([line("input", 96.0), line("input", 95.0, epochs=200)])
    assert [row.length for row in measured(grid)] == ["300", "200 of 300"]
    seeds = only_grid([line("input", 96.0), line("input", 95.0, seed=1)])
    assert [row.num_seeds for row in measured(seeds)] == [2]


def test_every_method_of_the_paper_is_there_even_if_ours_is_a_smoke_test():
    grid = only_grid([line("input", 96.0), SMOKE])
    of_cutmix = [row for row in grid.rows if row.method == "cutmix"]
    assert [(row.is_measured, row.is_smoke) for row in of_cutmix] == [(True, True), (False, False)]
    assert sum(row.method == "input" for row in grid.rows) == 1


def test_better_is_claimed_only_where_the_interval_excludes_zero():
    better = [line("alignmixup", 96.0 + 0.1 * s + 0.01 * (s % 2), s) for s in range(3)]
    worse = [line("baseline", 95.0 + 0.1 * s, s) for s in range(3)]
    (claim,) = claims_of(only_grid(better + worse))
    assert claim.comparison.high < 0  # of errors: lower is better
    assert claim.verdict == "AlignMixup is better"
    parameters = replace(claim.measure, printed="params")  # neither way is better
    assert replace(claim, measure=parameters).verdict == "AlignMixup is lower"
    noisy = [line("baseline", value, s) for s, value in enumerate((95.0, 97.0, 96.0))]
    (claim,) = claims_of(only_grid(better + noisy))
    assert claim.verdict == "no difference shown"
    (claim,) = claims_of(only_grid(better[:1] + worse[:1]))
    assert claim.verdict == "one seed: no comparison"
    assert claims_of(only_grid(better[:1] + worse[1:])) == []  # no seed in common


def test_negative_seeds_are_seeds_and_an_unknown_one_is_none():
    lines = [line(m, v + 0.1 * s * s, seed=s) for m, v in (("input", 96), ("cutmix", 95))
             for s in (-3, -1, 2)]  # fmt: skip
    (claim,) = claims_of(only_grid(lines))
    assert claim.comparison.num_seeds == 3
    unknown = only_grid([line("input", 96.0, seed=-1), line("input", 95.0, seed=None)])
    assert [row.num_seeds for row in measured(unknown)] == [2]


def test_variants_of_one_method_are_compared_and_named():
    """Settings of one method side by side, as in a study: the names say what differs."""
    faster = {"trained": {"train.epochs": 300, "train.lr": 0.2}}
    lines = [line("input", 96.0 + 0.1 * s + 0.01 * (s % 2), s, **faster) for s in range(3)]
    lines += [line("input", 95.0 + 0.1 * s, s) for s in range(3)]
    (claim,) = claims_of(only_grid(lines))
    assert sorted(claim.names) == ["Input mixup", "Input mixup (train.lr=0.2)"]
    assert claim.verdict == "Input mixup (train.lr=0.2) is better"


def test_comparisons_of_several_variants_are_told_apart():
    """All were "Input mixup - Baseline", and the page named the variant of the first alone."""
    lines = []
    for width in (4, 8):
        small = {"trained": {"train.epochs": 300, "train.lr": 0.2, "net.width": width}}
        for method, top1 in (("input", 96.0), ("baseline", 95.0)):
            lines += [line(method, top1 + 0.1 * s * s, s, **small) for s in range(2)]
    found = [claim.names for claim in claims_of(only_grid(lines)) if "Base" in claim.names[1]]
    across = [names for names in found if "Input" in names[0]]
    assert across == [(f"Input mixup (net.width={w})", f"Baseline (net.width={w})") for w in (4, 8)]


def test_a_number_that_is_the_same_with_every_seed_is_not_compared():
    """A decoder's 12 M parameters more were "no difference shown"."""
    lines = []
    for method, millions in (("alignmixup-ae", 23.6), ("baseline", 11.2)):
        for metric, value in (("params", millions), ("ms_per_batch", millions / 5)):
            cost = {"task": "cost", "metric": metric}
            lines += [
                line(method, value + 0.1 * s * (metric != "params"), s, **cost) for s in (0, 1)
            ]
    compared = {claim.measure.metric for claim in claims_of(only_grid(lines, "cost"))}
    assert compared == {"ms_per_batch"}


def test_runs_trained_otherwise_are_not_compared():
    changed = {"trained": {"train.epochs": 300, "train.lr": 0.2}}
    lines = [line("alignmixup", 96.0, s, **changed) for s in range(2)]
    lines += [line("baseline", 95.0, s) for s in range(2)]
    assert claims_of(only_grid(lines)) == []
    shorter = [line("alignmixup", 96.0, s, epochs=200) for s in range(2)]
    assert claims_of(only_grid(shorter + lines[2:])) == []


def test_the_summary_leaves_smoke_tests_out_and_says_so():
    lines = [line("input", 96.0), SMOKE]
    made = summarize(lines, "median10", of_300)
    assert [row[0] for row in made.tables[0].rows] == ["Input mixup"]
    assert any("smoke tests" in text for text in made.lines)
    everything = summarize(lines, "median10", of_300, smoke_tests=True)
    assert len(everything.grids[0].rows) > len(made.grids[0].rows)
    alone = summarize([SMOKE], "median10", of_300)  # there is nothing else to show
    assert [row.method for row in measured(alone.grids[0])] == ["cutmix"]


def test_the_summary_shows_the_ten_most_recent_runs():
    lines = [line("input", 90.0, s, date=f"2026-01-{s + 1:02}T00:00") for s in range(12)]
    *_, recent = summarize(lines, "median10", of_300).tables
    assert [row[2] for row in recent.rows] == [str(s) for s in range(11, 1, -1)]
    assert "10 most recent of 12" in recent.title


def test_the_recipe_of_many_results_is_looked_up_once():
    asked = []

    def settings(key):
        asked.append(key)
        return of_300(key)

    lines = [line(method, 96.0, seed=seed) for method in ("input", "cutmix") for seed in range(9)]
    summary = summarize(lines, "median10", settings)
    assert len(asked) == 2
    paper_tables(summary, "median10", settings)
    assert len(asked) == 4


def test_comparisons_are_a_table_for_papers():
    lines = [
        line(m, v + 0.1 * s, s) for m, v in (("baseline", 95.0), ("input", 96.0)) for s in (0, 1)
    ]
    made = comparison_table(summarize(lines, "median10", of_300).grids)
    assert made is not None
    assert made.rows[0][0] == "Input mixup - Baseline"
    assert comparison_table(summarize(lines[:1], "median10", of_300).grids) is None


def test_charts_show_a_run_on_its_own_images_if_it_was_scored_on_them():
    def scored(value, date, **settings):
        more = {"eps": 8 / 255, **settings}
        return line(
            "input", value, task="fgsm", metric="top1_error", settings=more, date=f"2026-01-0{date}"
        )

    own, other = scored(40.0, 1), scored(90.0, 2, images="shapes/test, 1000 images")
    (run,) = runs_of([own, other], of_300)
    assert run.value("fgsm", "top1_error") == 40.0
    strength, _ = _attacked([run])
    assert [row["top1"] for row in strength] == [60.0]
    (run,) = runs_of([other], of_300)
    assert run.value("fgsm", "top1_error") == 90.0


@pytest.mark.parametrize("dates", [("", ""), ("2026-01-02", "2026-01-02"), ("2", "1")])
def test_tables_and_lists_of_runs_show_the_same_of_two_measurements(dates):
    lines = [line("input", v, date=d) for v, d in zip((96.0, 95.0), dates, strict=True)]
    (row,) = measured(only_grid(lines))
    (cell,) = row.cells.values()
    (run,) = runs_of(lines, of_300)
    assert cell.seeds == {0: 100 - run.top1}


@pytest.mark.parametrize("epochs", [10, 29, 30, 300])
def test_tables_and_lists_of_runs_show_the_same_accuracy(epochs):
    metrics = {"top1_median10": 60.0, "top1_last": 90.0, "top1": 91.0}
    lines = [line("input", v, epochs=epochs, metric=m) for m, v in metrics.items()]
    (row,) = measured(only_grid(lines))
    (cell,) = row.cells.values()
    (run,) = runs_of(lines, of_300)
    assert cell.seeds == {0: 100 - run.top1}


def test_an_attack_that_is_measured_again_has_one_line_in_its_chart():
    def attacked(errors, date, eps):
        settings = {"eps": eps, "errors_by_step": errors}
        more = {"settings": settings, "date": date}
        return line("input", errors[-1], task="pgd", metric="top1_error", **more)

    again = [attacked([30.0, 40.0], "2026-01-02", 0.01), attacked([10.0, 20.0], "2026-01-01", 0.01)]
    (run,) = runs_of([*again, attacked([1.0, 2.0], "2026-01-01", 0.005)], of_300)
    strength, steps = _attacked([run])
    assert sorted(row["top1"] for row in strength) == [60.0, 98.0]
    places = [(row["series"], row["attack"], row["step"]) for row in steps]
    assert len(places) == len(set(places)) == 4


def test_labels_name_what_differs_and_nothing_else():
    runs = runs_of([line("input", 96.0), line("cutmix", 95.0)], of_300)
    assert short_labels(runs) == ["Input mixup", "CutMix"]
    runs = runs_of([line("input", 96.0), line("input", 95.0, epochs=200)], of_300)
    assert short_labels(runs) == ["Input mixup, 300 epochs", "Input mixup, 200 epochs"]


@pytest.mark.parametrize("recipe_settings", [of_300, lambda key: None])
def test_clean_batch_statistics_are_named_and_not_compared_with_others(recipe_settings):
    """Of recipes that are not registered they were compared as if they were alike."""
    clean = {"trained": {"train.epochs": 300, "statistics": "clean"}}
    ece = {"task": "calibration", "metric": "ece"}
    results = [line("input", 5.0 + s, s, **ece, **clean) for s in (0, 1)]
    results += [line("cutmix", 6.0 + s, s, **ece) for s in (0, 1)]
    (grid,) = make_grids(results, "calibration", recipe_settings=recipe_settings)
    assert [row.name_without(()) for row in measured(grid)] == [
        "Input mixup (statistics=clean)",
        "CutMix",
    ]
    assert claims_of(grid) == []
    # Both kinds of one network: rows of their own, and runs that are told apart.
    both = [line("input", 7.0 + s, s, **ece) for s in (0, 1)] + results
    (grid,) = make_grids(both, "calibration", recipe_settings=recipe_settings)
    rows = [row.name_without(()) for row in measured(grid)]
    assert rows == ["Input mixup", "Input mixup (statistics=clean)", "CutMix"]
    runs = [run for run in runs_of(both, recipe_settings) if run.seed == 0]
    assert short_labels(runs[:2]) == ["Input mixup", "Input mixup, statistics=clean"]
    assert [run.name for run in runs[:2]] == [
        "cifar10-r18-input",
        "cifar10-r18-input (clean statistics)",
    ]
    assert len({run.title for run in runs}) == 3
