"""Folders that older versions wrote are resumed: ``old_run`` is one, stopped after one of 2 epochs.

It was written before ``train.ema`` and registered optimizers, by this script's ``run``.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import alignmixup as am
from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.experiments.data_record import Sets
from alignmixup.experiments.load import load_run
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.training import TrainSettings, fit, summarize
from alignmixup.training.checkpoint import CHECKPOINT, load_checkpoint
from alignmixup.training.ledger import LEDGER
from seeds import TEST_SEED

OLD = Path(__file__).parent / "old_run"
SETTINGS = TrainSettings(
    epochs=2, batch_size=16, lr=0.05, schedule="cosine", milestones=(), device="cpu", seed=3
)


def run(out, **changes):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, 8, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 10)
    )
    loader = DeviceLoader(shapes("train", 64), 16, 3)
    settings = TrainSettings(**{**SETTINGS.__dict__, **changes})
    return fit(net, InputMixup(), loader, lambda _: {"top1": 10.0}, settings, out, quiet=True)


def test_an_old_run_is_resumed_and_its_ledger_kept(tmp_path):
    shutil.copytree(OLD, tmp_path / "old")
    assert run(tmp_path / "old").is_complete
    before, after = ((p / LEDGER).read_bytes() for p in (OLD, tmp_path / "old"))
    assert after.startswith(before)
    assert summarize(tmp_path / "old").epochs == 2
    if TEST_SEED:
        return  # the old run had the seeds as they are written
    run(tmp_path / "whole")
    whole, resumed = (load_checkpoint(tmp_path / n / CHECKPOINT) for n in ("whole", "old"))
    assert whole.tensors.keys() == resumed.tensors.keys()
    for name, value in whole.tensors.items():  # close, as the first half is another machine's
        torch.testing.assert_close(resumed.tensors[name], value, msg=name, atol=1e-4, rtol=1e-3)


def test_an_old_run_with_other_settings_is_refused(tmp_path):
    shutil.copytree(OLD, tmp_path / "old")
    with pytest.raises(ValueError, match=r"\(train.lr: 0.05 before, 0.1 now\); choose another"):
        run(tmp_path / "old", lr=0.1)


def test_a_run_folder_without_the_new_settings_opens_and_is_complete(tmp_path):
    sets = Sets(shapes("train", 32), shapes("test", 16))
    small = {"net.width": 4, "train.epochs": 1, "train.batch_size": 16, "train.device": "cpu"}
    name = "cifar10-r18-baseline-fast"
    am.train(name, tmp_path, sets=sets, changes=small, quiet=True)
    weights = load_run(tmp_path, device="cpu").model.state_dict()
    record = json.loads((tmp_path / "run.json").read_text())
    del record["train"]["ema"]
    (tmp_path / "run.json").write_text(json.dumps(record))
    again = load_run(tmp_path, device="cpu").model.state_dict()
    assert all(torch.equal(again[key], value) for key, value in weights.items())
    assert am.train(name, tmp_path, sets=sets, changes=small, quiet=True)
