"""Result lines folded into tables: what is averaged, what is refused, what reaches the page."""

import html
import math
import re

import pytest

from alignmixup.contracts import RecipeKey, Result
from alignmixup.report import paper
from alignmixup.report.measures import kinds_in, number
from alignmixup.report.reading import read_results
from alignmixup.report.render import Table, to_html, to_latex, to_markdown
from alignmixup.report.tables import table
from alignmixup.report.terminal import to_text

AWKWARD = Table(
    title="Error (%) & <b>cost</b> of a_b | c",
    columns=("Method", "x^2 ~ {y}", "$5 #1"),
    rows=(("[red]a|b[/red]", "1.00 \u00b1 0.10, n=2", "<script>"), ("\\bs", "a*b_c`d`", "-")),
    notes=("a & b\nover two lines",),
)


def key(text):
    """The key of these words: data, network, method and perhaps a variant."""
    return RecipeKey(*text.split())


def accuracy(value, recipe="cifar10 r18 alignmixup", seed=0, which="median10", **more):
    return Result("accuracy", f"top1_{which}", value, key=key(recipe), seed=seed, **more)


def cell(made, row, column=1):
    return {r[0]: r for r in made.rows}[row][column]


# Reading


def test_lines_come_back_as_written(tmp_path):
    wrote = [accuracy(95.1), accuracy(95.2, seed=1, settings={"note": "\u00e9 \u2028"})]
    run = tmp_path / "run" / "deep"
    run.mkdir(parents=True)
    file = run / "results.jsonl"
    file.write_text("".join(r.to_json() + "\n" for r in wrote), encoding="utf-8")
    (run / "ledger.jsonl").write_text('{"step": 1}\n')
    assert read_results([tmp_path]) == wrote
    assert read_results([str(file)]) == wrote
    assert read_results([file, tmp_path]) == wrote


def test_folder_of_plain_files(tmp_path):
    for name, value in (("b", 2.0), ("a", 1.0)):
        (tmp_path / f"{name}.jsonl").write_text(accuracy(value).to_json() + "\n\n")
    assert [r.value for r in read_results([tmp_path])] == [1.0, 2.0]


def test_nothing_to_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no results"):
        read_results([tmp_path])
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_results([tmp_path / "none"])
    (tmp_path / "ledger.jsonl").write_text('{"event": "start"}\n')  # a run that has only begun
    with pytest.raises(FileNotFoundError, match="holds no results"):
        read_results([tmp_path])


def test_what_holds_no_results_is_skipped_among_others(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "results.jsonl").write_text(accuracy(95.1).to_json() + "\n")
    (tmp_path / "run.log").write_text("epoch 1\n")
    (tmp_path / "begun").mkdir()
    with pytest.warns(UserWarning, match="skipped") as told:
        assert len(read_results(sorted(tmp_path.iterdir()))) == 1
    assert len(told) == 2
    with pytest.raises(ValueError, match="not a result line"):
        read_results([tmp_path / "run.log"])
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_results([run, tmp_path / "none"])


@pytest.mark.parametrize("length", [1, 20, -1])
def test_torn_last_line_is_reported_and_skipped(tmp_path, length):
    whole, torn = accuracy(95.1), accuracy(95.2, seed=1).to_json()
    file = tmp_path / "results.jsonl"
    file.write_text(whole.to_json() + "\n" + torn[:length])
    with pytest.warns(UserWarning, match=r"results\.jsonl:2: skipped an unfinished last line"):
        assert read_results([file]) == [whole]
    file.write_text(whole.to_json() + "\n" + torn)  # whole but for its line end
    assert len(read_results([file])) == 2


