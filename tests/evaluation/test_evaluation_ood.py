"""Out-of-distribution metrics against scikit-learn and hand-made cases; the sources of noise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn

from alignmixup.evaluation import Pixels
from alignmixup.evaluation.outliers import Outliers, center_crop, noise, noisy_images, resize
from alignmixup.evaluation.tasks.ood import (
    SCORES,
    ood,
    ood_from_logits,
    score_histogram,
    separation_metrics,
)


def compare(model, inside, outside, name, *, seed=None, **how):
    """Every metric of one source of outliers."""
    return ood(model, inside, [Outliers(name, lambda n: outside, seed)], **how)


def by_name(results):
    return {r.metric: r.value for r in results}


# Few distinct values, so that ties within and between the sets are the rule.
scores = st.lists(st.integers(0, 6), min_size=1, max_size=30).map(
    lambda values: torch.tensor(values, dtype=torch.float64) / 8
)


# Laws


@given(scores)
def test_identical_distributions_cannot_be_told_apart(q):
    values = separation_metrics(q, q)
    assert values["auroc"] == pytest.approx(50)
    assert values["det_acc_best"] == pytest.approx(50)
    assert values["fpr95"] >= 95 - 1e-9


@given(scores, scores)
def test_swapping_the_sets_and_the_sign_swaps_the_metrics(inside, outside):
    a, b = separation_metrics(inside, outside), separation_metrics(-outside, -inside)
    assert a["auroc"] == pytest.approx(b["auroc"])
    assert a["aupr_id"] == pytest.approx(b["aupr_ood"])
    assert a["aupr_ood"] == pytest.approx(b["aupr_id"])
    assert a["auroc"] + separation_metrics(outside, inside)["auroc"] == pytest.approx(100)


@given(scores, scores)
def test_metrics_depend_on_the_order_alone(inside, outside):
    a = separation_metrics(inside, outside)
    b = separation_metrics(inside.exp(), outside.exp())
    assert a == pytest.approx(b)


@given(scores, scores)
def test_the_balanced_prior_ignores_the_size_of_a_set(inside, outside):
    assert separation_metrics(inside, outside) == pytest.approx(
        separation_metrics(inside, outside.repeat(3))
    )


@given(scores)
def test_priors_agree_on_sets_of_equal_size(q):
    other = q.flip(0) * 0.7
    balanced = separation_metrics(q, other, prior="balanced")
    assert balanced == pytest.approx(separation_metrics(q, other, prior="empirical"))


def test_separated_sets_are_told_apart():
    values = separation_metrics(torch.tensor([0.8, 0.9]), torch.tensor([0.1, 0.2, 0.3]))
    assert values.pop("fpr95") == 0
    assert set(values.values()) == {100.0}


# Agreements


@given(scores, scores)
@settings(max_examples=60)
def test_areas_equal_scikit_learn(inside, outside):
    q = np.concatenate([inside, outside])
    is_id = np.r_[np.ones(len(inside)), np.zeros(len(outside))]
    balanced = np.r_[np.full(len(inside), 1 / len(inside)), np.full(len(outside), 1 / len(outside))]
    for prior, weight in (("balanced", balanced), ("empirical", None)):
        ours = separation_metrics(inside, outside, prior=prior)
        assert ours["auroc"] == pytest.approx(100 * roc_auc_score(is_id, q))
        expected = average_precision_score(is_id, q, sample_weight=weight)
        assert ours["aupr_id"] == pytest.approx(100 * expected)
        expected = average_precision_score(1 - is_id, -q, sample_weight=weight)
        assert ours["aupr_ood"] == pytest.approx(100 * expected)


@given(scores, scores)
@settings(max_examples=60)
def test_thresholds_equal_a_search_over_all_of_them(inside, outside):
    deltas = [*inside.tolist(), *outside.tolist(), float("inf")]
    rates = [
        (float((inside >= d).double().mean()), float((outside >= d).double().mean()))
        for d in deltas
    ]
    values = separation_metrics(inside, outside)
    best = max(0.5 * tpr + 0.5 * (1 - fpr) for tpr, fpr in rates)
    assert values["det_acc_best"] == pytest.approx(100 * best)
    largest = max(d for d, (tpr, _) in zip(deltas, rates, strict=True) if tpr >= 0.95 - 1e-12)
    fpr = float((outside >= largest).double().mean())
    assert values["fpr95"] == pytest.approx(100 * fpr)


def test_a_small_case_by_hand():
    values = separation_metrics(torch.tensor([0.9, 0.6, 0.4]), torch.tensor([0.6, 0.1]))
    # Pairs ID > OOD: 2 + (0.5 + 1) + (0 + 1) = 4.5 of 6.
    assert values["auroc"] == pytest.approx(75)
    # delta = 0.4: all ID kept, half of the OOD kept.
    assert values["det_acc_best"] == pytest.approx(75)
    assert values["fpr95"] == pytest.approx(50)
    # Precisions from rates: 1, (2/3)/(2/3 + 1/2), 1/(1 + 1/2).
    assert values["aupr_id"] == pytest.approx(100 * (1 + 4 / 7 + 2 / 3) / 3)
    # OOD positive: 0.1 first with precision 1; 0.6 with OOD rate 1, ID rate 2/3.
    assert values["aupr_ood"] == pytest.approx(100 * (1 + 3 / 5) / 2)


def test_detection_accuracy_at_one_half_by_hand():
    def logits(q):  # two classes, max softmax = q
        return torch.stack([torch.log(q), torch.log1p(-q)], dim=1)

    # With two classes max softmax is never below 1/2; with three it is.
    three = torch.tensor([[0.4, 0.3, 0.3], [0.45, 0.45, 0.1], [0.8, 0.1, 0.1]]).log()
    two = torch.cat([logits(torch.tensor([0.9, 0.7])), torch.full((2, 1), -50.0)], dim=1)
    values = by_name(ood_from_logits(two, three, "made"))
    assert values["det_acc_half"] == pytest.approx(50 * (1 + 2 / 3))
    exactly_half = torch.tensor([[0.0, 0.0, -1000.0]])
    values = by_name(ood_from_logits(exactly_half, exactly_half, "made"))
    assert values["det_acc_half"] == 50  # 0.5 is called ID: right for one, wrong for the other


def test_scores_by_their_formulas():
    z = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, 0.0]], dtype=torch.float64)
    p = z.exp() / z.exp().sum(dim=1, keepdim=True)
    torch.testing.assert_close(SCORES["max_softmax"](z), p.max(dim=1).values)
    torch.testing.assert_close(SCORES["energy"](z), z.exp().sum(dim=1).log())
    torch.testing.assert_close(SCORES["entropy"](z), (p * p.log()).sum(dim=1))
    for score in SCORES.values():  # confident beats indifferent
        assert score(z)[0] > score(z)[1]


def test_confident_scores_do_not_tie_in_float32():
    inside = torch.tensor([[30.0, 0.0], [28.0, 0.0]])
    outside = torch.tensor([[25.0, 0.0], [20.0, 0.0]])
    assert inside.softmax(1).max() == outside[:1].softmax(1).max() == 1  # float32 cannot tell
    assert by_name(ood_from_logits(inside, outside, "made"))["auroc"] == 100
    assert by_name(ood_from_logits(outside, inside, "made"))["auroc"] == 0


# The whole task


class Brightness(nn.Module):
    """Confident on bright images."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(20.0))

    def forward(self, x):
        bright = x.mean(dim=(1, 2, 3)) * self.gain
        return torch.stack([bright, torch.zeros_like(bright), torch.zeros_like(bright)], dim=1)


