"""The zoo: seeds, options, other people's models, default taps, and errors that help."""

import dataclasses
import re
import sys

import pytest
import torch
from torch import nn

from alignmixup.models import (
    ADL,
    NetSpec,
    ResNet50,
    Wrapped,
    build,
    default_tap,
    external,
    initialize,
    zoo,
)
from alignmixup.models.resnet import their_name

MEAN, STD = (0.49, 0.48, 0.45), (0.2, 0.21, 0.22)
SMALL = {
    "preact_resnet18": NetSpec("preact_resnet18", width=4),
    "wrn16_8": NetSpec("wrn16_8", width=2),
    "resnet50": NetSpec("resnet50", width=4),
    "vgg_gap": NetSpec("vgg_gap", width=4),
    "acol_vgg": NetSpec("acol_vgg", width=4),
    "adl_vgg": NetSpec("adl_vgg", width=4),
    "adl_resnet50": NetSpec("adl_resnet50", width=4, last_stride=1),
}


def make(spec, *, num_classes=3, image_size=32, seed=0):
    return build(spec, num_classes, mean=MEAN, std=STD, image_size=image_size, seed=seed)


def same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def tapped(net, layer, x):
    seen = []
    handle = net.get_submodule(layer).register_forward_hook(lambda m, i, out: seen.append(out))
    with torch.no_grad():
        net.eval()(x)
    handle.remove()
    assert len(seen) == 1
    return seen[0]


def test_every_name_of_ours_is_covered_here():
    assert {*SMALL, "timm:NAME", "torchvision:NAME"} == set(zoo.names())


@pytest.mark.parametrize("spec", SMALL.values(), ids=SMALL)
def test_weights_are_a_function_of_the_seed_and_of_nothing_else(spec):
    torch.manual_seed(11)
    first = make(spec, seed=5)
    torch.manual_seed(12)
    assert same_weights(first, make(spec, seed=5))
    assert not same_weights(first, make(spec, seed=6))


@pytest.mark.parametrize("name", [*SMALL, "torchvision:resnet18", "timm:resnet10t"])
def test_torchs_own_random_state_is_untouched(name, timm):
    before = torch.get_rng_state()
    make(SMALL.get(name, NetSpec(name)), seed=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:resnet10t"])
def test_other_peoples_weights_are_a_function_of_the_seed_too(name, timm):
    torch.manual_seed(11)
    first = make(NetSpec(name), seed=5)
    torch.manual_seed(12)
    assert same_weights(first, make(NetSpec(name), seed=5))
    assert not same_weights(first, make(NetSpec(name), seed=6))


@pytest.mark.parametrize("name", ["timm:resnet10t", "torchvision:resnet18", "resnet50"])
def test_weights_load_into_the_librarys_own_model(name, timm, tmp_path):
    """As the tutorial on prediction says of an exported file, read without this package."""
    import torchvision
    from safetensors.torch import load_file, save_file

    net = make(NetSpec(name)).eval()
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    state = load_file(tmp_path / "net.safetensors")
    if name == "resnet50":
        plain = torchvision.models.resnet50(num_classes=3)
        weights = {their_name(k): v for k, v in state.items() if not k.startswith("normalize.")}
    else:
        library, _, model = name.partition(":")
        create = timm.create_model if library == "timm" else torchvision.models.get_model
        plain = create(model, num_classes=3)
        start = "model."
        weights = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
    plain.load_state_dict(weights)
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    normalized = (x - state["normalize.mean"]) / state["normalize.std"]
    torch.testing.assert_close(plain.eval()(normalized), net(x), atol=1e-4, rtol=1e-4)


def test_initialize_follows_the_stated_laws():
    net = make(NetSpec("preact_resnet18"))
    conv = net.layer3[0].conv1.weight  # fan-in 9 * 128, fan-out 9 * 256
    assert conv.abs().max() <= (9 * 128) ** -0.5
    assert conv.std().item() == pytest.approx((1 / (3 * 9 * 128)) ** 0.5, rel=0.01)
    assert abs(conv.mean().item()) < 1e-4
    linear = net.head.linear.weight
    assert linear.abs().max() <= 512**-0.5
    assert linear.std().item() == pytest.approx((1 / (3 * 512)) ** 0.5, rel=0.05)


def test_without_batch_norm_the_signal_does_not_fade():
    net = make(NetSpec("vgg_gap")).eval()
    conv = next(m for m in net.modules() if isinstance(m, nn.Conv2d) and m.in_channels == 256)
    assert conv.weight.std().item() == pytest.approx((2 / (9 * conv.out_channels)) ** 0.5, rel=0.01)
    assert not conv.bias.any()
    x = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    first, second = net(x)
    assert (first - second).norm() > 1e-2 * first.norm()


def test_initialize_restores_batch_norm_and_forgets_what_was_learned():
    net, fresh = make(SMALL["wrn16_8"], seed=2), make(SMALL["wrn16_8"], seed=2)
    net.train()(torch.rand(4, 3, 32, 32))
    assert not same_weights(net, fresh)
    initialize(net, torch.Generator().manual_seed(2))
    assert same_weights(net, fresh)


def test_initialize_refuses_a_layer_it_has_no_law_for():
    with pytest.raises(ValueError, match="'1', a LayerNorm"):
        initialize(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), torch.Generator())


