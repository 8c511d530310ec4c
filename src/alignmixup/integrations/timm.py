"""timm: a training task that mixes. Tested with timm 1.0.27 to 1.0.31; older tasks differ."""

from __future__ import annotations

from typing import Any

import torch
from timm.task import ClassificationTask
from torch import Tensor, nn

from alignmixup.contracts import Criterion, Mixer, check_mixer, soft_targets
from alignmixup.integrations.attached import averaged, processes
from alignmixup.integrations.draws import share_done, step_rng
from alignmixup.outputs import as_logits

__all__ = ["MixupTask"]


class MixupTask(ClassificationTask):  # type: ignore[misc]
    """A ``timm.task.ClassificationTask`` whose forward mixes the batch in training mode.

    ``compile``, ``prepare_distributed`` and the average of weights are those of timm: compile
    first, then prepare. All ranks draw the same. The number of steps is part of the task's
    checkpoint state, so a resumed run repeats its draws.

    A method with parameters or state is attached first: ``mixer = mixer.attach(model, images)``.
    Its module is part of the task and of the checkpoint state; add its parameters to the optimizer
    by ``optimizer.add_param_group({"params": mixer.module.parameters()})``.

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
        check_mixer(mixer)
        super().__init__(model, criterion or nn.CrossEntropyLoss(), device, dtype, verbose)
        self.mixer, self.mixed_criterion = mixer, criterion
        self.mixer_module = None if mixer.module is None else mixer.module.to(device)
        self.num_steps, self.mixer_seed, self.step = num_steps, mixer_seed, 0

    def prepare_distributed(self, *args: Any, **kwargs: Any) -> MixupTask:
        """Wrap the model in DDP, and give every process the mixer's state of rank 0."""
        super().prepare_distributed(*args, **kwargs)
        if self.mixer_module is not None:
            processes().share_state(self.mixer_module)
        return self

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Any]:
        """Return the loss and the logits of the mixed batch; in evaluation mode those of the batch.

        The criterion gets rows of class shares in both.
        """
        net = as_logits(self.trainable_module)
        if not self.training:
            logits = net(input)
            rows = soft_targets(target, logits.shape[1]) if target.ndim == 1 else target
            return {"loss": self.criterion(logits, rows), "output": logits}
        rng = step_rng(self.mixer_seed, self.step)
        progress = share_done(self.step, self.num_steps)
        mixed = self.mixer(net, input, target, rng, progress=progress)
        self.step += 1
        loss = averaged(mixed.loss(self.mixed_criterion), self.mixer)
        return {"loss": loss, "output": mixed.logits}

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        """Return the number of steps done, and the state of the mixer if it has any."""
        mixer = {} if self.mixer_module is None else {"mixer": self.mixer_module.state_dict()}
        return {"step": self.step, **mixer}

    def load_task_state(
        self,
        state: dict[str, Any] | None,
        strict: bool = True,
        module: nn.Module | None = None,
        ema: bool = False,
    ) -> None:
        """Continue from the number of steps done, with the state of the mixer."""
        state = state or {}
        self.step = state.get("step", self.step)
        if self.mixer_module is not None and "mixer" in state:
            self.mixer_module.load_state_dict(state["mixer"], strict=strict)
