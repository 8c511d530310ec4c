"""TransMix: its laws, unfused attention of timm's transformer as oracle, defects of OpenMixup."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alignmixup.hooks import peek
from alignmixup.mixers.attention import class_attention, find_attention, nearest, peek_attention
from alignmixup.mixers.boxes import BoxDraw, share_mask, shown_share
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.oneof import OneOf
from alignmixup.mixers.transmix import TransMix, attended_share
from cases import NUM_CLASSES, TinyNet, draw_case, images, labels
from tiny_transformer import TinyTransformer
from torchvision_schemas import define_torchvision_schemas


@pytest.fixture(scope="module")
def timm():
    define_torchvision_schemas()
    return pytest.importorskip("timm")


def make_vit(timm, **changes: object) -> nn.Module:
    """timm's transformer, tiny: 4 x 4 patches of 8 pixels, two blocks of three heads."""
    settings = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 3,
        "num_classes": NUM_CLASSES,
        **changes,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = timm.models.vision_transformer.VisionTransformer(**settings)
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
    return net


def pixels(batch_size: int, *size: int) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.rand(batch_size, 3, *(size or (32, 32)), generator=rng)


def unfused(net: nn.Module, x: Tensor) -> Tensor:
    """The last block's attention as timm computes it without fusion: [b, heads, n, n]."""
    kept: list[Tensor] = []
    attention = net.blocks[-1].attn
    attention.fused_attn = False
    handle = attention.attn_drop.register_forward_hook(lambda *call: kept.append(call[2]))
    net(x)
    handle.remove()
    attention.fused_attn = True
    return kept[0]


# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"qk_norm": True}, {"reg_tokens": 3}, {"img_size": (16, 32)}],
    ids=["plain", "qk_norm", "registers", "wide"],
)
def test_attention_is_that_of_timms_unfused_block(timm, changes: dict) -> None:
    net = make_vit(timm, **changes)
    x = pixels(3, *changes.get("img_size", (32, 32)))
    expected = unfused(net, x).mean(1)[:, 0, net.num_prefix_tokens :]
    assert net.blocks[-1].attn.fused_attn
    with peek_attention(net, "") as attention:
        logits = net(x)
    found = attention.on_grid(x)
    assert found.shape == (3, x.shape[2] // 8, 4)
    torch.testing.assert_close(found.flatten(1), expected)
    torch.testing.assert_close(logits, net(x))  # which is unchanged
    assert found.std() > 1e-3  # not uniform
    assert not found.requires_grad


def test_the_last_attention_is_found_in_any_wrapper(timm) -> None:
    net = make_vit(timm, depth=11)  # a sort by name would take the ninth
    assert find_attention(net, "") == ("blocks.10.attn", 1)
    assert find_attention(nn.Sequential(net), "0.blocks.1.attn") == ("0.blocks.1.attn", 1)
    compiled = torch.compile(TinyTransformer(num_registers=2), backend="eager")
    assert find_attention(compiled, "") == ("blocks.1.attn", 3)


def test_class_attention_against_a_loop() -> None:
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)
    for i in range(2):
        rows = [(q[i, h, 0] @ k[i, h].T / 2).softmax(0) for h in range(3)]
        expected = torch.stack(rows).mean(0)[2:]
        torch.testing.assert_close(class_attention(q, k, 2)[i], expected)


def test_a_network_without_class_token_is_named(timm) -> None:
    mixer = TransMix()
    draw = draw_case(mixer, "cut", 6)
    without = make_vit(timm, class_token=False, global_pool="avg")
    x = pixels(6)
    with pytest.raises(ValueError, match=r"has no class token \(cls_token\).* or CutMix"):
        mixer.apply(without, x, labels(6), draw)
    with pytest.raises(ValueError, match=r"TinyNet has no q_norm and k_norm, .* timm's names"):
        mixer.apply(TinyNet(), images(6), labels(6), draw)
    wrong = TransMix("blocks.0")
    with pytest.raises(ValueError, match=r"blocks\.0 has no q_norm and k_norm"):
        wrong.apply(TinyTransformer(), images(6), labels(6), draw)
    rotated = TinyTransformer()
    rotated.rope = nn.Identity()
    with pytest.raises(ValueError, match=r"adds positions after q_norm and k_norm \(rope\)"):
        mixer.apply(rotated, images(6), labels(6), draw)


