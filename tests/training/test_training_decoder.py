"""Training a decoder in stages: an interrupted one repeats the uninterrupted one bit for bit."""

import os
import signal
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from alignmixup.training import Stopped
from alignmixup.training.checkpoint import read_facts
from alignmixup.training.decoder_fit import OtherSettings, fit_decoder


class Pair(NamedTuple):
    output: Tensor
    target: Tensor


class Net(nn.Module):
    """A frozen encoder with batch statistics, and a decoder to train."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
            self.decoder = nn.Sequential(
                nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1)
            )

    def forward(self, x, *, decode=True):
        return Pair(self.decoder(self.encoder(x)), x)


class Loader:
    """Three batches an epoch, other ones in each; ``stop`` ends the process at that step."""

    def __init__(self, stop=None):
        self.stop, self.given = stop, 0

    def __len__(self):
        return 3

    def epoch(self, epoch, start_step=0):
        for step in range(start_step, 3):
            if self.given == self.stop:
                raise KeyboardInterrupt
            self.given += 1
            rng = torch.Generator().manual_seed(10 * epoch + step)
            yield (torch.rand(5, 3, 8, 8, generator=rng),)


def state(net):
    return {key: value.clone() for key, value in net.state_dict().items()}


def test_an_interrupted_training_goes_on_as_if_nothing_had_been(tmp_path):
    whole, pieces, path = Net(), Net(), tmp_path / "decoder.safetensors"
    fit = fit_decoder(whole, Loader(), steps=40, lr=1e-2)
    with pytest.raises(KeyboardInterrupt):
        fit_decoder(pieces, Loader(stop=25), steps=40, lr=1e-2, checkpoint=path)
    assert path.exists()
    loader = Loader()
    again = fit_decoder(pieces, loader, steps=40, lr=1e-2, checkpoint=path)
    assert loader.given < 20, "it began anew"
    assert again == fit
    after = state(pieces)
    for key, value in state(whole).items():
        assert torch.equal(value, after[key]), key


def test_one_that_diverges_is_an_error_and_leaves_nothing(tmp_path):
    path = tmp_path / "decoder.safetensors"
    with pytest.raises(
        ValueError, match=r"has diverged: .* is (inf|nan) by step \d+ of 20; lower lr"
    ):
        fit_decoder(Net(), Loader(), steps=20, lr=1e30, checkpoint=path)
    assert not path.exists(), "one to go on from, and to diverge again"


def test_one_that_is_done_is_only_read(tmp_path):
    path, net = tmp_path / "decoder.safetensors", Net()
    fit = fit_decoder(net, Loader(), steps=6, checkpoint=path, facts={"layer": "encoder"})
    with safe_open(path, "pt") as file:
        assert not [name for name in file.keys() if name.startswith("optimizer")]  # noqa: SIM118
    written, fresh = path.read_bytes(), Net()
    nobody = Loader(stop=0)
    again = fit_decoder(fresh, nobody, steps=6, checkpoint=path, facts={"layer": "encoder"})
    assert again == fit
    assert path.read_bytes() == written
    for key, value in state(net).items():
        assert torch.equal(value, state(fresh)[key]), key


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"steps": 7}, "steps: 6 before, 7 now"),
        ({"seed": 1}, "seed: 0 before, 1 now"),
        ({"facts": {"layer": "stem"}}, "layer: encoder before, stem now"),
    ],
)
def test_a_decoder_with_other_settings_is_refused_and_left_alone(tmp_path, changes, named):
    path = tmp_path / "decoder.safetensors"
    how = {"steps": 6, "facts": {"layer": "encoder"}}
    fit_decoder(Net(), Loader(), checkpoint=path, **how)
    written = path.read_bytes()
    with pytest.raises(OtherSettings, match=named):
        fit_decoder(Net(), Loader(), checkpoint=path, **{**how, **changes})
    assert path.read_bytes() == written


def test_every_step_is_reported_to_the_caller():
    steps = []
    fit_decoder(Net(), Loader(), steps=4, on_step=lambda: steps.append(1))
    assert len(steps) == 4


def test_progress_is_said_when_it_is_wanted(capsys):
    fit_decoder(Net(), Loader(), steps=4)
    assert capsys.readouterr().err == ""
    fit_decoder(Net(), Loader(), steps=4, quiet=False)
    assert "decoder: step 4/4  error" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_decoder_trains_and_resumes_on_a_gpu(tmp_path):
    path = tmp_path / "decoder.safetensors"
    with pytest.raises(KeyboardInterrupt):
        fit_decoder(Net(), Loader(stop=25), steps=40, lr=1e-2, device="cuda", checkpoint=path)
    net = Net()
    fit = fit_decoder(net, Loader(), steps=40, lr=1e-2, device="cuda", checkpoint=path)
    assert next(net.decoder.parameters()).is_cuda
    assert fit.final_error < fit.errors[0]


class Signalling(Loader):
    """Sends SIGTERM before its 10th batch."""

    def epoch(self, epoch, start_step=0):
        for batch in super().epoch(epoch, start_step):
            if self.given == 10:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch


def test_a_signal_stops_it_after_its_step_with_a_checkpoint(tmp_path):
    whole, pieces, path = Net(), Net(), tmp_path / "decoder.safetensors"
    fit = fit_decoder(whole, Loader(), steps=40, lr=1e-2)
    with pytest.raises(Stopped, match="the same command resumes") as stop:
        fit_decoder(pieces, Signalling(), steps=40, lr=1e-2, checkpoint=path)
    assert stop.value.number == signal.SIGTERM
    assert read_facts(path)["step"] == 10
    assert fit_decoder(pieces, Loader(), steps=40, lr=1e-2, checkpoint=path) == fit
