"""AttentiveMix: its laws, a loop with topk as oracle, torchvision's ResNet, defects of others."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from alignmixup.contracts import Draw
from alignmixup.mixers.attentivemix import AttentiveMix, strongest
from alignmixup.ops.guide import MEAN, STD, Guide, load_guide
from cases import NUM_CLASSES, TinyNet, images, labels
from torchvision_schemas import define_torchvision_schemas


class Recorder(TinyNet):
    """A network that keeps what it is shown."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return super().forward(x)


def draw_of(lam: float, batch_size: int = 6) -> Draw:
    return Draw("cut", torch.arange(batch_size).roll(1), torch.tensor(lam))


def maps_of(net: nn.Module, x: Tensor) -> Tensor:
    net.eval()
    with torch.no_grad():
        maps = net.layer4(net.layer2(net.layer1(x)))
    net.train()
    return maps


# ---- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.5, 0.99, 1.0])
def test_it_pastes_the_strongest_cells_of_the_partner(lam: float) -> None:
    """Against torch.topk and a loop over samples and cells."""
    net, x, y, draw = Recorder(), images(6), labels(6), draw_of(lam)
    mixed = AttentiveMix().apply(net, x, y, draw)
    num = min(max(int(16 * (1 - torch.tensor(lam))), 1), 16)
    attention = maps_of(TinyNet(), x).mean(1).flatten(1)
    expected = x.clone()
    for i, partner in enumerate(draw.perm.tolist()):
        for cell in attention[partner].topk(num).indices.tolist():
            rows, columns = (slice(4 * at, 4 * at + 4) for at in divmod(cell, 4))
            expected[i, :, rows, columns] = x[partner, :, rows, columns]
    assert torch.equal(net.seen, expected)
    one_hot = torch.eye(NUM_CLASSES)[y]
    share = 1 - num / 16
    torch.testing.assert_close(mixed.targets, share * one_hot + (1 - share) * one_hot[draw.perm])


@pytest.mark.parametrize("num", [0, 1, 6, 49])
def test_exactly_so_many_cells_and_of_equal_ones_the_first(num: int) -> None:
    equal = torch.ones(3, 7, 7)
    cells = strongest(equal, torch.tensor(1 - (num + 0.5) / 49).clamp(min=0), 0, None)
    assert cells.sum((1, 2)).tolist() == [num] * 3
    assert torch.equal(cells.flatten(1), (torch.arange(49) < num).expand(3, -1))


def test_at_least_one_cell_unless_none_is_allowed() -> None:
    values = torch.rand(3, 4, 4)
    for lam in (0.97, 1.0):
        assert strongest(values, torch.tensor(lam), 1, None).sum() == 3
        assert not strongest(values, torch.tensor(lam), 0, None).any()


def test_a_fixed_number_of_cells_is_the_papers() -> None:
    mixer = AttentiveMix.paper("guide.safetensors")
    assert (mixer.num_cells, mixer.guide_size) == (6, 224)
    draw = mixer.draw(4, torch.Generator().manual_seed(0))
    assert strongest(torch.rand(4, 7, 7), draw.lam, 1, 6).sum((1, 2)).tolist() == [6] * 4


def test_the_guide_leaves_the_network_as_it_was() -> None:
    """Running statistics move once, by the mixed batch; modes and gradients are untouched."""
    net, twin, x, y = TinyNet(), TinyNet(), images(6), labels(6)
    net.layer2.eval()
    twin.layer2.eval()
    draw = draw_of(0.4)
    mixed = AttentiveMix().apply(net, x, y, draw)
    seen = Recorder()
    AttentiveMix().apply(seen, x, y, draw)
    assert [m.training for m in net.modules()] == [m.training for m in twin.modules()]
    twin(seen.seen)
    for name, buffer in net.named_buffers():
        assert torch.equal(buffer, dict(twin.named_buffers())[name]), name
    mixed.loss().backward()
    soft = -(mixed.targets * twin(seen.seen).log_softmax(1)).sum(1).mean()
    soft.backward()
    torch.testing.assert_close(net.layer1[0].weight.grad, twin.layer1[0].weight.grad)


class Tokens(nn.Module):
    """A class token and 2 x 4 patches of 8 pixels, behind a layer that returns tokens."""

    num_prefix_tokens = 1

    def __init__(self) -> None:
        super().__init__()
        self.layer4 = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        patches = F.avg_pool2d(x, 8).flatten(2).transpose(1, 2)
        return self.layer4(torch.cat((patches[:, :1] * 0 + 9, patches), 1)).mean(1)


def test_tokens_are_cells_without_the_class_token() -> None:
    x = images(3).repeat(1, 1, 1, 2)  # 16 x 32
    net, draw = Tokens(), draw_of(0.55, 3)
    mixed = AttentiveMix().apply(net, x, torch.arange(3), draw)
    cells = F.avg_pool2d(x, 8).mean(1)
    rank = cells.flatten(1).argsort(1, descending=True).argsort(1).view(3, 2, 4)
    mask = (rank < 3).repeat_interleave(8, 1).repeat_interleave(8, 2)[draw.perm].unsqueeze(1)
    assert torch.equal(net.seen, torch.where(mask, x[draw.perm], x))
    torch.testing.assert_close(mixed.targets[0], torch.tensor([1 - 3 / 8, 0, 3 / 8]))


# ---- defects of other implementations ------------------------------------------------------------


