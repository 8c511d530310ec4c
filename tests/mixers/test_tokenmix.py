"""TokenMix: its laws, loops as oracles, and defects of other implementations."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from alignmixup.contracts import sigmoid_bce
from alignmixup.mixers.attention import clean_attention
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.label_smoothing import LabelSmoothing
from alignmixup.mixers.tokenmix import TokenDraw, TokenMix, block_mask, shown_shares, token_targets
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.schema import Recipe
from cases import NUM_CLASSES, TinyNet, draw_case, images, labels
from tiny_transformer import TinyTransformer

MIXER = TokenMix(grid=4)


class Recorder(TinyTransformer):
    """A network that keeps what it is shown."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return super().forward(x)


# ---- masks ---------------------------------------------------------------------------------------


def slow_mask(grid: int, num: int, rng: torch.Generator) -> tuple[Tensor, list]:
    """The rectangles drawn cell by cell, from the same numbers."""
    mask, boxes = torch.zeros(grid, grid, dtype=torch.bool), []
    chance = iter(torch.rand(64, 4, generator=rng).tolist())
    while int(mask.sum()) < num:
        rest = num - int(mask.sum())
        for _ in range(10):
            u = next(chance)
            area = 1 + u[0] * (rest - 1)
            aspect = math.exp(math.log(0.3) + u[1] * (math.log(1 / 0.3) - math.log(0.3)))
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if h >= grid or w >= grid:
                continue
            y, x = int(u[2] * (grid - h + 1)), int(u[3] * (grid - w + 1))
            box = torch.zeros_like(mask)
            box[y : y + h, x : x + w] = True
            assert int(box.sum()) == h * w  # inside the grid
            if 0 < int((box & ~mask).sum()) <= rest:
                mask |= box
                boxes.append((h, w))
                break
        else:
            break
    return mask, boxes


@pytest.mark.parametrize("seed", range(8))
def test_masks_are_the_rectangles_of_a_loop(seed: int) -> None:
    expected, boxes = slow_mask(14, 112, torch.Generator().manual_seed(seed))
    found = block_mask(14, 112, torch.Generator().manual_seed(seed))
    assert found == expected.tolist()
    assert len(boxes) > 1


def test_nearly_all_masks_have_the_number_that_is_wanted() -> None:
    rng = torch.Generator().manual_seed(0)
    counts = [sum(map(sum, block_mask(14, 112, rng))) for _ in range(200)]
    assert sum(count == 112 for count in counts) > 180
    assert 100 <= min(counts) <= max(counts) == 112


def test_the_number_of_tokens_is_fixed() -> None:
    """112 of 196, as in the authors' code, which draws from a Beta distribution and ignores it."""
    assert round(TokenMix().share * 14**2) == 112
    rng = torch.Generator().manual_seed(0)
    for _ in range(5):
        draw = TokenMix(mask="random").draw(4, rng)
        assert int(draw.mask.sum()) == 112
        torch.testing.assert_close(draw.lam, torch.tensor(1 - 112 / 196))
    assert not TokenMix(share=0.0).draw(4, rng).mask.any()
    assert TokenMix(share=1.0, mask="random").draw(4, rng).mask.all()


# ---- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_step_against_a_loop(smoothing: float) -> None:
    x, y, mixer = images(6), labels(6), dataclasses.replace(MIXER, smoothing=smoothing)
    attention = clean_attention(TinyTransformer(), x, "")
    for seed in range(4):
        draw, net = draw_case(mixer, "cut", 6, seed), Recorder()
        mixed = mixer.apply(net, x, y, draw)
        for i, j in enumerate(draw.perm.tolist()):
            expected, shares = x[i].clone(), [0.0, 0.0]
            for row in range(4):
                for column in range(4):
                    rows, columns = (slice(4 * at, 4 * at + 4) for at in (row, column))
                    if draw.mask[row, column]:
                        expected[:, rows, columns] = x[j, :, rows, columns]
                        shares[1] += float(attention[j, row, column] / attention[j].sum())
                    else:
                        shares[0] += float(attention[i, row, column] / attention[i].sum())
            assert torch.equal(net.seen[i], expected)
            target = torch.zeros(NUM_CLASSES)
            off = smoothing / 2 / NUM_CLASSES
            for share, label in zip(shares, (y[i], y[j]), strict=True):
                half = torch.full((NUM_CLASSES,), off)
                half[label] = max(share - smoothing / 2 + off, 0)
                target += half
            torch.testing.assert_close(mixed.targets[i], target, atol=1e-5, rtol=1e-5)


