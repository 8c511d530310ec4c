"""A trained run, opened from its folder alone: its network, its classes, predictions, exports."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from alignmixup import models
from alignmixup.device import pick_device
from alignmixup.experiments.data_record import DataRecord
from alignmixup.experiments.export import MODULE, Format, export
from alignmixup.experiments.predict import Prediction, predict
from alignmixup.experiments.run_folder import read_run
from alignmixup.recipes.schema import Recipe
from alignmixup.training import Summary, summarize
from alignmixup.training.checkpoint import CHECKPOINT, load_weights

if TYPE_CHECKING:
    from alignmixup.experiments.predict import Sources


@dataclass(frozen=True, eq=False)
class Run:
    """A trained run: its settings, and its network with the weights of the last checkpoint.

    ``train`` and ``load_run`` return one.

    Args:
        folder: Folder of the run.
        recipe: What was trained, every setting.
        model: The network in evaluation mode; it takes images in [0, 1] and normalizes them.
        epoch: Epochs trained.
        data: Name, classes, image size and normalization of the images.

    Example:
        ```python
        from alignmixup.datasets import shapes

        sets = am.Sets(shapes("train", 32), shapes("test", 32))
        small = {"net.width": 4, "train.epochs": 1, "train.batch_size": 16}
        run = am.train("cifar10-r18-cutmix-fast", "runs/a", sets=sets, changes=small, quiet=True)
        print(run.summary.last, run.class_names)
        print(run.predict(sets.test.images).class_names)
        run.export("weights.safetensors")
        ```
    """

    folder: Path
    recipe: Recipe
    model: nn.Module = field(repr=False)
    epoch: int
    data: DataRecord

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the logits."""
        return self.data.class_names

    @property
    def summary(self) -> Summary:
        """Last, best and median test accuracy, and whether the run is complete."""
        return summarize(self.folder)

    def predict(self, images: Sources, *, batch_size: int = 256) -> Prediction:
        """Classify images.

        Args:
            images: A tensor [b, 3, h, w] of bytes, or of floats in [0, 1]; or PIL images, or paths
                of image files, one or several. Tensors of the run's image size are used as they
                are; everything else is cropped and resized as in the evaluation of the recipe.
            batch_size: Images per forward pass.

        Returns:
            The label, the class name and the probabilities of each image.
        """
        return predict(self.model, images, self.recipe.data, self.data, batch_size)

    def export(self, path: Path | str, format: Format = "safetensors") -> list[Path]:
        """Write the network for use without the run.

        Args:
            path: File to write; a folder for ``format="hub"``.
            format: ``"safetensors"``: plain weights, and beside them a JSON file that says how to
                build the network and which classes it knows. ``"torch-export"``: a program of
                ``torch.export`` for any batch size, which runs without this package. ``"hub"``: a
                folder for the Hugging Face Hub (``pip install 'alignmixup[hub]'``).

        Returns:
            The files written.
        """
        return export(self.model, Path(path), format, self.recipe, self.data, self.epoch)


def load_run(
    folder: Path | str,
    *,
    model: nn.Module | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
    device: str = "auto",
) -> Run:
    """Open a run from its folder; its data are not needed.

    Args:
        folder: Folder of the run.
        model: The module to load the weights into, for a run that trained a module of yours.
        num_classes: Number of classes, for runs of older versions, which did not record it.
        image_size: Side of the images, for the same runs.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ...

    Returns:
        The run: ``run.model`` with the weights of its last checkpoint, ``run.recipe``,
        ``run.class_names``, ``run.predict(images)`` and ``run.export(path)``.

    Raises:
        FileNotFoundError: If the folder holds no run, or no checkpoint yet.
        ValueError: If the run did not record its classes, or a plugin of it cannot be imported.

    Example:
        ```python
        from alignmixup.datasets import shapes

        sets = am.Sets(shapes("train", 32), shapes("test", 32))
        small = {"net.width": 4, "train.epochs": 1, "train.batch_size": 16}
        am.train("cifar10-r18-input-fast", "runs/b", sets=sets, changes=small, quiet=True)

        run = am.load_run("runs/b")
        with torch.inference_mode():
            logits = run.model(x)
        ```
    """
    if not isinstance(model, nn.Module | None):
        raise ValueError(f"model must be an nn.Module, got {model!r}")
    place = Path(folder)
    record = read_run(place)
    recipe, data = record.recipe, record.images
    if num_classes is not None and image_size is not None and data is None:
        data = DataRecord.unnamed(recipe.data.name, num_classes, image_size)
    if data is None:
        raise ValueError(
            f"{place} was begun by a version that recorded no classes: pass num_classes and "
            "image_size"
        )
    net = _build(place, recipe, data) if model is None else model
    # The normalization is among the weights.
    facts = load_weights(net, place / CHECKPOINT, {"epoch": int})
    net.to(pick_device(device))
    return Run(place, recipe, net.eval(), facts["epoch"], data)


def _build(folder: Path, recipe: Recipe, data: DataRecord) -> nn.Module:
    if recipe.net.name.startswith(MODULE):
        raise ValueError(
            f"{folder} holds the weights of a module of yours, "
            f"{recipe.net.name.removeprefix(MODULE)}: pass one with model="
        )
    spec = dataclasses.replace(recipe.net, pretrained=False)  # the checkpoint has all weights
    size, classes = data.image_size, len(data.class_names)
    return models.build(spec, classes, data.mean, data.std, size, seed=recipe.train.seed)
