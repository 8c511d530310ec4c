"""The autoencoding classifier: its arithmetic against a re-statement, its counts, its decoder."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from alignmixup.datasets.loading.device_loader import DeviceLoader
from alignmixup.datasets.shapes import shapes
from alignmixup.models import VGGGAP, PreActResNet18, ResNet50, WideResNet
from alignmixup.models.autoencoder import AutoencodingClassifier
from alignmixup.models.decoder import ResidualDecoder, ToImage, start_side
from alignmixup.training.decoder_fit import fit_decoder

MEAN, STD = (0.5, 0.375, 0.25), (0.25, 0.1875, 0.3125)  # exact in binary

BACKBONES = {
    "layer4-r18": lambda **k: PreActResNet18(5, MEAN, STD, width=4, **k),
    "norm-wrn": lambda **k: WideResNet(5, MEAN, STD, width=1, **k),
    "layer4-r50": lambda **k: ResNet50(5, MEAN, STD, width=2, **k),
    "conv6-vgg": lambda **k: VGGGAP(5, MEAN, STD, width=2, **k),
}


def randomised(net, seed=1):
    """No weight, BN figure or bias stays at a value that would hide a left-out step."""
    rng = torch.Generator().manual_seed(seed)
    for name, tensor in net.state_dict().items():
        if tensor.is_floating_point() and not name.startswith("normalize."):
            fresh = torch.rand(tensor.shape, generator=rng)
            tensor.copy_(fresh + 0.5 if tensor.ndim == 1 else 0.6 * (fresh - 0.5))
    return net


def small(image_size=32, **options):
    sizes = {"embedding_dim": 6, "embedding_channels": 3, "decoder_channels": 16}
    net = AutoencodingClassifier(BACKBONES["layer4-r18"](), image_size, **sizes, **options)
    return randomised(net).double().eval()


def images(n=3, side=32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(n, 3, side, side, generator=rng, dtype=torch.float64)


def output_of(net, layer, x, **flags):
    seen = []
    handle = net.get_submodule(layer).register_forward_hook(lambda m, i, out: seen.append(out))
    with torch.no_grad():
        net(x, **flags)
    handle.remove()
    assert len(seen) == 1
    return seen[0]


# ---- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKBONES)
def test_the_encoder_is_the_backbone_up_to_its_tap(name):
    """Same modules, same weights: a trained network can be given an autoencoder afterwards."""
    backbone = randomised(BACKBONES[name]()).double()
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    net = AutoencodingClassifier(backbone, 32, embedding_dim=6, decoder=False)
    assert net.training
    assert backbone.training
    after = backbone.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)  # BN statistics too
    net.double().eval()
    A = output_of(backbone, name.split("-")[0], images())
    assert torch.equal(output_of(net, "encoder", images()), A)
    assert net.classifier.out_features == 5


def test_a_decoder_starts_at_the_mean_color():
    net = AutoencodingClassifier(BACKBONES["layer4-r18"](), 32, embedding_dim=6)
    decoded = net(images().float(), decode=True)
    assert (decoded.output == 0).all()
    expected = torch.tensor(MEAN).view(3, 1, 1).expand(3, 3, 32, 32)
    assert torch.equal(decoded.image, expected)


def test_target_and_image_are_in_the_two_spaces():
    net, x = small(), images()
    decoded = net(x, decode=True)
    mean, std = (torch.tensor(v, dtype=x.dtype).view(3, 1, 1) for v in (MEAN, STD))
    torch.testing.assert_close(decoded.target, (x - mean) / std)
    torch.testing.assert_close(decoded.image, decoded.output * std + mean)
    assert decoded.deviation is None


@pytest.mark.parametrize("embedding", ["vector", "tensor"])
def test_a_variational_code_is_mu_without_noise_and_a_sample_with_it(embedding):
    net, x = small(embedding=embedding, variational=True), images()
    mu, sigma = output_of(net, "embed", x).chunk(2, dim=1)
    assert (sigma > 0).all()
    raw = output_of(net, "embed.inner", x).chunk(2, dim=1)[1]
    torch.testing.assert_close(sigma, torch.logaddexp(raw, raw.new_zeros(())) + 1e-4)
    noise = torch.randn(3, net.code_dim, generator=torch.Generator().manual_seed(0)).double()
    for given, code in ((None, mu), (noise, mu + sigma * noise.view(mu.shape))):
        logits = code.flatten(1) @ net.classifier.weight.T + net.classifier.bias
        torch.testing.assert_close(net(x, noise=given), logits)
        decoded = net(x, decode=True, noise=given)
        torch.testing.assert_close(decoded.output, net.decoder(code))
        assert torch.equal(decoded.mean, mu)
        assert torch.equal(decoded.deviation, sigma)


def test_a_tiny_sigma_keeps_a_finite_logarithm():
    net = small(variational=True)
    net.embed.inner.linear.bias.data.fill_(-1e4)
    assert output_of(net, "embed", images()).chunk(2, 1)[1].log().isfinite().all()


# ---- agreement with a re-statement ---------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"pooled": True}, {"reduced_channels": 2}, {"embedding": "tensor"}]
)
def test_embedding_and_classifier_restated(options):
    net, x = small(**options), images()
    A, state = output_of(net, "encoder", x), net.state_dict()
    if options.get("embedding") == "tensor":
        e = A.new_zeros(3, 3, 2, 2)
        for i in range(2):
            for j in range(2):
                patch = A[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
                e[:, :, i, j] = torch.einsum("bcij,dcij->bd", patch, state["embed.conv.weight"])
        e = (e + state["embed.conv.bias"].view(3, 1, 1)).flatten(1)
    else:
        if "reduced_channels" in options:
            A = torch.einsum("bchw,dc->bdhw", A, state["embed.reduce.weight"][:, :, 0, 0])
        weight = state["embed.linear.weight"]
        if "pooled" in options:
            e = A.flatten(2).mean(2) @ weight.T
        else:
            e = torch.einsum("bchw,dchw->bd", A, weight.view(6, *A.shape[1:]))
        e = e + state["embed.linear.bias"]
    expected = e @ state["classifier.weight"].T + state["classifier.bias"]
    torch.testing.assert_close(net(x), expected)


def restated_decoder(state, code, *, num_blocks=2):
    """The evaluation-mode decoder, written from its definition on the bare tensors."""

    def norm(x, name):
        mean, var = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        return F.batch_norm(x, mean, var, state[f"{name}.weight"], state[f"{name}.bias"])

    def double(x):
        return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)

    if "start.linear.weight" in state:
        x = code.flatten(1) @ state["start.linear.weight"].T + state["start.linear.bias"]
        x = x.view(len(code), -1, 4, 4)
    else:
        x = F.conv2d(code, state["start.weight"], state["start.bias"])
    num_stages = len({name.split(".")[1] for name in state if name.startswith("stages.")})
    for stage in range(num_stages):
        for block in range(num_blocks):
            at, is_first = f"stages.{stage}.{block}", block == 0
            inner = norm(x, f"{at}.norm1").relu()
            if is_first:
                x, inner = double(x), double(inner)
            inner = F.conv2d(inner, state[f"{at}.conv1.weight"], padding=1)
            inner = norm(inner, f"{at}.norm2").relu()
            inner = F.conv2d(inner, state[f"{at}.conv2.weight"], padding=1)
            if f"{at}.shortcut.weight" in state:
                x = F.conv2d(x, state[f"{at}.shortcut.weight"])
            x = x + inner
    x = norm(x, "norm").relu()
    return F.conv2d(x, state["to_image.weight"], state["to_image.bias"], padding=1)


@pytest.mark.parametrize("code_shape", [(6,), (3, 2, 2), (3, 4, 4), (3, 3, 3)])
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_decoder_restated(code_shape, num_blocks):
    """(3, 3, 3) does not double to 32, so it goes through the linear layer."""
    decoder = ResidualDecoder(code_shape, 32, channels=16, num_blocks=num_blocks)
    decoder = randomised(decoder).double().eval()
    code = torch.randn(2, *code_shape, generator=torch.Generator().manual_seed(0)).double()
    picture = decoder(code)
    assert picture.shape == (2, 3, 32, 32)
    expected = restated_decoder(decoder.state_dict(), code, num_blocks=num_blocks)
    torch.testing.assert_close(picture, expected)
    assert picture.std() > 0.1  # or the agreement says nothing


# ---- figures -------------------------------------------------------------------------------------

R18 = {"backbone": lambda: PreActResNet18(100, MEAN, STD), "image_size": 32}
R18_8X8 = {"backbone": lambda: PreActResNet18(100, MEAN, STD, last_stride=1), "image_size": 32}
WRN = {"backbone": lambda: WideResNet(100, MEAN, STD), "image_size": 32}
TINY = {"backbone": lambda: PreActResNet18(200, MEAN, STD), "image_size": 64}
R50 = {"backbone": lambda: ResNet50(1000, MEAN, STD), "image_size": 224}


@pytest.mark.parametrize(
    ("net", "options", "code_shape", "millions"),
    [  # encoder + embedding + classifier + decoder, in millions
        (R18, {}, (512,), "11.17 + 4.19 + 0.05 + 8.25 = 23.66"),
        (R18, {"pooled": True}, (512,), "11.17 + 0.26 + 0.05 + 8.25 = 19.73"),
        (R18, {"embedding": "tensor"}, (128, 2, 2), "11.17 + 0.26 + 0.05 + 13.56 = 25.04"),
        (R18, {"variational": True}, (512,), "11.17 + 8.39 + 0.05 + 8.25 = 27.86"),
        (R18_8X8, {}, (512,), "11.17 + 16.78 + 0.05 + 8.25 = 36.25"),
        (WRN, {}, (512,), "10.96 + 16.78 + 0.05 + 8.25 = 36.04"),
        (TINY, {}, (512,), "11.17 + 16.78 + 0.10 + 8.40 = 36.45"),
        (TINY, {"embedding": "tensor"}, (128, 4, 4), "11.17 + 0.26 + 0.41 + 4.26 = 16.10"),
        (R50, {}, (512,), "23.51 + 3.47 + 0.51 + 7.52 = 35.02"),  # the paper: 25 M -> 35 M
        (R50, {"embedding": "tensor"}, (128, 3, 3), "23.51 + 1.05 + 1.15 + 15.55 = 41.26"),
    ],
)
def test_parameter_counts_and_code_shapes(net, options, code_shape, millions):
    with torch.device("meta"):
        net = AutoencodingClassifier(net["backbone"](), net["image_size"], **options)
        decoded = net(torch.empty(2, 3, net.image_size, net.image_size), decode=True)
    assert net.code_shape == code_shape
    assert decoded.output.shape == (2, 3, net.image_size, net.image_size)

    def count(part):
        return f"{sum(p.numel() for p in part.parameters()) / 1e6:.2f}"

    parts = " + ".join(map(count, (net.encoder, net.embed, net.classifier, net.decoder)))
    assert f"{parts} = {count(net)}" == millions


@pytest.mark.parametrize(("width", "reduced"), [(8, None), (16, None), (32, 128), (64, 128)])
def test_large_maps_are_reduced_where_they_have_more_channels_than_that(width, reduced):
    """Maps of 28 x 28 with 64, 128, 256 and 512 channels: all too large to be read whole."""
    with torch.device("meta"):
        net = AutoencodingClassifier(PreActResNet18(10, MEAN, STD, width=width), 224)
    weights = net.embed.linear.weight
    assert weights.shape[1] == (reduced or 8 * width) * 28 * 28
    assert (net.embed.reduce is None) == (reduced is None)


def test_widths_halve_down_to_an_eighth():
    with torch.device("meta"):
        decoder = ResidualDecoder((512,), 224, channels=256)
    assert [stage[0].conv1.out_channels for stage in decoder.stages] == [128, 64, 32, 32, 32]
    assert [start_side(side) for side in (8, 32, 64, 128, 28, 224)] == [4, 4, 4, 4, 7, 7]


# ---- training a decoder alone --------------------------------------------------------------------


def test_fit_decoder_changes_the_decoder_alone():
    net = small().float().train()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    batches = [(images(6, seed=i).float(), None) for i in range(2)]
    fit = fit_decoder(net, batches, steps=8, lr=3e-3, seed=0)
    after = net.state_dict()
    changed = {key for key, value in before.items() if not torch.equal(value, after[key])}
    assert {key.split(".")[0] for key in changed} == {"decoder"}
    assert {f"decoder.{name}" for name, _ in net.decoder.named_parameters()} <= changed
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert all(module.training for module in net.modules())
    assert len(fit.errors) == 8
    assert fit.errors[-1] < fit.errors[0]
    seen = torch.cat([(x - x.new_tensor(MEAN).view(3, 1, 1)) for x, _ in batches])
    seen = seen / seen.new_tensor(STD).view(3, 1, 1)
    expected = (seen - seen.mean(0)).square().mean()
    assert fit.mean_image_error == pytest.approx(float(expected), rel=1e-4)
    # The first answer of a fresh decoder is the mean color.
    assert fit.errors[0] == pytest.approx(float(seen[:6].square().mean()), rel=1e-5)


def test_fit_decoder_is_a_function_of_its_seed():
    def errors(seed):
        net = small().float()
        state = torch.get_rng_state()
        fit = fit_decoder(net, [(images(4).float(),)], steps=4, seed=seed)
        assert torch.equal(state, torch.get_rng_state())
        return fit.errors

    assert errors(0) == errors(0)
    assert errors(0) != errors(1)


def test_fit_decoder_can_train_a_new_embedding_too():
    net = small().float()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    fit_decoder(net, [(images(4).float(),)], steps=2, parts=("embed", "decoder"))
    after = net.state_dict()
    changed = {key.split(".")[0] for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"embed", "decoder"}


def test_fit_decoder_names_what_is_wrong():
    net, batches = small().float(), [(images(4).float(),)]
    with pytest.raises(ValueError, match=r"steps must be at least 1 .* got steps=0"):
        fit_decoder(net, batches, steps=0)
    for lr in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"lr positive and finite, got steps=1, lr={lr}"):
            fit_decoder(net, batches, steps=1, lr=lr)
    with pytest.raises(ValueError, match=r"no parts \['decode'\] to train; .*'decoder'"):
        fit_decoder(net, batches, steps=1, parts=("decode",))
    with pytest.raises(ValueError, match="batches ended after 1 epochs: pass a loader, or a list"):
        fit_decoder(net, iter(batches), steps=3)


# Over eight seeds 67 to 82 % was left after 30 steps, 34 to 53 % after 120.
@pytest.mark.parametrize(
    ("num_steps", "error_left"), [(30, 0.95), pytest.param(120, 0.65, marks=pytest.mark.slow)]
)
def test_a_decoder_on_a_random_encoder_learns_to_reconstruct_shapes(num_steps, error_left):
    """Held-out pictures: about half of the error of the mean image, in 120 steps."""
    train, test = (shapes(split, 600, image_size=16) for split in ("train", "test"))
    torch.manual_seed(0)
    backbone = PreActResNet18(10, train.mean, train.std, width=8, last_stride=1)
    net = AutoencodingClassifier(
        backbone, 16, embedding_dim=64, decoder_channels=64, decoder_blocks=1
    )
    loader = DeviceLoader(train, batch_size=50, seed=0, pad=0, flip=False)
    fit_decoder(net, loader, steps=num_steps, lr=5e-3, parts=("embed", "decoder"))
    net.eval()
    with torch.no_grad():
        decoded = net(test.images / 255, decode=True)
    error = (decoded.output - decoded.target).square().mean()
    spread = (decoded.target - decoded.target.mean(0)).square().mean()
    assert error < error_left * spread


# ---- compiled ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("options", [{}, {"embedding": "tensor", "variational": True}], ids=str)
def test_compiles_to_one_graph_a_flag(options):
    torch.compiler.reset()
    net = AutoencodingClassifier(
        BACKBONES["conv6-vgg"](), 32, embedding_dim=8, embedding_channels=2, **options
    )
    nn.init.normal_(net.decoder.eval().to_image.weight)
    compiled = torch.compile(net.eval(), backend="eager", fullgraph=True)
    x = torch.rand(2, 3, 32, 32)
    noise = {"noise": torch.randn(2, net.code_dim)} if net.variational else {}
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, **noise), net(x, **noise))
        ours, theirs = compiled(x, decode=True, **noise), net(x, decode=True, **noise)
        for field in ("image", "output", "target", "mean"):
            torch.testing.assert_close(getattr(ours, field), getattr(theirs, field))


# ---- bad settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embedding": "matrix"}, "unknown embedding 'matrix'; choose 'vector' or 'tensor'"),
        ({"embedding_dim": 0}, "embedding_dim must be at least 1, got 0"),
        ({"embedding": "tensor", "embedding_channels": 0}, "embedding_channels must be at least 1"),
        ({"embedding": "tensor", "pooled": True}, "pooled=True .* options of a vector"),
        ({"reduced_channels": 99}, r"reduced_channels must lie in 1\.\.32, got 99"),
        ({"pooled": True, "reduced_channels": 2}, "needs no reduced_channels"),
        ({"decoder_channels": 0}, "decoder channels must be at least 1, got 0"),
        ({"decoder_blocks": 0}, "decoder num_blocks must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        AutoencodingClassifier(BACKBONES["layer4-r18"](), 32, **options)


def test_bad_sizes_and_networks_are_named():
    with pytest.raises(ValueError, match="image_size=40 is neither 4 nor 7 times a power of two"):
        AutoencodingClassifier(BACKBONES["layer4-r18"](), 40)
    with pytest.raises(ValueError, match="halves the map, and this encoder's is 1 x 1"):
        AutoencodingClassifier(BACKBONES["layer4-r18"](), 8, embedding="tensor")
    with pytest.raises(ValueError, match=r"from normalize to head, got a Sequential"):
        AutoencodingClassifier(nn.Sequential(nn.Linear(2, 2)), 32)


def test_bad_input_is_named():
    net = small(decoder=False)
    with pytest.raises(ValueError, match=r"built for images of 32 x 32, got \[3, 3, 16, 16\]"):
        net(images(side=16))
    with pytest.raises(ValueError, match="built with decoder=False"):
        net(images(), decode=True)
    with pytest.raises(ValueError, match="noise is for a network with variational=True"):
        net(images(), noise=torch.zeros(3, 6))
    with pytest.raises(ValueError, match=r"shape \[3, 6\] .* got \[3, 5\]: .* embedding_dim to 6"):
        small(variational=True)(images(), noise=torch.zeros(3, 5))


def test_the_last_convolution_resets_to_zero():
    conv = ToImage(4, 3, 3)
    assert not conv.weight.any()
    nn.init.ones_(conv.weight)
    conv.reset_parameters()
    assert not conv.weight.any()
    assert not conv.bias.any()
