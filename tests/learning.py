"""Does a method teach its labels? Seconds on striped images, half a minute on built-in shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from alignmixup.contracts import ImageSet, Mixer
from alignmixup.datasets.shapes import SHAPE_NAMES, shapes
from cases import NUM_CLASSES as NUM_STRIPES, TinyNet

NUM_CLASSES = len(SHAPE_NAMES)
CHANCE = 1 / NUM_CLASSES

# ---- stripes: a few directions, seen in every part of an image -----------------------------------


def striped_images(num_images: int, seed: int) -> tuple[Tensor, Tensor]:
    """Stripes along four directions and no stripes, of any phase and contrast, 16 x 16."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_images) % NUM_STRIPES
    down, across = torch.tensor([[1.0, 0, 1, 1, 0], [0, 1, 1, -1, 0]])[:, labels, None, None]
    phase = 2 * torch.pi * torch.rand(num_images, 1, 1, generator=rng)
    sides = torch.arange(16.0)
    wave = (torch.pi / 4 * (down * sides.unsqueeze(1) + across * sides) + phase).cos()
    contrast = 0.15 + 0.3 * torch.rand(num_images, 3, 1, 1, generator=rng)
    contrast = contrast * (labels < NUM_STRIPES - 1).view(-1, 1, 1, 1)
    noise = 0.1 * torch.rand(num_images, 3, 16, 16, generator=rng)
    return 0.45 + contrast * wave.unsqueeze(1) + noise, labels


def learn_stripes(mixer: Mixer, seed: int, num_steps: int = 60) -> Learned:
    """Train a tiny network with the labels and its twin with wrong ones; both see the same draws.

    Scored with the statistics of the batch: the running ones lag behind so short a training.
    """
    x, y = striped_images(300, seed)
    nets = TinyNet("pool", seed), TinyNet("pool", seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mixers = [mixer.attach(net, x[:30]) for net in nets]
    modules = [*nets, *(each.module for each in mixers if each.module is not None)]
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    rng = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        rows = torch.randint(len(x), (30,), generator=rng)
        draw = mixer.draw(30, rng)
        optimizer.zero_grad()
        for own, net, shift in zip(mixers, nets, (0, 1), strict=True):
            mixed = own.apply(net, x[rows], (y[rows] + shift) % NUM_STRIPES, draw)
            # Losses of the clean batch would teach the stripes whatever the mixed labels say.
            extra = {k: v for k, v in mixed.extra.items() if k not in ("clean", "mixup")}
            replace(mixed, extra=extra).loss().backward()
        optimizer.step()
    x, y = striped_images(200, seed + 1000)
    with torch.no_grad():
        return Learned(*(float((net(x).argmax(1) == y).float().mean()) for net in nets))


# ---- shapes --------------------------------------------------------------------------------------


def small_shapes(split: str, num_images: int) -> ImageSet:
    return shapes(split, num_images, image_size=16)


def check_it_teaches(mixer: Mixer, epochs: int) -> None:
    """Assert that the mixer's own labels teach the shapes, and that wrong ones would not.

    Give it no clean steps and no clean loss: they would teach the shapes whatever the labels say.
    """
    learned = learn_shapes(mixer, epochs)
    assert learned.right > 2.5 * CHANCE
    # Where shapes are mistaken for each other a wrong label is right now and then: up to 0.16 seen.
    assert learned.wrong < 1.8 * CHANCE


@dataclass(frozen=True)
class Learned:
    """Held-out accuracy with the method's labels, and with each moved to the next class."""

    right: float
    wrong: float


def learn_shapes(mixer: Mixer, epochs: int) -> Learned:
    """Train a small network and its twin on 3,000 images of 16 x 16; both see the same mixes."""
    train, test = small_shapes("train", 3000), small_shapes("test", 500)
    net = _Twins()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=60 * epochs + 1)
    rng = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for chosen in torch.randperm(len(train), generator=rng).split(50):
            optimizer.zero_grad()
            mixed = mixer(net, train.images[chosen] / 255, train.labels[chosen], rng)
            assert mixed.targets is not None
            wrong = mixed.criterion(net.twins_logits, mixed.targets.roll(1, 1))
            (mixed.loss() + wrong).backward()
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.no_grad():
        logits = net(test.images / 255), net.twins_logits
    right, wrong = ((guess.argmax(1) == test.labels).float().mean() for guess in logits)
    return Learned(float(right), float(wrong))


class _Twins(nn.Module):
    """Two small networks that start alike; the mixer knows of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.twin = small_network(), small_network()
        self.twins_logits = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.twins_logits = self.twin(x)
        logits: Tensor = self.net(x)
        return logits


def small_network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48), nn.ReLU()),
            *(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(48, NUM_CLASSES)),
        )
