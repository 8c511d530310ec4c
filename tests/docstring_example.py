"""Run the example in the docstring of a public class that is not in the top-level package."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

import torch

import alignmixup as am


def run_example(public: object, given: dict[str, Any]) -> dict[str, Any]:
    """Execute it with ``torch``, ``am`` and these names, and return all names afterwards."""
    doc = inspect.getdoc(public) or ""
    (code,) = re.findall(r"^    ```python\n(.*?)^    ```", doc, re.M | re.S)
    names = {"torch": torch, "am": am, **given}
    exec(compile(textwrap.dedent(code), str(public), "exec"), names)
    return names
