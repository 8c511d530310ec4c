"""Calibration: hand-made bins, loops over the formulas, torchmetrics away from the bin edges."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn import functional as F

from alignmixup.contracts import Result, Skipped
from alignmixup.evaluation.tasks.calibration import (
    Reliability,
    calibration,
    calibration_metrics,
    fit_temperature,
    reliability,
    temperature_scaling,
)


def sample_predictor(n=4000, k=5, seed=0, sharpness=1.0):
    """Logits, and labels drawn from softmax(sharpness * logits): calibrated at 1."""
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, k, generator=rng, dtype=torch.float64)
    p = (sharpness * logits).softmax(dim=1)
    return logits, torch.multinomial(p, 1, generator=rng).squeeze(1)


class Lookup(nn.Module):
    """Returns the logits whose number is written in the first pixel."""

    def __init__(self, logits):
        super().__init__()
        self.register_buffer("logits", logits)

    def forward(self, x):
        return self.logits[(x[:, 0, 0, 0] * 2**20).round().long()]


def lookup(logits, labels, batch_size=1000):
    x = torch.zeros(len(labels), 3, 1, 1, dtype=torch.float64)
    x[:, 0, 0, 0] = torch.arange(len(labels)) / 2**20
    batches = list(zip(x.split(batch_size), labels.split(batch_size), strict=True))
    return Lookup(logits), batches


def by_loop(confidence, correct, num_bins):
    """The definitions, bin by bin and image by image."""
    n = len(confidence)
    ece = oe = ue = mce = 0.0
    for m in range(num_bins):
        members = [
            i
            for i, p in enumerate(confidence)
            if m / num_bins < p <= (m + 1) / num_bins or (m == 0 and p == 0)
        ]
        if not members:
            continue
        conf = sum(confidence[i] for i in members) / len(members)
        acc = sum(correct[i] for i in members) / len(members)
        ece += len(members) / n * abs(acc - conf)
        oe += len(members) / n * conf * max(conf - acc, 0)
        ue += len(members) / n * conf * max(acc - conf, 0)
        mce = max(mce, abs(acc - conf))
    return {"ece": ece, "oe": oe, "ue": ue, "mce": mce}


# Laws


@pytest.mark.parametrize("num_bins", [10, 15, 20])
def test_a_calibrated_predictor_has_an_ece_below_its_sampling_error(num_bins):
    logits, labels = sample_predictor(n=20000)
    p, predicted = logits.softmax(dim=1).max(dim=1)
    diagram = reliability(p, predicted == labels, num_bins)
    # The accuracy of a bin of c images scatters by sqrt(conf (1 - conf) / c); three times that.
    bins = zip(diagram.counts, diagram.confidence, strict=True)
    bound = sum(c / 20000 * 3 * math.sqrt(p * (1 - p) / c) for c, p in bins if c)
    assert 0 < diagram.ece < bound
    sharper = calibration_metrics(2 * logits, labels, num_bins)[0]
    assert sharper["ece"] > 3 * 100 * bound
    assert sharper["oe"] > sharper["ue"]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 20),
)
def test_over_and_under_confidence_share_the_calibration_error(pairs, num_bins):
    confidence, correct = zip(*pairs, strict=True)
    diagram = reliability(
        torch.tensor(confidence, dtype=torch.float64), torch.tensor(correct), num_bins
    )
    assert diagram.oe + diagram.ue <= diagram.ece + 1e-12
    assert diagram.ece <= diagram.mce + 1e-12
    assert diagram.mce <= 1
    assert sum(diagram.counts) == len(pairs)
    filled = [
        (low, conf, high)
        for low, high, count, conf in zip(
            diagram.edges, diagram.edges[1:], diagram.counts, diagram.confidence, strict=False
        )
        if count
    ]
    assert all(low - 1e-12 <= conf <= high + 1e-12 for low, conf, high in filled)


@given(
    st.lists(
        st.tuples(
            st.one_of(st.floats(0, 1), st.integers(0, 30).map(lambda i: i / 30)), st.booleans()
        ),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([1, 2, 10, 15, 20]),
)
def test_errors_equal_the_formulas_by_loop(pairs, num_bins):
    confidence, correct = zip(*pairs, strict=True)
    diagram = reliability(
        torch.tensor(confidence, dtype=torch.float64), torch.tensor(correct), num_bins
    )
    for name, expected in by_loop(confidence, correct, num_bins).items():
        assert getattr(diagram, name) == pytest.approx(expected, abs=1e-12)


# By hand


def test_bins_are_closed_on_the_right():
    confidence = torch.tensor([0.0, 0.25, 0.2500001, 0.5, 0.75, 0.76, 1.0], dtype=torch.float64)
    diagram = reliability(confidence, torch.ones(7, dtype=torch.bool), num_bins=4)
    assert diagram.edges == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert diagram.counts == (2, 2, 1, 2)
    fifteenths = torch.arange(16, dtype=torch.float64) / 15
    diagram = reliability(fifteenths, torch.ones(16), num_bins=15)
    assert diagram.counts == (2, *[1] * 14)


def test_empty_bins_count_nothing():
    diagram = reliability(torch.tensor([0.95, 0.95]), torch.tensor([True, False]), num_bins=10)
    assert diagram.counts == (0,) * 9 + (2,)
    assert diagram.ece == pytest.approx(0.45)
    assert diagram.mce == pytest.approx(0.45)
    assert diagram.oe == pytest.approx(0.95 * 0.45)
    assert diagram.ue == 0


def test_certain_predictors():
    sure = torch.ones(4)
    right = reliability(sure, torch.ones(4))
    assert (right.ece, right.oe, right.ue, right.mce) == (0, 0, 0, 0)
    wrong = reliability(sure, torch.zeros(4))
    assert (wrong.ece, wrong.oe, wrong.ue, wrong.mce) == (1, 1, 0, 1)
    modest = reliability(torch.full((4,), 0.5), torch.ones(4), num_bins=2)
    assert (modest.ece, modest.oe, modest.ue) == (0.5, 0, 0.25)


def test_equal_logits_lie_on_their_edge():
    logits = torch.zeros(6, 2)  # confidence exactly 1/2, predicted class 0
    metrics = calibration_metrics(logits, torch.tensor([0, 0, 0, 1, 1, 1]), num_bins=2)[0]
    assert metrics["ece"] == 0
    assert metrics["nll"] == pytest.approx(math.log(2))
    assert metrics["brier"] == pytest.approx(0.5)
    _, batches = lookup(logits, torch.zeros(6).long())
    (ece, *_) = calibration(Lookup(logits), batches, num_bins=2)
    assert ece.settings["reliability"]["counts"] == (6, 0)


def test_nonmonotone_accuracy_keeps_bins_and_counts_together():
    # The low bin is always right, the high one never: sorting the columns apart would hide it.
    confidence = torch.tensor([0.6] * 10 + [0.9] * 30, dtype=torch.float64)
    correct = torch.tensor([True] * 10 + [False] * 30)
    diagram = reliability(confidence, correct, num_bins=10)
    assert diagram.ece == pytest.approx(0.25 * 0.4 + 0.75 * 0.9)


# Agreements


@pytest.fixture(scope="module")
def torchmetrics_functional():
    """torchmetrics imports torchvision, whose operators are absent beside some builds of torch."""
    from torchvision_schemas import define_torchvision_schemas

    define_torchvision_schemas()
    return pytest.importorskip("torchmetrics.functional.classification")


@pytest.mark.parametrize("num_bins", [10, 15, 20])
def test_ece_and_mce_equal_torchmetrics_away_from_the_edges(num_bins, torchmetrics_functional):
    logits, labels = sample_predictor(sharpness=0.6)
    p = logits.softmax(dim=1)
    metrics = calibration_metrics(logits, labels, num_bins)[0]
    for norm, name in (("l1", "ece"), ("max", "mce")):
        theirs = torchmetrics_functional.multiclass_calibration_error(
            p, labels, num_classes=5, n_bins=num_bins, norm=norm
        )
        assert metrics[name] == pytest.approx(100 * float(theirs), rel=1e-5)


def test_nll_and_brier_by_their_formulas():
    logits, labels = sample_predictor(n=200)
    p = logits.softmax(dim=1)
    metrics = calibration_metrics(logits.float(), labels)[0]
    assert metrics["nll"] == pytest.approx(float(-p[torch.arange(200), labels].log().mean()))
    brier = (p - F.one_hot(labels, 5)).square().sum(dim=1).mean()
    assert metrics["brier"] == pytest.approx(float(brier))


# Temperature


@pytest.mark.parametrize("sharpness", [0.25, 0.5, 1.0, 2.0])
def test_the_temperature_of_a_miscalibrated_predictor_is_found(sharpness):
    logits, labels = sample_predictor(n=20000, sharpness=sharpness)
    temperature = fit_temperature(logits, labels)
    # The slope of NLL has variance E[Var_p(z)]; four deviations of the estimate it implies.
    p = (sharpness * logits).softmax(dim=1)
    variance = (p * logits**2).sum(dim=1) - (p * logits).sum(dim=1) ** 2
    deviation = 1 / math.sqrt(float(variance.sum()))
    assert 1 / temperature == pytest.approx(sharpness, abs=4 * deviation)
    assert deviation < 0.025

    def nll(t):
        return float(F.cross_entropy(logits / t, labels))

    assert nll(temperature) <= min(nll(0.999 * temperature), nll(1.001 * temperature))
    grid = torch.logspace(-1, 1, 60, dtype=torch.float64)
    assert nll(temperature) <= min(nll(float(t)) for t in grid)


def test_temperature_scales_with_the_logits_and_ignores_shifts():
    logits, labels = sample_predictor(n=500)
    temperature = fit_temperature(logits, labels)
    assert fit_temperature(3 * logits, labels) == pytest.approx(3 * temperature)
    assert fit_temperature(logits + 1000, labels) == pytest.approx(temperature)


def test_a_nll_without_minimum_gives_the_bound():
    logits = 4 * torch.eye(3)
    assert fit_temperature(logits, torch.arange(3)) == 0.01
    assert fit_temperature(logits, torch.tensor([1, 2, 0])) == 100


def test_temperature_scaling_lowers_the_error_on_images_it_has_not_seen():
    logits, labels = sample_predictor(sharpness=0.4)
    model, batches = lookup(logits, labels)
    results = {r.metric: r for r in temperature_scaling(model, batches, held_out=0.25, seed=3)}
    values = {name: r.value for name, r in results.items()}
    assert values["temperature"] == pytest.approx(2.5, rel=0.1)
    assert values["ece"] < 0.3 * values["ece_before"]
    assert values["nll"] < values["nll_before"]
    assert results["ece"].settings["num_images"] == 3000
    assert sum(results["ece"].settings["reliability"]["counts"]) == 3000
    again = temperature_scaling(model, batches, held_out=0.25, seed=3)
    assert {r.metric: r.value for r in again} == values
    other = temperature_scaling(model, batches, held_out=0.25, seed=4)
    assert {r.metric: r.value for r in other} != values


def test_the_fit_sees_the_held_out_images_alone():
    logits, labels = sample_predictor(n=400, sharpness=0.4)
    model, batches = lookup(logits, labels)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(9))
    fit, rest = order[:100], order[100:]
    values = {r.metric: r.value for r in temperature_scaling(model, batches, held_out=0.25, seed=9)}
    assert values["temperature"] == fit_temperature(logits[fit], labels[fit])
    expected = calibration_metrics(logits[rest], labels[rest])[0]
    assert values["ece_before"] == pytest.approx(expected["ece"])


# The task, its records and bad input


def test_the_task_gives_percent_and_a_diagram_that_survives_json():
    logits, labels = sample_predictor(n=300)
    model, batches = lookup(logits, labels, batch_size=70)
    results = calibration(model, batches, num_bins=10)
    assert {r.metric: r.value for r in results} == calibration_metrics(logits, labels, 10)[0]
    p, predicted = logits.softmax(dim=1).max(dim=1)
    diagram = reliability(p, predicted == labels, 10)
    values = {r.metric: r.value for r in results}
    for metric in ("ece", "oe", "ue", "mce"):
        assert values[metric] == 100 * getattr(diagram, metric) > 0
    back = Result.from_json(results[0].to_json()).settings["reliability"]
    assert Reliability(**back).ece == diagram.ece
    assert json.loads(json.dumps(asdict(diagram)))["counts"] == list(diagram.counts)


def test_too_few_images_for_a_fit_are_a_reason_to_skip_it():
    model, batches = lookup(*sample_predictor(n=1))
    with pytest.raises(Skipped, match="of 1 images leaves 0 to fit and 1 to measure"):
        temperature_scaling(model, batches)
    for held_out in (0.25, 0.75):  # one image to fit, or one to measure
        model, batches = lookup(*sample_predictor(n=4))
        assert temperature_scaling(model, batches, held_out=held_out)[0].metric == "temperature"


def test_bad_input_is_explained():
    logits, labels = sample_predictor(n=10)
    model, batches = lookup(logits, labels)
    with pytest.raises(ValueError, match="num_bins must be at least 1, got 0"):
        calibration(model, batches, num_bins=0)
    with pytest.raises(ValueError, match=r"\[0, 1\], got \[0.5, 1.5\]"):
        reliability(torch.tensor([0.5, 1.5]), torch.ones(2))
    with pytest.raises(ValueError, match="got 2 and 3"):
        reliability(torch.rand(2), torch.ones(3))
    with pytest.raises(ValueError, match="got 0 and 0"):
        reliability(torch.rand(0), torch.ones(0))
    for share in (0.0, 1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"held_out must be a share .*, got {share}"):
            temperature_scaling(model, batches, held_out=share)
    with pytest.raises(ValueError, match="got none"):
        fit_temperature(torch.zeros(0, 3), torch.zeros(0).long())
