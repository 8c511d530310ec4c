"""A step: its batches, of any loader, the size of its draw, and its parts."""

import dataclasses

import pytest
import torch
from torch import nn

from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.mixers.nomix import NoMix
from alignmixup.training import TrainSettings
from alignmixup.training.distributed import Team
from alignmixup.training.optim import make_optimizer
from alignmixup.training.steps import Batches, GatheringLoader, PlainStep, draw_size, prepared


class OwnLoader:
    """Three batches an epoch, as tensors: a loader of the user's own."""

    def __len__(self):
        return 3

    def epoch(self, epoch, start_step=0):
        for step in range(start_step, 3):
            yield torch.full((4, 3, 2, 2), 10.0 * epoch + step), torch.arange(4)


def test_batches_of_a_loader_of_ones_own_are_those_it_yields():
    batches = Batches(OwnLoader(), Team())
    assert not isinstance(OwnLoader(), GatheringLoader)
    assert len(batches) == 3
    batches.prepare(2)  # nothing to draw
    found = [batches.gather(*batch) for batch in batches.of(2, 1)]
    assert [float(x.mean()) for x, _ in found] == [21.0, 22.0]
    assert all(torch.equal(y, torch.arange(4)) for _, y in found)
    assert torch.equal(batches.first(), torch.zeros(4, 3, 2, 2))
    assert list(batches.of(2, 3)) == []


def test_batches_made_on_the_device_are_those_of_the_loader():
    """The last one is smaller, which one process may train on."""
    loader = DeviceLoader(shapes("train", 22), 8, 0)
    batches = Batches(loader, Team())
    for epoch, start in ((0, 0), (1, 1), (0, 2), (1, 3)):
        found = [batches.gather(*batch) for batch in batches.of(epoch, start)]
        expected = list(loader.epoch(epoch, start))
        assert [len(x) for x, _ in found] == [8, 8, 6][start:]
        for (x, y), (wanted_x, wanted_y) in zip(found, expected, strict=True):
            assert torch.equal(x, wanted_x)
            assert torch.equal(y, wanted_y)


def test_rows_of_an_epoch_are_drawn_once_and_ahead_of_it(monkeypatch):
    loader = DeviceLoader(shapes("train", 16), 8, 0)
    drawn, draw = [], loader.rows
    monkeypatch.setattr(loader, "rows", lambda epoch: drawn.append(epoch) or draw(epoch))
    batches = Batches(loader, Team())
    for epoch in range(3):
        assert len(list(batches.of(epoch, 0))) == 2
        batches.prepare(epoch + 1)
    assert drawn == [0, 1, 2, 3]


def test_a_draw_is_for_a_part_of_this_process_or_of_all():
    batch = (torch.zeros(24, 3, 2, 2), torch.zeros(24))
    own = dataclasses.replace(TrainSettings(), accumulate=3)
    shared = dataclasses.replace(own, partners="batch")
    assert draw_size(batch, TrainSettings(), Team()) == 24
    assert draw_size(batch, own, Team()) == 8
    assert draw_size(batch, own, Team(1, 4)) == 8
    assert draw_size(batch, shared, Team(1, 4)) == 32
    with pytest.raises(
        ValueError, match=r"batch of 22 images has no 3 equal parts: .*accumulate=1"
    ):
        draw_size((batch[0][:22], batch[1][:22]), own, Team())


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_a_step_in_parts_is_the_step_of_the_whole_batch(clip_norm):
    """Its loss is the mean of all images, its gradient that of this mean, clipped once."""
    x = torch.rand(24, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(24) % 5
    found = []
    for parts in (1, 3):
        settings = TrainSettings(
            batch_size=24,
            lr=0.5,
            momentum=0.0,
            nesterov=False,
            weight_decay=0.0,
            clip_norm=clip_norm,
            accumulate=parts,
        )
        net = nn.Linear(12, 5, dtype=torch.float64)
        nn.init.zeros_(net.bias)
        nn.init.eye_(net.weight)
        optimizer = make_optimizer(net, settings)
        step = PlainStep(net, NoMix(), optimizer, settings, lambda x, y: (x, y))
        losses = [step((x, y), NoMix().draw(24 // parts, torch.Generator())) for _ in range(2)]
        assert [loss.shape for loss in losses] == [(), ()]
        found.append([*losses, net.weight, net.bias])
    torch.testing.assert_close(found[0], found[1])
    expected = nn.functional.cross_entropy(x @ torch.eye(12, 5).double(), y)
    torch.testing.assert_close(found[1][0], expected)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("float32", None)])
def test_layers_compute_in_the_precision_of_the_settings(precision, dtype):
    """Weights and their gradients are float32, whatever the layers compute in."""
    settings, net = TrainSettings(precision=precision), nn.Linear(12, 5)
    seen = []
    net.register_forward_hook(lambda layer, given, out: seen.append(out.dtype))
    step = PlainStep(net, NoMix(), make_optimizer(net, settings), settings, lambda x, y: (x, y))
    step((torch.rand(4, 12), torch.arange(4)), NoMix().draw(4, torch.Generator()))
    assert seen == [dtype or torch.float32]
    assert net.weight.dtype == net.weight.grad.dtype == torch.float32


@pytest.mark.usefixtures("traced")
def test_a_hook_is_not_lost_to_the_compiled_code_of_an_earlier_network():
    """Code is cached by class, and does not look whether a module has hooks."""
    settings, x = TrainSettings(compile=True), torch.ones(1, 2)
    for factor in (1, 2):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if factor == 2:
            net[0].register_forward_hook(lambda layer, given, out: 2 * out)
        module = prepared(net, settings)
        assert module is not net
        torch.testing.assert_close(module(x), net[1](factor * (x @ net[0].weight.T + net[0].bias)))
