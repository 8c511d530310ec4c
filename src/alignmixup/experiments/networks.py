"""The network that a run trains: built by name or a module of the user's, and its first weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor, nn

from alignmixup import models
from alignmixup.contracts import ImageSet
from alignmixup.datasets.folder import FileSet
from alignmixup.device import compute_for
from alignmixup.experiments.batches import side_of
from alignmixup.experiments.export import MODULE
from alignmixup.experiments.run_folder import read_recipe
from alignmixup.hooks import evaluating
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import Recipe
from alignmixup.training.checkpoint import CHECKPOINT, load_checkpoint


def build_net(
    recipe: Recipe, images: ImageSet | FileSet, device: torch.device, model: nn.Module | None = None
) -> nn.Module:
    """Build the recipe's network for these images, or take ``model``; put it on ``device``."""
    size = side_of(recipe.data, images)
    net, name = model, f"model ({type(model).__name__})"
    if net is None:
        scale, name = (images.mean, images.std), recipe.net.name
        net = models.build(recipe.net, images.num_classes, *scale, size, seed=recipe.train.seed)
    _check_logits(net, name, size, images.num_classes)
    is_last = compute_for(recipe.train, device).channels_last
    layout = torch.channels_last if is_last else torch.preserve_format
    return net.to(device, memory_format=layout)  # type: ignore[call-overload,no-any-return]


def _check_logits(net: nn.Module, name: str, size: int, num_classes: int) -> None:
    weight = next(net.parameters(), None)
    if weight is None:
        raise ValueError(f"{name} has no parameters: nothing to train")
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise ValueError(
            f"no parameter of {name} requires a gradient: nothing to train; "
            "call model.requires_grad_(), or that of its last layer"
        )
    if weight.dtype != torch.float32:
        raise ValueError(
            f"{name} has weights of {weight.dtype}, and is trained on images in float32: pass "
            "model.float(); --train.precision chooses the arithmetic"
        )
    logits = _first_output(net, size, name)
    shape = list(getattr(logits, "shape", [type(logits).__name__]))
    if shape != [2, num_classes]:
        raise ValueError(
            f"{name} must return logits [b, {num_classes}], one for each class of the images, got "
            f"{shape} for 2 images: change its last layer, or wrap a model that returns more than "
            "logits by alignmixup.as_logits"
        )


def returns_shares(net: nn.Module, size: int) -> bool:
    """Whether the outputs look like those of a softmax, which losses of logits would apply again.

    It looks at two black images: logits are not all positive with a sum of 1.
    """
    found = _first_output(net, size, type(net).__name__)
    if not isinstance(found, Tensor) or bool((found < 0).any()):
        return False
    return bool(((found.sum(dim=1) - 1).abs() < 1e-4).all())


def _first_output(net: nn.Module, size: int, name: str) -> object:
    """Return what the network returns for two black images, or raise if it takes no such images."""
    black = torch.zeros(2, 3, size, size, device=next(net.parameters()).device)
    try:
        with torch.no_grad(), evaluating(net):
            return net(black)
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"{name} fails on images of {size} x {size} ({error}): use images of another size, "
            "such as those of folder:PATH@224, or another network"
        ) from error


def for_module(recipe: Recipe, model: nn.Module) -> Recipe:
    """Return the recipe with a module of the user's as its network, under a key of its own."""
    kind = type(model).__name__
    key = dataclasses.replace(recipe.key, network=kind)
    return dataclasses.replace(recipe, key=key, net=NetSpec(f"{MODULE}{kind}"))


def initialize(net: nn.Module, folder: Path, num_classes: int) -> dict[str, object]:
    """Load the weights of another run, averaged if it has EMA; those of a head for other classes
    stay as drawn.

    Returns:
        What the run records: the other run, its recipe and epoch, and the weights not loaded.
    """
    checkpoint = load_checkpoint(folder / CHECKPOINT, {"epoch": int})
    theirs, ours = checkpoint.weights(), net.state_dict()
    shared = sorted({*ours} & {*theirs})
    drawn = [name for name in shared if ours[name].shape != theirs[name].shape]
    wrong = sorted({*ours} ^ {*theirs})
    wrong += [name for name in drawn if ours[name].shape[:1] != (num_classes,)]
    # A layer as a whole: a flattened head for maps of another size has a bias of the same shape.
    heads = {name.rpartition(".")[0] for name in drawn}
    drawn = [name for name in shared if name.rpartition(".")[0] in heads]
    if wrong:
        raise ValueError(
            f"the weights of {folder} are those of another network ({wrong[0]} differs): train "
            f"with the net.* settings of {read_recipe(folder).name}"
        )
    net.load_state_dict({k: v for k, v in theirs.items() if k not in drawn}, strict=False)
    return {
        "run": str(folder.resolve()),
        "recipe": read_recipe(folder).name,
        "epoch": checkpoint.facts["epoch"],
        "redrawn": drawn,
    }