def test_uniform_scores_are_the_area() -> None:
    draw = draw_case(TokenMix(grid=8), "cut", 6)
    mask = draw.mask.repeat_interleave(2, 0).repeat_interleave(2, 1)
    own, other = shown_shares(torch.full((6, 8, 8), 1 / 64), draw.perm, mask)
    area = draw.mask.float().mean().expand(6)
    torch.testing.assert_close(own, 1 - area)
    torch.testing.assert_close(other, area)
    torch.testing.assert_close(own + other, torch.ones(6))
    by_area = TokenMix(grid=8, score="area").apply(TinyNet(), images(6), labels(6), draw)
    one_hot = torch.eye(NUM_CLASSES)[labels(6)]
    expected = own[:, None] * one_hot + other[:, None] * one_hot[draw.perm]
    torch.testing.assert_close(by_area.targets, expected)


def test_no_token_leaves_the_anchor() -> None:
    net, x, y = Recorder(), images(6), labels(6)
    empty = TokenMix(grid=4, share=0.0)
    mixed = empty.apply(net, x, y, draw_case(empty, "cut", 6))
    assert torch.equal(net.seen, x)
    assert torch.equal(mixed.targets, torch.eye(NUM_CLASSES)[y])


def test_shares_need_not_sum_to_one() -> None:
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:4] = True
    scores = torch.zeros(2, 2, 2)
    scores[0, 1, 0] = scores[1, 0, 0] = 1.0  # the anchor's below, the partner's above
    own, other = shown_shares(scores, torch.tensor([1, 0]), mask)
    assert (own + other).tolist() == [2.0, 0.0]


def test_the_clean_pass_has_no_gradient_and_leaves_the_mode() -> None:
    net = TinyTransformer()
    mixed = MIXER.apply(net, images(6), labels(6), draw_case(MIXER, "cut", 6))
    assert not mixed.targets.requires_grad
    assert all(module.training for module in net.modules())