@pytest.mark.parametrize("is_shared", [False, True])
def test_an_attention_with_relative_positions_is_named(timm, is_shared: bool) -> None:
    """Its products have a bias, which queries and keys do not show."""
    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    kind = timm.models.vision_transformer_relpos.VisionTransformerRelPos
    net = kind(**settings, num_classes=NUM_CLASSES, class_token=True, shared_rel_pos=is_shared)
    with pytest.raises(ValueError, match=r"k_norm \((shared_)?rel_pos\), so its attention cannot"):
        TransMix()(net, pixels(6), labels(6))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        # Normalized before heads and tokens change places.
        ({"block_fn": "ParallelScalingBlock"}, r"\[6, 17, 3, 8\]"),
        # The difference of two attentions, twice as many heads.
        ({"attn_layer": "diff"}, r"\[6, 6, 17, 4\]"),
    ],
)
def test_queries_of_another_layout_are_named(timm, settings: dict, found: str) -> None:
    parts = vars(timm.models.vision_transformer)
    net = make_vit(timm, **{key: parts.get(name, name) for key, name in settings.items()})
    with pytest.raises(ValueError, match=rf"queries {found} .* must be \[b, 3, tokens, d\]"):
        TransMix(prob=1.0)(net, pixels(6), labels(6))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_attention_within_a_checkpoint_is_read(use_reentrant: bool) -> None:
    class Checkpointed(TinyTransformer):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=use_reentrant)

    x, y, draw = images(6).requires_grad_(), labels(6), draw_case(TransMix(), "cut", 6)
    plain, net = TinyTransformer(), Checkpointed()
    one, other = (TransMix().apply(each, x, y, draw) for each in (plain, net))
    assert torch.equal(one.targets, other.targets)
    for mixed in (one, other):
        mixed.loss().backward()
    for parameter, expected in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


# ---- laws ----------------------------------------------------------------------------------------


def test_a_step_against_timms_attention(timm) -> None:
    """Images of CutMix; the label of each sample from the attention for its mixed image."""
    net, x, y = make_vit(timm), pixels(6), labels(6)
    for seed in range(6):
        draw = draw_case(TransMix(), "cut", 6, seed)
        mixed = TransMix().apply(net, x, y, draw)
        box = share_mask(draw.center, draw.lam, (32, 32))
        images_ = torch.where(box, x[draw.perm], x)
        torch.testing.assert_close(mixed.logits, net(images_))
        attention = unfused(net, images_).mean(1)[:, 0, 1:].view(6, 4, 4)
        small = F.interpolate(box[None, None].float(), (4, 4), mode="nearest")[0, 0]
        one_hot = torch.eye(NUM_CLASSES)[y]
        for i in range(6):
            inside = (attention[i] * small).sum() / attention[i].sum()
            partner = (box.float().mean() + inside) / 2
            expected = (1 - partner) * one_hot[i] + partner * one_hot[draw.perm[i]]
            torch.testing.assert_close(mixed.targets[i], expected, atol=1e-5, rtol=1e-5)


def test_uniform_attention_counts_patches_and_pixels() -> None:
    for seed in range(10):
        draw = draw_case(TransMix(), "cut", 6, seed)
        box = share_mask(draw.center, draw.lam, (16, 16))
        lam = shown_share(box)
        found = attended_share(torch.full((6, 4, 4), 0.3), box, lam)
        covered = box[::4, ::4].float().mean()
        torch.testing.assert_close(found, (1 - ((1 - lam) + covered) / 2).expand(6))


def test_shares_are_bounded_and_rows_sum_to_one() -> None:
    net, x, y = TinyTransformer(), images(6), torch.arange(6) % NUM_CLASSES
    found = []
    for seed in range(10):
        draw = draw_case(TransMix(), "cut", 6, seed)
        mixed = TransMix().apply(net, x, y, draw)
        torch.testing.assert_close(mixed.targets.sum(1), torch.ones(6))
        area = 1 - shown_share(share_mask(draw.center, draw.lam, (16, 16)))
        is_other = y != y[draw.perm]
        shares = mixed.targets[torch.arange(6), y[draw.perm]][is_other]
        assert (shares >= area / 2 - 1e-6).all()
        assert (shares <= (1 + area) / 2 + 1e-6).all()
        found.append(shares.std())
    assert max(found) > 0.01  # samples of a batch differ


