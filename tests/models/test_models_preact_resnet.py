"""PreActResNet-18: its arithmetic against a re-statement, its counts, its maps and its heads."""

import pytest
import torch
import torch.nn.functional as F

from alignmixup.models import Head, PreActResNet18

MEAN, STD = (0.5, 0.375, 0.25), (0.25, 0.1875, 0.3125)  # exact in binary


def small(**options):
    net = PreActResNet18(options.pop("num_classes", 5), MEAN, STD, width=4, **options)
    return randomised(net).double()


def randomised(net):
    """Give BN figures other than the identity, so that a left-out or doubled BN shows."""
    rng = torch.Generator().manual_seed(1)
    for name, tensor in net.state_dict().items():
        if tensor.is_floating_point() and not name.startswith("normalize."):
            fresh = torch.rand(tensor.shape, generator=rng)
            tensor.copy_(fresh + 0.5 if tensor.ndim == 1 else 0.6 * (fresh - 0.5))
    return net


def features(net, layer, x):
    seen = []
    handle = net.get_submodule(layer).register_forward_hook(lambda m, i, out: seen.append(out))
    with torch.no_grad():
        net(x)
    handle.remove()
    assert len(seen) == 1
    return seen[0]


def restated(state, x, *, stem_stride=1, last_stride=2, block="released"):
    """The evaluation-mode network, written from its definition on the bare tensors.

    In the released network every block applies its shortcut, empty or not, to ReLU(BN(x)).
    """

    def norm(x, name):
        mean, var = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        return F.batch_norm(x, mean, var, state[f"{name}.weight"], state[f"{name}.bias"])

    x = (x - x.new_tensor(MEAN).view(1, 3, 1, 1)) / x.new_tensor(STD).view(1, 3, 1, 1)
    x = F.conv2d(x, state["stem.conv.weight"], stride=stem_stride, padding=1)
    if "stem.norm.weight" in state:
        x = norm(x, "stem.norm").relu()
    for stage, stage_stride in zip((1, 2, 3, 4), (1, 2, 2, last_stride), strict=True):
        for index in (0, 1):
            at, stride = f"layer{stage}.{index}", stage_stride if index == 0 else 1
            pre = norm(x, f"{at}.norm1").relu()
            if index == 0 and stage > 1:
                x = F.conv2d(pre, state[f"{at}.shortcut.weight"], stride=stride)
            elif block == "released":
                x = pre
            inner = F.conv2d(pre, state[f"{at}.conv1.weight"], stride=stride, padding=1)
            inner = norm(inner, f"{at}.norm2").relu()
            x = x + F.conv2d(inner, state[f"{at}.conv2.weight"], padding=1)
    return x


@pytest.mark.parametrize("block", ["released", "standard"])
@pytest.mark.parametrize("stem_norm", [True, False])
@pytest.mark.parametrize(("stem_stride", "last_stride"), [(1, 2), (2, 2), (1, 1)])
def test_logits_equal_the_network_written_out(block, stem_norm, stem_stride, last_stride):
    strides = {"stem_stride": stem_stride, "last_stride": last_stride, "block": block}
    net = small(stem_norm=stem_norm, **strides).eval()
    x = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    state = net.state_dict()
    expected = restated(state, x, **strides)
    torch.testing.assert_close(features(net, "layer4", x), expected)
    logits = expected.mean((2, 3)) @ state["head.linear.weight"].T + state["head.linear.bias"]
    torch.testing.assert_close(net(x), logits)


def formula(num_classes, width=64, *, stem_norm):
    """Parameters by hand: convolutions without bias, two figures a BN channel, a linear layer."""
    total = 27 * width + 2 * width * stem_norm
    before = width
    for channels in (width, 2 * width, 4 * width, 8 * width):
        total += 2 * before + 9 * before * channels + 2 * channels + 9 * channels**2
        total += 0 if channels == before else before * channels
        total += 2 * (2 * channels + 9 * channels**2)
        before = channels
    return total + 8 * width * num_classes + num_classes


