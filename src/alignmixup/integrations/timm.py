"""timm: a training task that mixes. Tested with timm 1.0.30; older versions have no tasks."""

from __future__ import annotations

from typing import Any

import torch
from timm.task import ClassificationTask
from torch import Tensor, nn

from alignmixup.contracts import Criterion, Mixer
from alignmixup.integrations.draws import share_done, step_rng
from alignmixup.outputs import as_logits

__all__ = ["MixupTask"]


class MixupTask(ClassificationTask):  # type: ignore[misc]
    """A ``timm.task.ClassificationTask`` whose forward mixes the batch in training mode.

    ``compile``, ``prepare_distributed`` and the average of weights are those of timm: compile
    first, then prepare. All ranks draw the same. The number of steps is part of the task's
    checkpoint state, so a resumed run repeats its draws.

    Args:
        model: The model to train.
        mixer: The method; layers have the names they have in ``model``.
        criterion: Function of ``(logits, targets)``; defaults to the loss of the mixer.
        num_steps: Steps of the whole training, for mixers with a schedule.
        mixer_seed: Seed of the draws.
        device: Device of the task.
        dtype: Data type of the task.
        verbose: Log the criterion.

    Example:
        ```python
        model = timm.create_model("vit_tiny_patch16_224", num_classes=10)
        task = MixupTask(model, am.AlignMixup("blocks.5"))
        task(images, labels)["loss"].backward()
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        mixer: Mixer,
        criterion: Criterion | None = None,
        *,
        num_steps: int = 0,
        mixer_seed: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        verbose: bool = True,
    ) -> None:
        super().__init__(model, criterion or nn.CrossEntropyLoss(), device, dtype, verbose)
        self.mixer, self.mixed_criterion = mixer, criterion
        self.num_steps, self.mixer_seed, self.step = num_steps, mixer_seed, 0

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Any]:
        """Return the loss and the logits of the mixed batch; in evaluation mode those of timm."""
        if not self.training:
            plain: dict[str, Any] = super().forward(input, target)
            return plain
        rng = step_rng(self.mixer_seed, self.step)
        progress = share_done(self.step, self.num_steps)
        net = as_logits(self.trainable_module)
        mixed = self.mixer(net, input, target, rng, progress=progress)
        self.step += 1
        return {"loss": mixed.loss(self.mixed_criterion), "output": mixed.logits}

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        """Return the number of steps done."""
        return {"step": self.step}

    def load_task_state(
        self,
        state: dict[str, Any] | None,
        strict: bool = True,
        module: nn.Module | None = None,
        ema: bool = False,
    ) -> None:
        """Continue from the number of steps done."""
        self.step = (state or {}).get("step", self.step)