@pytest.mark.parametrize(
    ("spec", "tap", "shape"),
    [
        (NetSpec("preact_resnet18", width=4), "layer4", (32, 4, 4)),
        (NetSpec("preact_resnet18", width=4, last_stride=1), "layer4", (32, 8, 8)),
        (NetSpec("preact_resnet18", width=4, stem_stride=2), "layer4", (32, 2, 2)),
        (NetSpec("wrn16_8", width=2), "norm", (64, 8, 8)),
        (NetSpec("resnet50", width=4), "layer4", (128, 1, 1)),
        (NetSpec("resnet50", width=4, last_stride=1), "layer4", (128, 2, 2)),
        (NetSpec("vgg_gap", width=4), "conv6", (64, 2, 2)),
        (NetSpec("acol_vgg", width=4), "body", (32, 2, 2)),
        (NetSpec("adl_vgg", width=4), "conv6", (64, 2, 2)),
        (NetSpec("adl_resnet50", width=4, last_stride=1), "layer4", (128, 2, 2)),
    ],
)
def test_taps_of_our_networks(spec, tap, shape):
    net = make(spec)
    assert default_tap(spec, net) == default_tap(spec.name, net) == tap
    assert tapped(net, tap, torch.rand(2, 3, 32, 32)).shape == (2, *shape)


@pytest.mark.parametrize("name", ["preact_resnet18", "wrn16_8"])
def test_options_reach_the_network(name):
    net = make(NetSpec(name, width=4, head="flatten", stem_stride=2), image_size=64)
    assert net.head.kind == "flatten"
    assert net(torch.rand(2, 3, 64, 64)).isfinite().all()
    assert net.get_submodule("stem.conv" if name == "preact_resnet18" else "stem").stride == (2, 2)


@pytest.mark.parametrize("name", ["preact_resnet18", "wrn16_8", "resnet50", "vgg_gap"])
@pytest.mark.parametrize("kind", ["vector", "pooled", "tensor"])
def test_an_autoencoder_goes_around_every_network_that_erases_nothing(name, kind):
    spec = dataclasses.replace(SMALL[name], autoencoder=kind)
    net = make(spec, image_size=64)
    assert default_tap(spec, net) == "encoder"
    x = torch.rand(2, 3, 64, 64)
    assert net(x).shape == (2, 3)
    assert net(x, decode=True).image.shape == x.shape


def test_the_decoders_norms_do_not_let_an_encoder_without_any_fade():
    """VGG-GAP by torch's own law would bring the signal down by orders of magnitude."""
    spec = NetSpec("vgg_gap", width=16)
    alone, net = make(spec), make(dataclasses.replace(spec, autoencoder="vector"))
    ours, theirs = net.encoder.state_dict(), alone.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    bound = net.decoder.stages[0][0].conv1.weight[0].numel() ** -0.5  # the decoder keeps its law
    assert net.decoder.stages[0][0].conv1.weight.abs().max() <= bound


def test_an_autoencoder_has_no_head_to_choose():
    spec = NetSpec("preact_resnet18", width=4, autoencoder="vector", head="flatten")
    with pytest.raises(ValueError, match="head='flatten' does not apply with autoencoder='vector'"):
        make(spec)


def test_stem_norm_reaches_the_network():
    for stem_norm in (True, False):
        net = make(NetSpec("preact_resnet18", width=4, stem_norm=stem_norm))
        assert ("stem.norm.weight" in net.state_dict()) is stem_norm


FOREIGN = [
    ("torchvision:resnet18", 32, "model.layer4", (512, 1, 1)),
    pytest.param(*("torchvision:vgg11", 32, "model.features", (512, 1, 1)), marks=pytest.mark.slow),
    ("torchvision:densenet121", 32, "model.features", (1024, 1, 1)),
    ("timm:resnet10t", 32, "model.layer4", (512, 1, 1)),
    ("timm:levit_128s", 64, "model.stem", (128, 4, 4)),
    ("timm:vit_tiny_patch16_224", 32, "model.blocks.11", (5, 192)),
]


