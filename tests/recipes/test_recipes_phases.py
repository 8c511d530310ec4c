"""Recipes whose image size, batch size or mixer changes by epoch, resumed at any of them."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from alignmixup.cli.training import parse_train
from alignmixup.experiments import run as running
from alignmixup.experiments.run import train
from alignmixup.mixers.puzzlemix import PuzzleMix
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.schema import Phase, Recipe, changed, on_data
from alignmixup.training.checkpoint import load_checkpoint

PHASES = (
    Phase(1, {"data.image_size": 16, "train.batch_size": 6, "mixer.clean_lam": 1.0}),
    Phase(2, {"mixer.clean_lam": 1.0}),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 2)):
        for label in ("a", "b"):
            (place / split / label).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (40, 36, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / split / label / f"{i}.png")
    return place


def recipe(folder, epochs=4):
    small = find_recipe("imagenet-r50-puzzlemix").shrunk()
    small = dataclasses.replace(small, mixer=PuzzleMix(loss="ce", grids=(2,), use_transport=False))
    data = dataclasses.replace(small.data, name=f"folder:{folder}", image_size=32)
    settings = dataclasses.replace(small.train, epochs=epochs, classifier_lr=None)
    return dataclasses.replace(small, data=data, train=settings, phases=PHASES)


@pytest.fixture
def seen(monkeypatch):
    """What each step was given: the shape of its images and the mixer's share of clean ones."""
    shapes = []
    apply = PuzzleMix.apply

    def looking(self, net, x, y, draw):
        shapes.append((tuple(x.shape), self.clean_lam))
        return apply(self, net, x, y, draw)

    monkeypatch.setattr(PuzzleMix, "apply", looking)
    return shapes


def steps_of_four_epochs():
    early = [((6, 3, 16, 16), 1.0)] * 2
    middle = [((4, 3, 32, 32), 1.0)] * 3
    late = [((4, 3, 32, 32), 0.0)] * 3
    return [*early, *middle, *late, *late]


def test_each_phase_has_its_size_batch_and_mixer(folder, tmp_path, seen):
    summary = train(recipe(folder), tmp_path / "run", quiet=True).summary
    assert summary.is_complete
    assert summary.epochs == 4
    assert seen == steps_of_four_epochs()
    events = [json.loads(x) for x in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    starts = [(e["settings"]["batch_size"], e["steps"]) for e in events if e["event"] == "start"]
    assert starts == [(6, 2), (4, 3), (4, 3)]
    assert sum(e["event"] == "provenance" for e in events) == 1
    assert [e["epoch"] for e in events if e["event"] == "epoch"] == [1, 2, 3, 4]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert Recipe.from_json(record) == recipe(folder)
    lines = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["trained"]["phases"][0]["until"] == 1


class Killed(Exception):
    pass


def tensors(out):
    """All but torch's own generator, from which nothing here draws."""
    found = load_checkpoint(out / "checkpoint.safetensors").tensors
    return {name: value for name, value in found.items() if name != "rng.cpu"}


@pytest.fixture(scope="module")
def uninterrupted(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    train(recipe(folder), out, quiet=True)
    return tensors(out)


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 2, 4, 9])
def test_a_run_killed_in_any_phase_resumes_to_the_same_weights(
    folder, uninterrupted, tmp_path, monkeypatch, num_steps
):
    """The checkpoint is that of the last whole epoch, also where a phase has just ended."""
    left, apply = [num_steps], PuzzleMix.apply

    def dying(self, net, x, y, draw):
        if not left[0]:
            raise Killed
        left[0] -= 1
        return apply(self, net, x, y, draw)

    monkeypatch.setattr(PuzzleMix, "apply", dying)
    with pytest.raises(Killed):
        train(recipe(folder), tmp_path / "killed", quiet=True)
    monkeypatch.setattr(PuzzleMix, "apply", apply)
    summary = train(recipe(folder), tmp_path / "killed", quiet=True).summary
    assert summary.is_complete
    whole, killed = uninterrupted, tensors(tmp_path / "killed")
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    events = [json.loads(x) for x in (tmp_path / "killed/ledger.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events if e["event"] in ("start", "epoch")] == [
        *("start", "epoch", "start", "epoch", "start", "epoch", "epoch")
    ]


def test_a_shorter_run_has_the_phases_it_reaches(folder):
    ends = [(list(epochs), stage.train.batch_size) for epochs, stage in recipe(folder, 2).stages()]
    assert ends == [([0], 6), ([1], 4)]
    (only,) = recipe(folder, 1).stages()
    assert only[0] == range(1)
    assert [list(e) for e, _ in recipe(folder, 3).stages()] == [[0], [1], [2]]
    plain = dataclasses.replace(recipe(folder), phases=())
    assert plain.stages() == [(range(4), plain)]


def test_a_setting_changed_by_the_user_holds_in_every_phase(folder):
    mine = changed(recipe(folder), {"train.batch_size": 2})
    assert [stage.train.batch_size for _, stage in mine.stages()] == [2, 2, 2]
    assert [stage.data.image_size for _, stage in mine.stages()] == [16, 32, 32]


def test_a_flag_holds_in_every_phase(tmp_path, monkeypatch):
    trained = []
    run = SimpleNamespace(summary="")
    monkeypatch.setattr(running, "train", lambda recipe, out, **more: trained.append(recipe) or run)
    words = ["imagenet-r50-puzzlemix-100", "--train.batch-size", "64", "--out", str(tmp_path)]
    parse_train(words)()
    batches = [stage.train.batch_size for _, stage in trained[0].stages()]
    assert batches == [64, 64, 64]


def test_another_size_of_images_scales_the_phases_too(folder):
    small = on_data(recipe(folder), "folder:pictures@96")
    assert [stage.data.image_size for _, stage in small.stages()] == [48, 96, 96]


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ((Phase(2, {}), Phase(2, {})), r"must end at increasing epochs from 1 on, got \[2, 2\]"),
        ((Phase(0, {}),), "must end at increasing epochs"),
    ],
)
def test_phases_out_of_order_are_refused(folder, phases, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(recipe(folder), phases=phases)


def test_a_phase_that_would_change_the_network_is_refused():
    with pytest.raises(ValueError, match=r"a phase cannot change 'net\.width'"):
        Phase(1, {"net.width": 4})
    with pytest.raises(ValueError, match=r"a phase cannot change 'train\.lr'"):
        Phase(1, {"train.lr": 0.1})


def test_a_batch_of_a_phase_that_the_images_do_not_fill_is_refused(folder, tmp_path):
    large = (Phase(1, {"train.batch_size": 16}),)
    wrong = dataclasses.replace(recipe(folder), phases=large)
    with pytest.raises(ValueError, match=r"12 training images make no full batch of 16"):
        train(wrong, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_batch_of_a_later_phase_that_cannot_be_split_is_refused_before_training(folder, tmp_path):
    """Batches of 6, then of 4: the second ones have no three equal parts."""
    in_parts = changed(recipe(folder), {"train.accumulate": 3})
    with pytest.raises(ValueError, match=r"a batch of 4 cannot be split in 3 equal parts"):
        train(in_parts, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