def test_the_task_reads_images_with_or_without_labels():
    bright = 0.9 + 0.1 * torch.rand(20, 3, 4, 4)
    dark = 0.1 * torch.rand(30, 3, 4, 4)
    results = compare(Brightness(), [(bright, torch.zeros(20))], list(dark.split(7)), "dark")
    values = by_name(results)
    assert values["auroc"] == 100
    assert values["det_acc_best"] == 100
    assert values["fpr95"] == 0
    assert results[0].settings == {
        "source": "dark",
        "score": "max_softmax",
        "prior": "balanced",
        "num_id": 20,
        "num_ood": 30,
        "amp_dtype": None,
    }
    how = {"score": "energy", "prior": "empirical"}
    energy = compare(Brightness(), [bright], [dark], "dark", **how)
    assert by_name(energy)["auroc"] == 100
    assert "det_acc_half" not in by_name(energy)
    assert {r.settings["score"] for r in energy} == {"energy"}


def test_bad_input_is_explained():
    images = [torch.rand(4, 3, 4, 4)]
    with pytest.raises(ValueError, match=r"out-of-distribution source 'lsun'.*no images"):
        compare(Brightness(), images, [], "lsun")
    with pytest.raises(ValueError, match="no images"):
        compare(Brightness(), [], images, "lsun")
    with pytest.raises(ValueError, match="unknown score 'odin'"):
        compare(Brightness(), images, images, "lsun", score="odin")
    with pytest.raises(ValueError, match="prior must be"):
        separation_metrics(torch.rand(3), torch.rand(3), prior="equal")
    with pytest.raises(ValueError, match="3 in-distribution and 0 out"):
        separation_metrics(torch.rand(3), torch.rand(0))
    for bad in (torch.nan, torch.inf):
        one_bad = torch.tensor([0.5, bad])
        for sets in ((one_bad, torch.rand(3)), (torch.rand(3), one_bad)):
            with pytest.raises(ValueError, match="finite"):
                separation_metrics(*sets)