class Seven(nn.Module):
    """A network whose last map has 7 x 7 cells at any size, of which channel 0 is the brightest."""

    def __init__(self) -> None:
        super().__init__()
        self.layer4 = nn.AdaptiveAvgPool2d(7)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return self.layer4(x).mean((2, 3))


def test_labels_are_each_samples_own_area() -> None:
    """At 32 pixels a cell has 16, 20 or 25 of them: neither k / 49 nor the area of sample 0."""
    x = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    net, draw = Seven(), draw_of(0.5, 8)
    targets = AttentiveMix().apply(net, x, torch.arange(8) % 3, draw).targets
    shown = (net.seen == x).all(1).float().mean((1, 2))
    own = torch.eye(3)[torch.arange(8) % 3]
    expected = shown[:, None] * own + (1 - shown)[:, None] * own[draw.perm]
    torch.testing.assert_close(targets, expected)
    assert len(shown.unique()) > 1
    assert (shown - (1 - 24 / 49)).abs().max() > 1e-3


def test_attention_is_the_mean_over_channels_not_the_last() -> None:
    """xden2331's code takes the last channel."""
    x = torch.zeros(2, 3, 14, 14)
    x[1, 2, :2, :2] = 0.5  # strongest in the last channel
    x[1, :2, -2:, -2:] = 0.4  # strongest in the mean
    net = Seven()
    AttentiveMix(num_cells=1).apply(net, x, torch.arange(2), draw_of(0.9, 2))
    assert torch.equal(net.seen[0, :, -2:, -2:], x[1, :, -2:, -2:])
    assert not net.seen[0, :, :-2].any()


def test_unknown_settings_are_refused() -> None:
    """OpenMixup's keywords beta and grid_size are swallowed there."""
    with pytest.raises(TypeError):
        AttentiveMix(beta=8.0)


# ---- the frozen guide ----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["BasicBlock", "Bottleneck"])
def resnet(request: pytest.FixtureRequest) -> nn.Module:
    """A shallow ResNet of torchvision with statistics that are not those of a new one."""
    define_torchvision_schemas()
    module = pytest.importorskip("torchvision.models.resnet")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = module.ResNet(getattr(module, request.param), [1, 2, 1, 1]).eval()
        for name, tensor in net.state_dict().items():
            if "running" in name:
                tensor.uniform_(0.5, 1.5)
    return net


def test_the_guide_is_torchvisions_resnet(resnet: nn.Module, tmp_path: Path) -> None:
    x = images(2)
    kept: list[Tensor] = []
    handle = resnet.layer4.register_forward_hook(lambda *call: kept.append(call[2]))
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (MEAN, STD))
    with torch.no_grad():
        resized = F.interpolate(x, (64, 64), mode="bilinear", align_corners=False)
        resnet((resized - mean) / std)
    handle.remove()
    path = tmp_path / "guide.safetensors"
    save_file(resnet.state_dict(), path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    mixer = AttentiveMix(str(path), sha256, guide_size=64)
    maps = mixer._maps(TinyNet(), x)
    torch.testing.assert_close(maps, kept[0], atol=1e-4, rtol=1e-3)
    assert not maps.requires_grad
    # A loader that normalizes gives the same map.
    scaled = AttentiveMix(str(path), guide_size=64, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    shift, scale = (torch.tensor(v).view(3, 1, 1) for v in (scaled.mean, scaled.std))
    torch.testing.assert_close(scaled._maps(TinyNet(), (x - shift) / scale), maps)
    net = Recorder()
    assert mixer.apply(net, x, labels(2), draw_of(0.4, 2)).loss().isfinite()
    with pytest.raises(ValueError, match=f"has sha256 {sha256}, expected 00"):
        load_guide(path, sha256="00")


def test_a_file_that_is_no_guide_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be a .safetensors file .* got 'none.pth'"):
        load_guide("none.pth")
    path = tmp_path / "other.safetensors"
    save_file({"conv1.weight": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="cannot be used as guide: conv1"):
        load_guide(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be used as guide"):
        load_guide(path)
    with pytest.raises(ValueError, match="ResNet is missing"):
        Guide({})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"guide": ""}, "guide must be 'self' or a file"),
        ({"sha256": "ab"}, "set for a file only, got guide='self' and sha256='ab'"),
        ({"min_cells": -1}, "min_cells must be an integer >= 0, got -1"),
        ({"num_cells": 0}, "num_cells must be an integer >= 1, got 0"),
        ({"guide_size": 16}, "guide_size must be an integer >= 32, got 16"),
        ({"layer": 4}, "a layer is the name of a sub-module"),
    ],
)
@pytest.mark.unchecked_shapes
def test_bad_settings_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentiveMix(**change)


def test_a_layer_without_cells_is_named() -> None:
    mixer = AttentiveMix(layer="fc")
    with pytest.raises(ValueError, match=r"layer 'fc' returns \[6, 5\]; maps"):
        mixer.apply(TinyNet(), images(6), labels(6), draw_of(0.5))


@pytest.mark.parametrize(("num_cells", "lam"), [(6, 43 / 49), (49, 0.0), (60, 0.0)])
def test_a_number_of_cells_is_a_nominal_share(num_cells: int, lam: float) -> None:
    draw = AttentiveMix(num_cells=num_cells).draw(4, torch.Generator().manual_seed(0))
    assert float(draw.lam) == pytest.approx(lam)
    attention = torch.rand(4, 7, 7)
    assert (strongest(attention, draw.lam, 0, num_cells).sum((1, 2)) == min(num_cells, 49)).all()
    assert not strongest(attention, torch.tensor(1.0), 0, num_cells).any()