@pytest.mark.parametrize(("name", "size", "tap", "shape"), FOREIGN)
def test_other_peoples_models_are_normalized_and_tapped(name, size, tap, shape, timm):
    net = make(NetSpec(name), image_size=size).eval()
    assert default_tap(name, net) == tap
    x = torch.rand(2, 3, size, size)
    assert tapped(net, tap, x).shape == (2, *shape)
    normalized = (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    with torch.no_grad():
        logits = net(x)
        torch.testing.assert_close(logits, net.model(normalized))
    assert logits.shape == (2, 3)
    assert logits.isfinite().all()


def test_taps_of_a_bare_model_have_no_prefix(timm):
    bare = make(NetSpec("timm:resnet10t")).model
    assert default_tap("timm:resnet10t", bare) == "layer4"


def test_the_tap_of_torchvisions_vision_transformer_is_its_last_block(torchvision):
    with torch.device("meta"):
        bare = torchvision.models.vit_b_16(weights=None)
    assert default_tap("torchvision:vit_b_16", bare) == "encoder.layers.encoder_layer_11"


@pytest.mark.parametrize("name", ["torchvision:mobilenet_v2", "timm:resnetv2_50"])
def test_a_family_without_a_known_tap_lists_the_layers(name, timm):
    with torch.device("meta"):
        source = sys.modules[name.partition(":")[0]]
        create = source.create_model if source is timm else source.models.get_model
        net = create(name.partition(":")[2])
    with pytest.raises(ValueError, match="name the layer to mix at") as caught:
        default_tap(name, net)
    expected = "features.18" if "mobilenet" in name else "stages.3"
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("preact_resnet_18", "did you mean 'preact_resnet18'"),
        ("efficientnet", "choose from .*timm:NAME"),
        ("keras:resnet50", "did you mean 'resnet50'"),
        ("timm:levit_128ss", "did you mean .*'timm:levit_128s'"),
        ("torchvision:resnet81", "did you mean .*'torchvision:resnet18'"),
    ],
)
def test_an_unknown_name_says_which_there_are(name, hint, timm):
    with pytest.raises(ValueError, match=hint) as caught:
        make(NetSpec(name))
    assert repr(name) in str(caught.value)
    with pytest.raises(ValueError):
        default_tap(name, nn.Identity())


@pytest.mark.parametrize(
    ("spec", "option"),
    [
        (NetSpec("wrn16_8", stem_norm=False), "stem_norm=False"),
        (NetSpec("wrn16_8", pretrained=True), "pretrained=True"),
        (NetSpec("preact_resnet18", pretrained=True), "pretrained=True"),
        (NetSpec("resnet50", head="flatten"), "head='flatten'"),
        (NetSpec("resnet50", stem_stride=2), "stem_stride=2"),
        (NetSpec("vgg_gap", last_stride=1), "last_stride=1"),
        (NetSpec("timm:resnet10t", width=8), "width=8"),
        (NetSpec("torchvision:resnet18", last_stride=1), "last_stride=1"),
    ],
)
def test_an_option_a_network_does_not_have_is_an_error(spec, option):
    with pytest.raises(ValueError, match=f"{option} does not apply to {spec.name}"):
        make(spec)


