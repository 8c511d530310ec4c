"""MultiMix and its dense form: the laws of their weights, and the tapped form as an oracle."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alignmixup.contracts import fusing, soft_cross_entropy, soft_targets
from alignmixup.hooks import peek
from alignmixup.mixers.multimix import (
    DenseMultiMix,
    MultiMix,
    attention_map,
    mix_columns,
    mix_positions,
    similarity,
)
from alignmixup.ops.philox import dirichlet
from cases import NUM_CLASSES, TinyNet, draw_case, images, labels

DENSE = DenseMultiMix(num_mixes=7, classifier="fc")


def net() -> TinyNet:
    return TinyNet("pool").double()


def batch() -> tuple[Tensor, Tensor]:
    return images(6, dtype=torch.float64), labels(6)


def weights_of(mixer: MultiMix, draw, shape, dim) -> Tensor:
    return dirichlet(draw.seed, draw.concentration, shape, dim=dim).double()


def test_mixing_logits_is_mixing_embeddings() -> None:
    """The identity that saves a tap: the tapped form, with embeddings mixed, agrees."""
    mixer, (x, y) = MultiMix(num_mixes=9), batch()
    draw, model = draw_case(mixer, "all", 6), net()
    mixed = mixer.apply(model, x, y, draw)
    weights = weights_of(mixer, draw, (6, 9), 0)
    with peek(model, "layer4") as peeked:
        model(x)
    embeddings = peeked.output.mean((2, 3))
    torch.testing.assert_close(mixed.logits, model.fc(weights.T @ embeddings))
    one_hot = torch.eye(NUM_CLASSES)[y].double()
    torch.testing.assert_close(mixed.targets.double(), weights.T @ one_hot)


def test_the_identity_matrix_does_not_mix() -> None:
    logits, targets = torch.randn(6, NUM_CLASSES), torch.eye(NUM_CLASSES)[labels(6)]
    mixed = mix_columns(logits, targets, torch.eye(6))
    assert torch.equal(mixed[0], logits)
    assert torch.equal(mixed[1], targets)


def test_two_images_are_manifold_mixup_of_the_embedding() -> None:
    lam = torch.tensor([[0.3], [0.7]])
    logits, targets = torch.randn(2, 4), torch.eye(4)[:2]
    mixed = mix_columns(logits, targets, lam)
    torch.testing.assert_close(mixed[0][0], 0.3 * logits[0] + 0.7 * logits[1])
    torch.testing.assert_close(mixed[1][0], 0.3 * targets[0] + 0.7 * targets[1])


@pytest.mark.parametrize("mixer", [MultiMix(num_mixes=7), DENSE])
def test_every_image_gets_a_gradient(mixer: MultiMix) -> None:
    x, y = batch()
    x.requires_grad_()
    mixer.apply(net().eval(), x, y, draw_case(mixer, "all", 6)).loss().backward()
    assert (x.grad.flatten(1).abs().sum(1) > 0).all()


@pytest.mark.parametrize("attention", ["gap", "cam", "uniform"])
def test_the_dense_form_is_a_loop_over_positions(attention: str) -> None:
    mixer = DenseMultiMix(num_mixes=5, classifier="fc", attention=attention)
    (x, y), model = batch(), net().eval()
    draw = draw_case(mixer, "all", 6)
    mixed = mixer.apply(model, x, y, draw)
    with peek(model, "layer4") as peeked:
        model(x)
    z, one_hot = peeked.output.flatten(2), soft_targets(y, NUM_CLASSES).double()
    weights = weights_of(mixer, draw, (16, 6, 5), 1)
    row = 0
    for j in range(16):
        for n in range(5):
            shares = []
            for i in range(6):
                u = z[i].mean(1) if attention == "gap" else model.fc.weight[y[i]]
                scores = (u @ z[i]).relu() if attention != "uniform" else torch.ones(16).double()
                total = scores.sum()
                a = scores[j] / total if total > 0 else torch.tensor(1 / 16)
                shares.append(a * weights[j, i, n])
            total = sum(shares)
            shares = torch.stack(
                [s / total if total > 0 else weights[j, i, n] for i, s in enumerate(shares)]
            )
            expected = model.fc(shares @ z[:, :, j])
            torch.testing.assert_close(mixed.logits[row], expected, atol=1e-5, rtol=1e-5)
            targets = mixed.targets[row].double()
            torch.testing.assert_close(targets, shares @ one_hot, atol=1e-5, rtol=1e-5)
            row += 1
    assert row == len(mixed.logits)
    torch.testing.assert_close(mixed.targets.sum(1), torch.ones(row))


def test_equal_weights_and_uniform_attention_pool_to_multimix() -> None:
    logits = torch.randn(16, 6, NUM_CLASSES)
    targets, uniform = torch.eye(NUM_CLASSES)[labels(6)], torch.full((6, 16), 1 / 16)
    weights = torch.rand(6, 8).softmax(0)
    dense, labels_of = mix_positions(logits, targets, uniform, weights.expand(16, 6, 8))
    plain, plain_labels = mix_columns(logits.mean(0), targets, weights)
    torch.testing.assert_close(dense.view(16, 8, -1).mean(0), plain)
    torch.testing.assert_close(labels_of.view(16, 8, -1)[3], plain_labels)


def test_a_column_without_attention_keeps_its_weights() -> None:
    weights = torch.rand(1, 6, 3).softmax(1)
    targets = torch.eye(6)
    _, labels_of = mix_positions(torch.randn(1, 6, 6), targets, torch.zeros(6, 1), weights)
    torch.testing.assert_close(labels_of, weights[0].T)
    away = similarity(-torch.ones(2, 3, 4), torch.ones(2, 3))
    assert torch.equal(away, torch.full((2, 4), 0.25))


def test_no_gradient_reaches_the_attention() -> None:
    """With every position equal but for attention, only the classifier's inputs get a gradient."""
    z, weight = (torch.randn(shape, requires_grad=True) for shape in ((6, 3, 2, 2), (6, 3)))
    for kind in ("gap", "cam", "uniform"):
        assert not attention_map(z, torch.eye(6), weight, kind).requires_grad
    x, y = batch()
    x.requires_grad_()
    model, draw = net().eval(), draw_case(DENSE, "all", 6)
    mixed = DENSE.apply(model, x, y, draw)
    assert not mixed.targets.requires_grad  # they depend on the attention alone
    assert mixed.logits.requires_grad


