"""Load what all tests share, ``shared_setup``, in every process that runs tests.

With ``-n 2`` this process starts the workers and prints; it imports neither torch nor the package.
"""

import atexit
import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "unchecked_shapes: bad input on purpose, code to be traced, or many equal draws"
    )
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("shared_setup")
    if hasattr(config, "workerinput"):
        # The results have been sent: it takes seconds to free every object of every module.
        atexit.register(os._exit, 0)