def test_torn_in_the_middle_of_a_letter(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_bytes(accuracy(95.1).to_json().encode() + b'\n{"task": "\xc3')
    with pytest.warns(UserWarning, match="unfinished"):
        assert len(read_results([file])) == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"task": "accuracy", "metr', "Unterminated"),
        ('{"task": "a", "metric": "b"}', "value"),
        ('{"task": "a", "metric": "b", "value": "3"}', "value must be a number, got '3'"),
        ('{"task": "a", "metric": "b", "value": true}', "value must be a number"),
        ('{"task": "a", "metric": "b", "value": 3, "epoch": "3"}', "epoch must be an integer"),
        ('{"task": "a", "metric": "b", "value": 3, "hardware": {}}', "hardware must be a string"),
        (
            '{"task": "a", "metric": "b", "value": 3,'
            '"key": {"data": 1, "network": "r18", "method": "input"}}',
            "data of a recipe's key must be a string, got 1",
        ),
        ('{"task": "a", "metric": "b", "value": 3, "settings": 4}', "settings must be an object"),
        ('{"task": "a", "metric": "b", "value": 3, "seed": [1]}', "seed must be an integer"),
        ('{"task": null, "metric": "b", "value": 3}', "task must be a string"),
        ('{"task": "a", "metric": "b", "value": 3, "color": 1}', "color"),
        ('{"task": "a", "metric": "b", "value": 3, "key": "x"}', "key must be an object or null"),
        ('{"task": "a", "metric": "b", "value": 3, "key": {"x": 1}}', "unexpected keyword"),
        ('{"loss": 3.2, "step": 1}', "a result of alignmixup has a task"),  # of another program
        ("[1, 2]", "expected a JSON object"),
        ("\\xff", "not a result line"),
    ],
)
def test_damaged_line_is_an_error_that_names_it(tmp_path, line, why):
    file = tmp_path / "results.jsonl"
    good = accuracy(95.1).to_json()
    file.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError, match=re.escape(why)) as error:
        read_results([file])
    assert f"{file}:2:" in str(error.value)
    file.write_text(f"{good}\n{line}\n")  # a line end behind it: not torn, but wrong
    with pytest.raises(ValueError, match=r"results\.jsonl:2: not a result line"):
        read_results([file])


# Folding


def test_ours_beside_theirs():
    made = table([accuracy(96.98), accuracy(95.0, "cifar10 r18 baseline")], "accuracy")
    assert cell(made, "AlignMixup") == "3.02 (2.95)"
    assert cell(made, "Baseline") == "5.00 (5.19)"
    assert cell(made, "PuzzleMix") == "(2.93)"
    assert [r[0] for r in made.rows][:2] == ["Baseline", "Input mixup"]
    assert len(made.rows) == 11
    alone = table([accuracy(96.98)], "accuracy", paper_rows=False)
    assert alone.rows == (("AlignMixup", "3.02 (2.95)"),)


def test_seeds_are_averaged_with_their_sample_deviation():
    made = table([accuracy(v, seed=s) for s, v in enumerate((95, 96, 97))], "accuracy")
    assert cell(made, "AlignMixup") == "4.00 \u00b1 1.00, n=3 (2.95)"
    two = table([accuracy(95, seed=4), accuracy(96, seed=9)], "accuracy")
    assert cell(two, "AlignMixup") == f"4.50 \u00b1 {math.sqrt(0.5):.2f}, n=2 (2.95)"


def test_a_repeated_measurement_does_not_count_as_a_seed():
    old = accuracy(90, date="2024-01-01")
    made = table([accuracy(95, date="2024-02-01"), old, accuracy(97, seed=1)], "accuracy")
    assert cell(made, "AlignMixup") == "4.00 \u00b1 1.41, n=2 (2.95)"
    assert any("1 repeated" in note for note in made.notes)
    undated = table([accuracy(90), accuracy(95)], "accuracy")
    assert cell(undated, "AlignMixup") == "5.00 (2.95)"
    assert not any("repeated" in note for note in table([old], "accuracy").notes)


def test_it_always_says_which_accuracy():
    results = [accuracy(95, which="best"), accuracy(94, which="last"), accuracy(93)]
    for which, value, words in (
        ("best", "5.00", "the best test epoch"),
        ("last", "6.00", "the last epoch"),
        ("median10", "7.00", "the median of the last ten epochs"),
    ):
        made = table(results, "accuracy", which=which)
        assert cell(made, "AlignMixup") == f"{value} (2.95)"
        assert words in made.title
        assert any(f"Ours is {words}" in note for note in made.notes)
        assert any("authors' own logs: CIFAR-10 R-18 3.11." in note for note in made.notes)


