"""The public names keep their meaning whatever else of the package has been imported, and used."""

from __future__ import annotations

import os

from forked import Forked

# In a process of its own: importing a submodule sets an attribute of its package, so that a package
# of the same name as a function would take its place.
PROGRAM = """
import importlib, pkgutil, sys, types, warnings
from pathlib import Path

import torch

import alignmixup as am

torch.set_num_threads(1)
failed = []
for found in pkgutil.walk_packages(am.__path__, "alignmixup."):
    if found.name.startswith("alignmixup.ops.triton.") or found.name.endswith("__main__"):
        continue  # kernels need a GPU or the interpreter; a __main__ runs
    if found.name == "alignmixup.integrations.timm":
        continue  # imports timm, and with it a torchvision that may not fit its torch
    try:
        importlib.import_module(found.name)
    except ImportError as error:
        if (error.name or "alignmixup").partition(".")[0] == "alignmixup":
            raise  # not an extra that is missing
        failed.append(error.name)

for name in sorted(sys.modules):
    if name.partition(".")[0] == "alignmixup":
        module = sys.modules[name]
        for public in getattr(module, "__all__", ()):
            assert not isinstance(getattr(module, public), types.ModuleType), (name, public)

from alignmixup.datasets import shapes
from alignmixup.experiments.run import Sets
from alignmixup.models import NetSpec, build
from alignmixup.recipes.catalog import find_recipe

sets = Sets(shapes("train", 16), shapes("test", 8))
recipe = find_recipe("cifar10-r18-baseline-fast").shrunk()
net = build(NetSpec("vgg_gap", width=2), 10, sets.test.mean, sets.test.std, 32, seed=0)
for attempt in ("first", "second"):
    for name in am.__all__:
        value = getattr(am, name)
        assert not isinstance(value, types.ModuleType), (attempt, name)
        assert callable(value) or isinstance(value, str), (attempt, name, value)
    am.train(recipe, Path(sys.argv[1]) / attempt, sets=sets, quiet=True)
    am.evaluate(net, sets.test, tasks=["accuracy"])
print("done", *failed)
"""


def test_every_public_name_works_twice_after_every_module_is_imported(tmp_path):
    lines = Forked(PROGRAM, [str(tmp_path)], os.environ).finish()
    assert lines[-1].split()[:1] == ["done"], lines
