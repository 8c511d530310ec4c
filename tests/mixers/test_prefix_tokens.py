"""Tokens that are no positions (class token, registers) are mixed in place and never aligned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixer
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.manifold_mixup import ManifoldMixup
from alignmixup.ops.align import align_mix
from cases import NUM_CLASSES, TinyNet, draw_case, images, labels


class Patches(nn.Module):
    """Tokens [b, 16, 12] of patches of 4 x 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, 12, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class TinyViT(nn.Module):
    """Patches behind ``prefix`` learned tokens, two layers and a head on all tokens."""

    def __init__(self, prefix: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.patch_embed = Patches()
            self.first = nn.Parameter(torch.randn(1, prefix, 12))
            self.blocks = nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12))
            self.head = nn.Linear(12 * (prefix + 16), NUM_CLASSES)
        self.num_prefix_tokens = prefix  # as timm's vision transformers have it

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch_embed(x)
        first = self.first.expand(len(x), -1, -1)
        return self.head(self.blocks(torch.cat((first, tokens), dim=1)).flatten(1))


def logits_of(mixer: Mixer, net: nn.Module, draw: Draw) -> Tensor:
    return mixer.apply(net, images(6), labels(6), draw).logits.detach()


def tokens_after(net: TinyViT, mixer: Mixer, draw: Draw) -> tuple[Tensor, Tensor]:
    """The tokens of ``blocks`` as they are, and as the head sees them mixed."""
    seen: list[Tensor] = []
    handle = net.head.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    net(images(6))
    logits_of(mixer, net, draw)
    handle.remove()
    plain, mixed = (flat.view(6, -1, 12) for flat in seen)
    return plain, mixed


@pytest.mark.parametrize("prefix", [1, 3])
@pytest.mark.parametrize("case", ["feat", "feat'"])
def test_prefix_tokens_are_mixed_and_patches_aligned(case: str, prefix: int) -> None:
    mixer = AlignMixup("blocks")
    draw = draw_case(mixer, case, 6)
    plain, mixed = tokens_after(TinyViT(prefix), mixer, draw)
    blend = torch.lerp(plain[draw.perm], plain, draw.lam)
    keep = "anchor" if case == "feat" else "partner"
    aligned = align_mix(plain[:, prefix:].contiguous(), draw.perm, draw.lam, keep=keep)
    torch.testing.assert_close(mixed[:, :prefix], blend[:, :prefix])
    torch.testing.assert_close(mixed[:, prefix:], aligned)
    assert not torch.allclose(aligned, blend[:, prefix:], atol=1e-3)


def test_the_number_is_the_setting_or_that_of_the_innermost_module_around_the_layer() -> None:
    def at(layer: str, prefix_tokens: int | None = None) -> AlignMixup:
        # A soft plan: with a sharp one the class tokens, alike in all samples, find each other.
        return AlignMixup(layer, eps=100.0, prefix_tokens=prefix_tokens)

    draw = draw_case(at("blocks"), "feat", 6)
    found, silent = TinyViT(), TinyViT()
    del silent.num_prefix_tokens
    expected = logits_of(at("blocks"), found, draw)
    assert torch.equal(logits_of(at("blocks", 1), silent, draw), expected)
    wrapped = nn.Sequential(nn.Identity(), found)
    wrapped.num_prefix_tokens = 5
    assert torch.equal(logits_of(at("1.blocks"), wrapped, draw), expected)
    # Without either, and with 0 stated, every token is a position.
    everywhere = logits_of(at("blocks"), silent, draw)
    assert torch.equal(logits_of(at("blocks", 0), found, draw), everywhere)
    assert not torch.allclose(everywhere, expected, atol=1e-3)


def test_patch_embeddings_have_no_prefix_yet() -> None:
    net, mixer = TinyViT(), AlignMixup("patch_embed")
    draw = draw_case(mixer, "feat", 6)
    stated = AlignMixup("patch_embed", prefix_tokens=0)
    assert torch.equal(logits_of(mixer, net, draw), logits_of(stated, net, draw))


@pytest.mark.parametrize("name", ["cls_token", "cls_token2", "class_embedding", "register_tokens"])
def test_a_token_that_is_not_counted_is_an_error_under_any_of_its_names(name: str) -> None:
    net = TinyViT()
    del net.num_prefix_tokens
    net.register_parameter(name, net.first)
    draw = draw_case(AlignMixup("blocks"), "feat", 6)
    with pytest.raises(ValueError, match="set prefix_tokens to their number"):
        logits_of(AlignMixup("blocks"), net, draw)
    logits_of(AlignMixup("blocks", prefix_tokens=1), net, draw)
    logits_of(AlignMixup("patch_embed"), net, draw)


def test_manifold_mixup_mixes_every_token_alike() -> None:
    mixer = ManifoldMixup(("blocks",))
    draw = draw_case(mixer, "blocks", 6)
    plain, mixed = tokens_after(TinyViT(), mixer, draw)
    torch.testing.assert_close(mixed, torch.lerp(plain[draw.perm], plain, draw.lam))


def test_gradients_reach_the_prefix_and_the_patches() -> None:
    net, mixer = TinyViT(), AlignMixup("blocks")
    mixer.apply(net, images(6), labels(6), draw_case(mixer, "feat", 6)).loss().backward()
    for parameter in (net.first, net.patch_embed.proj.weight):
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().sum() > 0


@pytest.mark.parametrize("case", ["input", "feat"])
@pytest.mark.parametrize(
    ("mixer", "net", "message"),
    [
        (AlignMixup("blocks", prefix_tokens=17), TinyViT, "17 leaves no token to align of the 17"),
        (
            AlignMixup(prefix_tokens=1),
            TinyNet,
            r"prefix_tokens is 1, .* returns maps \[6, 8, 4, 4\]",
        ),
        (AlignMixup("blocks", resolution=2), TinyViT, r"resolution 2 .* returns \[6, 17, 12\]"),
    ],
)
def test_what_cannot_be_is_named_in_any_case(mixer, net, message: str, case: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixer.apply(net(), images(6), labels(6), draw_case(mixer, case, 6))
