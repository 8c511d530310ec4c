"""The published figures: typed a second time here, and held against the paper's own arithmetic."""

import math
import re
from collections import Counter
from pathlib import Path

import pytest

from alignmixup.report import paper
from alignmixup.report.paper import FIGURES, METHODS

OURS = ("alignmixup", "alignmixup-ae")
C100 = {"data": "cifar100", "network": "r18"}
FOUR = ("det_acc_half", "auroc", "aupr_id", "aupr_ood")
PAIRS = (
    ("cifar10", "r18"),
    ("cifar10", "wrn16-8"),
    ("cifar100", "r18"),
    ("cifar100", "wrn16-8"),
    ("tiny", "r18"),
)


def find(**place):
    """Every cell that has all these values."""
    return [f for f in FIGURES if all(getattr(f, k) == v for k, v in place.items())]


def published(**place):
    """The value of the one printed cell that has all these values, None where there is none."""
    printed = [f.value for f in find(**place) if f.value is not None]
    assert len(printed) <= 1, f"several cells have {place}"
    return printed[0] if printed else None


def test_every_cell_is_there_once():
    count = Counter(f.table for f in FIGURES)
    assert count == {
        "cls": 55,
        "cls-imgnet": 33,
        "cls-300": 9,
        "adv": 99,
        "ood": 132,
        "ood_extra": 176,
        "wsol": 26,
        "ablation": 44,
        "imgnet": 9,
        "levit": 5,
        "supp-calibration": 22,
        "iterations": 8,
        "detection": 4,
        "logs": 5,
    }
    keys = [
        (f.table, f.data, f.network, f.method, f.metric, f.source, f.layers, f.aligned, f.num_iters)
        for f in FIGURES
    ]
    assert len(set(keys)) == len(keys)


def test_dashes_are_the_printed_ones():
    empty = Counter(f.table for f in FIGURES if f.value is None)
    assert empty == {"cls-imgnet": 3, "adv": 1, "wsol": 3, "ablation": 8}
    assert published(table="adv", data="tiny", method="comixup", metric="fgsm_error") is None


def test_names_are_known():
    assert {f.method for f in FIGURES} == set(METHODS)
    assert len(set(METHODS.values())) == len(METHODS)
    assert {f.data for f in FIGURES} == set(paper.DATA)
    assert {f.network for f in FIGURES} == set(paper.NETWORKS)
    assert {f.source for f in FIGURES} - {""} == set(paper.SOURCES)
    assert {f.table for f in FIGURES} == set(paper.TABLES)
    assert {f.metric for f in FIGURES} == set(paper.METRICS)
    shares = [f for f in FIGURES if f.value is not None and paper.METRICS[f.metric].unit == "%"]
    assert all(0 < f.value < 100 for f in shares)