def test_a_mask_finer_or_coarser_than_the_network() -> None:
    """A patch of the network takes the token at its top left pixel."""
    for grid in (2, 8):
        mixer = TokenMix(grid=grid, mask="random")
        draw = draw_case(mixer, "cut", 6)
        net, x, y = TinyTransformer(), images(6), torch.arange(6) % NUM_CLASSES
        draw = dataclasses.replace(draw, perm=torch.arange(6).roll(2))
        pixels = draw.mask.repeat_interleave(16 // grid, 0).repeat_interleave(16 // grid, 1)
        attention = clean_attention(net, x, "")
        inside = (attention * pixels[::4, ::4]).sum((1, 2)) / attention.sum((1, 2))
        targets = mixer.apply(net, x, y, draw).targets
        torch.testing.assert_close(targets[torch.arange(6), y], 1 - inside)
        torch.testing.assert_close(targets[torch.arange(6), y[draw.perm]], inside[draw.perm])


# ---- a teacher -----------------------------------------------------------------------------------


def test_maps_of_a_teacher() -> None:
    """The class of each image has its map: negative values are zero, an empty map is uniform."""
    x, y = images(6), labels(6)
    maps = torch.randn(6, NUM_CLASSES, 4, 4, generator=torch.Generator().manual_seed(0))
    maps[3] = -1.0
    mixer = TokenMix(grid=4, score="maps").with_maps(lambda images: maps)
    draw = dataclasses.replace(draw_case(mixer, "cut", 6), perm=torch.arange(6).roll(2))
    targets = mixer.apply(TinyNet(), x, y, draw).targets
    for i in range(6):
        own = maps[i, y[i]].relu()
        own = own / own.sum() if i != 3 else torch.full((4, 4), 1 / 16)
        torch.testing.assert_close(targets[i, y[i]], own[~draw.mask].sum())
    assert mixer == TokenMix(grid=4, score="maps")  # the teacher is no setting
    with pytest.raises(ValueError, match=r"needs a teacher: mixer = mixer\.with_maps"):
        TokenMix(grid=4, score="maps").apply(TinyNet(), x, y, draw)
    bad = mixer.with_maps(lambda images: maps[0])
    with pytest.raises(ValueError, match=r"must return maps \[6, k, n, m\], got \[5, 4, 4\]"):
        bad.apply(TinyNet(), x, y, draw)


# ---- defects of other implementations ------------------------------------------------------------


def test_the_anchor_counts_outside_the_mask() -> None:
    """OpenMixup gives the anchor the mass inside the mask, although it shows it outside."""
    scores = torch.zeros(2, 2, 2)
    scores[:, 0, 0] = 1.0
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[:2, :2] = True  # the partner covers what matters
    own, other = shown_shares(scores, torch.tensor([1, 0]), mask)
    assert (own.tolist(), other.tolist()) == ([0.0, 0.0], [1.0, 1.0])


def test_targets_are_never_negative() -> None:
    """The authors' value of a class, y1 - s / 2 + s / 2 K, is negative below a share of s / 2."""
    labels_ = torch.eye(4)[[0, 1]]
    shares = torch.tensor([0.01, 0.5]), torch.tensor([0.9, 0.0])
    targets = token_targets(labels_, torch.tensor([1, 0]), *shares, smoothing=0.1)
    assert (targets >= 0).all()
    assert targets[0, 0] == pytest.approx(0.1 / 8)  # what the other label's smoothing leaves it


def test_each_sample_has_its_own_weights() -> None:
    """OpenMixup averages the loss over the batch before it multiplies by the weights."""
    mixer, y = dataclasses.replace(MIXER, loss="ce"), labels(6)
    draw = dataclasses.replace(draw_case(mixer, "cut", 6), perm=torch.arange(6).roll(2))
    mixed = mixer.apply(TinyTransformer(), images(6), y, draw)
    one, two = (F.cross_entropy(mixed.logits, z, reduction="none") for z in (y, y[draw.perm]))
    rows = torch.arange(6)
    own, other = mixed.targets[rows, y], mixed.targets[rows, y[draw.perm]]
    torch.testing.assert_close(mixed.loss(), (own * one + other * two).mean())
    assert own.std() > 0.01


# ---- loss, preset and records --------------------------------------------------------------------


def test_the_loss_is_torchs_bce_with_logits() -> None:
    z = torch.tensor([[200.0, -200.0, 0.3]], requires_grad=True)
    t = torch.tensor([[0.2, 1.3, 0.5]])
    expected = F.binary_cross_entropy_with_logits(z, t)
    torch.testing.assert_close(sigmoid_bce(z, t), expected)
    sigmoid_bce(z, t).backward()
    assert z.grad.isfinite().all()
    assert sigmoid_bce(z.bfloat16(), t).dtype == torch.float32
    mixed = MIXER.apply(TinyTransformer(), images(6), labels(6), draw_case(MIXER, "cut", 6))
    assert mixed.criterion is sigmoid_bce


def test_multi_label_targets_keep_their_mass() -> None:
    mixer = TokenMix(grid=4, score="area")
    y = torch.eye(NUM_CLASSES)[labels(6)] + torch.eye(NUM_CLASSES)[labels(6) - 1]
    mixed = mixer.apply(TinyNet(), images(6), y, draw_case(mixer, "cut", 6))
    torch.testing.assert_close(mixed.targets.sum(1), torch.full((6,), 2.0))


def test_the_published_training_switches_with_mixup() -> None:
    switch = TokenMix.released()
    mixup = LabelSmoothing(InputMixup(alpha=0.8, loss="sigmoid_bce"), 0.1)
    assert switch.mixers == (TokenMix(smoothing=0.1), mixup)
    assert list(switch.cases.values()) == [0.5, 0.5]
    assert (switch.smoothing, switch.pairing) == (0.0, "reverse")
    small = dataclasses.replace(switch, mixers=(TokenMix(grid=4, smoothing=0.1), mixup))
    for case in small.cases:
        draw = draw_case(small, case, 6)
        mixed = small.apply(TinyTransformer(), images(6), labels(6), draw)
        assert mixed.criterion is sigmoid_bce
        assert mixed.loss().isfinite()
    recipe = dataclasses.replace(find_recipe("cifar10-r18-baseline"), mixer=switch)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": 1}, "grid must be an integer >= 2, got 1"),
        ({"share": 1.5}, r"share must lie in \[0, 1\], got 1.5"),
        ({"smoothing": -0.1}, "smoothing must lie in"),
        ({"mask": "stripes"}, "mask must be .*, got 'stripes'"),
        ({"score": "cam"}, "score must be .*, got 'cam'"),
        ({"loss": "mse"}, "loss must be .*, got 'mse'"),
        ({"attention": 3}, "a layer is the name of a sub-module"),
    ],
)
def test_bad_settings_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenMix(**change)


def test_a_network_or_images_that_do_not_fit_are_named() -> None:
    draw = draw_case(MIXER, "cut", 6)
    assert isinstance(draw, TokenDraw)
    with pytest.raises(ValueError, match="TinyNet has no q_norm and k_norm"):
        MIXER.apply(TinyNet(), images(6), labels(6), draw)
    fine = TokenMix(grid=17)
    with pytest.raises(ValueError, match="17 x 17 tokens is finer than images of 16 x 16"):
        fine.apply(TinyTransformer(), images(6), labels(6), draw_case(fine, "cut", 6))
