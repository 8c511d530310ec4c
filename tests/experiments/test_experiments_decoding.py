"""A decoder for the frozen network of a run: what it learns, what is written, what is refused."""

import dataclasses
import json
import math
import shutil

import pytest
import torch

from alignmixup.cli import main
from alignmixup.contracts import RecipeKey
from alignmixup.datasets import shapes
from alignmixup.experiments import data_record, decoding
from alignmixup.experiments.decoding import DECODER, DecoderSettings, open_painter, train_decoder
from alignmixup.experiments.painters import (
    LayerDecoder,
    OwnDecoder,
    Reconstruction,
    _as_map,
    features_at,
    reconstruction,
)
from alignmixup.experiments.run import Sets, train
from alignmixup.experiments.run_folder import FolderInUse
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE, AlignMixupVAE
from alignmixup.mixers.nomix import NoMix
from alignmixup.models import PreActResNet18, build
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.report.reading import read_results
from alignmixup.training import TrainSettings

SMALL = DecoderSettings(epochs=3, batch_size=25, lr=1e-2, channels=16)
# Its error is 0.68 to 0.89 of that of the mean image, over seven seeds.
LONGER = dataclasses.replace(SMALL, epochs=12)
SIDE = 16


@pytest.fixture(scope="module")
def sets():
    return Sets(shapes("train", 200, SIDE), shapes("test", 50, SIDE))


def run_of(folder, sets, net, mixer):
    settings = TrainSettings(epochs=1, batch_size=50, lr=0.01, milestones=(), device="cpu")
    key = RecipeKey("shapes", "r18", "baseline")
    recipe = Recipe(key, DataSpec("shapes", flip=False), net, mixer, settings)
    train(recipe, folder, sets=sets, quiet=True)
    return folder


@pytest.fixture(scope="module")
def plain(sets, tmp_path_factory):
    net = NetSpec("preact_resnet18", width=4)
    return run_of(tmp_path_factory.mktemp("runs") / "plain", sets, net, AlignMixup("layer3"))


@pytest.fixture(scope="module")
def decoded(plain, sets):
    """The run with its decoder, and how well that one does."""
    before = {p.name: p.read_bytes() for p in plain.iterdir() if p.name != "results.jsonl"}
    measured = train_decoder(plain, LONGER, sets=sets, quiet=True)
    after = {p.name: p.read_bytes() for p in plain.iterdir()}
    assert {name: after[name] for name in before} == before, "the run itself was changed"
    return plain, measured


def test_a_second_decoder_of_a_run_is_refused_while_the_first_is_trained(plain, sets, tmp_path):
    folder = shutil.copytree(plain, tmp_path / "run")
    refused = []

    def train_another():
        if not refused:
            refused.append("now")
            with pytest.raises(FolderInUse, match="another process is training in"):
                train_decoder(folder, SMALL, sets=sets, quiet=True)

    short = dataclasses.replace(SMALL, epochs=1)
    train_decoder(folder, short, sets=sets, again=True, quiet=True, on_step=train_another)
    assert refused


def test_the_decoder_does_better_than_the_mean_image(decoded, sets):
    folder, measured = decoded
    assert measured.num_images == 50
    assert measured.error < 0.95 * measured.mean_image_error
    x = sets.test.images.double() / 255
    std = torch.tensor(sets.test.std, dtype=torch.float64).view(3, 1, 1)
    by_hand = ((x - x.mean(0)) / std).square().mean()
    assert measured.mean_image_error == pytest.approx(float(by_hand), rel=1e-5)
    _, painter = open_painter(folder, 10, SIDE, "cpu")
    with torch.no_grad():
        painted = painter.paint(painter.features(x.float()))
    assert measured.error == pytest.approx(float(((painted - x) / std).square().mean()), rel=1e-4)


def test_settings_and_errors_are_kept_with_the_run(decoded):
    folder, measured = decoded
    said = json.loads((folder / "decoder.json").read_text())
    assert said["settings"]["layer"] == "layer3", "the layer the run mixes at"
    assert said["error"] == measured.error
    results = {r.metric: r for r in read_results([folder]) if r.task == "reconstruction"}
    assert results["error"].value == measured.error
    assert results["mean_image_error"].value == measured.mean_image_error
    assert (results["error"].key.data, results["error"].settings["layer"]) == ("shapes", "layer3")