@pytest.mark.parametrize(
    ("table", "method", "values"),
    [
        ("cls", "baseline", [5.19, 5.11, 23.24, 20.63, 43.40]),
        ("cls", "puzzlemix", [2.93, 2.99, 20.01, 19.25, 36.52]),
        ("cls", "alignmixup", [2.95, 3.09, 18.29, 18.77, 33.13]),
        ("cls", "alignmixup-ae", [2.83, 3.15, 17.82, 18.09, 32.73]),
        ("cls-imgnet", "baseline", [25, 418, 23.68]),
        ("cls-imgnet", "comixup", [25, 1022, None]),
        ("cls-imgnet", "saliencymix", [25, 462, 21.26]),
        ("cls-imgnet", "alignmixup", [25, 450, 20.68]),
        ("cls-imgnet", "alignmixup-ae", [35, 688, 18.83]),
        ("cls-300", "manifold", [21.64]),
        ("cls-300", "alignmixup", [21.38]),
        ("adv", "baseline", [89.41, 88.02, 87.12, 72.81, 91.85, 99.99, 99.94, 99.97, 99.99]),
        ("adv", "comixup", [60.19, 58.93, 77.61, 56.59, None, 97.59, 96.19, 95.35, 94.23]),
        ("adv", "alignmixup-ae", [52.13, 54.86, 76.40, 55.44, 78.98, 97.16, 95.32, 91.69, 92.23]),
        (
            "ood",
            "baseline",
            [54.0, 47.1, 54.5, 45.6, 66.5, 72.3, 74.5, 69.2, 61.2, 64.8, 67.8, 60.6],
        ),
        (
            "ood",
            "alignmixup-ae",
            [76.9, 83.5, 86.7, 79.4, 75.6, 84.1, 85.9, 81.7, 79.7, 88.0, 89.7, 85.7],
        ),
        ("wsol", "acol", [45.9, None, 57.4, None]),
        ("wsol", "adl", [52.4, None, 61.3, 58.4]),
        ("wsol", "cutout", [45.8, 52.4]),
        ("wsol", "alignmixup", [53.1, 56.2, 63.8, 65.4]),
        ("imgnet", "baseline", [24.03]),
        ("imgnet", "alignmixup", [22.0]),
        ("levit", "baseline", [67.4]),
        ("levit", "alignmixup", [69.9]),
        ("supp-calibration", "baseline", [10.25, 1.11]),
        ("supp-calibration", "alignmixup", [5.78, 0.41]),
        ("supp-calibration", "alignmixup-ae", [5.06, 0.48]),
        ("iterations", "alignmixup", [80.98, 80.96, 81.31, 81.42, 81.71, 81.50, 81.34, 81.28]),
        ("detection", "cutmix", [77.6, 35.16]),
        ("detection", "alignmixup", [78.4, 35.84]),
        ("logs", "alignmixup", [96.89, 96.77, 81.47, 80.18, 65.24]),
    ],
)
def test_rows_typed_a_second_time(table, method, values):
    assert [f.value for f in find(table=table, method=method)] == values


@pytest.mark.parametrize(
    ("source", "method", "values"),
    [
        ("lsun-resize", "baseline", (67.6, 73.3, 76.6, 68.9)),
        ("tiny-resize", "saliencymix", (75.3, 81.2, 83.8, 79.5)),
        ("uniform", "input", (50.0, 67.9, 71.8, 71.7)),
        ("gaussian", "alignmixup-ae", (86.0, 87.2, 91.9, 75.6)),
    ],
)
def test_further_sources(source, method, values):
    cells = find(table="ood_extra", source=source, method=method)
    assert {f.metric: f.value for f in cells} == dict(zip(FOUR, values, strict=True))


@pytest.mark.parametrize(
    ("method", "layers", "unaligned", "aligned"),
    [
        ("baseline", "", 76.76, None),
        ("alignmixup", "x-e", 80.81, None),
        ("alignmixup", "x-A", 80.34, 81.71),
        ("alignmixup", "x-A-e", 80.33, 81.92),
        ("alignmixup", "x-A-E", 80.46, 81.36),
        ("alignmixup-ae", "x-A2-e", 81.47, 81.20),
        ("alignmixup-ae", "x-A8-e", 80.49, 82.20),
        ("alignmixup-vae", "x-musigma", 81.81, None),
        ("alignmixup-vae", "x-A-musigma", 81.00, 81.89),
    ],
)
def test_ablation_by_layers(method, layers, unaligned, aligned):
    for is_aligned, value in ((False, unaligned), (True, aligned)):
        got = published(table="ablation", method=method, layers=layers, aligned=is_aligned)
        assert got == value