# Sources


def normal_cdf(z):
    return 0.5 * (1 + torch.erf(torch.tensor(z / 2**0.5))).item()


def test_noise_has_the_stated_distribution():
    n = 200 * 3 * 16 * 16
    five_sigma = 5 * 0.5 / n**0.5
    uniform = torch.cat(list(noise("uniform", 200, (3, 16, 16), seed=0)))
    assert uniform.shape == (200, 3, 16, 16)
    for level in (0.1, 0.5, 0.9):
        assert float((uniform < level).double().mean()) == pytest.approx(level, abs=five_sigma)
    gaussian = torch.cat(list(noise("gaussian", 200, (3, 16, 16), seed=1)))
    assert gaussian.min() == 0
    assert gaussian.max() == 1
    for level in (0.25, 0.5, 0.75):
        share = float((gaussian < level).double().mean())
        assert share == pytest.approx(normal_cdf((level - 0.5) / 0.5), abs=five_sigma)
    clipped = float((gaussian == 0).double().mean())
    assert clipped == pytest.approx(normal_cdf(-0.5 / 0.5), abs=five_sigma)


def test_noise_repeats_by_its_seed():
    made = noise("uniform", 600, (3, 2, 2), seed=5)
    assert [len(batch) for batch in made] == [250, 250, 100]
    first, again = torch.cat(list(made)), torch.cat(list(made))
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.cat(list(noise("uniform", 600, (3, 2, 2), seed=6))))
    assert len(first.unique()) > 7000  # no batch repeats another


def test_noise_takes_any_shape_and_a_result_records_its_seed():
    made = noise("uniform", 7, (1, 4, 6), seed=5)
    assert torch.cat(list(made)).shape == (7, 1, 4, 6)
    x = torch.rand(6, 3, 4, 4)
    for made in (noise("uniform", 6, (3, 4, 4), seed=9), noisy_images([x], "uniform", seed=9)):
        results = compare(Brightness(), [x], made, "made", seed=9)
        assert {r.settings["seed"] for r in results} == {9}
    assert all("seed" not in r.settings for r in compare(Brightness(), [x], [x], "itself"))


def test_noisy_images_add_in_pixel_space():
    x = torch.rand(6, 3, 4, 4)
    noisy = torch.cat(list(noisy_images([(x, torch.zeros(6))], "uniform", seed=2)))
    added = torch.cat(list(noise("uniform", 6, (3, 4, 4), seed=2)))
    torch.testing.assert_close(noisy, (x + added).clamp(0, 1))