def test_asked_again_nothing_changes_and_other_settings_are_refused(decoded, sets):
    folder, measured = decoded
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert train_decoder(folder, LONGER, sets=sets, quiet=True) == measured
    other = dataclasses.replace(LONGER, layer="layer4")
    with pytest.raises(ValueError, match=r"layer: layer3 before, layer4 now.*--again"):
        train_decoder(folder, other, sets=sets, quiet=True)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_what_cannot_be_decoded_is_refused(plain, decoded, sets, tmp_path):
    with pytest.raises(ValueError, match="has no decoder of its own"):
        train_decoder(plain, DecoderSettings(kind="own"), sets=sets)
    with pytest.raises(ValueError, match="kind must be 'map' or 'vector' or 'own', got 'tensor'"):
        DecoderSettings(kind="tensor")
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        DecoderSettings(epochs=0)
    with pytest.raises(ValueError, match=r"'head' returns .* a decoder reads maps"):
        train_decoder(plain, dataclasses.replace(SMALL, layer="head"), sets=sets, again=False)
    with pytest.raises(FileNotFoundError, match="not the folder of a run"):
        train_decoder(tmp_path, SMALL, sets=sets)


def test_a_decoder_is_thrown_away_only_when_the_next_one_can_be_trained(decoded, sets):
    folder, _ = decoded
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for layer in ("layre3", "head"):
        wrong = dataclasses.replace(SMALL, layer=layer)
        with pytest.raises(ValueError, match=layer):
            train_decoder(folder, wrong, sets=sets, again=True, quiet=True)
    with pytest.raises(ValueError, match="has no decoder of its own"):
        train_decoder(folder, DecoderSettings(kind="own"), sets=sets, again=True)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_decoder_that_diverges_is_an_error_and_nothing_of_it_is_recorded(plain, sets, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(plain, folder)
    before = (folder / "results.jsonl").read_bytes()
    wild = dataclasses.replace(SMALL, epochs=1, lr=1e30)
    with pytest.raises(ValueError, match=r"diverged.* lower lr \(--lr\), which is 1e\+30"):
        train_decoder(folder, wild, sets=sets, again=True, quiet=True)
    assert (folder / "results.jsonl").read_bytes() == before
    assert not list(folder.glob("decoder.*")), "the record of one that was thrown away is left"
    for lr in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"lr must be positive and finite, got {lr}"):
            DecoderSettings(lr=lr)


