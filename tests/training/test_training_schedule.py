"""The learning rate as a function of progress."""

import dataclasses
import math

import pytest

from alignmixup.training.optim import learning_rate_share
from alignmixup.training.settings import TrainSettings, differences

STEP = TrainSettings(epochs=2000, milestones=(500, 1000, 1500))
COSINE = TrainSettings(epochs=200, schedule="cosine", milestones=())
LINEAR = TrainSettings(
    epochs=10, schedule="linear", milestones=(), points=((1, 0.5), (3, 1.0), (3, 0.2), (7, 0.0))
)


@pytest.mark.parametrize(
    ("epoch", "share"),
    [(0, 1), (499.99, 1), (500, 0.1), (999.9, 0.1), (1000, 0.01), (1500, 0.001), (1999.9, 0.001)],
)
def test_step_schedule_drops_at_the_papers_epochs(epoch, share):
    assert learning_rate_share(STEP, epoch) == pytest.approx(share)


def test_cosine_runs_from_one_to_zero():
    assert learning_rate_share(COSINE, 0) == 1
    assert learning_rate_share(COSINE, 100) == pytest.approx(0.5)
    assert learning_rate_share(COSINE, 200) == learning_rate_share(COSINE, 201) == pytest.approx(0)
    shares = [learning_rate_share(COSINE, e / 7) for e in range(1400)]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("settings", [STEP, COSINE])
def test_warm_up_rises_linearly_then_meets_the_schedule(settings):
    warm = dataclasses.replace(settings, warmup_epochs=5.0)
    assert [learning_rate_share(warm, e) for e in (0, 1, 2.5, 5)] == [0, 0.2, 0.5, 1]
    assert learning_rate_share(warm, settings.epochs) == pytest.approx(
        learning_rate_share(settings, settings.epochs), abs=1e-9
    )


def test_warm_cosine_is_the_cosine_of_what_is_left():
    warm = dataclasses.replace(COSINE, warmup_epochs=20.0)
    assert learning_rate_share(warm, 65) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": -1}, "batch_size"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": float("nan")}, "lr must be positive"),
        ({"momentum": -0.1}, "momentum"),
        ({"schedule": "linear"}, "'linear'"),
        ({"precision": "fp8"}, "'fp8'"),
        ({"milestones": (10, 5)}, "milestones must be increasing epochs from 1 on"),
        ({"milestones": (-5, 0)}, "milestones must be increasing epochs"),
        ({"momentum": 1.5}, "momentum must be less than 1"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum above 0"),
        ({"clip_norm": 0.0}, "clip_norm must be positive, or None"),
        ({"classifier_lr": -1.0}, "classifier_lr must be positive, or None"),
        (
            {"classifier_lr": 0.001, "min_lr": 0.01},
            r"min_lr must not exceed classifier_lr \(0.001\), got 0.01",
        ),
        ({"seed": 2**62}, "seed must be from"),
        ({"seed": -(2**62)}, "seed must be from"),
        ({"partners": "batch", "compile": True}, "partners='batch' cannot be compiled"),
        ({"compile": "yes"}, r"compile must be True or False or 'auto', got 'yes'"),
    ],
)
def test_settings_that_cannot_be_are_named(change, named):
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(STEP, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2**62 - 1},
        {"classifier_lr": 0.01, "min_lr": 0.01},
        {"min_lr": 0.1},
        {"compile": True},
        {"partners": "batch", "compile": "auto"},
        {"ema": 0.0},
    ],
)
def test_settings_at_the_edge_are_taken(change):
    assert dataclasses.replace(STEP, **change) != STEP


def test_a_record_may_have_settings_where_another_has_none():
    assert differences({"a": {"b": 1}}, {"a": None}) == ["a: {'b': 1} before, None now"]
    assert differences({}, {"a": {"b": 1}}) == ["a: None before, {'b': 1} now"]
    assert differences({"a": {"b": 1}}, {"a": {"b": 2}}) == ["a.b: 1 before, 2 now"]
    assert differences({"a": {"b": (1, (2,))}}, {"a": {"b": [1, [2]]}}) == []


@pytest.mark.parametrize(
    ("epoch", "share"),
    [(0, 0.5), (1, 0.5), (2, 0.75), (2.999, 0.99975), (3, 0.2), (5, 0.1), (7, 0), (9.9, 0)],
)
def test_linear_schedule_goes_through_its_points_and_jumps_where_an_epoch_stands_twice(
    epoch, share
):
    assert learning_rate_share(LINEAR, epoch) == pytest.approx(share)


@pytest.mark.parametrize(
    "changes",
    [
        {"points": ()},
        {"schedule": "cosine"},
        {"points": ((3, 0.1), (2, 0.1))},
        {"points": ((0, -0.1), (2, 0.1))},
        {"points": ((0, 1.0), (float("inf"), 0.1))},
        {"points": ((0, float("nan")), (2, 0.1))},
    ],
)
def test_points_that_make_no_schedule_are_refused(changes):
    with pytest.raises(ValueError, match="points"):
        dataclasses.replace(LINEAR, **changes)


def test_a_warm_up_longer_than_the_run_is_cut_to_half_of_it():
    short = TrainSettings(epochs=2, milestones=(500, 1000), warmup_epochs=5.0).fitted()
    assert (short.warmup_epochs, short.epochs) == (1.0, 2)
    assert [learning_rate_share(short, e) for e in (0, 0.5, 1, 1.9)] == [0, 0.5, 1, 1]
    for settings in (STEP, dataclasses.replace(STEP, warmup_epochs=5.0), short):
        assert settings.fitted() == settings
