"""Captured steps on a GPU: the same draws give the same training as plain steps."""

import dataclasses

import pytest
import torch
from torch import nn

from alignmixup.data import DeviceLoader, shapes
from alignmixup.mixing import AlignMixup, CutMix, Cutout, InputMixup, ManifoldMixup, NoMix
from alignmixup.nets import PreActResNet18
from alignmixup.train import TrainSettings
from alignmixup.train.steps import CapturedStep, PlainStep, make_optimizer, make_step

pytestmark = pytest.mark.gpu

SETTINGS = TrainSettings(
    batch_size=32, lr=0.02, nesterov=True, clip_norm=5.0, capture=True, channels_last=True
)
MIXERS = [
    NoMix(),
    InputMixup(),
    Cutout(),
    CutMix(),
    ManifoldMixup(),
    AlignMixup(),
    AlignMixup(lam_per_sample=True, aligned=False),
]


def train(mixer, step_kind, num_steps=24, settings=SETTINGS):
    torch.manual_seed(0)
    half = (0.5, 0.5, 0.5)
    net = PreActResNet18(10, half, half, width=16).cuda().to(memory_format=torch.channels_last)
    loader = DeviceLoader(shapes("train", 320), 32, 0, "cuda", channels_last=True)
    plain = PlainStep(net, mixer, make_optimizer(net, settings), settings, loader.gather)
    step = step_kind(plain)
    rng = torch.Generator().manual_seed(1)
    rows = torch.cat([loader.rows(e) for e in range(3)])
    losses = []
    for i in range(num_steps):
        for group in plain.optimizer.param_groups:
            group["lr"].fill_(0.02 * (1 - i / num_steps))
        losses.append(step((rows[32 * i : 32 * (i + 1)],), mixer.draw(32, rng)))
    return torch.stack(losses).cpu(), step


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda m: type(m).__name__)
def test_captured_steps_are_the_plain_steps(mixer):
    plain, _ = train(mixer, lambda p: p)
    captured, step = train(mixer, CapturedStep)
    assert step.path == "captured"
    assert len(step._graphs) == len(mixer.cases)
    # Convolutions may take other algorithms in a graph's memory: float32 differences that training
    # multiplies step by step, hence a per cent after two dozen steps.
    torch.testing.assert_close(captured, plain, rtol=2e-2, atol=1e-2)


class Waits(nn.Module):
    """Waits for the device in the middle of its forward: no graph can hold it."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 10)

    def forward(self, x):
        mean = x.mean((2, 3))
        return self.head(mean) if float(mean.sum()) > -1 else self.head(-mean)


def test_what_cannot_be_captured_is_run_plainly_and_says_so():
    net = Waits().cuda()
    loader = DeviceLoader(shapes("train", 64), 32, 0, "cuda")
    settings = dataclasses.replace(SETTINGS, clip_norm=None)
    plain = PlainStep(net, NoMix(), make_optimizer(net, settings), settings, loader.gather)
    step = make_step(plain, torch.device("cuda"))
    rng = torch.Generator()
    losses = [float(step((loader.rows(0)[:32],), NoMix().draw(32, rng))) for _ in range(8)]
    assert step.path.startswith("plain for ['clean']")
    assert losses[-1] < losses[0]