def test_columns_and_rows_in_the_papers_order():
    recipes = [
        "tiny r18 zebra",
        "shapes small alignmixup",
        "cifar100 wrn16-8 alignmixup-ae",
        "cifar10 r18 alignmixup fast",
        "cifar100 r18 alignmixup",
    ]
    made = table([accuracy(90, name) for name in recipes], "accuracy", paper_rows=False)
    assert made.columns == (
        "Method",
        "CIFAR-10 R-18 (%)",
        "CIFAR-100 R-18 (%)",
        "CIFAR-100 WRN16-8 (%)",
        "Tiny-ImageNet R-18 (%)",
        "shapes small (%)",
    )
    assert [r[0] for r in made.rows] == [
        "AlignMixup",
        "AlignMixup (fast)",
        "AlignMixup/AE",
        "zebra",
    ]
    assert cell(made, "AlignMixup (fast)", 1) == "10.00 (2.95)"
    assert cell(made, "AlignMixup (fast)", 2) == "-"
    assert cell(made, "AlignMixup", 1) == "(2.95)"
    assert cell(made, "AlignMixup", 5) == "10.00"
    assert cell(made, "zebra", 4) == "10.00"


def test_levit_accuracy_is_shown_as_error():
    made = table([accuracy(69.0, "imagenet levit-128s alignmixup")], "accuracy")
    assert cell(made, "AlignMixup") == "31.00 (30.10)"


def test_results_with_different_settings_are_never_averaged():
    def pgd(value, seed, **settings):
        name = "cifar100 r18 alignmixup"
        return Result("pgd", "top1_error", value, settings, key=key(name), seed=seed)

    mixed = [pgd(96, 0, steps=10), pgd(98, 0, steps=20), pgd(99, 1, steps=20)]
    made = table(mixed, "robustness", paper_rows=False)
    assert made.rows == (
        ("AlignMixup (steps=10)", "96.00 (90.40)"),
        ("AlignMixup (steps=20)", "98.50 \u00b1 0.71, n=2 (90.40)"),
    )
    only = table(mixed[1:], "robustness", paper_rows=False)
    assert only.rows == (("AlignMixup", "98.50 \u00b1 0.71, n=2 (90.40)"),)
    timed = [pgd(96, 0, steps=20, seconds=1.5), pgd(98, 1, steps=20, seconds=2.5)]
    assert len(table(timed, "robustness", paper_rows=False).rows) == 2


def test_runs_of_different_length_are_rows_of_their_own():
    results = [
        Result("fgsm", "top1_error", value, {}, key=key("cifar100 r18 alignmixup"), seed=0, epoch=n)
        for value, n in ((80.0, 200), (70.0, 300))
    ]
    made = table(results, "robustness", paper_rows=False)
    assert [row[0] for row in made.rows] == ["AlignMixup (epochs=200)", "AlignMixup (epochs=300)"]
    assert not any("repeated" in note for note in made.notes)


def test_runs_trained_otherwise_are_rows_of_their_own():
    def run(value, seed=0, epoch=200, **trained):
        more = {f"train.{name}": value for name, value in trained.items()}
        return accuracy(value, seed=seed, epoch=epoch, trained={"train.epochs": 200, **more})

    results = [
        *(run(96.0 + seed, seed, lr=0.2, milestones=[100, 150]) for seed in range(2)),
        run(90.0, lr=0.4, milestones=[100, 150]),
        run(91.0, lr=0.2, milestones=[50]),
        run(92.0, milestones=[100, 150]),
    ]
    made = table(results, "accuracy", paper_rows=False)
    assert made.rows == (
        ("AlignMixup", "3.50 \u00b1 0.71, n=2 (2.95)"),
        ("AlignMixup (train.lr=0.4)", "10.00 (2.95)"),
        ("AlignMixup (train.lr=default)", "8.00 (2.95)"),
        ("AlignMixup (train.milestones=[50])", "9.00 (2.95)"),
    )
    usual = "Where a row does not say otherwise: train.lr=0.2, train.milestones=[100, 150]."
    assert usual in made.notes
    # Scored on the way, a longer run is not the shorter one.
    early = accuracy(80.0, epoch=200, trained={"train.epochs": 400})
    names = [row[0] for row in table([results[0], early], "accuracy", paper_rows=False).rows]
    assert len(names) == 2
    assert any("train.epochs=400" in name for name in names)


