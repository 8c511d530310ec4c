"""A training on the built-in shapes, short enough for a test: does a method learn at all?"""

from __future__ import annotations

import torch
from torch import nn

from alignmixup.contracts import ImageSet, Mixer
from alignmixup.data.shapes import SHAPE_NAMES, shapes

NUM_CLASSES = len(SHAPE_NAMES)
CHANCE = 1 / NUM_CLASSES


def small_shapes(split: str, num_images: int) -> ImageSet:
    return shapes(split, num_images, image_size=16)


def accuracy_on_shapes(mixer: Mixer, epochs: int = 8) -> float:
    """Held-out accuracy of a small network after ``epochs`` over 3,000 images of 16 x 16."""
    train, test = small_shapes("train", 3000), small_shapes("test", 500)
    net = small_network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=60 * epochs + 1)
    rng = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for chosen in torch.randperm(len(train), generator=rng).split(50):
            optimizer.zero_grad()
            mixer(net, train.images[chosen] / 255, train.labels[chosen], rng).loss().backward()
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.no_grad():
        guess = net(test.images / 255).argmax(1)
    return float((guess == test.labels).float().mean())


def small_network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48), nn.ReLU()),
            *(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(48, NUM_CLASSES)),
        )
