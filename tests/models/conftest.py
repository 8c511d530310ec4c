"""torchvision for the tests of this folder, also beside a torch that it was not built for."""

import pytest

from torchvision_schemas import define_torchvision_schemas


@pytest.fixture(scope="session")
def torchvision():
    define_torchvision_schemas()
    return pytest.importorskip("torchvision")


@pytest.fixture(scope="session")
def timm(torchvision):
    return pytest.importorskip("timm")