# The Gain rows as printed; a cell is named by what find() needs.
GAINS = {
    **{
        ("cls", "top1_error", *pair, ""): gain
        for pair, gain in zip(PAIRS, (0.06, -0.10, 1.52, 1.14, 1.76), strict=True)
    },
    **{
        ("adv", "fgsm_error", *pair, ""): gain
        for pair, gain in zip(PAIRS, (4.98, 1.26, 3.31, 1.40, 1.76), strict=True)
    },
    **{
        ("adv", "pgd_error", *pair, ""): gain
        for pair, gain in zip(PAIRS[:4], (1.80, 0.87, 1.48, 1.60), strict=True)
    },
    **{
        (table, metric, "cifar100", "r18", source): gain
        for table, source, gains in (
            ("ood", "lsun-crop", (6.1, 3.8, 3.0, 4.5)),
            ("ood", "isun", (1.7, 1.7, 2.2, 1.9)),
            ("ood", "tiny-crop", (4.4, 3.2, 2.6, 3.8)),
            ("ood_extra", "lsun-resize", (2.1, 2.7, 1.0, 1.4)),
            ("ood_extra", "tiny-resize", (0.9, 3.6, 3.4, 2.8)),
            ("ood_extra", "uniform", (3.5, 3.0, 4.9, 2.5)),
            ("ood_extra", "gaussian", (1.9, 2.8, 2.4, -3.9)),
        )
        for metric, gain in zip(FOUR, gains, strict=True)
    },
    ("cls-imgnet", "top1_error", "imagenet", "r50", ""): 2.41,
    ("imgnet", "top1_error", "imagenet", "r50", ""): 0.39,
    ("wsol", "top1_loc", "cub200", "vgg", ""): 0.6,
    ("wsol", "top1_loc", "cub200", "r50", ""): 1.4,
    ("wsol", "maxboxacc_v2", "cub200", "vgg", ""): 1.2,
    ("wsol", "maxboxacc_v2", "cub200", "r50", ""): 0.6,
    ("supp-calibration", "ece", "cifar100", "r18", ""): 0.77,
    ("supp-calibration", "oe", "cifar100", "r18", ""): 0.14,
}
# What the cells of the table give where the printed gain is another.
WRONG_GAINS = {
    ("ood", "aupr_ood", "cifar100", "r18", "tiny-crop"): 3.7,
    ("ood_extra", "det_acc_half", "cifar100", "r18", "lsun-resize"): 1.2,
    ("ood_extra", "auroc", "cifar100", "r18", "gaussian"): 2.5,
}


def gain_over(key, rivals=None):
    """Our best figure against the best of ``rivals`` (all others), positive where ours is better"""
    table, metric, data, network, source = key
    cells = find(table=table, metric=metric, data=data, network=network, source=source)
    sign = {"lower": -1, "higher": 1}[paper.METRICS[metric].better]
    scores = {f.method: sign * f.value for f in cells if f.value is not None}
    others = rivals or [m for m in scores if m not in OURS]
    best = max(scores[m] for m in OURS if m in scores)
    return round(best - max(scores[m] for m in others), 2)


@pytest.mark.parametrize("key", GAINS, ids="-".join)
def test_printed_gains_follow_from_the_cells(key):
    got = gain_over(key)
    if key in WRONG_GAINS:
        assert got == WRONG_GAINS[key] != GAINS[key]
        # All three slips are right against PuzzleMix, as if SaliencyMix came in afterwards.
        assert gain_over(key, ["puzzlemix"]) == GAINS[key]
    else:
        assert got == GAINS[key]


def test_tables_agree_with_each_other():
    def error(method):
        return published(table="cls", method=method, **C100)

    for method in ("baseline", "manifold", "stylecutmix"):
        accuracy = published(table="ablation", method=method)
        assert math.isclose(accuracy, 100 - error(method))
    headline = {"alignmixup": "x-A", "alignmixup-ae": "x-A-e"}
    for method, layers in headline.items():
        accuracy = published(table="ablation", method=method, layers=layers, aligned=True)
        assert math.isclose(accuracy, 100 - error(method))
    default = published(table="iterations", num_iters=100)
    assert math.isclose(default, 100 - error("alignmixup"))
    for aligned in (False, True):
        rows = [
            published(table="ablation", method="alignmixup-ae", layers=layers, aligned=aligned)
            for layers in ("x-A-e", "x-A4-e")
        ]
        assert rows[0] == rows[1]


