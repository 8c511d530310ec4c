"""Style weights from the command line: what is written, printed, and refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from PIL import Image

from alignmixup.cli import main
from alignmixup.datasets import shapes
from alignmixup.experiments import batches, styling
from alignmixup.experiments.styling import make_style_weights, some_images
from alignmixup.mixers.stylecutmix import StyleCutMix
from alignmixup.ops.adain import find_weights, load_adain


def small(out: Path, **settings: object) -> styling.StyleWeights:
    return make_style_weights("shapes", out, steps=4, num_images=60, width=3, **settings)


def test_the_command_writes_weights_and_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "style.safetensors"
    args = ["--out", str(out), "--steps", "4", "--images", "60", "--width", "3"]
    assert main(["adain", "shapes", *args, "--device", "cpu"]) == 0
    said, progress = capsys.readouterr()
    assert progress.splitlines()[-1] == "style network: step 4 of 4"
    assert hashlib.sha256(out.read_bytes()).hexdigest() in said
    assert "small AdaIN network, 60 images" in said
    assert "dB" in said
    found = find_weights(str(out))
    assert found.metadata["data"] == "shapes/train"
    assert (found.metadata["steps"], found.metadata["num_images"]) == ("4", "60")
    # What the mixers need is in it, the distances for the automatic gamma included.
    distances = load_adain(str(out)).class_distances
    assert distances is not None
    assert distances.shape == (10, 10)
    x, y = torch.rand(4, 3, 32, 32), torch.arange(4)
    mixer = StyleCutMix(str(out), prob=1.0, gamma="auto", sha256=found.sha256)
    head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
    assert mixer(head, x, y).loss().isfinite()


@pytest.mark.slow
def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    sums = [
        small(tmp_path / f"{i}.safetensors", seed=s).weights.sha256 for i, s in enumerate((0, 0, 1))
    ]
    assert sums[0] == sums[1] != sums[2]


def test_steps_are_told_one_by_one(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    small(tmp_path / "a.safetensors", on_step=lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.slow
def test_weights_there_are_get_the_distances_of_the_set(tmp_path: Path) -> None:
    first = small(tmp_path / "a.safetensors").weights
    made = make_style_weights(
        "shapes", tmp_path / "b.safetensors", weights=first.path, num_images=80
    )
    assert made.psnr is None
    assert made.weights.metadata["from_sha256"] == first.sha256
    assert made.weights.metadata["distances"] == "shapes/train"
    one, other = (load_adain(w.path) for w in (first, made.weights))
    assert torch.equal(one.encoder[0].weight, other.encoder[0].weight)
    assert not torch.equal(one.class_distances, other.class_distances)


@pytest.mark.slow
def test_classes_get_equal_shares() -> None:
    images = some_images("shapes", 45, seed=3)
    counts = images.labels.bincount(minlength=10)
    assert counts.sum() == 45
    assert set(counts.tolist()) == {4, 5}
    whole = shapes("train")
    # They are images of the set, with their own labels.
    row = (whole.images == images.images[7]).flatten(1).all(1).nonzero()[0]
    assert whole.labels[row] == images.labels[7]
    assert len(some_images("shapes", 10**9)) == len(whole)


def test_files_are_decoded_only_as_far_as_they_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split, name in ((s, n) for s in ("train", "val") for n in ("cat", "dog")):
        folder = tmp_path / split / name
        folder.mkdir(parents=True)
        for i in range(6):
            Image.new("RGB", (20, 24), (40 * i, 0, 0)).save(folder / f"{i}.png")
    decoded: list[str] = []
    decode = batches.decode_files
    monkeypatch.setattr(
        batches, "decode_files", lambda paths, size: (decoded.extend(paths), decode(paths, size))[1]
    )
    images = some_images(f"folder:{tmp_path}@16", 4)
    assert len(decoded) == 4
    assert images.images.shape == (4, 3, 16, 16)
    assert images.labels.bincount().tolist() == [2, 2]


def test_bad_requests_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"out must be a \.safetensors file, got 'a\.pth'"):
        small(Path("a.pth"))
    with pytest.raises(ValueError, match="5 images are fewer than the 10 classes of shapes"):
        make_style_weights("shapes", tmp_path / "a.safetensors", num_images=5)
    (tmp_path / "there.safetensors").touch()
    with pytest.raises(ValueError, match=r"there\.safetensors exists; choose another file"):
        small(tmp_path / "there.safetensors")
    with pytest.raises(ValueError, match="unknown data set 'mnist'"):
        make_style_weights("mnist", tmp_path / "a.safetensors")