@pytest.mark.parametrize(
    ("num_classes", "stem_norm", "literal"),
    [(10, False, 11_171_146), (10, True, 11_171_274), (100, True, 11_217_444)],
)
def test_parameter_count(num_classes, stem_norm, literal):
    with torch.device("meta"):
        net = PreActResNet18(num_classes, MEAN, STD, stem_norm=stem_norm)
    count = sum(p.numel() for p in net.parameters())
    assert count == formula(num_classes, stem_norm=stem_norm) == literal


def test_stem_norm_is_on_unless_refused():
    assert "stem.norm.weight" in PreActResNet18(2, MEAN, STD, width=2).state_dict()
    bare = PreActResNet18(2, MEAN, STD, width=2, stem_norm=False)
    assert "stem.norm.weight" not in bare.state_dict()


@pytest.mark.parametrize(
    ("image_size", "options", "side"),
    [
        (32, {}, 4),
        (32, {"last_stride": 1}, 8),
        (64, {}, 8),
        (64, {"stem_stride": 2}, 4),
        (30, {}, 4),
    ],
)
def test_layer4_has_the_stated_map_and_a_flattened_head_fits_it(image_size, options, side):
    net = small(head="flatten", image_size=image_size, **options)
    x = torch.rand(2, 3, image_size, image_size, dtype=torch.float64)
    assert features(net, "layer4", x).shape == (2, 32, side, side)
    assert net.head.linear.in_features == 32 * side**2


def test_the_released_block_is_the_default():
    x = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    default, released, standard = (
        features(small(**options).eval(), "layer4", x)
        for options in ({}, {"block": "released"}, {"block": "standard"})
    )
    assert torch.equal(default, released)
    assert (released - standard).abs().max() > 0.01 * released.abs().max()


def test_full_width_gives_512_channels():
    net = PreActResNet18(10, MEAN, STD)
    assert features(net, "layer4", torch.rand(2, 3, 32, 32)).shape == (2, 512, 4, 4)


@pytest.mark.parametrize(("kind", "sees_positions"), [("pool", False), ("flatten", True)])
def test_only_a_flattened_head_sees_where_features_are(kind, sees_positions):
    net = small(head=kind).eval()
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    order = torch.tensor([5, 0, 15, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14])
    plain = net(x)
    net.layer4.register_forward_hook(lambda m, i, out: out.flatten(2)[..., order].view_as(out))
    changed = (net(x) - plain).abs().max() / plain.abs().max()
    assert (changed > 1e-3) if sees_positions else (changed < 1e-12)


def test_pooled_head_is_mean_then_linear_and_flattened_head_a_sum_over_positions():
    maps = torch.rand(3, 6, 4, 4, dtype=torch.float64)
    pool = Head(6, 7).double()
    expected = pool.linear(maps.mean(-1).mean(-1))
    torch.testing.assert_close(pool(maps), expected)
    flat = Head(6, 7, kind="flatten", side=4).double()
    weight = flat.linear.weight.view(7, 6, 4, 4)
    expected = torch.einsum("bchw,kchw->bk", maps, weight) + flat.linear.bias
    torch.testing.assert_close(flat(maps), expected)
    torch.testing.assert_close(flat(maps.to(memory_format=torch.channels_last)), expected)


def test_it_trains_under_autocast_and_channels_last():
    net = PreActResNet18(3, MEAN, STD, width=8).to(memory_format=torch.channels_last)
    x = torch.rand(4, 3, 16, 16).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(x)
    assert logits.dtype == torch.bfloat16
    F.cross_entropy(logits.float(), torch.tensor([0, 1, 2, 0])).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_errors_name_the_value_and_the_remedy():
    with pytest.raises(ValueError, match=r"'average'.*'pool' or 'flatten'"):
        Head(4, 2, kind="average")
    with pytest.raises(ValueError, match="num_classes must be at least 1, got 0"):
        Head(4, 0)
    with pytest.raises(ValueError, match=r"unknown block 'raw'; choose 'released' or 'standard'"):
        small(block="raw")
    with pytest.raises(ValueError, match=r"maps of 4 x 4, got 8 x 8.*image_size"):
        small(head="flatten", image_size=32)(torch.rand(1, 3, 64, 64, dtype=torch.float64))
