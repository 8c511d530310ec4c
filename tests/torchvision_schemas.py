"""Make torchvision importable beside a torch whose build its compiled operators do not fit.

At import torchvision describes ``torchvision::nms`` and ``qnms`` to the compiler, and fails where
its compiled library did not define them ("operator torchvision::nms does not exist"). Defining the
two schemas first makes its models and transforms work; to call the operators takes a kernel, too.
"""

from __future__ import annotations

import importlib

import torch

__all__ = ["define_torchvision_schemas"]

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[torch.library.Library] = []  # a library takes its definitions along when collected


def define_torchvision_schemas() -> None:
    """Import torchvision, with the schemas defined if it does not import by itself.

    A torchvision that fits its torch defines them itself, so ours must not come first; and a second
    call finds torchvision imported and does nothing.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(operator + _SCHEMA)
        _kept.append(library)
        importlib.import_module("torchvision")