def test_style_networks_that_runs_train_for_themselves_do_not_split_seeds():
    def styled(seed, **weights):
        trained = {"mixer.weights": "small", "style_weights": {"sha256": str(seed)}, **weights}
        return accuracy(95.0 + seed, recipe="cifar10 r18 stylemix", seed=seed, trained=trained)

    made = table([styled(0), styled(1)], "accuracy", paper_rows=False)
    assert made.rows == (("StyleMix", "4.50 \u00b1 0.71, n=2 (3.76)"),)
    other = styled(0, **{"mixer.weights": "reference"})
    assert len(table([styled(0), other], "accuracy", paper_rows=False).rows) == 2


def test_measured_curves_and_attack_seeds_do_not_split_seeds():
    results = [
        Result(
            "pgd",
            "top1_error",
            value,
            {"num_steps": 2, "seed": seed, "errors_by_step": [value - 1, value]},
            key=key("cifar100 r18 alignmixup"),
            seed=seed,
        )
        for seed, value in enumerate((90.0, 92.0))
    ]
    made = table(results, "robustness", paper_rows=False)
    assert made.rows == (("AlignMixup", "91.00 \u00b1 1.41, n=2 (90.40)"),)


def test_settings_that_differ_between_columns_split_nothing():
    results = [
        Result("fgsm", "top1_error", 60, {"batch": b}, RecipeKey(d, "r18", "alignmixup"), 0)
        for d, b in (("cifar10", 100), ("tiny", 50))
    ]
    made = table(results, "robustness", paper_rows=False)
    assert made.rows == (("AlignMixup", "60.00 (54.83)", "60.00 (78.83)"),)
    assert made.columns[1:] == ("CIFAR-10 R-18 FGSM (%)", "Tiny-ImageNet R-18 FGSM (%)")


def test_out_of_distribution_has_a_column_a_source_and_metric():
    results = [
        Result("ood", metric, value, {"source": source}, key("cifar100 r18 alignmixup"), seed)
        for source in ("svhn", "gaussian", "lsun-crop")
        for metric, value in (("fpr95", 70.0), ("auroc", 80.0))
        for seed in (0, 1)
    ]
    made = table(results, "ood")
    assert made.title == "Out-of-distribution detection, CIFAR-100 R-18"
    assert made.columns[1:] == (
        "LSUN (crop) AuROC (%)",
        "LSUN (crop) FPR95 (%)",
        "Gaussian AuROC (%)",
        "Gaussian FPR95 (%)",
        "svhn AuROC (%)",
        "svhn FPR95 (%)",
    )
    ours = next(r for r in made.rows if r[0] == "AlignMixup")
    assert ours[1:3] == ("80.0 \u00b1 0.0, n=2 (79.9)", "70.0 \u00b1 0.0, n=2")
    assert ours[3] == "80.0 \u00b1 0.0, n=2 (87.9)"
    assert cell(made, "StyleMix", 1) == "(64.2)"
    assert cell(made, "StyleMix", 2) == "-"


@pytest.mark.parametrize(
    ("kind", "task", "metric", "recipe", "row", "text"),
    [
        ("robustness", "fgsm", "top1_error", "tiny r18 cutmix", "CutMix", "50.00 (88.68)"),
        ("calibration", "calibration", "ece", "cifar100 r18 input", "Input mixup", "50.00 (18.50)"),
        ("calibration", "calibration", "oe", "cifar10 r18 input", "Input mixup", "50.00"),
        ("localization", "localization", "top1_loc", "cub200 r50 cutout", "Cutout", "50.0 (52.4)"),
        ("detection", "detection", "map", "voc07 ssd-r50 cutmix", "CutMix", "50.00 (77.60)"),
        ("cost", "cost", "ms_per_batch", "imagenet r50 comixup", "Co-Mixup", "50.0 (1022.0)"),
    ],
)
def test_every_kind_finds_its_published_figure(kind, task, metric, recipe, row, text):
    results = [Result(task, metric, 50, key=key(recipe), seed=0)]
    assert kinds_in(results) == [kind]
    assert cell(table(results, kind), row) == text


