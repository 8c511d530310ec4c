"""A trained run, opened from its folder alone: its network, its classes, predictions, exports."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from alignmixup import models
from alignmixup.contracts import ImageSet
from alignmixup.datasets.folder import FileSet
from alignmixup.device import pick_device, tensors_on_cpu
from alignmixup.experiments.batches import train_batches
from alignmixup.experiments.data_record import DataRecord, load_own
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
        clean_batches: Batches without mixing that the statistics of batch norm were estimated from;
            None: they are those of training.

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
    clean_batches: int | None = None

    @property
    def has_clean_statistics(self) -> bool:
        """Whether batch norm has statistics of images without mixing."""
        return self.clean_batches is not None

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the logits."""
        return self.data.class_names

    @property
    def summary(self) -> Summary:
        """Last, best and median test accuracy, and whether the run is complete."""
        return summarize(self.folder)

    @tensors_on_cpu
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

    @tensors_on_cpu
    def with_clean_statistics(
        self,
        images: ImageSet | FileSet | None = None,
        *,
        num_batches: int = 50,
        data_root: Path | str | None = None,
    ) -> Run:
        """Estimate the running statistics of batch norm anew, from images without mixing.

        In training they follow the last twenty or so steps, of mixed and clean images as these were
        drawn. The weights stay, as do the statistics of norms that classifying does not update:
        frozen ones, those of a decoder. The run in its folder stays as it is.

        Args:
            images: Training images; defaults to those that the run loaded by name.
            num_batches: Batches to estimate from, at most one epoch, augmented as in training; all
                have equal weight.
            data_root: Folder of the data sets; defaults to ALIGNMIXUP_DATA, then ``./datasets``.

        Returns:
            The run with a copy of its network; results of ``am.evaluate`` record the difference.

        Raises:
            ValueError: If the network has no batch norm, or the training images are not known.

        Example:
            ```python
            from alignmixup.datasets import shapes

            sets = am.Sets(shapes("train", 32), shapes("test", 32))
            small = {"net.width": 4, "train.epochs": 1, "train.batch_size": 16}
            run = am.train("cifar10-r18-input-fast", "runs/c", sets=sets, changes=small, quiet=True)
            clean = run.with_clean_statistics(sets.train)
            print(am.evaluate(clean, sets.test).value("accuracy", "top1"))
            ```
        """
        norms = _tracking_norms(self.model)
        if not norms:
            raise ValueError(f"the network of {self.folder} has no batch norm with statistics")
        if num_batches < 1:
            raise ValueError(f"num_batches must be at least 1, got {num_batches}")
        spec, settings = self.recipe.data, self.recipe.train
        if images is None:
            remedy = "pass the training images, run.with_clean_statistics(sets.train)"
            if self.data.test_sha256 is not None:
                raise ValueError(f"{self.folder} was trained on images passed as sets=: {remedy}")
            images = load_own(spec, "train", data_root, remedy=remedy)
        model = copy.deepcopy(self.model)
        device = next(model.parameters()).device
        loader = train_batches(spec, settings, images, device)
        used = min(num_batches, len(loader))
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)  # of dropout
            update_bn((x for x, _ in itertools.islice(loader.epoch(0), used)), model)
        for own, norm in zip(norms, _tracking_norms(model), strict=True):
            if not norm.num_batches_tracked:  # frozen, or of a decoder: reset, but not estimated
                norm.load_state_dict(own.state_dict())
        return dataclasses.replace(self, model=model, clean_batches=used)

    @tensors_on_cpu
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
        return export(
            self.model,
            Path(path),
            format,
            self.recipe,
            self.data,
            self.epoch,
            has_clean_statistics=self.has_clean_statistics,
        )


@tensors_on_cpu
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
    net.eval()
    return Run(place, recipe, net, facts["epoch"], data)


def _tracking_norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Return the batch norms with running statistics."""
    norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [norm for norm in norms if norm.track_running_stats]


def _build(folder: Path, recipe: Recipe, data: DataRecord) -> nn.Module:
    if recipe.net.name.startswith(MODULE):
        raise ValueError(
            f"{folder} holds the weights of a module of yours, "
            f"{recipe.net.name.removeprefix(MODULE)}: pass one with model="
        )
    spec = dataclasses.replace(recipe.net, pretrained=False)  # the checkpoint has all weights
    size, classes = data.image_size, len(data.class_names)
    return models.build(spec, classes, data.mean, data.std, size, seed=recipe.train.seed)
