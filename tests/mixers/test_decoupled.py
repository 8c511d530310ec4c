"""The decoupled loss against a softmax over the kept classes, row by row, and its laws."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from alignmixup.contracts import Mixer, soft_cross_entropy
from alignmixup.mixers.comixup import CoMixup
from alignmixup.mixers.decoupled import Decoupled, decoupled_cross_entropy
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.label_smoothing import LabelSmoothing
from alignmixup.mixers.oneof import OneOf
from alignmixup.mixers.regmixup import RegMixup
from alignmixup.mixers.tokenmix import TokenMix
from cases import NUM_CLASSES, TinyNet, draw_case, images, labels


def two_hot(lam: Tensor, first: Tensor, second: Tensor, num_classes: int) -> Tensor:
    eye = torch.eye(num_classes, dtype=torch.float64)
    return lam[:, None] * eye[first] + (1 - lam)[:, None] * eye[second]


def batch(seed: int, num_classes: int = 7, b: int = 9) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(b, num_classes, generator=rng, dtype=torch.float64)
    lam = 0.05 + 0.9 * torch.rand(b, generator=rng, dtype=torch.float64)
    lam[0], lam[1] = 1.0, 0.5
    first, second = (torch.randint(num_classes, (b,), generator=rng) for _ in range(2))
    return z, two_hot(lam, first, second, num_classes)


def term(z: Tensor, t: Tensor, by_label: bool = True, smoothing: float = 0.0) -> Tensor:
    """The added term alone, by a weight of one."""
    loss = decoupled_cross_entropy(z, t, eta=1.0, by_label=by_label, smoothing=smoothing)
    return loss - soft_cross_entropy(z, t)


@pytest.mark.parametrize("by_label", [True, False])
@given(seed=st.integers(0, 99), num_classes=st.integers(2, 9))
def test_it_is_a_softmax_over_the_kept_classes(by_label: bool, seed: int, num_classes: int) -> None:
    z, t = batch(seed, num_classes)
    total = 0.0
    for row, target in zip(z, t, strict=True):
        mixed = [k for k in range(num_classes) if target[k] > 1e-3]
        if len(mixed) < 2:
            continue
        for i in mixed:
            kept = [i, *(k for k in range(num_classes) if k not in mixed)]
            weight = float(target[i]) if by_label else 1.0
            total -= weight * float(row[kept].log_softmax(0)[0])
    assert float(term(z, t, by_label)) == pytest.approx(total / len(z), abs=1e-10)


def test_no_eta_is_cross_entropy_bit_for_bit() -> None:
    draw = draw_case(InputMixup(), "input", 6)
    plain = InputMixup().apply(TinyNet(), images(6), labels(6), draw)
    same = Decoupled(InputMixup(), eta=0.0).apply(TinyNet(), images(6), labels(6), draw)
    assert torch.equal(plain.loss(), same.loss())
    more = Decoupled(InputMixup()).apply(TinyNet(), images(6), labels(6), draw)
    assert torch.equal(plain.logits, more.logits)
    assert torch.equal(plain.targets, more.targets)
    assert more.loss() > plain.loss()


@pytest.mark.parametrize("by_label", [True, False])
def test_the_term_is_not_negative_and_nothing_for_two_classes(by_label: bool) -> None:
    for seed in range(10):
        assert term(*batch(seed), by_label) > 0
        z, t = batch(seed, num_classes=2)
        assert abs(float(term(z, t, by_label))) < 1e-12
        z.requires_grad_()
        decoupled_cross_entropy(z, t, eta=1.0, by_label=by_label).backward()
        assert z.grad.isfinite().all()


def test_adding_a_constant_to_a_row_changes_nothing() -> None:
    z, t = batch(0)
    shift = torch.linspace(-50, 50, len(z), dtype=torch.float64)[:, None]
    torch.testing.assert_close(term(z + shift, t), term(z, t))


def test_which_class_is_the_anchor_does_not_matter() -> None:
    """The released code takes lam by class index from row 0: there weights change places."""
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(6, 7, generator=rng, dtype=torch.float64)
    lam = torch.full((6,), 0.8, dtype=torch.float64)
    low, high = torch.tensor([1, 0, 2, 3, 1, 0]), torch.tensor([4, 5, 6, 5, 6, 3])
    upward, downward = two_hot(lam, low, high, 7), two_hot(1 - lam, high, low, 7)
    torch.testing.assert_close(term(z, upward), term(z, downward))
    # The classes renamed in reverse order: nothing changes either.
    torch.testing.assert_close(term(z.flip(1), upward.flip(1)), term(z, upward))
    # Each row has its own lam, whatever row 0 has.
    mixed = torch.cat([upward[:3], two_hot(1 - lam[:3], low[3:], high[3:], 7)])
    parts = term(z[:3], mixed[:3]), term(z[3:], mixed[3:])
    torch.testing.assert_close(term(z, mixed), sum(parts) / 2)


def test_half_of_each_class_has_the_term_too() -> None:
    """The released code leaves it out at lam = 0.5."""
    z, half = batch(0)[0], torch.full((9,), 0.5, dtype=torch.float64)
    first, second = torch.arange(9) % 7, (torch.arange(9) + 3) % 7
    here, near = (term(z, two_hot(lam, first, second, 7)) for lam in (half, half + 1e-9))
    assert here > 0.1
    torch.testing.assert_close(here, near)


def test_mixed_classes_do_not_compete() -> None:
    """The term of class i does not change with the logit of the other mixed class."""
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(1, 6, dtype=torch.float64, generator=rng).requires_grad_()
    t = torch.zeros(1, 6, dtype=torch.float64)
    t[0, 1], t[0, 4] = 0.7, 0.3
    (gradient,) = torch.autograd.grad(term(z, t), z)
    for k, share in ((1, 0.7), (4, 0.3)):
        kept = [c for c in range(6) if c not in (1, 4)] + [k]
        p = z.detach()[0, kept].softmax(0)[-1]
        # Of its own term alone: share (p - 1).
        assert float(gradient[0, k]) == pytest.approx(float(share * (p - 1)))


def test_more_than_two_classes_and_smoothing() -> None:
    """Smoothing gives every class a share, which is not mixing."""
    z, t = batch(3)
    smooth = 0.9 * t + 0.1 / 7
    own = term(z, smooth, by_label=False, smoothing=0.1)
    torch.testing.assert_close(own, term(z, t, by_label=False))
    outer = Decoupled(LabelSmoothing(InputMixup(), 0.1))
    draw = draw_case(outer, "input", 6)
    net = TinyNet()
    mixed = outer.apply(net, images(6), labels(6), draw)
    loss = decoupled_cross_entropy(
        mixed.logits, mixed.targets, eta=0.1, by_label=True, smoothing=0.1
    )
    assert torch.equal(mixed.loss(), loss)
    many = Decoupled(CoMixup(loss="ce"))
    assert many(TinyNet(), images(8), labels(8), torch.Generator().manual_seed(0)).loss() > 0


@pytest.mark.parametrize(
    ("mixer", "smoothing"),
    [
        (OneOf((LabelSmoothing(InputMixup(), 0.1),)), 0.1),
        (LabelSmoothing(LabelSmoothing(InputMixup(), 0.1), 0.2), 0.28),
        (LabelSmoothing(OneOf((OneOf((InputMixup(),), smoothing=0.1),)), 0.2), 0.28),
        (LabelSmoothing(TokenMix(grid=4, score="area", smoothing=0.1, loss="ce"), 0.2), 0.28),
    ],
    ids=["oneof", "twice", "nested", "token"],
)
def test_smoothing_is_not_mixing_at_any_depth(mixer: Mixer, smoothing: float) -> None:
    draw = mixer.draw(6, torch.Generator().manual_seed(0))
    batch = TinyNet(), images(6), labels(6), dataclasses.replace(draw, perm=torch.arange(6).roll(1))
    plain, ours = (m.apply(*batch) for m in (mixer, Decoupled(mixer, eta=1.0)))
    added = term(ours.logits, ours.targets, smoothing=smoothing)
    assert added > 0.1
    torch.testing.assert_close(ours.loss() - plain.loss(), added)


def test_bf16_logits_are_computed_in_float32() -> None:
    z, t = batch(0)
    wide = decoupled_cross_entropy(z.bfloat16().float(), t.float(), eta=0.1, by_label=True)
    narrow = decoupled_cross_entropy(z.bfloat16(), t.float(), eta=0.1, by_label=True)
    assert torch.equal(wide, narrow)


def test_the_preset_of_the_paper_counts_classes_alike() -> None:
    draw = draw_case(InputMixup(), "input", 6)
    draw = dataclasses.replace(draw, lam=torch.tensor(0.3))
    mixed = Decoupled.paper(InputMixup()).apply(TinyNet(), images(6), labels(6), draw)
    expected = decoupled_cross_entropy(mixed.logits, mixed.targets, eta=0.1, by_label=False)
    assert torch.equal(mixed.loss(), expected)
    assert mixed.targets.shape == (6, NUM_CLASSES)


@pytest.mark.unchecked_shapes
def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="eta must be >= 0 and finite, got -1"):
        Decoupled(InputMixup(), eta=-1.0)
    for mixer in (RegMixup(), OneOf((InputMixup(), LabelSmoothing(RegMixup())))):
        with pytest.raises(ValueError, match=r"RegMixup .* Decoupled would have no effect"):
            Decoupled(mixer)
    with pytest.raises(ValueError, match="weight must be 'label' or 'one', got 'half'"):
        Decoupled(InputMixup(), weight="half")
    with pytest.raises(ValueError, match="InputMixup has another loss: set its loss='ce'"):
        Decoupled(InputMixup(loss="bce"))(TinyNet(), images(6), labels(6))
