"""A collate function gives the network the images and targets that the mixer would."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import alignmixup as am
from cases import IMAGE_SIZE, NUM_CLASSES, ROWS, Row, every_row, images, labels


class Seen(nn.Module):
    """Keep the images of the last call."""

    def forward(self, x: Tensor) -> Tensor:
        self.images = x
        return x.new_zeros(len(x), NUM_CLASSES)


def samples() -> list[tuple[Tensor, Tensor]]:
    return list(zip(images(6), labels(6), strict=True))


@every_row
def test_a_method_mixes_alike_or_is_an_error(row: Row) -> None:
    if row.mixer.needs_network:
        with pytest.raises(ValueError, match=r"looks into the network.* in the training loop"):
            am.MixCollate(row.mixer, NUM_CLASSES)
        return
    collate = am.MixCollate(row.mixer, NUM_CLASSES, rng=torch.Generator().manual_seed(3))
    x, targets = collate(samples())
    net = Seen()
    mixed = row.mixer(net, images(6), labels(6), torch.Generator().manual_seed(3))
    assert torch.equal(x, net.images)
    assert torch.equal(targets, mixed.targets)


def test_methods_that_mix_images_work_and_the_others_do_not() -> None:
    free = {type(row.mixer).__name__ for row in ROWS if not row.mixer.needs_network}
    pixels = {"InputMixup", "CutMix", "Cutout", "SaliencyMix", "StyleMix", "StyleCutMix", "NoMix"}
    pixels |= {"ResizeMix", "FMix", "SmoothMix", "GridMix", "OneOf", "LabelSmoothing"}
    assert free == pixels


def test_the_loader_shuffles_and_the_collate_function_mixes() -> None:
    data = TensorDataset(images(12), labels(12))
    loader = DataLoader(data, batch_size=4, collate_fn=am.MixCollate(am.InputMixup(), NUM_CLASSES))
    for x, targets in loader:
        assert x.shape == (4, 3, IMAGE_SIZE, IMAGE_SIZE)
        torch.testing.assert_close(targets.sum(1), torch.ones(4))
        assert not x.requires_grad


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_with_a_generator_of_ones_own_are_an_error(start: str) -> None:
    """Each would have a copy: the same draws in all of them, and again in each epoch."""
    data, rng = TensorDataset(images(4), labels(4)), torch.Generator()
    collate = am.MixCollate(am.InputMixup(), NUM_CLASSES, rng=rng)
    how: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": start}
    loader = DataLoader(data, batch_size=2, collate_fn=collate, **how)
    with pytest.raises(ValueError, match=r"rng= is for a loader without workers.*generator="):
        next(iter(loader))


def test_a_copy_draws_what_the_original_would() -> None:
    collate = am.MixCollate(am.InputMixup(), NUM_CLASSES, rng=torch.Generator().manual_seed(1))
    collate(samples())
    twins = copy.deepcopy(collate), pickle.loads(pickle.dumps(collate))
    expected = collate(samples())
    for twin in twins:
        assert all(map(torch.equal, twin(samples()), expected))


def test_workers_repeat_their_mixes_with_the_seed_of_the_loader() -> None:
    data = TensorDataset(images(8).repeat(2, 1, 1, 1), labels(8).repeat(2))
    collate = am.MixCollate(am.InputMixup(), NUM_CLASSES)

    def epochs(seed: int) -> list[Tensor]:
        rng = torch.Generator().manual_seed(seed)
        loader = DataLoader(data, 8, collate_fn=collate, num_workers=2, generator=rng)
        return [targets for _ in range(2) for _, targets in loader]

    first, again = epochs(0), epochs(0)
    torch.testing.assert_close(first, again, atol=0, rtol=0)
    different = {tuple(targets.flatten().tolist()) for targets in first}
    assert len(different) == 4  # in each worker, in each epoch


def test_multi_label_targets_and_a_collate_function_of_ones_own() -> None:
    rows = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])

    def stack(samples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([s["image"] for s in samples]), torch.stack([s["tags"] for s in samples])

    mixer = am.InputMixup(loss="sigmoid_bce")
    collate = am.MixCollate(mixer, 3, collate=stack)
    _, targets = collate([{"image": x, "tags": y} for x, y in zip(images(2), rows, strict=True)])
    torch.testing.assert_close(targets.sum(1), torch.full((2,), 2.0))


class Twice(am.InputMixup):
    """Calls the network twice, which a data loader cannot do."""

    def _mix(self, net, x, y, draw):
        net(x)
        return super()._mix(net, x, y, draw)


def test_a_method_that_runs_the_network_twice_is_named() -> None:
    with pytest.raises(ValueError, match="Twice called the network 2 times: set needs_network"):
        am.MixCollate(Twice(), NUM_CLASSES)(samples())


@pytest.mark.parametrize("wrong", [0, 2.0, "10", None, ["cat", "dog"]])
def test_a_number_of_classes_that_is_none_is_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"num_classes must be an integer >= 1, got "):
        am.MixCollate(am.CutMix(), wrong)
    assert am.MixCollate(am.CutMix(), np.int64(3)).num_classes == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sample", [{"image": torch.rand(3, 8, 8), "label": 1}, (torch.rand(3, 8, 8), 1, "cat.png")]
)
def test_samples_that_are_no_pairs_are_named(sample: object) -> None:
    with pytest.raises(ValueError, match=r"a pair \(image, label\).* collate="):
        am.MixCollate(am.CutMix(), NUM_CLASSES)([sample, sample])


def test_a_class_is_no_mixer() -> None:
    with pytest.raises(ValueError, match=r"such as alignmixup\.CutMix\(\), got <class"):
        am.MixCollate(am.CutMix, NUM_CLASSES)  # type: ignore[arg-type]