def test_noise_is_normalized_for_a_model_whose_loader_normalizes():
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)

    class Undo(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Brightness()

        def forward(self, x):
            return self.inner(Pixels(mean, std).restore(x))

    x = torch.rand(30, 3, 4, 4)
    made = noise("gaussian", 30, (3, 4, 4), seed=0)
    plain = by_name(compare(Brightness(), [x], made, "gaussian"))
    inside = [Pixels(mean, std).normalize(x)]
    normalized = compare(Undo(), inside, made, "gaussian", normalized_by=(mean, std))
    assert by_name(normalized) == pytest.approx(plain)


def test_a_source_that_is_skipped_leaves_the_others():
    x = torch.rand(6, 3, 4, 4)
    sources = [Outliers("gone", lambda n: None), Outliers("here", lambda n: [x[:n]])]
    assert {r.settings["source"] for r in ood(Brightness(), [x], sources)} == {"here"}
    with pytest.raises(ValueError, match="no out-of-distribution images"):
        ood(Brightness(), [x], sources[:1])


def test_center_crop_takes_the_middle():
    image = torch.arange(36).view(1, 1, 6, 6)
    assert center_crop(image, 2).flatten().tolist() == [14, 15, 20, 21]
    assert torch.equal(center_crop(image, 6), image)
    assert center_crop(image, (2, 4)).flatten().tolist() == [13, 14, 15, 16, 19, 20, 21, 22]
    with pytest.raises(ValueError, match="cannot crop 7 x 7 pixels from 6 x 6"):
        center_crop(image, 7)


def test_resize_agrees_with_pillow():
    from PIL import Image

    rng = torch.Generator().manual_seed(0)
    images = torch.randint(256, (3, 3, 64, 64), generator=rng, dtype=torch.uint8)
    ours = resize(images, 32)
    assert ours.dtype == torch.uint8
    for image, small in zip(images, ours, strict=True):
        pil = Image.fromarray(image.permute(1, 2, 0).numpy())
        theirs = np.asarray(pil.resize((32, 32), Image.Resampling.BILINEAR))
        # Pillow rounds after each of its two passes; we round once.
        gap = small.permute(1, 2, 0).int().numpy() - theirs.astype(np.int32)
        assert np.abs(gap).max() <= 1
    for value in (0, 255):
        plain = torch.full((1, 3, 37, 37), value, dtype=torch.uint8)
        assert (resize(plain, 32) == value).all()
        assert (resize(plain, 41) == value).all()
    floats = resize(images.float() / 255, 32)
    torch.testing.assert_close(floats, ours.float() / 255, atol=0.51 / 255, rtol=0)


def test_the_papers_detection_accuracy_comes_first():
    logits = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    metrics = [r.metric for r in ood_from_logits(logits, logits, "same")]
    assert metrics[0] == "det_acc_half"
    assert metrics.index("det_acc_best") > 0
    by_energy = [r.metric for r in ood_from_logits(logits, logits, "same", score="energy")]
    assert "det_acc_half" not in by_energy  # an energy has no threshold of 0.5


@given(values=st.lists(st.floats(-5, 5), min_size=1, max_size=30), split=st.integers(1, 30))
def test_a_histogram_counts_every_score_once(values, split):
    inside, outside = torch.tensor(values), torch.tensor(values[:split])
    made = score_histogram(inside, outside, num_bins=7)
    assert sum(made["id"]) == len(inside)
    assert sum(made["ood"]) == len(outside)
    assert len(made["edges"]) == 8
    assert len(made["id"]) == len(made["ood"]) == 7
    assert made["edges"] == sorted(made["edges"])
    if inside.min() < inside.max():
        ends = (made["edges"][0], made["edges"][-1])
        assert ends == pytest.approx((min(values), max(values)), abs=1e-6)
        other = score_histogram(outside, inside, num_bins=7)
        swapped = {"edges": made["edges"], "id": made["ood"], "ood": made["id"]}
        assert other == swapped


@pytest.mark.parametrize("prior", ["balanced", "empirical"])
@pytest.mark.parametrize("score", sorted(SCORES))
def test_the_metrics_of_logits_are_those_of_their_scores(score, prior):
    rng = torch.Generator().manual_seed(0)
    inside, outside = (torch.randn(n, 3, generator=rng, dtype=torch.float64) for n in (30, 11))
    found = by_name(ood_from_logits(2 * inside, outside, "other", score=score, prior=prior))
    sets = (SCORES[score](logits) for logits in (2 * inside, outside))
    expected = separation_metrics(*sets, prior=prior)
    assert {name: found[name] for name in expected} == expected


def test_the_histogram_is_in_the_settings_of_auroc_alone():
    logits = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    results = ood_from_logits(logits, 2 * logits, "other")
    assert [r.metric for r in results if "histogram" in r.settings] == ["auroc"]
    (auroc,) = (r for r in results if r.metric == "auroc")
    assert type(auroc).from_json(auroc.to_json()) == auroc  # plain numbers


@pytest.mark.parametrize("spread", [0.0, 1e-12, 1e-7, 0.5, 1e4])
def test_the_bins_of_a_histogram_have_a_width(spread):
    inside = 0.1 + spread * torch.linspace(0, 1, 9, dtype=torch.float64)
    made = score_histogram(inside, inside[3:6])
    widths = np.diff(made["edges"])
    assert (widths > 0).all()
    assert widths.max() < 1.1 * widths.min()
    assert (sum(made["id"]), sum(made["ood"])) == (9, 3)