def test_ablations_stand_beside_their_own_rows_of_the_paper():
    names = ["baseline", "alignmixup xA", "alignmixup xA-unaligned", "alignmixup xe"]
    names += ["alignmixup-ae x", "alignmixup-ae xAe-fast", "alignmixup"]
    names += ["alignmixup iterations10", "alignmixup iterations1000"]
    results = [accuracy(80, f"cifar100 r18 {name}") for name in reversed(names)]
    made = table(results, "accuracy", paper_rows=False)
    assert made.title.startswith("Top-1 error, CIFAR-100 R-18")
    assert made.rows == (
        ("Baseline", "20.00 (23.24)"),
        ("AlignMixup", "20.00 (18.29)"),
        ("AlignMixup ({x, e})", "20.00 (19.19)"),
        ("AlignMixup ({x, A})", "20.00 (18.29)"),
        ("AlignMixup ({x, A}, unaligned)", "20.00 (19.66)"),
        ("AlignMixup (10 iterations)", "20.00 (19.04)"),
        ("AlignMixup (1000 iterations)", "20.00 (18.72)"),
        ("AlignMixup/AE ({x, A, e}, fast)", "20.00 (17.82)"),
        ("AlignMixup/AE ({x})", "20.00"),
    )


def test_other_figures_and_other_data_of_an_ablation_have_none_beside_them():
    attacked = Result("fgsm", "top1_error", 50, key=key("cifar100 r18 alignmixup xA"), seed=0)
    made = table([attacked], "robustness", paper_rows=False)
    assert made.rows == (("AlignMixup ({x, A})", "50.00"),)
    elsewhere = table([accuracy(80, "tiny r18 alignmixup xA")], "accuracy", paper_rows=False)
    assert elsewhere.rows == (("AlignMixup ({x, A})", "20.00"),)


@pytest.mark.parametrize("network", ["r18-flatten", "wrn28-10", "my net"])
def test_parts_that_the_paper_does_not_know_have_their_own_names(network):
    """A network with a dash was taken for a method when names were parsed."""
    mine = accuracy(80).stamped(key=RecipeKey("my-data", network, "my-mix", "a-b"))
    made = table([mine, accuracy(80)], "accuracy", paper_rows=False)
    assert made.columns[2] == f"my-data {network} (%)"
    assert made.rows[1] == ("my-mix (a, b)", "-", "20.00")


def test_a_result_without_a_key_is_an_error_with_its_remedy():
    with pytest.raises(ValueError, match=r"has no recipe key; add one with result\.stamped"):
        table([accuracy(80).stamped(key=None)], "accuracy")


def test_every_cell_is_found_by_its_own_key():
    for cell in paper.FIGURES:
        if cell.value is not None and cell.table != "logs":
            metric = cell.metric if cell.top1_error is None else "top1_error"
            found = paper.cell_beside(paper.key_of(cell), metric, cell.source)
            assert (found.value, found.top1_error) == (cell.value, cell.top1_error) or (
                found.table == "cls" and found.top1_error == cell.top1_error
            )


def test_an_unaligned_twin_does_not_borrow_the_aligned_figure():
    names = ("alignmixup", "alignmixup fast", "alignmixup unaligned", "alignmixup unaligned-fast")
    results = [accuracy(80, f"cifar100 r18 {name}") for name in names]
    made = table(results, "accuracy", paper_rows=False)
    texts = [row[1] for row in made.rows]
    assert sorted("(" in text for text in texts) == [False, False, True, True]
    assert all("(" not in row[1] for row in made.rows if "unaligned" in row[0])


def test_what_cannot_be_shown_is_an_error():
    results = [accuracy(95)]
    with pytest.raises(ValueError, match="unknown kind of table 'speed'; choose from accuracy"):
        table(results, "speed")
    with pytest.raises(ValueError, match="unknown accuracy 'max'"):
        table(results, "accuracy", which="max")
    with pytest.raises(ValueError, match="no results for a table of ood"):
        table(results, "ood")
    with pytest.raises(ValueError, match="which='best'"):
        table(results, "accuracy", which="best")
    with pytest.raises(ValueError, match="has 2 columns, but row"):
        Table("t", ("a", "b"), (("1",),))


# Rendering


