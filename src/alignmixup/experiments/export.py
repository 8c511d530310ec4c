"""A trained network for use elsewhere: plain weights, a program of torch.export, or the Hub.

weights.safetensors   the state of the network, normalization included
weights.json          "class", "spec" and "arguments": how to build it; "class_names" and
                      "image_size": what it knows and takes

facts = json.loads(Path("weights.json").read_text())
net = build(NetSpec(**facts["spec"]), **facts["arguments"])     # of alignmixup.models
net.load_state_dict(load_file("weights.safetensors"))           # of safetensors.torch
"""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import nn

from alignmixup.experiments.data_record import DataRecord
from alignmixup.files import make_folder, replacing, write_text, writing
from alignmixup.recipes.schema import Recipe
from alignmixup.registry import imported_plugins, suggestion

Format = Literal["safetensors", "torch-export", "hub"]

# Before the class name of a module passed to ``train(model=)``, in the name of the network.
MODULE = "module:"


def export(
    model: nn.Module,
    path: Path,
    format: Format,
    recipe: Recipe,
    data: DataRecord,
    epoch: int,
    *,
    has_clean_statistics: bool = False,
) -> list[Path]:
    """Write the network of a run in one of the formats; return the files written."""
    if format not in get_args(Format):
        raise ValueError(
            f"unknown format {format!r}{suggestion(str(format), list(get_args(Format)))}"
        )
    facts = describe(model, recipe, data, epoch)
    if has_clean_statistics:
        facts["statistics"] = "clean"
    if format == "hub":
        from alignmixup.experiments.hub import HubModel

        if "spec" not in facts:
            raise ValueError(
                f"format='hub' needs a network built by name; {facts['class']} can inherit "
                "huggingface_hub.PyTorchModelHubMixin itself"
            )
        wrapped = HubModel(facts["spec"], facts["arguments"], facts["class_names"])
        wrapped.model.load_state_dict(model.state_dict())
        with writing(path):
            wrapped.save_pretrained(path)
        return sorted(path.iterdir())
    suffix = {"safetensors": ".safetensors", "torch-export": ".pt2"}[format]
    if path.suffix != suffix:
        raise ValueError(f"the file of format {format!r} must end in {suffix}, got {path}")
    make_folder(path.parent)
    if format == "torch-export":
        # In memory first: on a full disk torch's writer aborts the process.
        program = io.BytesIO()
        torch.export.save(_program(model, data.image_size), program)
        with replacing(path) as partial:
            partial.write_bytes(program.getbuffer())
        return [path]
    state = {name: value.cpu().contiguous().clone() for name, value in model.state_dict().items()}
    with replacing(path) as partial:
        save_file(state, partial)
    text = path.with_suffix(".json")
    write_text(text, json.dumps({"weights": path.name, **facts}, indent=2))
    return [path, text]


def describe(model: nn.Module, recipe: Recipe, data: DataRecord, epoch: int) -> dict[str, Any]:
    """Return how to build the network and what it was trained for, as JSON takes it.

    A module that was passed to ``train`` is named by its class; only its author can build it.
    """
    kind = type(model)
    how: dict[str, Any] = {"module": kind.__module__, "class": kind.__qualname__}
    if not recipe.net.name.startswith(MODULE):
        how["build"] = "alignmixup.models.build(alignmixup.models.NetSpec(**spec), **arguments)"
        how["spec"] = dataclasses.asdict(dataclasses.replace(recipe.net, pretrained=False))
        how["arguments"] = {
            "num_classes": len(data.class_names),
            "mean": list(data.mean),
            "std": list(data.std),
            "image_size": data.image_size,
        }
    return {
        **how,
        "plugins": list(imported_plugins()),
        "class_names": list(data.class_names),
        "image_size": data.image_size,
        "recipe": recipe.name,
        "epoch": epoch,
    }


def _program(model: nn.Module, image_size: int) -> torch.export.ExportedProgram:
    """The network as a graph of torch operations, for any number of images."""
    example = torch.rand(2, 3, image_size, image_size, device=next(model.parameters()).device)
    batch = torch.export.Dim("batch", min=1)
    return torch.export.export(model, (example,), dynamic_shapes=({0: batch},))
