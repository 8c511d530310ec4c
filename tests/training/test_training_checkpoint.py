"""Checkpoints and the ledger: what is written comes back, and damage is named."""

import errno

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from alignmixup.mixers.nomix import NoMix
from alignmixup.training import TrainSettings, fit
from alignmixup.training.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    load_checkpoint,
    load_weights,
)
from alignmixup.training.ledger import Ledger, read_ledger
from alignmixup.training.tensor_file import DTYPES


def write(path, checkpoint):
    writer = CheckpointWriter(path)
    writer.save(checkpoint)
    writer.close()


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    path = tmp_path / "c.safetensors"
    weights = torch.randn(3, 4).to(memory_format=torch.contiguous_format)
    rng = torch.Generator().manual_seed(3).get_state()
    write(path, Checkpoint({"model.w": weights, "rng.draws": rng}, {"epoch": 3, "cases": ["a"]}))
    read = load_checkpoint(path)
    assert read.facts == {"epoch": 3, "cases": ["a"]}
    assert torch.equal(read.part("model")["w"], weights)
    assert torch.equal(read.part("rng")["draws"], rng)
    assert read.part("optimizer") == {}
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_reads_every_kind_of_tensor(tmp_path, dtype):
    path = tmp_path / "c.safetensors"
    values = (torch.randn(3, 5) * 4).to(dtype)
    tensors = {"some": values, "scalar": values[0, 0], "empty": values[:0], "odd": values[:, :3]}
    write(path, Checkpoint(tensors, {"text": 'quotes " and \u00e4'}))
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == dtype
        assert torch.equal(read[name], tensor)
    assert load_checkpoint(path).facts == {"text": 'quotes " and \u00e4'}


def test_tensors_start_at_a_multiple_of_eight_bytes(tmp_path):
    """So that a reader may map them into memory."""
    path = tmp_path / "c.safetensors"
    for length in range(9):
        write(path, Checkpoint({"some": torch.ones(3)}, {"text": "x" * length}))
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_channels_last_weights_come_back_with_the_same_values(tmp_path):
    path = tmp_path / "c.safetensors"
    weights = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    write(path, Checkpoint({"model.w": weights}, {}))
    assert torch.equal(load_checkpoint(path).tensors["model.w"], weights)


@pytest.mark.gpu
def test_a_checkpoint_from_a_gpu_holds_the_moment_of_saving(tmp_path):
    path = tmp_path / "c.safetensors"
    wide = torch.randn(64, 48, 3, 3, device="cuda").to(memory_format=torch.channels_last)
    tensors = {"model.w": wide, "model.n": torch.arange(7, device="cuda"), "rng": torch.arange(9)}
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    writer = CheckpointWriter(path)
    writer.save(Checkpoint(tensors, {}))
    for _ in range(100):
        wide.mul_(1.1)  # training goes on while the file is written
    writer.close()
    read = load_checkpoint(path).tensors
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], expected[name]) for name in tensors)


def test_what_is_saved_is_the_moment_of_saving(tmp_path):
    path = tmp_path / "c.safetensors"
    weights, cases = torch.zeros(1000, 1000), ["input"]
    writer = CheckpointWriter(path)
    writer.save(Checkpoint({"model.w": weights}, {"cases": cases}))
    weights.fill_(1)  # training goes on while the file is written
    cases.append("feat")
    writer.close()
    there = load_checkpoint(path)
    assert not there.tensors["model.w"].any()
    assert there.facts == {"cases": ["input"]}


def test_a_tensor_the_format_has_no_name_for_is_named_at_once(tmp_path):
    writer = CheckpointWriter(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=r"cannot hold model\.z of torch\.complex64; it holds"):
        writer.save(Checkpoint({"model.z": torch.zeros(2, dtype=torch.complex64)}, {}))
    assert not list(tmp_path.iterdir())


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"scale": 1.0}

    def set_extra_state(self, state):
        """There is nothing to restore."""


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (WithExtraState(3, 2), r"model\.0\._extra_state of dict"),
        (nn.Linear(3, 2, dtype=torch.complex64), r"model\.0\.weight of torch\.complex64"),
    ],
)
def test_a_network_that_no_checkpoint_can_hold_is_named_before_its_first_step(
    layer, named, tmp_path
):
    settings = TrainSettings(epochs=1, milestones=(), device="cpu")
    loader = [(torch.rand(2, 3), torch.tensor([0, 1]))]  # read by no one
    with pytest.raises(ValueError, match=f"a checkpoint cannot hold {named}; it holds"):
        fit(nn.Sequential(layer), NoMix(), loader, dict, settings, tmp_path, quiet=True)


def test_a_first_write_that_fails_leaves_nothing(tmp_path):
    path = tmp_path / "missing" / "c.safetensors"
    writer = CheckpointWriter(path)
    writer.save(Checkpoint({"w": torch.zeros(2)}, {}))
    with pytest.raises(OSError, match="there is none yet"):
        writer.close()


def test_a_failed_write_leaves_the_file_before_it(tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    write(path, Checkpoint({"model.w": torch.ones(2)}, {"epoch": 1}))

    def full(file, tensors, metadata):
        file.write(b"as far as it went")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("alignmixup.training.checkpoint.write_tensors", full)
    writer = CheckpointWriter(path)
    writer.save(Checkpoint({"model.w": torch.zeros(2)}, {"epoch": 2}))
    with pytest.raises(OSError, match=r"c\.safetensors.*No space left on device.*intact"):
        writer.close()
    assert load_checkpoint(path).facts == {"epoch": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_a_truncated_file_is_named(tmp_path):
    path = tmp_path / "c.safetensors"
    write(path, Checkpoint({"model.w": torch.randn(100)}, {"epoch": 1}))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"c\.safetensors is damaged"):
        load_checkpoint(path)
    with pytest.raises(FileNotFoundError, match="folder of a run"):
        load_checkpoint(tmp_path / "none.safetensors")


def test_weights_of_another_network_are_refused(tmp_path):
    path = tmp_path / "c.safetensors"
    write(path, Checkpoint({"model.weight": torch.ones(2, 3), "model.bias": torch.ones(2)}, {}))
    with pytest.raises(ValueError, match="another network"):
        load_weights(nn.Linear(4, 2), path)
    net = nn.Linear(3, 2)
    load_weights(net, path)
    assert torch.equal(net.weight, torch.ones(2, 3))


def test_a_ledger_is_cut_back_to_its_checkpoint(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.append("epoch", {"epoch": 1})
    length = ledger.length
    ledger.append("epoch", {"epoch": 2})
    Ledger(path, length).append("epoch", {"epoch": 2, "again": True})
    assert [e.get("again") for e in read_ledger(path)] == [None, True]


def test_a_torn_last_line_is_left_out_and_other_damage_named(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"event": "start"}\n{"event": "ep')
    assert read_ledger(path) == [{"event": "start"}]
    path.write_text('{"event": "ep\n{"event": "start"}\n')
    with pytest.raises(ValueError, match="line 1 is damaged"):
        read_ledger(path)


def test_a_ledger_shorter_than_its_checkpoint_says_so(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="3 bytes, but its checkpoint was written after 99"):
        Ledger(path, 99)
    path.unlink()
    with pytest.raises(ValueError, match="0 bytes, but its checkpoint was written after 99"):
        Ledger(path, 99)
    assert not path.exists()


def test_a_ledger_of_other_bytes_is_named(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"event": "\xff"}\n')
    with pytest.raises(ValueError, match="line 1 is damaged"):
        read_ledger(path)
