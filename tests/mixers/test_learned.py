"""AutoMix, SAMix and AdAutoMix: blocks against loops, masks, gradients, schedules, both losses."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import alignmixup as am
from alignmixup.contracts import Draw, Mixed, soft_cross_entropy
from alignmixup.mixers.adautomix import AdAutoMix
from alignmixup.mixers.automix import AutoMix, AutoMixBlock, rescaled
from alignmixup.mixers.learned import Learned, attend
from alignmixup.mixers.samix import SAMix, emphasis
from alignmixup.mixers.stateful import follow, run_to
from cases import NUM_CLASSES, TinyNet, images, labels, with_lam
from learned_cases import METHODS, attached, drawn, maps

every_method = pytest.mark.parametrize("mixer", METHODS.values(), ids=METHODS)
every_pair_method = pytest.mark.parametrize(
    "mixer", [METHODS[name] for name in ("automix", "automix-channel", "samix")]
)


# ---- blocks --------------------------------------------------------------------------------------


def test_attention_is_a_weighted_mean_at_each_position() -> None:
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 2, 3, generator=rng, dtype=torch.float64) for _ in range(2))
    v = torch.randn(2, 1, 2, 3, generator=rng, dtype=torch.float64)
    found = attend(q, k, v).flatten(2)
    for b in range(2):
        for i in range(6):
            products = [float(q[b].flatten(1)[:, i] @ k[b].flatten(1)[:, j]) for j in range(6)]
            weights = [math.exp(p / math.sqrt(3)) for p in products]
            values = [w * float(v[b].flatten()[j]) for j, w in enumerate(weights)]
            assert float(found[b, 0, i]) == pytest.approx(sum(values) / sum(weights))


@pytest.mark.parametrize("lam_channel", [False, True])
def test_the_block_of_automix_looks_from_the_anchor_at_the_partner(lam_channel: bool) -> None:
    block = AutoMixBlock(6, lam_channel).double()
    for parameter in block.parameters():  # larger than at the start, where masks hardly differ
        torch.nn.init.normal_(parameter)
    rng = torch.Generator().manual_seed(0)
    h, other = (torch.randn(1, 6, 2, 3, generator=rng, dtype=torch.float64) for _ in range(2))
    lam = torch.tensor(0.3)
    scores = block(h, other, lam).flatten()
    points = [each[0].flatten(1).T.detach() for each in (h, other)]
    if lam_channel:
        points = [
            torch.cat([each, torch.full((6, 1), share).double()], 1)
            for each, share in zip(points, (float(lam), 1 - float(lam)), strict=True)
        ]
    query, value = block.query.weight.flatten(1), block.value.weight.flatten(1)
    assert len(query) == 3
    anchor = points[0] @ query.T + block.query.bias
    partner = points[1] @ query.T + block.query.bias
    values = (points[1] @ value.T + block.value.bias)[:, 0]
    for position in range(6):
        weights = (anchor[position] @ partner.T / math.sqrt(3)).softmax(0)
        torch.testing.assert_close(scores[position], weights @ values)


@every_pair_method
def test_masks_lie_between_and_follow_the_values(mixer: Learned) -> None:
    mixer, _ = attached(mixer)
    h, perm = maps(mixer), torch.arange(6).roll(1)
    mask = mixer.mask(h, perm, torch.tensor(0.4), (16, 16))
    assert mask.shape == (6, 1, 16, 16)
    assert ((mask > 0) & (mask < 1)).all()
    assert mask.std() > 1e-4


def test_a_block_without_values_has_a_constant_mask() -> None:
    mixer, _ = attached(METHODS["automix"])
    value = mixer.learner.block.value
    nn.init.zeros_(value.weight)
    nn.init.constant_(value.bias, 0.7)
    mask = mixer.mask(maps(mixer), torch.arange(6).roll(1), torch.tensor(0.4), (16, 16))
    torch.testing.assert_close(mask, torch.full_like(mask, 1 - torch.sigmoid(torch.tensor(0.7))))


def test_automix_repeats_cells_and_samix_interpolates_them() -> None:
    """Nearest: every block of 4 x 4 pixels is one cell of the 4 x 4 map."""
    for name, is_constant in (("automix", True), ("samix", False)):
        mixer, _ = attached(METHODS[name])
        mask = mixer.mask(maps(mixer), torch.arange(6).roll(1), torch.tensor(0.4), (16, 16))
        cells = mask.unfold(2, 4, 4).unfold(3, 4, 4).flatten(4)
        assert bool((cells.std(-1) < 1e-7).all()) == is_constant


def test_the_channel_of_lam_changes_the_mask() -> None:
    for name, depends in (("automix", False), ("automix-channel", True)):
        mixer, _ = attached(METHODS[name])
        h, perm = maps(mixer), torch.arange(6).roll(1)
        low, high = (mixer.mask(h, perm, torch.tensor(lam), (16, 16)) for lam in (0.2, 0.8))
        assert bool((low - high).abs().max() > 1e-4) == depends


@pytest.mark.parametrize("curve", [1.0, 1.25, 2.0])
def test_the_emphasis_of_samix_rises_from_0_to_1(curve: float) -> None:
    g = emphasis(torch.linspace(0, 1, 101, dtype=torch.float64), curve)
    torch.testing.assert_close(g[[0, 50, 100]], torch.tensor([0, 0.5, 1], dtype=torch.float64))
    assert (g.diff() >= -1e-12).all()
    for wrong in (0.9, math.nan, math.inf):
        with pytest.raises(ValueError, match="curve must be finite and at least 1"):
            SAMix(curve=wrong)


@pytest.mark.parametrize("num_images", [2, 3, 4])
def test_the_masks_of_adautomix_by_a_loop(num_images: int) -> None:
    mixer, _ = attached(AdAutoMix("layer2", num_images=num_images))
    block, h = mixer.learner.block, maps(mixer)
    group = torch.stack([torch.arange(6).roll(shift) for shift in range(num_images)])
    shares = torch.full((num_images,), 1 / num_images)
    masks = mixer.masks(h, group, shares, (16, 16))
    scores = []
    for i in range(num_images):
        q = block.query(h[group[i]]).flatten(2)
        others = [block.key(h[group[j]]).flatten(2) for j in range(num_images) if j != i]
        similar = sum(torch.einsum("bdi,bdj->bij", q, k) for k in others) / math.sqrt(4)
        own = block.value(h[group[i]]).flatten(2)
        scores.append(torch.einsum("bij,bcj->bci", similar.softmax(2), own).view(6, 1, 4, 4))
    large = torch.stack([F.interpolate(s, (16, 16), mode="bilinear") for s in scores])
    torch.testing.assert_close(masks, large.softmax(0))
    torch.testing.assert_close(masks.sum(0), torch.ones(6, 1, 16, 16))


def test_equal_maps_share_every_pixel_equally() -> None:
    mixer, _ = attached(METHODS["adautomix"])
    same = torch.arange(6).expand(3, 6)
    masks = mixer.masks(maps(mixer), same, torch.tensor([0.5, 0.3, 0.2]), (16, 16))
    torch.testing.assert_close(masks, torch.full_like(masks, 1 / 3))


# ---- what the network sees -----------------------------------------------------------------------


@every_pair_method
@pytest.mark.parametrize("lam", [0.92, 0.95, 0.05, 1.0])
def test_near_the_ends_the_network_gets_input_mixup(mixer: Learned, lam: float) -> None:
    mixer, net = attached(mixer)
    draw = drawn(mixer, lam)
    mixed = mixer.apply(net, images(6), labels(6), draw)
    plain = Draw("input", draw.perm, draw.lam)
    expected = am.InputMixup().apply(TinyNet(), images(6), labels(6), plain)
    assert torch.equal(mixed.logits, expected.logits)
    assert torch.equal(mixed.targets, expected.targets)
    inner = with_lam(draw, 0.5)
    middle = am.InputMixup().apply(
        TinyNet(), images(6), labels(6), Draw("input", draw.perm, inner.lam)
    )
    assert not torch.equal(mixer.apply(net, images(6), labels(6), inner).logits, middle.logits)


def test_a_rescaled_mask_has_the_mean_of_its_own_labels() -> None:
    """The released code takes the share of the other draw."""
    mask = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for lam in (0.1, 0.5, 0.9):
        other = rescaled(mask, torch.tensor(lam))
        torch.testing.assert_close(other.mean((1, 2, 3)), torch.full((5,), lam))
        assert ((other >= 0) & (other <= 1)).all()
    mixer, net = attached(SAMix("layer2", rescale_prob=1.0, switch=0.0))
    draw = drawn(mixer, 0.3)
    seen = []
    net.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    x = torch.zeros(6, 3, 16, 16)
    x[::2] = 1.0  # anchors of 1 whose partners are 0 show the mask itself
    draw = draw.with_tensors({"perm": torch.arange(6).roll(1)})
    mixer.apply(net, x, labels(6), draw)
    torch.testing.assert_close(seen[1][::2].mean((1, 2, 3)), torch.full((3,), 0.3))


def renumbered(draw: Draw, s: Tensor) -> Draw:
    """The draw for a batch renumbered by ``s``: perm -> s^-1 perm s."""
    inverse = s.argsort()
    names = ("perm", "block_perm", "perms")
    moved = {n: inverse[t[..., s]] for n, t in draw.tensors().items() if n in names}
    return draw.with_tensors(moved)


@every_method
def test_renumbering_the_batch_renumbers_the_result(mixer: Learned) -> None:
    s = torch.randperm(6, generator=torch.Generator().manual_seed(3))
    results = []
    for order in (torch.arange(6), s):
        own, net = attached(mixer)
        draw = renumbered(drawn(own), order)
        results.append(own.apply(net, images(6)[order], labels(6)[order], draw))
    one, other = results
    torch.testing.assert_close(other.logits, one.logits[s], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other.targets, one.targets[s])
    for name, value in one.extra.items():
        torch.testing.assert_close(other.extra[name], value, atol=1e-5, rtol=1e-5)


# ---- losses and gradients ------------------------------------------------------------------------


def gradients(mixed: Mixed, terms: tuple[str, ...], mixer: Learned, net: nn.Module) -> list[Tensor]:
    """The gradients of some terms; "" is the loss of the mixed batch."""
    losses = {"": mixed.criterion(mixed.logits, mixed.targets), **mixed.extra}
    parameters = [*net.parameters(), *mixer.learner.block.parameters()]
    total = torch.stack([losses[term] for term in terms]).sum()
    found = torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@every_method
def test_network_and_block_are_trained_by_their_own_losses(mixer: Learned) -> None:
    mixer, net = attached(mixer)
    mixed = mixer.apply(net, images(6), labels(6), drawn(mixer))
    num = len(list(net.parameters()))
    is_own = {"", "clean", "mixup"} & {"", *mixed.extra}
    of_net = gradients(mixed, tuple(is_own), mixer, net)
    of_block = gradients(mixed, tuple({*mixed.extra} - is_own), mixer, net)
    assert all(g.abs().max() > 0 for g in of_net[:num])
    assert all(torch.equal(g, torch.zeros_like(g)) for g in of_net[num:])
    assert all(torch.equal(g, torch.zeros_like(g)) for g in of_block[:num])
    assert any(g.abs().max() > 0 for g in of_block[num:])
    assert all(p.grad is None for p in mixer.learner.teacher.parameters())


@pytest.mark.parametrize("name", ["automix", "samix"])
def test_the_losses_of_a_pair_method_by_hand(name: str) -> None:
    mixer, net = attached(dataclasses.replace(METHODS[name], switch=0.0))
    draw = drawn(mixer, 0.3)
    mixed = mixer.apply(net, images(6), labels(6), draw)
    twin, plain = attached(dataclasses.replace(METHODS[name], switch=0.0))
    x, rows, teacher = images(6), torch.eye(NUM_CLASSES)[labels(6)], twin.learner.teacher
    h = maps(twin)
    own = twin.mask(h, draw.perm, draw.lam, (16, 16))
    block = twin.mask(h, draw.block_perm, draw.block_lam, (16, 16))
    lam = draw.block_lam
    torch.testing.assert_close(mixed.extra["clean"], soft_cross_entropy(plain(x), rows))
    torch.testing.assert_close(mixed.logits, plain(own * x + (1 - own) * x[draw.perm]))
    taught = teacher(block * x + (1 - block) * x[draw.block_perm])
    expected = soft_cross_entropy(taught, lam * rows + (1 - lam) * rows[draw.block_perm])
    torch.testing.assert_close(mixed.extra["block"], expected)
    values = block.detach().flatten().double()
    penalty = max(0.0, abs(float(values.mean() - lam)) - 0.1)
    if name == "samix":
        penalty -= 2 * float((values - values.mean()).square().mean())
    assert float(mixed.extra["mask"].detach()) == pytest.approx(0.1 * penalty, abs=1e-6)


def test_a_step_without_the_block_has_gradients_of_zero() -> None:
    """As DeiT has in one of five steps; a captured step has the same parameters in all."""
    mixer, net = attached(AutoMix("layer2", block_prob=0.0, mask_weight=0.0))
    mixer.apply(net, images(6), labels(6), drawn(mixer)).loss().backward()
    for parameter in mixer.learner.block.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_adautomix_takes_turns() -> None:
    """Even: -beta CE + (1 - beta) cos. Odd: CE. Two steps later it is even again."""
    found = []
    for sign in (1, -1):
        mixer, net = attached(AdAutoMix("layer2", beta=0.3, cos_sign=sign, ema=(1.0, 1.0)))
        draw = drawn(mixer)
        terms = []
        for step in range(4):
            assert mixer.learner.turn == step % 2
            mixed = mixer.apply(net, images(6), labels(6), draw)
            terms.append(float(mixed.extra["block"].detach()))
        assert terms[0] == pytest.approx(terms[2], rel=1e-4)
        assert terms[1] == pytest.approx(terms[3], rel=1e-4)
        found.append(terms)
    (released, loss, *_), (paper, same, *_) = found
    assert loss == pytest.approx(same)
    assert loss > 0
    assert released + paper == pytest.approx(-2 * 0.3 * loss, rel=1e-4)
    teacher, x = attached(METHODS["adautomix"])[0].learner.teacher, images(6)
    mixer, _ = attached(METHODS["adautomix"])
    draw = drawn(mixer)
    shares = torch.cat([draw.block_lam.view(1), (1 - draw.block_lam) * draw.others[1]])
    group = torch.cat([torch.arange(6).view(1, 6), draw.perms[1]])
    masks = mixer.masks(maps(mixer), group, shares, (16, 16))
    mixed = teacher(sum(m * x[index] for m, index in zip(masks, group, strict=True)))
    cosines = [
        share * F.cosine_similarity(mixed, teacher(x[index]))
        for share, index in zip(shares, group, strict=True)
    ]
    nearness = float(sum(cosines).mean().detach())
    assert released == pytest.approx(-0.3 * loss + 0.7 * nearness, rel=1e-3)


def test_without_beta_the_even_step_has_no_cross_entropy() -> None:
    """Labels change nothing."""
    mixer, net = attached(AdAutoMix("layer2", beta=0.0))
    draw = drawn(mixer)
    with torch.no_grad():
        one, other = (
            mixer.apply(net, images(6), y, draw).extra["block"]
            for y in (labels(6), 4 - labels(6) % 5)
        )
    assert torch.equal(one, other)


def test_adautomix_trains_on_three_batches_by_their_shares() -> None:
    mixer, net = attached(METHODS["adautomix"])
    draw = drawn(mixer, 0.5)
    mixed = mixer.apply(net, images(6), labels(6), draw)
    x, rows, plain = images(6), torch.eye(NUM_CLASSES)[labels(6)], TinyNet()
    second, third = draw.perms[0]
    a, b = (0.5 * draw.others[0]).tolist()
    targets = 0.5 * rows + a * rows[second] + b * rows[third]
    torch.testing.assert_close(mixed.targets, targets)
    torch.testing.assert_close(mixed.extra["clean"], 0.5 * soft_cross_entropy(plain(x), rows))
    flat = plain(0.5 * x + a * x[second] + b * x[third])
    torch.testing.assert_close(mixed.extra["mixup"], 0.5 * soft_cross_entropy(flat, targets))
    pairs, net = attached(METHODS["adautomix-pairs"])
    extra = pairs.apply(net, images(6), labels(6), drawn(pairs)).extra
    assert set(extra) == {"clean", "block"}
    torch.testing.assert_close(extra["clean"], soft_cross_entropy(TinyNet()(x), rows))


# ---- chance and schedules ------------------------------------------------------------------------


@pytest.mark.unchecked_shapes  # hundreds of draws of the same shapes
def test_shares_of_three_are_uniform_values_divided_by_their_sum() -> None:
    """Not Dirichlet: P(lam > 1/2) = P(u > v + w) = 1/6, and 1/4 for Dirichlet(1, 1, 1)."""
    rng, mixer = torch.Generator().manual_seed(0), AdAutoMix()
    draws = [mixer.draw(2, rng) for _ in range(1200)]
    lam = torch.stack([draw.lam for draw in draws])
    assert float((lam > 0.5).float().mean()) == pytest.approx(1 / 6, abs=0.04)
    assert all(torch.equal(draw.lam, draw.block_lam) for draw in draws)
    assert all(torch.allclose(draw.others.sum(1), torch.ones(2)) for draw in draws[:20])
    pair = AdAutoMix(num_images=2).draw(2, rng)
    assert pair.lam != pair.block_lam


def test_shares_of_three_are_finite_where_all_values_are_zero() -> None:
    """With a small alpha a value is 0 or 1, each in half of the draws."""
    mixer, rng = AdAutoMix("layer2", alpha=1e-3), torch.Generator().manual_seed(0)
    draws = [mixer.draw(2, rng) for _ in range(100)]
    for name in ("lam", "block_lam", "others"):
        assert all(bool(draw.tensors()[name].isfinite().all()) for draw in draws)
    assert {0.0, 1.0} <= {round(float(draw.lam), 6) for draw in draws}


def test_the_two_draws_are_independent() -> None:
    draw = AutoMix().draw(50, torch.Generator().manual_seed(0))
    assert not torch.equal(draw.perm, draw.block_perm)
    assert draw.lam != draw.block_lam


def test_the_teacher_slows_down_by_a_cosine() -> None:
    mixer, rng = AutoMix(ema=(0.999, 0.999999)), torch.Generator()
    shares = {p: float(mixer.draw(2, rng, p).ema_share) for p in (0.0, 0.09, 0.5, 0.999999)}
    assert shares[0.0] == shares[0.09] == pytest.approx(1e-3)
    assert shares[0.5] == pytest.approx(1e-6 + (1e-3 - 1e-6) / 2)
    assert shares[0.999999] == pytest.approx(1e-6, rel=1e-3)


def test_the_teacher_moves_at_the_start_of_a_step() -> None:
    mixer, net = attached(AutoMix("layer2", ema=(0.25, 0.25)))
    with torch.no_grad():
        net.fc.weight.add_(1.0)
    before = mixer.learner.teacher.fc.weight.clone()
    mixer.apply(net, images(6), labels(6), drawn(mixer))
    expected = 0.25 * before + 0.75 * net.fc.weight
    torch.testing.assert_close(mixer.learner.teacher.fc.weight.data, expected.data)


def test_the_weight_of_the_mask_decays_where_it_should() -> None:
    rng = torch.Generator()
    assert AutoMix().draw(2, rng, 0.9).mask_weight == pytest.approx(0.1)
    decaying = AutoMix.imagenet()
    weights = [float(decaying.draw(2, rng, p).mask_weight) for p in (0.0, 0.5, 0.9999)]
    assert weights == pytest.approx([0.1, 0.05, 0.0], abs=1e-6)


def test_presets_have_the_published_rates() -> None:
    assert dict(AutoMix().optimizer_group) == {}
    rated = (AutoMix.tiny_imagenet(), SAMix.imagenet(), AdAutoMix.imagenet())
    for mixer in (*rated, AutoMix.imagenet(), SAMix.tiny_imagenet()):
        assert dict(mixer.optimizer_group) == {"lr": 0.1, "min_lr": 0.001}
    assert dict(AutoMix.deit().optimizer_group) == {"lr": 1e-3, "min_lr": 1e-4}
    assert dict(AutoMix(block_momentum=0.0).optimizer_group) == {"momentum": 0.0}
    assert not AutoMix().lam_channel
    assert AutoMix.imagenet().lam_channel
    assert (AutoMix.deit().lam_channel, AutoMix.deit().block_prob) == (True, 0.8)
    assert SAMix.imagenet().curve is SAMix.tiny_imagenet().curve is None
    for kind in (AutoMix, AdAutoMix):
        assert kind.two_heads("fc") == kind(heads=2, classifier="fc")
    assert AdAutoMix.paper() == AdAutoMix(cos_sign=-1)
    assert SAMix.cifar100_tuned() == SAMix(rescale_prob=0.25)
    assert AdAutoMix.tiny_imagenet().beta == 0.4


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AutoMix(ema=(0.9, 1.5)), r"ema must be two numbers in \[0, 1\], got \(0.9, 1.5\)"),
        (lambda: AutoMix(switch=-0.1), r"switch must lie in \[0, 1\], got -0.1"),
        (lambda: AutoMix(block_prob=2.0), r"block_prob must lie in \[0, 1\], got 2.0"),
        (lambda: AutoMix(mask_weight=-1.0), "mask_weight must be >= 0 and finite, got -1.0"),
        (lambda: AutoMix(layer=3), "a layer is the name of a sub-module"),
        (lambda: SAMix(rescale_prob=1.5), r"rescale_prob must lie in \[0, 1\], got 1.5"),
        (lambda: AutoMix(heads=3), "heads must be 1 or 2, got 3"),
        (
            lambda: AutoMix("layer2", heads=2, classifier="layer4").attach(TinyNet(), images(4)),
            "classifier 'layer4' is a Sequential; two heads need the name of the linear layer",
        ),
        (lambda: SAMix(global_eta=-1.0), "global_eta must be >= 0 and finite, got -1.0"),
        (lambda: SAMix(global_eta=0.1, loss="bce"), "set loss='ce', got 'bce'"),
        (lambda: AdAutoMix(num_images=1), "num_images must be an integer >= 2, got 1"),
        (lambda: AdAutoMix(beta=1.1), r"beta must lie in \[0, 1\], got 1.1"),
        (lambda: AdAutoMix(cos_sign=0), "cos_sign must be 1 or -1, got 0"),
        (
            lambda: AutoMix("fc").attach(TinyNet(), images(4)),
            r"layer 'fc' returns \[4, 5\]; AutoMix",
        ),
    ],
)
def test_bad_settings_are_named(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# ---- tokens --------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A class token and 4 x 4 patches of an image of 16 x 16."""

    num_prefix_tokens = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, 8))
        self.block = nn.Linear(8, 8)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], dim=1)
        return self.head(torch.tanh(self.block(tokens)).mean(1))