def split_cells(line):
    return [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_markdown_keeps_every_cell_in_its_place():
    text = to_markdown(AWKWARD)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    plain = [[re.sub(r"\\(.)", r"\1", c) for c in split_cells(line)] for line in lines]
    assert plain[0] == list(AWKWARD.columns)
    assert plain[1] == ["---"] * 3
    assert plain[2:] == [list(row) for row in AWKWARD.rows]
    assert not re.search(r"(?<!\\)[<>*_`\[]", text.replace("### ", ""))
    assert r"- a \& b over two lines" in text


def test_latex_leaves_no_bare_special():
    text = to_latex(AWKWARD)
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert body[0].startswith(r"{[}red]a\textbar{}b{[}/red] & 1.00 $\pm$ 0.10, n=2 & ")
    assert body[0].endswith(r"\textless{}script\textgreater{} \\")
    assert body[1].startswith(r"\textbackslash{}bs & a*b\_c`d` & ")
    assert r"x\textasciicircum{}2 \textasciitilde{} \{y\} & \$5 \#1 \\ \midrule" in text
    assert r"\begin{tabular}{lcc} \toprule" in text
    assert r"Error (\%) \& \textless{}b" in text
    for line in body:
        assert len(re.findall(r"(?<!\\)&", line)) == 2
    assert not re.search(r"(?<!\\)[%#]", text)


def test_latex_translates_what_pdflatex_lacks():
    title = (
        "J\u00e9gou \u1ebf \u0141\u00f8 a\u0308 \u03b1=2 \u03bf \u2265 8\u00d78 \u2014 \u8bc6\x07"
    )
    text = to_latex(Table(title, ("a",), (("\U0001f600 \u2019x\u2026",),)))
    assert text.isascii()
    assert (
        r"{J\'{e}gou \'{\^{e}} \L{}\o{} \"{a} $\alpha$=2 $\mathit{o}$ $\ge$ 8$\times$8 ---" in text
    )
    assert "{[}U+8BC6]{[}U+0007]" in text
    assert r"{[}U+1F600] 'x\dots{} \\" in text


def test_html_escapes_and_parses():
    text = to_html(AWKWARD)
    assert "<script>" not in text
    assert "<b>" not in text
    cells = re.findall(r"<t[dh](?: [^>]*)?>(.*?)</t[dh]>", text)
    want = [*AWKWARD.columns, *(c for row in AWKWARD.rows for c in row)]
    assert [html.unescape(c) for c in cells] == want
    assert "<li>a &amp; b" in text
    assert "<ul>" not in to_html(Table("t", ("a",), (("1",),)))


def test_terminal_shows_names_as_they_are():
    for word in ("[red]a|b[/red]", "\\bs", "<script>", "a*b_c`d`", "<b>cost</b>"):
        assert word in to_text(AWKWARD, 120)


def test_shorter_schedules_stand_beside_the_figures_of_their_own_tables():
    lines = [
        accuracy(78.0, "cifar100 r18 alignmixup"),
        accuracy(78.0, "cifar100 r18 alignmixup 300"),
        accuracy(78.0, "cifar100 r18 input 300"),
        accuracy(78.0, "cifar100 r18 baseline 300"),
        accuracy(78.0, "cifar100 r18 alignmixup unaligned-300"),
    ]
    made = table(lines, "accuracy")
    assert cell(made, "AlignMixup") == "22.00 (18.29)"
    assert cell(made, "AlignMixup (300)") == "22.00 (21.38)"
    assert cell(made, "Input mixup (300)") == "22.00 (20.21)"
    # The paper prints neither after 300 epochs.
    assert cell(made, "Baseline (300)") == cell(made, "AlignMixup (unaligned, 300)") == "22.00"
    lines = [accuracy(78.0, f"imagenet r50 alignmixup {end}") for end in ("", "100")]
    made = table([*lines, accuracy(70.0, "imagenet levit-128s alignmixup")], "accuracy")
    assert cell(made, "AlignMixup") == "22.00 (20.68)"
    assert cell(made, "AlignMixup (100)") == "22.00 (22.00)"
    assert cell(made, "AlignMixup", 2) == "30.00 (30.10)"


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [
        (99.97, 1, "99.97"),
        (99.9996, 1, "99.9996"),
        (0.044, 1, "0.04"),
        (-0.004, 2, "-0.004"),
        (100.0, 1, "100.0"),
        (0.0, 2, "0.00"),
        (99.94, 1, "99.9"),
        (0.06, 1, "0.1"),
        (1e-9, 2, "0.00"),
        (2e6, 2, "2.000e+06"),
    ],
)
def test_a_number_is_shown_as_zero_or_a_hundred_only_if_it_is(value, digits, shown):
    assert number(value, digits) == shown
    line = Result("ood", "auroc", value, {"source": "uniform"}, key=key("cifar10 r18 mine"), seed=0)
    made = table([line], "ood", paper_rows=False)
    if digits == 1:
        assert shown in made.rows[0]
