"""RegMixup against two plain passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from alignmixup.contracts import soft_cross_entropy
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.mixers.regmixup import RegMixup
from cases import TinyNet, draw_case, images, labels, with_lam


def frozen_norms() -> TinyNet:
    """A network whose batch norm does not depend on the batch."""
    return TinyNet().double().eval()


def gradients(net: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(net.parameters())))


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_it_is_two_plain_passes(eta: float, scale: float) -> None:
    """The value and its gradient: clean + eta mixed."""
    mixer, net = RegMixup(eta=eta, scale=scale), frozen_norms()
    x, y = images(6, dtype=torch.float64), labels(6)
    draw = draw_case(mixer, "beside", 6)
    ours = mixer.apply(net, x, y, draw).loss()
    clean = NoMix()(net, x, y).loss()
    mixed = InputMixup().apply(net, x, y, draw_like(draw)).loss()
    expected = scale * (clean + eta * mixed)
    torch.testing.assert_close(ours, expected)
    for one, other in zip(gradients(net, ours), gradients(net, expected), strict=True):
        torch.testing.assert_close(one, other)


def draw_like(draw):
    """The same partners and share for input mixup."""
    other = draw_case(InputMixup(), "input", len(draw.perm))
    return other.with_tensors({"perm": draw.perm, "lam": draw.lam})


def test_without_a_weight_it_is_no_mixing() -> None:
    net, x, y = frozen_norms(), images(6, dtype=torch.float64), labels(6)
    mixed = RegMixup(eta=0.0)(net, x, y, torch.Generator().manual_seed(0))
    torch.testing.assert_close(mixed.loss(), NoMix()(net, x, y).loss())


def test_a_whole_share_is_twice_the_clean_loss() -> None:
    net, x, y = frozen_norms(), images(6, dtype=torch.float64), labels(6)
    mixer = RegMixup(eta=0.7)
    draw = with_lam(draw_case(mixer, "beside", 6), 1.0)
    clean = NoMix()(net, x, y).loss()
    torch.testing.assert_close(mixer.apply(net, x, y, draw).loss(), 1.7 * clean)


def test_batch_norm_sees_both_batches_in_one_pass() -> None:
    calls = []

    class Counted(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().forward(x)

    net = Counted()
    RegMixup()(net, images(6), labels(6))
    assert calls == [12]
    assert int(net.layer1[1].num_batches_tracked) == 1


def test_the_released_preset_is_the_mean_over_all_images() -> None:
    """Half of the paper's formula."""
    net, x, y = frozen_norms(), images(6, dtype=torch.float64), labels(6)
    draw = draw_case(RegMixup(), "beside", 6)
    mixed = InputMixup().apply(net, x, y, draw_like(draw))
    z = torch.cat([net(x), mixed.logits])
    t = torch.cat([torch.eye(5)[y], mixed.targets]).double()
    ours = RegMixup.released().apply(net, x, y, draw)
    torch.testing.assert_close(ours.loss(), soft_cross_entropy(z, t))
    assert RegMixup.released(20.0).alpha == 20.0


def test_shares_are_near_one_half() -> None:
    rng = torch.Generator().manual_seed(0)
    shares = torch.stack([RegMixup(alpha=20.0).draw(2, rng).lam for _ in range(500)])
    assert (shares - 0.5).abs().mean() < 0.1


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="eta must be >= 0 and finite, got -1"):
        RegMixup(eta=-1.0)
    with pytest.raises(ValueError, match="scale must be >= 0 and finite, got inf"):
        RegMixup(scale=float("inf"))
