"""Mix in the data loader: a collate function for methods that do not look into the network.

The network that ``apply`` gets here records the images it is called with and returns zeros: the
images are the mixed ones, and the targets are those of the mixed batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import default_collate, get_worker_info

from alignmixup.contracts import Mixer, check_mixer


class MixCollate:
    """A collate function that returns mixed images and soft targets.

    For a loop that cannot call a mixer, as torchvision's ``MixUp`` and ``CutMix``; methods that
    look into the network (``mixer.needs_network``) are an error. Each worker of a data loader mixes
    with the random state that the loader gives it. A method with a schedule stays at its start: in
    a worker there is no progress.

    Args:
        mixer: A method that works on images alone, such as ``CutMix``.
        num_classes: Number of classes of the integer labels.
        collate: Turns a list of samples into ``(images, labels)``; torch's default otherwise.
        rng: Source of randomness for a loader without workers; torch's global one otherwise. With
            workers pass ``generator=`` to the loader, which seeds them.

    Raises:
        ValueError: If the mixer needs the network, or ``num_classes`` is not positive.

    Example:
        ```python
        data = torch.utils.data.TensorDataset(x, y)
        collate = am.MixCollate(am.CutMix(prob=1.0), num_classes=10)
        for images, targets in torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate):
            torch.nn.functional.cross_entropy(model(images), targets).backward()
        ```
    """

    def __init__(
        self,
        mixer: Mixer,
        num_classes: int,
        collate: Callable[[list[Any]], Any] = default_collate,
        rng: torch.Generator | None = None,
    ) -> None:
        check_mixer(mixer)
        if mixer.needs_network:
            raise ValueError(
                f"{type(mixer).__name__} looks into the network, which a data loader does not "
                "have: call the mixer in the training loop, or choose a method that mixes images "
                "(InputMixup, CutMix, SaliencyMix, ..., your own with needs_network = False)"
            )
        if not hasattr(num_classes, "__index__") or num_classes < 1:
            raise ValueError(f"num_classes must be an integer >= 1, got {num_classes!r}")
        self.mixer, self.num_classes = mixer, num_classes
        self.collate, self.rng = collate, rng

    def __getstate__(self) -> dict[str, Any]:
        # As bytes: a worker that is spawned cannot read a generator as torch sends it.
        state = None if self.rng is None else self.rng.get_state().numpy().tobytes()
        return {**vars(self), "rng": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if state["rng"] is not None:
            self.rng = torch.Generator()
            self.rng.set_state(torch.frombuffer(bytearray(state["rng"]), dtype=torch.uint8))

    def __call__(self, samples: list[Any]) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b k"]]:
        """Mix one batch.

        Args:
            samples: Pairs of an image and a label, or what ``collate`` takes.

        Returns:
            Mixed images and their soft targets.

        Raises:
            ValueError: If a batch is no pair, or ``rng`` is set and the loader has workers.
        """
        if self.rng is not None and get_worker_info() is not None:
            raise ValueError(
                "MixCollate: rng= is for a loader without workers, which would each draw the same "
                "from a copy of it: leave it out, and pass generator= to the loader for a seed"
            )
        batch = self.collate(samples)
        if got := kind_unless_pair(batch):
            raise ValueError(
                f"a sample must be a pair (image, label), got a batch that is a {got}: pass a "
                "collate= that returns (images, labels)"
            )
        images, labels = batch
        recorder = _Recorder(self.num_classes)
        with torch.no_grad():
            mixed = self.mixer(recorder, images, labels, self.rng)
        if len(recorder.calls) != 1 or mixed.targets is None:
            raise ValueError(
                f"{type(self.mixer).__name__} called the network {len(recorder.calls)} times: set "
                "needs_network = True in its class, and call it in the training loop"
            )
        return recorder.calls[0], mixed.targets


class _Recorder(nn.Module):
    """A network that keeps the images it is called with."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.calls: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(x)
        return x.new_zeros(len(x), self.num_classes)


def kind_unless_pair(batch: object) -> str:
    """Return what a batch is, in words, or nothing for a pair (images, labels)."""
    kind = type(batch).__name__
    if not isinstance(batch, tuple | list):
        return kind
    return "" if len(batch) == 2 else f"{kind} of {len(batch)}"