def test_one_that_diverges_in_its_last_step_is_an_error_too(plain, sets, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(plain, folder)
    bad = Reconstruction(math.nan, 1.0, 50)
    monkeypatch.setattr(decoding, "reconstruction", lambda *args: bad)
    with pytest.raises(ValueError, match="on the test images is nan: train it --again with a low"):
        train_decoder(
            folder, dataclasses.replace(SMALL, epochs=1), sets=sets, again=True, quiet=True
        )
    assert not (folder / "decoder.json").exists()


def test_a_run_that_goes_on_needs_its_decoder_again(sets, tmp_path):
    folder = run_of(tmp_path / "run", sets, NetSpec("preact_resnet18", width=4), NoMix())
    with pytest.raises(FileNotFoundError, match="has no decoder: train one with"):
        open_painter(folder, 10, SIDE, "cpu")
    quick = dataclasses.replace(SMALL, epochs=1)
    train_decoder(folder, quick, sets=sets, quiet=True)
    _, painter = open_painter(folder, 10, SIDE, "cpu")
    assert painter.layer == "layer4", "the layer the paper mixes at"
    record = json.loads((folder / "run.json").read_text())
    record["train"]["epochs"] = 2  # as if it had been begun so, and stopped half-way
    (folder / "run.json").write_text(json.dumps(record))
    ledger = (folder / "ledger.jsonl").read_text()
    (folder / "ledger.jsonl").write_text(ledger.replace('"epochs": 1', '"epochs": 2', 1))
    with pytest.raises(ValueError, match="is at epoch 1 of 2: finish it"):
        train_decoder(folder, quick, sets=sets)
    train(Recipe.from_json(record), folder, sets=sets, quiet=True)
    with pytest.raises(ValueError, match="was trained for epoch 1 of the run, which is now at 2"):
        open_painter(folder, 10, SIDE, "cpu")
    with pytest.raises(ValueError, match="run_epoch: 1 before, 2 now"):
        train_decoder(folder, quick, sets=sets)
    train_decoder(folder, quick, sets=sets, again=True, quiet=True)
    open_painter(folder, 10, SIDE, "cpu")


def test_a_half_trained_decoder_is_not_drawn_with(plain, sets, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(plain, folder)
    (folder / DECODER).unlink(missing_ok=True)
    real = decoding.train_batches

    class Torn:
        """Ends the process in its second epoch."""

        def __init__(self, loader):
            self.loader = loader

        def __len__(self):
            return len(self.loader)

        def epoch(self, epoch, start_step=0):
            if epoch == 1:
                raise KeyboardInterrupt
            return self.loader.epoch(epoch, start_step)

    monkeypatch.setattr(decoding, "train_batches", lambda *args: Torn(real(*args)))
    with pytest.raises(KeyboardInterrupt):
        train_decoder(folder, SMALL, sets=sets, quiet=True)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="is at step 8 of 24: run 'alignmixup decoder"):
        open_painter(folder, 10, SIDE, "cpu")
    assert train_decoder(folder, SMALL, sets=sets, quiet=True).error > 0
    open_painter(folder, 10, SIDE, "cpu")


@pytest.mark.parametrize("variational", [False, True])
def test_an_autoencoder_is_decoded_by_its_own_decoder_until_it_gets_another(
    sets, tmp_path, variational
):
    net = NetSpec("preact_resnet18", width=4, autoencoder="vector", variational=variational)
    mixer = AlignMixupVAE(num_iters=5) if variational else AlignMixupAE(num_iters=5)
    folder = run_of(tmp_path / "run", sets, net, mixer)
    own = DecoderSettings(kind="own")
    measured = train_decoder(folder, own, sets=sets)
    assert not (folder / DECODER).exists()
    said = {r.metric: dict(r.settings) for r in read_results([folder])}
    assert said["error"] == {"kind": "own", "layer": "encoder", "num_images": 50}
    opened, painter = open_painter(folder, 10, SIDE, "cpu")
    x = sets.test.images[:8] / 255
    with torch.no_grad():
        expected = opened.model(x, decode=True).image
        torch.testing.assert_close(painter.paint(painter.features(x)), expected)
    assert isinstance(painter, OwnDecoder)
    assert 0 < measured.error < 2 * measured.mean_image_error
    if not variational:
        train_decoder(folder, dataclasses.replace(SMALL, epochs=1), sets=sets, quiet=True)
        _, painter = open_painter(folder, 10, SIDE, "cpu")
        assert isinstance(painter, LayerDecoder)
        assert painter.layer == "encoder"
        assert train_decoder(folder, own, sets=sets) == measured
        assert (folder / DECODER).exists(), "measuring the own one throws nothing away"
        lines = (folder / "results.jsonl").read_bytes()
        assert train_decoder(folder, own, sets=sets, again=True) == measured
        assert not list(folder.glob("decoder.*"))
        assert (folder / "results.jsonl").read_bytes() == lines, "recorded once"
        assert isinstance(open_painter(folder, 10, SIDE, "cpu")[1], OwnDecoder)


@pytest.mark.parametrize(
    "given", [{"layer": "nonsense"}, {"epochs": 7}, {"lr": 0.1}, {"channels": 8}, {"seed": 1}]
)
def test_settings_of_a_training_do_not_go_with_the_own_decoder(given):
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=f"trains nothing, so {name}={value!r} has no effect"):
        DecoderSettings(kind="own", **given)


