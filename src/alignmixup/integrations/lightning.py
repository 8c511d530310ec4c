"""Lightning: a mixin with a ``training_step`` that mixes.

The module imports nothing of Lightning, so that it works with ``lightning`` and with
``pytorch_lightning``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from alignmixup.contracts import Mixed, Mixer, NotAttached, check_mixer
from alignmixup.integrations.collate import kind_unless_pair
from alignmixup.integrations.draws import share_done, step_rng
from alignmixup.outputs import as_logits
from alignmixup.training.optim import mixer_parameters

__all__ = ["MixupModule"]


class MixupModule:
    """Mixin for a ``LightningModule`` whose ``forward`` returns logits.

    Put it before ``LightningModule`` among the base classes and set ``mixer``. Layers are named
    from the LightningModule: a network in ``self.net`` has ``"net.layer4"``. Batches are pairs of
    images and labels. All ranks draw the same; validation and prediction are not mixed.

    A method with parameters or state (AutoMix, RecursiveMix, ...) gets them by ``attach_mixer``, at
    the end of ``__init__``: they become part of the LightningModule, of its ``parameters()`` and of
    its checkpoints. ``gradient_clip_val`` clips them and the network each by its own norm.

    It logs ``train_loss`` and ``train_accuracy_under_mixing``, the share of label mass that the
    prediction hits.

    Attributes:
        mixer: The method; it can change in the course of training.
        mixer_module: Parameters and state of the mixer, a sub-module; None for a method without.
        mixer_seed: Seed of the draws, which depend on it, the epoch and the batch alone: a resumed
            run repeats them.

    Example:
        ```python
        class Classifier(MixupModule, lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = make_network()
                self.mixer = am.AlignMixup("net.layer3")

            def forward(self, x):
                return self.net(x)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)
        ```
    """

    mixer: Mixer
    mixer_module: nn.Module | None  # missing before ``attach_mixer``
    mixer_seed: int = 0

    # Of LightningModule.
    current_epoch: int
    global_step: int
    trainer: Any
    log: Callable[..., None]

    def attach_mixer(self, x: Tensor) -> None:
        """Make the parameters and the state of ``self.mixer`` part of this module.

        Args:
            x: Images of the size and number of a training batch; their values do not matter.
        """
        self.mixer = self.mixer.attach(as_logits(cast(nn.Module, self)), x)
        self.mixer_module = self.mixer.module
        if self.mixer_module is not None:
            # Each process has a history and batch statistics of its own.
            names = [f"mixer_module.{name}" for name, _ in self.mixer_module.named_buffers()]
            self._ddp_params_and_buffers_to_ignore = names

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of the mixed batch."""
        if got := kind_unless_pair(batch):
            raise ValueError(
                f"a batch must be a pair (images, labels), got a {got}: override training_step and "
                "return super().training_step((images, labels), batch_idx)"
            )
        check_mixer(getattr(self, "mixer", None))
        x, y = batch
        rng = step_rng(self.mixer_seed, self.current_epoch, batch_idx)
        net = as_logits(cast(nn.Module, self))
        self._check_attached()
        try:
            mixed = self.mixer(net, x, y, rng, progress=self.progress)
        except NotAttached:
            raise ValueError(self._how_to_attach()) from None
        loss = self.mixed_loss(mixed)
        self.log("train_loss", loss)
        if mixed.logits is not None:
            self.log("train_accuracy_under_mixing", mixed.accuracy_under_mixing())
        return loss

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        """Clip as Lightning does, the mixer's parameters and all others each by their own norm."""
        clip = cast(Any, super()).configure_gradient_clipping
        own = mixer_parameters(self.mixer)
        with _without_gradients(own):
            clip(*args, **kwargs)
        if own:
            are_own = {id(parameter) for parameter in own}
            every = cast(nn.Module, self).parameters()
            with _without_gradients([each for each in every if id(each) not in are_own]):
                clip(*args, **kwargs)

    def _check_attached(self) -> None:
        if self.mixer.module is not getattr(self, "mixer_module", None):
            raise ValueError(self._how_to_attach())

    def _how_to_attach(self) -> str:
        return (
            f"{type(self.mixer).__name__} has parameters or state: call self.attach_mixer(x) at "
            "the end of __init__, after self.mixer is set, with images of the size and number of a "
            "training batch"
        )

    def mixed_loss(self, mixed: Mixed) -> Tensor:
        """Return the loss of a mixed batch; override it to use a criterion of your own."""
        return mixed.loss()

    @property
    def progress(self) -> float:
        """Share of the training steps that are done, for mixers with a schedule."""
        return share_done(self.global_step, self.trainer.estimated_stepping_batches)


@contextmanager
def _without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Take the gradients of some parameters away, and give them back after the block."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
