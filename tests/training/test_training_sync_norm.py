"""Batch norms that share their statistics: torch's own where there is one process."""

import copy

import pytest
import torch
from torch import nn

from alignmixup.training.sync_norm import SyncNorm, sync_norms

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("settings", [{}, {"affine": False}, {"momentum": None}, {"eps": 0.1}])
@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.BatchNorm1d, (6, 3)), (nn.BatchNorm2d, (2, 3, 4, 5))]
)
def test_one_process_computes_what_torch_does(kind, shape, settings):
    plain = nn.Sequential(kind(3, **settings)).double()
    synced = copy.deepcopy(plain)
    assert sync_norms(synced) == 1
    assert isinstance(synced[0], SyncNorm)
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=rng, dtype=torch.float64)
        weight = torch.randn(shape, generator=rng, dtype=torch.float64)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for net, each in zip((plain, synced), inputs, strict=True):
            (net(each) * weight).sum().backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    torch.testing.assert_close(synced.state_dict(), plain.state_dict())
    torch.testing.assert_close(synced.eval()(x), plain.eval()(x))


def test_tensors_stay_the_same_objects_and_names():
    net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), nn.BatchNorm2d(4))
    before = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert sync_norms(net) == 2
    after = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert sync_norms(net) == 0  # each is synchronized already


def test_a_norm_alone_cannot_be_replaced():
    with pytest.raises(ValueError, match="a batch norm alone"):
        sync_norms(nn.BatchNorm2d(3))
