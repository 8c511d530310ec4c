"""Hugging Face Transformers: a mixin for ``Trainer`` whose ``compute_loss`` mixes.

The module imports nothing of Transformers: the mixin stands before ``Trainer`` in a class of yours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from alignmixup.contracts import Criterion, Mixer, check_mixer
from alignmixup.integrations.attached import (
    add_to,
    averaged,
    check_trained,
    clip_before_step,
    processes,
)
from alignmixup.integrations.draws import share_done, step_rng
from alignmixup.outputs import as_logits

__all__ = ["MixupTrainerMixin"]

MIXER = "mixer.safetensors"  # in the folder of a checkpoint


class MixupTrainerMixin:
    """Mixin for ``transformers.Trainer`` that mixes training batches.

    The model may return a ``ModelOutput``, a tuple or a tensor. Evaluation and prediction are those
    of ``Trainer``. The loss is a mean over the batch and is divided by the number of accumulation
    steps. All ranks draw the same, and a resumed run repeats its draws.

    A data set that makes ``pixel_values`` in a transform needs
    ``TrainingArguments(remove_unused_columns=False)``: ``Trainer`` drops the column of images
    before the transform otherwise.

    A method with parameters or state is attached first:
    ``mixer = am.AutoMix("layer3").attach(am.as_logits(model), images)``. Its parameters are a group
    of the optimizer, clipped at ``max_grad_norm`` by their own norm, and each checkpoint has a file
    ``mixer.safetensors``, which is read when the training is resumed from it.

    Args:
        mixer: The method.
        criterion: Function of ``(logits, targets)``; defaults to the loss of the mixer.
        mixer_seed: Seed of the draws.

    Attributes:
        images_key: Name of the images in a batch, ``"pixel_values"``.
        labels_key: Name of the labels in a batch, ``"labels"``.

    Raises:
        ValueError: If ``label_smoothing_factor`` or ``compute_loss_func`` is set, which would not
            be applied: pass a ``criterion`` instead.

    Example:
        ```python
        class MixupTrainer(MixupTrainerMixin, transformers.Trainer):
            pass


        mixer = am.AlignMixup("vit.layers.5", prefix_tokens=1)
        MixupTrainer(model, args, train_dataset=data, mixer=mixer).train()
        ```
    """

    images_key = "pixel_values"
    labels_key = "labels"

    # Of Trainer. The loss is a mean over the batch, whatever the model's own would be.
    loss_is_scaled_for_ga = False
    args: Any
    state: Any
    optimizer: Any

    def __init__(
        self,
        *args: Any,
        mixer: Mixer,
        criterion: Criterion | None = None,
        mixer_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        check_mixer(mixer)
        super().__init__(*args, **kwargs)
        if self.args.label_smoothing_factor or kwargs.get("compute_loss_func") is not None:
            raise ValueError(
                "label_smoothing_factor and compute_loss_func are not applied to mixed batches: "
                "pass criterion=nn.CrossEntropyLoss(label_smoothing=...) or your own loss"
            )
        self.model_accepts_loss_kwargs = False  # as above, before Transformers 5
        self.mixer, self.criterion, self.mixer_seed = mixer, criterion, mixer_seed
        self._step = (-1, 0)  # optimizer step, batch of it
        self._clipping: Any = None  # the optimizer that clips the mixer's parameters
        if mixer.module is not None:
            mixer.module.to(self.args.device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of the mixed batch in training, and that of ``Trainer`` otherwise."""
        if not model.training:
            plain: Any = super()
            return plain.compute_loss(model, inputs, return_outputs, num_items_in_batch)
        images, labels = self._images_and_labels(inputs)
        done, batch = self.state.global_step, self._step[1]
        self._step = (done, batch + 1 if self._step[0] == done else 0)
        if self.mixer.module is not None and not self._step[1]:
            self.mixer.module.zero_grad()  # Trainer does this for its model alone
        rng = step_rng(self.mixer_seed, *self._step)
        progress = share_done(done, self.state.max_steps)
        mixed = self.mixer(as_logits(model), images, labels, rng, progress=progress)
        loss = averaged(mixed.loss(self.criterion), self.mixer)
        return (loss, {"logits": mixed.logits}) if return_outputs else loss

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer of ``Trainer``; the parameters of the mixer are its last group."""
        is_given, trainer = self.optimizer is not None, cast(Any, super())
        optimizer = trainer.create_optimizer(*args, **kwargs)
        if is_given:
            check_trained(self.optimizer, self.mixer)
        else:
            add_to(self.optimizer, self.mixer)
        if self.mixer.module is not None:
            processes().share_state(self.mixer.module)
        inner = getattr(self.optimizer, "optimizer", self.optimizer)  # of accelerate's wrapper
        if (self.args.max_grad_norm or 0) > 0 and self._clipping is not inner:
            clip_before_step(inner, self.mixer, self.args.max_grad_norm)
            self._clipping = inner
        return optimizer

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        if self.mixer.module is not None and self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            state = {k: v.contiguous() for k, v in self.mixer.module.state_dict().items()}
            save_file(state, folder / MIXER)

    def _load_from_checkpoint(self, folder: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(folder, *args, **kwargs)  # type: ignore[misc]
        if self.mixer.module is not None:
            path = Path(folder) / MIXER
            if not path.exists():
                raise FileNotFoundError(
                    f"{path} does not exist: {folder} was not written with a mixer that has "
                    "parameters or state"
                )
            self.mixer.module.load_state_dict(load_file(path, str(self.args.device)))

    def _images_and_labels(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        wanted = (self.images_key, self.labels_key)
        if set(inputs) != set(wanted):
            raise ValueError(
                f"a batch must have {wanted[0]!r} and {wanted[1]!r} alone, got {sorted(inputs)}: "
                "set images_key and labels_key of the trainer, return these two from the data "
                "collator, or set remove_unused_columns=False if they were removed"
            )
        return inputs[self.images_key], inputs[self.labels_key]