def test_the_best_epoch_is_not_below_the_median_of_the_last_ten():
    for median in find(table="logs"):
        best = 100 - published(
            table="cls", data=median.data, network=median.network, method="alignmixup"
        )
        assert 0.1 < best - median.value < 1.7


def test_gains_in_the_text_that_hold():
    cls = {m: published(table="cls", method=m, **C100) for m in METHODS}
    assert math.isclose(cls["stylecutmix"] - cls["alignmixup"], 1.05)
    imagenet = {m: published(table="cls-imgnet", method=m, metric="top1_error") for m in METHODS}
    assert math.isclose(imagenet["manifold"] - imagenet["alignmixup"], 1.82)
    assert math.isclose(imagenet["alignmixup"] - imagenet["alignmixup-ae"], 1.85)
    levit = {f.method: f.value for f in find(table="levit")}
    assert math.isclose(levit["alignmixup"] - levit["input"], 1.6, abs_tol=1e-9)
    assert math.isclose(levit["cutmix"] - levit["baseline"], 1.3, abs_tol=1e-9)


def test_notes():
    def notes(table, **where):
        return {f.method: f.note for f in find(table=table, **where) if f.note}

    assert notes("cls", data="tiny") == {
        **dict.fromkeys(
            ("baseline", "input", "cutmix", "manifold", "puzzlemix", "comixup"),
            "reported by Co-Mixup",
        ),
        "alignmixup": "best test epoch",
    }
    assert notes("cls", data="cifar10") == {"alignmixup": "best test epoch"}
    assert set(notes("cls-imgnet")) == {"input", "cutmix", "manifold", "puzzlemix", "saliencymix"}
    assert set(notes("adv")) == {"baseline", "input", "cutmix", "manifold", "puzzlemix"}
    assert set(notes("wsol")) == {"cutout"}
    assert set(notes("logs").values()) == {"median of the last ten epochs"}


def test_a_table_is_found_by_name():
    assert paper.find("cls") == find(table="cls")
    with pytest.raises(ValueError, match="no table 'table1'; choose from cls, "):
        paper.find("table1")


def ood(method, source, table="ood_extra"):
    return [f.value for f in find(table=table, method=method, source=source)]


def cell(table, method, metric, **where):
    return published(table=table, method=method, metric=metric, **where)


def both_ways(method, network):
    return cell("cls", method, "top1_error", data="cifar10", network=network)


def ae_below_stylecutmix():
    cells = find(table="ablation", method="alignmixup-ae", aligned=False)
    return {f.layers for f in cells if f.value < 80.66}


def num_cases(layers):
    """The clean case, and one for each layer, but two for A: either image may be the kept one."""
    return 1 + sum(2 if layer == "A" else 1 for layer in layers.split("-"))