@pytest.mark.parametrize("kind", ["map", "vector"])
def test_features_painted_are_those_of_the_layer_and_the_network_stays_as_it_is(kind):
    net = build(NetSpec("preact_resnet18", width=4), 10, (0.5,) * 3, (0.2,) * 3, SIDE)
    net.train()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    decoder = LayerDecoder(net, "layer3", SIDE, kind=kind, channels=8).eval()
    net.train()
    x = torch.rand(3, 3, SIDE, SIDE)
    features = decoder.features(x)
    assert net.training
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert features.shape == (3, 16, 4, 4)
    torch.testing.assert_close(features, features_at(net, "layer3", x))
    # An untrained decoder paints the mean color, and its target is the image in normalized space.
    painted = decoder(x)
    torch.testing.assert_close(painted.image, torch.full_like(x, 0.5))
    torch.testing.assert_close(painted.target, (x - 0.5) / 0.2)


def test_a_vector_of_a_large_map_of_few_channels_reads_it_whole():
    """64 x 32 x 32 are more numbers than it reads unreduced, and fewer channels than 128."""
    net = PreActResNet18(10, (0.5,) * 3, (0.5,) * 3)
    decoder = LayerDecoder(net, "layer1", 32, kind="vector", channels=4)
    assert decoder.embed.linear.in_features == 64 * 32 * 32


def test_tokens_are_laid_on_their_square():
    class Tokens(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.normalize = PreActResNet18(2, (0.5,) * 3, (0.5,) * 3, width=1).normalize
            self.patch = torch.nn.Conv2d(3, 6, 4, 4)
            self.tokens = torch.nn.Flatten(2)
            self.swap = torch.nn.Identity()

        def forward(self, x):
            return self.swap(self.tokens(self.patch(self.normalize(x))).transpose(1, 2)).mean(1)

    net = Tokens().eval()
    decoder = LayerDecoder(net, "swap", SIDE, channels=8).eval()
    x = torch.rand(2, 3, SIDE, SIDE)
    tokens = decoder.features(x)
    assert tokens.shape == (2, 16, 6)
    with torch.no_grad():
        torch.testing.assert_close(_as_map(tokens, "swap"), net.patch(net.normalize(x)))
        decoder.decoder.to_image.weight.normal_()
        assert decoder.paint(tokens).shape == x.shape
    with pytest.raises(ValueError, match=r"tokens .* of a square"):
        _as_map(tokens[:, :15], "swap")


def test_the_mean_image_does_not_depend_on_the_batches():
    net = build(NetSpec("preact_resnet18", width=4), 10, (0.5,) * 3, (0.2,) * 3, SIDE)
    decoder = LayerDecoder(net, "layer3", SIDE, channels=8).eval()
    x = torch.rand(10, 3, SIDE, SIDE)
    whole = reconstruction(decoder, [(x, None)])
    parts = reconstruction(decoder, [(x[:3],), (x[3:],)])
    assert whole.error == pytest.approx(parts.error)
    assert whole.mean_image_error == pytest.approx(parts.mean_image_error)
    # This decoder answers everything with 0.5.
    assert whole.error == pytest.approx(float(((x - 0.5) / 0.2).square().mean()), rel=1e-5)


def test_the_command(sets, tmp_path, capsys, monkeypatch):
    few = {"train": sets.train, "test": sets.test}
    for module in (decoding, data_record):
        monkeypatch.setattr(module, "load_split", lambda spec, split, *_: few[split])
    folder = run_of(tmp_path / "run", sets, NetSpec("preact_resnet18", width=4), NoMix())
    size = ["--epochs", "1", "--batch-size", "40", "--channels", "4", "--device", "cpu"]
    assert main(["decoder", str(folder), "--layer", "layer3", *size]) == 0
    said = capsys.readouterr()
    assert "of the mean image's" in said.out
    assert "on 50 test images" in said.out
    assert "decoder: step 5/5" in said.err
    assert (folder / DECODER).exists()
    assert main(["decoder", str(folder), "--layer", "layer4", *size]) == 1
    assert "--again" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "decoder RUN" in capsys.readouterr().out