def test_a_wrong_classifier_is_named() -> None:
    x, y = images(6), labels(6)
    wrong = DenseMultiMix(num_mixes=3, classifier="layer1")
    with pytest.raises(ValueError, match="classifier 'layer1' is a Sequential"):
        wrong.apply(TinyNet("pool"), x, y, draw_case(wrong, "all", 6))
    with pytest.raises(ValueError, match="reads 128 features: choose the layer"):
        DENSE.apply(TinyNet(), x, y, draw_case(DENSE, "all", 6))
    missing = DenseMultiMix(num_mixes=3, classifier="head")
    with pytest.raises(ValueError, match=r"set classifier= .* perhaps classifier='fc'"):
        missing.apply(TinyNet("pool"), x, y, draw_case(missing, "all", 6))


@pytest.mark.parametrize("case", ["all", "input"])
def test_a_classifier_that_reads_no_mean_is_named(case: str) -> None:
    """What comes between the mean and the classifier would be left out of training."""
    x, y, draw = images(6), labels(6), draw_case(DENSE, case, 6)
    for between in (nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Sigmoid(), lambda mean: 2 * mean):
        model = TinyNet("pool")
        model.fc.register_forward_pre_hook(lambda _, given, b=between: b(given[0]))
        with pytest.raises(ValueError, match="does not read the mean of layer 'layer4'"):
            DENSE.apply(model, x, y, draw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_before_the_classifier_is_allowed(dtype: torch.dtype) -> None:
    x, y, model = images(6, dtype=dtype), labels(6), TinyNet("pool").to(dtype)
    model.fc.register_forward_pre_hook(lambda _, given: F.dropout(given[0], 0.3))
    assert DENSE.apply(model, x, y, draw_case(DENSE, "all", 6)).loss().isfinite()


def test_a_network_of_nan_has_a_loss_of_nan() -> None:
    model = TinyNet("pool")
    model.layer4.register_forward_hook(lambda *call: call[2] * float("nan"))
    loss = DENSE.apply(model, images(6), labels(6), draw_case(DENSE, "all", 6)).loss()
    assert loss.isnan()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_mixes": 0}, "num_mixes must be an integer >= 1"),
        ({"min_alpha": 3.0}, "min_alpha must be at most max_alpha"),
        ({"max_alpha": 0.0, "min_alpha": 0.0}, "alpha must be positive"),
        ({"prob": 1.5}, "prob must lie in"),
    ],
)
def test_settings_out_of_range(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiMix(**change)


def test_the_loss_is_the_mean_over_mixes() -> None:
    mixer, (x, y) = MultiMix(num_mixes=9), batch()
    mixed = mixer.apply(net(), x, y, draw_case(mixer, "all", 6))
    each = [
        soft_cross_entropy(z[None], t[None])
        for z, t in zip(mixed.logits, mixed.targets, strict=True)
    ]
    torch.testing.assert_close(mixed.loss(), torch.stack(each).mean())


@pytest.mark.slow
@pytest.mark.unchecked_shapes
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("attention", ["gap", "cam"])
def test_a_fused_step_is_the_plain_step(attention: str) -> None:
    mixer = DenseMultiMix(num_mixes=7, classifier="fc", attention=attention)
    draw, found = draw_case(mixer, "all", 6), []
    for is_fused in (False, True):
        model, (x, y) = net(), batch()
        with fusing(is_fused):
            loss = mixer.apply(model, x, y, draw).loss()
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0])