def test_values_out_of_range_are_errors():
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        NetSpec("wrn16_8", width=0)
    with pytest.raises(ValueError, match="stem_stride must be 1 or 2, got 3"):
        NetSpec("wrn16_8", stem_stride=3)
    with pytest.raises(ValueError, match="last_stride must be 1 or 2, got 4"):
        NetSpec("wrn16_8", last_stride=4)
    with pytest.raises(ValueError, match="num_classes must be at least 1, got 0"):
        make(NetSpec("wrn16_8"), num_classes=0)
    with pytest.raises(ValueError, match="no pretrained weights"):
        make(NetSpec("resnet50", width=8, pretrained=True))


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_a_missing_extra_is_named(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # what an absent package looks like
    with pytest.raises(ImportError, match=rf"{package} is missing: pip install alignmixup\[timm\]"):
        make(NetSpec(f"{package}:resnet18"))


def test_a_torchvision_built_for_another_torch_is_named(monkeypatch):
    def fail(package):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(external.importlib, "import_module", fail)
    with pytest.raises(ImportError, match=r"does not import beside torch .*nms does not exist"):
        make(NetSpec("torchvision:resnet18"))


def test_pretrained_weights_reach_our_networks(torchvision, monkeypatch):
    """The download is replaced: weights of another seed stand for ImageNet's."""
    with torch.random.fork_rng():
        resnet50 = torchvision.models.resnet50(weights=None)
    vgg = torchvision.models.vgg
    features = vgg.make_layers(vgg.cfgs["D"])
    states = {
        ("resnet50", "IMAGENET1K_V1"): resnet50.state_dict(),
        ("vgg16", "IMAGENET1K_V1"): {f"features.{k}": v for k, v in features.state_dict().items()},
    }
    monkeypatch.setattr(zoo, "torchvision_weights", lambda *which: states[which])
    net = make(NetSpec("resnet50", pretrained=True, last_stride=1))
    assert isinstance(net, ResNet50)
    assert torch.equal(net.layer4[0].conv2.weight, resnet50.layer4[0].conv2.weight)
    assert net.head.linear.out_features == 3
    full = make(NetSpec("resnet50", pretrained=True), num_classes=1000)
    assert torch.equal(full.head.linear.weight, resnet50.fc.weight)
    net = make(NetSpec("vgg_gap", pretrained=True))
    assert torch.equal(net.features[28].weight, features[28].weight)
    acol = make(NetSpec("acol_vgg", pretrained=True))
    assert torch.equal(acol.body.features[28].weight, features[28].weight)
    adl = make(NetSpec("adl_vgg", pretrained=True))
    assert torch.equal(adl.features[28].weight, features[28].weight)
    assert sum(isinstance(m, ADL) for m in adl.modules()) == 3
    adl = make(NetSpec("adl_resnet50", pretrained=True, last_stride=1))
    assert torch.equal(adl.layer4[0].conv2.weight, resnet50.layer4[0].conv2.weight)
    assert sum(isinstance(m, ADL) for m in adl.modules()) == 2


def test_pretrained_weights_reach_torchvisions_own_but_for_the_classifier(torchvision, monkeypatch):
    theirs = torchvision.models.resnet18(weights=None)
    state = theirs.state_dict()
    monkeypatch.setattr(external, "torchvision_weights", lambda *which: state)
    spec = NetSpec("torchvision:resnet18", pretrained=True)
    net = make(spec)
    assert isinstance(net, Wrapped)
    assert torch.equal(net.model.layer4[1].conv2.weight, theirs.layer4[1].conv2.weight)
    assert net.model.fc.weight.shape == (3, 512)
    del state["layer1.0.conv1.weight"]
    with pytest.raises(ValueError, match=r"layer1\.0\.conv1\.weight .* they have none"):
        make(spec)


@pytest.mark.slow
def test_weights_in_older_forms_are_taken(torchvision, monkeypatch):
    """DenseNet's files name layers as they were once; older files count no batches."""
    for name in ("densenet121", "resnet18"):
        theirs = torchvision.models.get_model(name, weights=None, num_classes=3)
        state = {
            re.sub(r"(denselayer\d+\.(?:norm|conv))([12]\.)", r"\1.\2", key): value
            for key, value in theirs.state_dict().items()
            if not key.endswith("num_batches_tracked")
        }
        monkeypatch.setattr(external, "torchvision_weights", lambda *which, state=state: state)
        net = make(NetSpec(f"torchvision:{name}", pretrained=True))
        for key, value in theirs.state_dict().items():
            if not key.endswith("num_batches_tracked"):
                assert torch.equal(net.model.state_dict()[key], value), key


def test_pretrained_weights_get_the_scale_they_were_trained_with(torchvision, monkeypatch):
    state = torchvision.models.resnet18(weights=None).state_dict()
    monkeypatch.setattr(external, "torchvision_weights", lambda *which: state)
    assert external._pretrained_scale(nn.Module()) == external.IMAGENET_SCALE
    own_scale = nn.Module()
    own_scale.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    assert external._pretrained_scale(own_scale) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    net = make(NetSpec("torchvision:resnet18", pretrained=True))
    plain = make(NetSpec("torchvision:resnet18"))
    x = torch.rand(1, 3, 8, 8)
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in external.IMAGENET_SCALE)
    torch.testing.assert_close(net.normalize(x), (x - mean) / std)
    assert not torch.allclose(plain.normalize(x), net.normalize(x))


def test_a_model_without_a_tensor_of_logits_is_refused():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    net = Wrapped(make(SMALL["wrn16_8"]).normalize, Pair())
    with pytest.raises(ValueError, match="returns a tuple, not a tensor"):
        net(torch.rand(1, 3, 4, 4))


def test_a_size_that_a_model_of_torchvision_does_not_take_is_named(timm):
    with pytest.raises(ValueError, match=r"vit_b_16 cannot be built for images of 20 x 20"):
        zoo.build(NetSpec("torchvision:vit_b_16"), 3, (0.5,) * 3, (0.25,) * 3, 20)