@every_method
def test_tokens_of_a_square_grid_are_maps(mixer: Learned) -> None:
    net = Tokens()
    own = dataclasses.replace(mixer, layer="block").attach(net, images(6))
    mixed = own.apply(net, images(6), labels(6), drawn(own))
    mixed.loss().backward()
    assert all(p.grad is not None for p in own.learner.block.parameters())
    tokens = run_to(net, images(6), "block")
    found = own._maps(net, tokens, images(6))
    assert torch.equal(found[:, :, 1, 2], tokens[:, 1 + 1 * 4 + 2])


@pytest.mark.parametrize("name", ["automix", "adautomix"])
def test_a_mixer_of_another_network_is_named(name: str) -> None:
    mixer, net = attached(METHODS[name])
    message = r"attached to another network \(fc.weight differs\): call mixer.attach\(model, x\)"
    net.fc = nn.Linear(net.fc.in_features, 7)
    with pytest.raises(ValueError, match=message):
        mixer(net, images(6), labels(6))
    net.fc = nn.Identity()
    with pytest.raises(ValueError, match=message):
        mixer(net, images(6), labels(6))


@every_method
def test_a_network_without_gradients_would_not_train_the_block(mixer: Learned) -> None:
    class Probe(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.layer4(self.layer2(self.layer1(x)))
            return self.fc(features.flatten(1))

    own, net = mixer.attach(Probe(), images(6)), Probe()
    with pytest.raises(ValueError, match=r"no gradient at the mask.* freeze it by requires_grad"):
        own(net, images(6), labels(6))
    own.learner.block.requires_grad_(False)
    assert own(net, images(6), labels(6)).loss().isfinite()


def test_the_teacher_follows_a_wrapped_network() -> None:
    mixer, net = attached(METHODS["automix"])
    with torch.no_grad():
        net.fc.bias.add_(1.0)
    follow(mixer.learner.teacher, torch.compile(net, backend="eager"), torch.tensor(1.0))
    assert torch.equal(mixer.learner.teacher.fc.bias, net.fc.bias)
