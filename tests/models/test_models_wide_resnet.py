"""Wide ResNet: the count of WRN16-8, its arithmetic against a re-statement, its tap and dropout."""

import pytest
import torch
import torch.nn.functional as F

from alignmixup.models import WideResNet

MEAN, STD = (0.5, 0.375, 0.25), (0.25, 0.1875, 0.3125)  # exact in binary


def small(**options):
    return WideResNet(4, MEAN, STD, width=4, widen_factor=2, **options).double()


def formula(num_classes, depth, k, num_biases):
    """Parameters by hand; ``num_biases`` is 1 where a convolution has a bias a channel, else 0."""
    num_blocks = (depth - 4) // 6
    total, before = (27 + num_biases) * 16, 16
    for channels in (16 * k, 32 * k, 64 * k):
        total += 2 * before + 9 * before * channels + 2 * channels + 9 * channels**2
        total += before * channels
        total += (num_blocks - 1) * 2 * (2 * channels + 9 * channels**2)
        total += num_biases * (2 * num_blocks + 1) * channels
        before = channels
    return total + 2 * before + before * num_classes + num_classes


@pytest.mark.parametrize(
    ("depth", "k", "literal"), [(16, 8, 10_961_370), (28, 10, 36_479_194), (16, 4, 2_748_890)]
)
def test_parameter_count(depth, k, literal):
    with torch.device("meta"):
        standard = WideResNet(10, MEAN, STD, depth=depth, widen_factor=k, block="standard")
        released = WideResNet(10, MEAN, STD, depth=depth, widen_factor=k)
    count = sum(p.numel() for p in standard.parameters())
    assert count == formula(10, depth, k, 0) == literal
    assert sum(p.numel() for p in released.parameters()) == formula(10, depth, k, 1)


def test_norm_gives_512_channels_of_8_by_8_and_none_negative():
    net = WideResNet(10, MEAN, STD)
    seen = []
    net.norm.register_forward_hook(lambda m, i, out: seen.append(out))
    with torch.no_grad():
        net(torch.rand(2, 3, 32, 32))
    assert seen[0].shape == (2, 512, 8, 8)
    assert seen[0].min() == 0
    # Fresh BN in training mode: unit deviation before the ReLU, so half a unit of power after it.
    assert 0.4 < seen[0].square().mean() < 0.6


@pytest.mark.parametrize("block", ["released", "standard"])
def test_logits_equal_the_network_written_out(block):
    """Released: biases, the stride in the second convolution, shortcuts that read x."""
    net = small(block=block).eval()
    rng = torch.Generator().manual_seed(2)
    state = net.state_dict()
    for name, tensor in state.items():
        if tensor.ndim == 1 and "normalize" not in name:
            tensor.copy_(torch.rand(tensor.shape, generator=rng) + 0.5)

    def norm(x, name):
        mean, var = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        return F.batch_norm(x, mean, var, state[f"{name}.weight"], state[f"{name}.bias"])

    x = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    logits = net(x)
    h = (x - x.new_tensor(MEAN).view(3, 1, 1)) / x.new_tensor(STD).view(3, 1, 1)

    def conv(x, name, stride=1, padding=1):
        bias = state.get(f"{name}.bias")
        return F.conv2d(x, state[f"{name}.weight"], bias, stride, padding)

    h = conv(h, "stem")
    for stage, first in ((1, 1), (2, 2), (3, 2)):
        for index, stride in ((0, first), (1, 1)):
            at = f"layer{stage}.{index}"
            pre = norm(h, f"{at}.norm1").relu()
            strides = (1, stride) if block == "released" else (stride, 1)
            inner = norm(conv(pre, f"{at}.conv1", strides[0]), f"{at}.norm2").relu()
            source = h if block == "released" else pre
            skip = h if index else conv(source, f"{at}.shortcut", stride, padding=0)
            h = skip + conv(inner, f"{at}.conv2", strides[1])
    pooled = norm(h, "norm.norm").relu().mean((2, 3))
    expected = pooled @ state["head.linear.weight"].T + state["head.linear.bias"]
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize(
    ("image_size", "options", "side"),
    [(32, {}, 8), (32, {"last_stride": 1}, 16), (64, {"stem_stride": 2}, 8)],
)
def test_a_flattened_head_fits_the_map(image_size, options, side):
    net = small(head="flatten", image_size=image_size, **options)
    assert net.head.linear.in_features == 4 * 2 * 4 * side**2
    x = torch.rand(2, 3, image_size, image_size, dtype=torch.float64)
    assert net(x).isfinite().all()


def test_the_final_norm_of_the_released_network_keeps_a_tenth_of_the_old_statistics():
    momenta = {block: small(block=block).norm.norm.momentum for block in ("released", "standard")}
    assert momenta == {"released": 0.9, "standard": 0.1}


def test_dropout_acts_in_training_alone():
    x = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    for dropout, differs in ((0.0, False), (0.5, True)):
        net = small(dropout=dropout).train()
        assert torch.equal(net(x), net(x)) is not differs
        net.eval()
        assert torch.equal(net(x), net(x))


def test_errors_name_the_value_and_the_remedy():
    with pytest.raises(ValueError, match=r"6 n \+ 4.*got 18"):
        small(depth=18)
    with pytest.raises(ValueError, match="dropout must lie in"):
        small(dropout=1.0)