def test_all_attention_elsewhere_halves_the_area_and_none_at_all_counts_patches() -> None:
    box = torch.zeros(16, 16, dtype=torch.bool)
    box[:8, :8] = True
    elsewhere = torch.zeros(1, 4, 4)
    elsewhere[0, 3, 3] = 1
    lam = shown_share(box)
    assert attended_share(elsewhere, box, lam).item() == 1 - 0.25 / 2
    assert attended_share(torch.zeros(1, 4, 4), box, lam).item() == 0.75


def test_no_gradient_reaches_the_attention() -> None:
    """The gradient is that of fixed labels."""
    net, twin, x, y = TinyTransformer(), TinyTransformer(), images(6), labels(6)
    draw = draw_case(TransMix(), "cut", 6)
    mixed = TransMix().apply(net, x, y, draw)
    assert not mixed.targets.requires_grad
    mixed.loss().backward()
    box = share_mask(draw.center, draw.lam, (16, 16))
    logits = twin(torch.where(box, x[draw.perm], x))
    F.cross_entropy(logits, mixed.targets).backward()
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert one.grad is None or torch.allclose(one.grad, other.grad, atol=1e-6)


def test_the_top_left_pixel_of_a_patch_decides() -> None:
    mask = torch.rand(3, 30, 22) < 0.5
    expected = F.interpolate(mask[:, None].float(), (5, 7), mode="nearest")[:, 0].bool()
    assert torch.equal(nearest(mask, (5, 7)), expected)


# ---- defects of other implementations ------------------------------------------------------------


def test_each_sample_has_its_own_weight_in_the_loss() -> None:
    """OpenMixup reduces the loss to its mean before it multiplies by the weights."""
    net, x, y = TinyTransformer(), images(6), labels(6)
    draw = dataclasses.replace(draw_case(TransMix(), "cut", 6), perm=torch.arange(6).roll(2))
    mixed = TransMix().apply(net, x, y, draw)
    one, two = (F.cross_entropy(mixed.logits, z, reduction="none") for z in (y, y[draw.perm]))
    lam = mixed.targets[torch.arange(6), y]
    torch.testing.assert_close(mixed.loss(), (lam * one + (1 - lam) * two).mean())
    averaged = (one.mean() * lam + two.mean() * (1 - lam)).mean()
    assert (mixed.loss() - averaged).abs() > 1e-5


def test_the_switch_is_the_one_that_ran() -> None:
    """A hyphen in the authors' file kept 0.8 from being read; 0.5 is the default of the option."""
    assert TransMix.released().cases == {"InputMixup/input": 0.5, "TransMix/cut": 0.5}
    assert TransMix.intended().cases == pytest.approx(
        {"InputMixup/input": 0.2, "TransMix/cut": 0.8}
    )
    assert TransMix.released().mixers == (InputMixup(alpha=0.8), TransMix())
    assert (TransMix.released().smoothing, TransMix.released().pairing) == (0.1, "reverse")


def test_the_mixup_case_is_that_of_the_switch() -> None:
    net, x, y = TinyTransformer(), images(6), labels(6)
    switch = TransMix.released()
    draw = draw_case(switch, "InputMixup/input", 6)
    ours, theirs = switch.apply(net, x, y, draw), OneOf.deit().apply(net, x, y, draw)
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.targets, theirs.targets)


def test_images_are_those_of_cutmix() -> None:
    draw = draw_case(TransMix(), "cut", 6)
    assert isinstance(draw, BoxDraw)
    net, x, y = TinyTransformer(), images(6), labels(6)
    cut = CutMix().apply(net, x, y, draw)
    assert torch.equal(TransMix().apply(net, x, y, draw).logits, cut.logits)
    with peek(net, "blocks.1.attn.q_norm") as queries:
        net(x)
    assert queries.output.shape == (6, 3, 17, 4)


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": None}, "a layer is the name of a sub-module"),
        ({"alpha": 0.0}, "alpha must be positive"),
        ({"prob": 2.0}, "prob must lie in"),
    ],
)
def test_bad_settings_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransMix(**change)
