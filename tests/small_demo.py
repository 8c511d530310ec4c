"""The demo in seconds: one epoch, few images."""

import dataclasses

import pytest

from alignmixup.demo import program, setup
from alignmixup.demo.setup import Size

SMALL = Size(epochs=1, num_train=64, num_test=40, batch_size=16)


def shrink_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the demo of this test train on few images."""
    monkeypatch.setattr(program, "Size", lambda **of: SMALL)
    monkeypatch.setattr(setup, "Size", lambda **of: SMALL)
    monkeypatch.setattr(program, "DECODER", dataclasses.replace(program.DECODER, epochs=1))
