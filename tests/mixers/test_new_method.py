"""A new method is one file: in ``mixers/``, or a plugin of a user."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import alignmixup as am
import alignmixup.mixers
from alignmixup.contracts import Mixer
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.schema import Recipe
from alignmixup.registry import MIXERS, import_plugin
from cases import TinyNet, images, labels

HEADER = """
from dataclasses import dataclass

import torch

from alignmixup.contracts import Draw, Mixed, Mixer, soft_targets
from alignmixup.mixers.base import (Loss, Method)
from alignmixup.mixers.sampling import (sample_pairs)
from alignmixup.registry import register_mixer

"""

# As the built-in methods are written.
METHOD = """
@register_mixer
@dataclass(frozen=True)
class RowMixup(Method):
    alpha: float = 0.5
    loss: Loss = "ce"

    cases = {"rows": 1.0}

    def draw(self, batch_size, rng, progress=0.0):
        return sample_pairs(self.cases, self.alpha, False, batch_size, rng)

    def _mix(self, net, x, y, draw):
        is_own = torch.arange(x.shape[2]) < (draw.lam * x.shape[2]).round()
        images = torch.where(is_own.view(-1, 1), x, x[draw.perm])
        return self._mixed(net(images), y, draw, is_own.float().mean())
"""

# A mixer of its own from top to bottom.
MIXER = """
@register_mixer
@dataclass(frozen=True)
class RowMixup(Mixer):
    alpha: float = 0.5

    cases = {"rows": 1.0}

    def draw(self, batch_size, rng, progress=0.0):
        perm = torch.randperm(batch_size, generator=rng)
        return Draw("rows", perm, torch.rand((), generator=rng))

    def apply(self, net, x, y, draw):
        is_own = torch.arange(x.shape[2]) < (draw.lam * x.shape[2]).round()
        logits = net(torch.where(is_own.view(-1, 1), x, x[draw.perm]))
        y, lam = soft_targets(y, logits.shape[1]), is_own.float().mean()
        return Mixed(logits, lam * y + (1 - lam) * y[draw.perm])
"""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget at the end what a test registers."""
    assert "RowMixup" not in MIXERS
    monkeypatch.setattr(MIXERS, "_entries", dict(MIXERS))
    yield
    vars(am).pop("RowMixup", None)


def check_method(mixer: Mixer) -> None:
    """It trains a step, and a recipe with it is read back from JSON."""
    net = TinyNet()
    before = net.fc.weight.clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mixed = mixer(net, images(6), labels(6), torch.Generator().manual_seed(0))
    torch.testing.assert_close(mixed.targets.sum(1), torch.ones(6))
    mixed.loss().backward()
    optimizer.step()
    assert not torch.equal(net.fc.weight, before)
    recipe = dataclasses.replace(find_recipe("cifar10-r18-baseline"), mixer=mixer)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


@pytest.mark.usefixtures("registry")
def test_a_file_in_mixers_is_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "row_mixup.py").write_text(HEADER + METHOD)
    path = [*alignmixup.mixers.__path__, str(tmp_path)]
    monkeypatch.setattr(alignmixup.mixers, "__path__", path)
    monkeypatch.setattr(MIXERS, "_package", "alignmixup.mixers")  # as at the first look-up
    assert am.RowMixup is MIXERS["RowMixup"]
    with pytest.raises(ValueError, match="alpha must be positive"):
        am.RowMixup(alpha=0.0)
    with pytest.raises(ValueError, match="6 images but 5 labels"):
        am.RowMixup()(TinyNet(), images(6), labels(5))
    check_method(am.RowMixup(alpha=0.3))


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("source", [METHOD, MIXER], ids=["method", "mixer"])
def test_a_plugin_file_is_a_method(source: str, tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(HEADER + source)
    import_plugin(str(tmp_path / "rows.py"))
    check_method(MIXERS["RowMixup"](alpha=0.3))


def test_an_unknown_method_in_a_record_suggests_the_nearest() -> None:
    record = find_recipe("cifar10-r18-baseline").to_json()
    record["mixer"]["kind"] = "NoMixx"
    with pytest.raises(ValueError, match="unknown mixer 'NoMixx'; did you mean 'NoMix'"):
        Recipe.from_json(record)


def test_the_loss_of_acol_is_read_back() -> None:
    """It is registered by the module of its network."""
    mixer = MIXERS["ErasingLoss"]()
    recipe = dataclasses.replace(find_recipe("cifar10-r18-baseline"), mixer=mixer)
    assert Recipe.from_json(recipe.to_json()).mixer == mixer
