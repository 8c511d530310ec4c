"""The policy for tokens holds in the models of timm and of Transformers.

Class, distillation and register tokens are mixed in place, patches are aligned among themselves,
and maps of Swin keep their channels in the last dimension. Each test writes the expected features
into the layer by a hook of its own and compares the logits.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import alignmixup as am
from alignmixup.contracts import Draw
from alignmixup.hooks import peek
from alignmixup.mixers.attention import clean_map
from alignmixup.ops.align import align_mix
from cases import NUM_CLASSES, labels
from torchvision_schemas import define_torchvision_schemas

pytestmark = pytest.mark.unchecked_shapes
SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 2}
SWIN = {"embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4}
HF = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 64,
    "patch_size": 16,
    "num_labels": NUM_CLASSES,
}
HF_SWIN = {
    "num_labels": NUM_CLASSES,
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
}
HF_PVT = {
    "num_labels": NUM_CLASSES,
    "image_size": 64,
    "hidden_sizes": [8, 8, 8, 8],
    "depths": [1, 1, 1, 2],
    "num_attention_heads": [1, 1, 1, 2],
}


def timm_model(name: str, **changes: object) -> nn.Module:
    define_torchvision_schemas()
    timm = pytest.importorskip("timm")
    return enlarged(timm.create_model(name, num_classes=NUM_CLASSES, img_size=64, **changes))


def hf_model(name: str, **config: object) -> nn.Module:
    define_torchvision_schemas()
    transformers = pytest.importorskip("transformers")
    settings = getattr(transformers, f"{name}Config")(**config)
    return enlarged(getattr(transformers, f"{name}ForImageClassification")(settings))


@torch.no_grad()
def enlarged(net: nn.Module) -> nn.Module:
    """Give the network weights with which its logits depend on its features.

    Small initial weights and layer scales hide what a layer returns.
    """
    rng = torch.Generator().manual_seed(0)
    for name, parameter in net.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter[0].numel() ** -0.5, generator=rng)
        elif "gamma" in name:
            parameter.fill_(1.0)
    return net.eval()


def batch() -> Tensor:
    """Noise of very different contrast in each image."""
    noise = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return noise ** torch.tensor([0.1, 1.0, 3.0, 9.0]).view(4, 1, 1, 1)


def draw_of(case: str) -> Draw:
    return Draw(case, torch.tensor([1, 2, 3, 0]), torch.tensor(0.4))


def expected_logits(net: nn.Module, layer: str, replace: Callable[[Tensor], Tensor]) -> Tensor:
    def hook(module: nn.Module, inputs: object, output: object) -> object:
        if isinstance(output, Tensor):
            return replace(output)
        return (replace(output[0]), *output[1:])

    handle = net.get_submodule(layer).register_forward_hook(hook)
    logits = am.as_logits(net)(batch())
    handle.remove()
    return logits


def by_policy(tokens: Tensor, prefix: int, draw: Draw, keep: str) -> Tensor:
    first = torch.lerp(tokens[draw.perm, :prefix], tokens[:, :prefix], draw.lam)
    patches = tokens[:, prefix:].contiguous()
    return torch.cat((first, align_mix(patches, draw.perm, draw.lam, keep=keep)), dim=1)


def check(net: nn.Module, mixer: am.AlignMixup, prefix: int, is_map: bool = False) -> None:
    for case, keep in {"feat": "anchor", "feat'": "partner"}.items():
        draw = draw_of(case)

        def replace(output: Tensor, draw: Draw = draw, keep: str = keep) -> Tensor:
            tokens = output.flatten(1, 2) if is_map else output
            return by_policy(tokens, prefix, draw, keep).view_as(output)

        expected = expected_logits(net, mixer.layer, replace)
        mixed = mixer.apply(am.as_logits(net), batch(), labels(4), draw)
        torch.testing.assert_close(mixed.logits, expected, atol=1e-4, rtol=1e-4)
        assert (expected - am.as_logits(net)(batch())).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "layer", "prefix"),
    [
        ("vit_tiny_patch16_224", "blocks.0", 1),
        ("vit_tiny_patch16_224", "patch_embed", 0),
        ("vit_medium_patch16_reg4_gap_256", "blocks.0", 4),
        ("vit_base_patch14_reg4_dinov2", "blocks.0", 5),
        ("deit_tiny_distilled_patch16_224", "blocks.0", 2),
        ("deit3_small_patch16_224", "blocks.0", 1),
        ("beit_base_patch16_224", "blocks.0", 1),
    ],
)
def test_timm_says_how_many_tokens_are_no_patches(name: str, layer: str, prefix: int) -> None:
    check(timm_model(name, patch_size=16, **SMALL), am.AlignMixup(layer), prefix)


@pytest.mark.parametrize("layer", ["patch_embed", "layers.0", "layers.0.blocks.0"])
def test_swin_has_its_channels_last(layer: str) -> None:
    net = timm_model("swin_tiny_patch4_window7_224", **SWIN)
    check(net, am.AlignMixup(layer), 0, is_map=True)
    check(net, am.AlignMixup(layer, channels_last=True), 0, is_map=True)


def test_a_convolution_inside_swin_has_its_channels_first() -> None:
    net, mixer = (
        timm_model("swin_tiny_patch4_window7_224", **SWIN),
        am.AlignMixup("patch_embed.proj"),
    )
    assert not mixer.selection(net).channels_last
    stated = am.AlignMixup("patch_embed.proj", channels_last=False)
    draw = draw_of("feat")
    found, expected = (m.apply(net, batch(), labels(4), draw).logits for m in (mixer, stated))
    assert torch.equal(found, expected)


def test_levit_has_a_stem_of_maps_and_stages_of_tokens() -> None:
    net = timm_model("levit_128s")
    check(net, am.AlignMixup("stages.0"), 0)
    draw = draw_of("feat")
    mixed = am.AlignMixup("stem").apply(net, batch(), labels(4), draw)
    expected = expected_logits(net, "stem", lambda maps: align_mix(maps, draw.perm, draw.lam))
    torch.testing.assert_close(mixed.logits, expected)


@pytest.mark.parametrize("says", [None, 1])
def test_a_class_token_that_is_added_later_is_not_counted(says: int | None) -> None:
    """CaiT adds it after the blocks; from 1.0.31 on timm says that there is one."""
    cait = timm_model("cait_xxs24_224", **SMALL)
    vars(cait).pop("num_prefix_tokens", None)
    if says is not None:
        cait.num_prefix_tokens = says
    check(cait, am.AlignMixup("blocks.0"), 0)
    check(cait, am.AlignMixup("blocks.0", prefix_tokens=1), 1)  # what is set counts
    with peek(cait, "blocks.0") as tokens:
        cait(batch())
    maps = clean_map(cait, batch(), "blocks.0")
    assert torch.equal(maps.flatten(2).mT, tokens.output)


def test_a_class_token_that_is_not_counted_is_an_error_until_it_is() -> None:
    net = hf_model("ViT", **HF)
    for case in ("input", "feat"):
        mixer, draw = am.AlignMixup("vit.layers.0"), draw_of(case)
        with pytest.raises(ValueError, match=r"has a class token.* set prefix_tokens"):
            mixer.apply(am.as_logits(net), batch(), labels(4), draw)
    check(net, am.AlignMixup("vit.layers.0", prefix_tokens=1), 1)


@pytest.mark.parametrize("layer", ["pvt.encoder.patch_embeddings.3", "pvt.encoder.block.3.0"])
def test_a_class_token_in_a_list_of_modules_is_found(layer: str) -> None:
    net = hf_model("Pvt", **HF_PVT)  # the last patch embedding adds a class token by itself
    with pytest.raises(ValueError, match=r"not say how many of the 5 tokens .* set prefix_tokens"):
        am.AlignMixup(layer, output=0)(am.as_logits(net), batch(), labels(4))
    check(net, am.AlignMixup(layer, output=0, prefix_tokens=1), 1)
    check(net, am.AlignMixup("pvt.encoder.patch_embeddings.0", output=0), 0)


@pytest.mark.parametrize(
    ("name", "config", "layer", "settings", "prefix"),
    [
        ("ViT", HF, "vit.layers.0", {"prefix_tokens": 1}, 1),
        ("ViT", HF, "vit.embeddings.patch_embeddings", {}, 0),
        ("DeiT", HF, "deit.layers.0", {"prefix_tokens": 2}, 2),
        ("Swin", HF_SWIN, "swin.encoder.layers.0", {"output": 0}, 0),
    ],
)
def test_models_of_transformers(name, config, layer, settings, prefix) -> None:
    check(hf_model(name, **config), am.AlignMixup(layer, **settings), prefix)


@pytest.mark.parametrize("mixer", [am.AttentiveMix(layer="vit.layers.0"), am.SAMix("vit.layers.0")])
def test_a_grid_of_tokens_that_are_not_counted_is_an_error_until_they_are(mixer) -> None:
    net = am.as_logits(hf_model("ViT", **HF))
    with pytest.raises(ValueError, match="set num_prefix_tokens of the network to the number"):
        mixer.attach(net, batch())(net, batch(), labels(4))
    net.num_prefix_tokens = 1  # of the wrapper or of the model in it
    assert mixer.attach(net, batch())(net, batch(), labels(4)).loss().isfinite()


def test_a_patch_embedding_is_a_grid_without_a_class_token() -> None:
    net = timm_model("vit_tiny_patch16_224", **SMALL)
    mixed = am.AttentiveMix(layer="patch_embed")(net, batch(), labels(4))
    assert mixed.loss().isfinite()


def test_transformers_do_not_count_their_tokens_and_return_outputs() -> None:
    net = hf_model("ViT", **HF)
    with pytest.raises(ValueError, match="set prefix_tokens"):
        am.AlignMixup("vit.layers.0")(am.as_logits(net), batch(), labels(4))
    with pytest.raises(ValueError, match=r"a BaseModelOutputWithPooling of .*'last_hidden_state'"):
        am.AlignMixup("vit", prefix_tokens=1)(am.as_logits(net), batch(), labels(4))
    mixer = am.ManifoldMixup(("vit",), output="last_hidden_state")
    draw = draw_of("vit")
    mixed = mixer.apply(am.as_logits(net), batch(), labels(4), draw)
    tokens = net.vit(batch()).last_hidden_state
    expected = net.classifier(torch.lerp(tokens[draw.perm, 0], tokens[:, 0], draw.lam))
    torch.testing.assert_close(mixed.logits, expected)


@pytest.mark.parametrize(
    ("name", "settings", "layer"),
    [
        ("vit_tiny_patch16_224", SMALL, "blocks.0"),
        ("swin_tiny_patch4_window7_224", SWIN, "layers.0"),
    ],
)
def test_manifold_mixup_mixes_every_position(name, settings, layer) -> None:
    net, mixer = timm_model(name, **settings), am.ManifoldMixup((layer,))
    draw = draw_of(layer)
    expected = expected_logits(net, layer, lambda out: torch.lerp(out[draw.perm], out, draw.lam))
    torch.testing.assert_close(mixer.apply(net, batch(), labels(4), draw).logits, expected)


def test_channels_last_of_tokens_is_an_error() -> None:
    net = timm_model("vit_tiny_patch16_224", **SMALL)
    with pytest.raises(ValueError, match=r"channels_last is set, but .* \[4, 17, 24\]"):
        am.AlignMixup("blocks.0", channels_last=True)(net, batch(), labels(4))
