"""Normalization: its law, its memory format and precision, and its errors."""

import math

import pytest
import torch

from alignmixup.models import Normalize
from alignmixup.models.normalize import ImageConv

MEAN, STD = (0.5, 0.25, 0.125), (0.25, 0.5, 2.0)


def test_each_channel_is_shifted_and_scaled_by_its_own_figures():
    x = torch.rand(2, 3, 4, 5)
    out = Normalize(MEAN, STD)(x)
    for c in range(3):
        torch.testing.assert_close(out[:, c], (x[:, c] - MEAN[c]) / STD[c])


def test_it_commutes_with_mixing():
    layer, x, lam = Normalize(MEAN, STD).double(), torch.rand(4, 3, 4, 4).double(), 0.3
    mixed = lam * x + (1 - lam) * x.flip(0)
    torch.testing.assert_close(layer(mixed), lam * layer(x) + (1 - lam) * layer(x).flip(0))


def test_memory_format_follows_the_images():
    layer = Normalize(MEAN, STD).to(memory_format=torch.channels_last)
    x = torch.rand(2, 3, 8, 8)
    last = layer(x.to(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert layer(x).is_contiguous()
    assert torch.equal(last, layer(x))


def test_autocast_leaves_it_in_float32_and_a_half_network_in_half():
    x = torch.rand(2, 3, 4, 4)
    layer = Normalize(MEAN, STD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.float32
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_its_figures_travel_with_the_weights():
    other = Normalize((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    other.load_state_dict(Normalize(MEAN, STD).state_dict())
    assert other.mean.flatten().tolist() == list(MEAN)
    assert other.std.flatten().tolist() == list(STD)
    assert not list(other.parameters())


def test_bytes_and_a_zero_deviation_are_refused():
    with pytest.raises(ValueError, match="divide by 255"):
        Normalize(MEAN, STD)(torch.zeros(1, 3, 2, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="std must be positive"):
        Normalize(MEAN, (0.5, 0.0, 0.5))


@pytest.mark.parametrize(
    ("mean", "std"),
    [((123.7, 116.3, 103.5), (58.4, 57.1, 57.4)), ((math.nan,) * 3, STD), (MEAN, (math.inf,) * 3)],
)
def test_figures_of_bytes_and_what_is_no_number_are_refused(mean, std):
    with pytest.raises(ValueError, match=r"mean must lie in \[0, 1\] .* of bytes by 255"):
        Normalize(mean, std)


@pytest.mark.parametrize("channels", [3, 8])
def test_images_padded_with_channels_of_zeros_give_the_same_and_the_same_gradients(channels):
    conv = ImageConv(channels, 5, 3, stride=2, padding=1).double()
    x = torch.rand(2, channels, 9, 8, dtype=torch.float64, requires_grad=True)
    plain, filled = conv(x), conv._padded(x)
    torch.testing.assert_close(filled, plain, rtol=0, atol=1e-12)
    inputs = (x, conv.weight, conv.bias)
    weight = torch.randn_like(plain)
    expected = torch.autograd.grad((plain * weight).sum(), inputs)
    gradients = torch.autograd.grad((filled * weight).sum(), inputs)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert set(conv.state_dict()) == {"weight", "bias"}
    assert conv.weight.shape == (5, channels, 3, 3)