CHECKS = {
    "gain-tiny-crop-aupr-ood": lambda: (
        gain_over(("ood", "aupr_ood", "cifar100", "r18", "tiny-crop")) == 3.7
        and gain_over(("ood", "aupr_ood", "cifar100", "r18", "tiny-crop"), ["saliencymix"]) == 3.7
    ),
    "gain-lsun-resize-det": lambda: (
        gain_over(("ood_extra", "det_acc_half", "cifar100", "r18", "lsun-resize")) == 1.2
    ),
    "gain-gaussian-auroc": lambda: (
        gain_over(("ood_extra", "auroc", "cifar100", "r18", "gaussian")) == 2.5
    ),
    "second-best-lsun-resize": lambda: (
        83.7 == ood("alignmixup-ae", "lsun-resize")[3] < ood("saliencymix", "lsun-resize")[3]
        and ood("saliencymix", "lsun-resize")[3] == 84.4 < ood("alignmixup", "lsun-resize")[3]
    ),
    "ood-all-metrics": lambda: (
        round(ood("saliencymix", "gaussian")[3] - ood("alignmixup", "gaussian")[3], 1) == 3.9
        and ood("alignmixup", "isun", "ood")[0] < ood("puzzlemix", "isun", "ood")[0]
    ),
    "ood-input-below-baseline": lambda: all(
        mixed > plain
        for mixed, plain in zip(
            ood("input", "lsun-crop", "ood"), ood("baseline", "lsun-crop", "ood"), strict=True
        )
    ),
    "ood-lsun-repeated": lambda: (
        ood("saliencymix", "lsun-crop", "ood")[1:] == [79.7, 82.2, 64.4]
        and ood("saliencymix", "lsun-resize")[1:] == [79.7, 82.2, 84.4]
    ),
    "ood-noise-repeated": lambda: all(
        round(u - g, 1) == 0.1
        for u, g in zip(ood("puzzlemix", "uniform"), ood("puzzlemix", "gaussian"), strict=True)
    ),
    "cost-swapped": lambda: (
        [
            round(
                cell("cls-imgnet", m, "ms_per_batch")
                / cell("cls-imgnet", "alignmixup", "ms_per_batch"),
                1,
            )
            for m in ("comixup", "puzzlemix")
        ]
        == [2.3, 1.9]
    ),
    "cost-average": lambda: (
        cell("cls-imgnet", "comixup", "top1_error") is None
        and gain_over(("cls-imgnet", "top1_error", "imagenet", "r50", ""), ["puzzlemix"]) == 2.41
        and round(
            cell("cls-imgnet", "puzzlemix", "top1_error")
            - cell("cls-imgnet", "alignmixup", "top1_error"),
            2,
        )
        == 0.56
    ),
    "five-cases": lambda: (
        (num_cases("x-A"), num_cases("x-A-e")) == (4, 5)
        and 100 - cell("cls", "alignmixup-ae", "top1_error", **C100)
        == pytest.approx(
            cell("ablation", "alignmixup-ae", "top1", layers="x-A-e", aligned=True), abs=1e-9
        )
    ),
    "cifar10-sota": lambda: (
        all(
            both_ways(rival, network) < both_ways("alignmixup", network)
            for rival in ("puzzlemix", "comixup")
            for network in ("r18", "wrn16-8")
        )
        and max(both_ways(m, "wrn16-8") for m in ("puzzlemix", "comixup"))
        < both_ways("alignmixup-ae", "wrn16-8")
    ),
    "ae-any-layers": lambda: ae_below_stylecutmix() == {"A", "e", "x-A8-e"},
    "input-underconfident": lambda: (
        cell("supp-calibration", "input", "oe")
        == max(f.value for f in find(table="supp-calibration", metric="oe"))
        > cell("supp-calibration", "baseline", "oe")
    ),
    "cutout-missing": lambda: (
        round(cell("wsol", "alignmixup", "top1_loc", network="vgg") - 7.3, 1)
        == cell("wsol", "cutout", "top1_loc", network="vgg")
        and round(cell("wsol", "alignmixup", "top1_loc", network="r50") - 3.8, 1)
        == cell("wsol", "cutout", "top1_loc", network="r50")
    ),
    # Stem, pooling, layer 2 and layer 3 each halve 224 pixels; layer 4 halves once more or not.
    "layer4-stride": lambda: (224 // 2**4 // 2, 224 // 2**4 // 1) == (7, 14),
}


def test_every_discrepancy_is_checked():
    findings = Path(__file__).parents[2] / "docs" / "findings.md"
    _, _, listed = findings.read_text().partition("| name of the check |")
    assert re.findall(r"^\| `([\w-]+)` \|", listed, re.M) == [*CHECKS]


@pytest.mark.parametrize("name", CHECKS)
def test_discrepancies_hold(name):
    assert CHECKS[name]()
