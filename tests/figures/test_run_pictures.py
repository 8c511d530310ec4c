"""Pictures of a run for the report page: what is made, what is left out, and when it is remade."""

import re
import shutil

import pytest
import torch

import alignmixup as am
from alignmixup.datasets import shapes
from alignmixup.experiments.load import load_run
from alignmixup.figures import run_pictures
from alignmixup.figures.run_pictures import has_pictures, make_pictures, write_pictures
from alignmixup.report.artifacts import KINDS, read_artifact, read_artifacts, write_artifact
from alignmixup.report.page import write_page

PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]+")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An autoencoder, which decodes its own features, with its pictures."""
    folder = tmp_path_factory.mktemp("run")
    sets = am.Sets(shapes("train", 16), shapes("test", 24))
    small = {"net.width": 4, "train.epochs": 1, "train.batch_size": 16, "train.device": "cpu"}
    am.train("cifar10-r18-alignmixup-ae-fast", folder, sets=sets, changes=small, quiet=True)
    left_out = write_pictures(folder, images=sets.test, device="cpu")
    return folder, sets.test, left_out


def test_what_is_made_has_the_shapes_that_are_documented(made):
    folder, images, left_out = made
    found = {kind: read_artifact(folder, kind) for kind in KINDS}
    assert all(a["kind"] == kind and a["epoch"] == 1 for kind, a in found.items())
    mixes = found["interpolations"]
    assert mixes["shares"][0] == 0
    assert mixes["shares"][-1] == 1
    assert all(
        PNG.fullmatch(p["rows"][r]) for p in mixes["pairs"] for r in ("aligned", "unaligned")
    )
    transport = found["transport"]
    rows, columns = transport["grid"]
    for pair in transport["pairs"]:
        assert pair["names"][0] != pair["names"][1]
        assert [len(row) for row in pair["plan"]] == [rows * columns] * (rows * columns)
        # Rounded to per mille, each entry by at most a half; the row is a share of one.
        assert all(abs(sum(row) - 1000) <= rows * columns / 2 + 10 for row in pair["plan"])
    confusion = found["confusion"]
    assert sum(map(sum, confusion["counts"])) == len(images) == confusion["num_images"]
    wrong = sum(n for i, row in enumerate(confusion["counts"]) for j, n in enumerate(row) if i != j)
    confidences = [mistake["confidence"] for mistake in confusion["mistakes"]]
    assert len(confidences) == min(12, wrong)
    assert confidences == sorted(confidences, reverse=True)
    # A flattened head has no class activation maps.
    assert set(left_out) == {"localization"}
    assert found["localization"]["left_out"] == left_out["localization"]


def test_pictures_are_made_once_and_again_for_other_weights(made):
    folder, _, _ = made
    assert has_pictures(folder)
    asked = []
    make_pictures([folder], on_run=asked.append)
    assert asked == []
    confusion = read_artifact(folder, "confusion")
    write_artifact(folder, "confusion", {**confusion, "epoch": 7})
    assert not has_pictures(folder)
    write_artifact(folder, "confusion", confusion)
    assert has_pictures(folder)


def test_a_diverged_network_has_no_pictures_and_a_page(made, tmp_path, monkeypatch):
    folder, images, _ = made
    shutil.copytree(folder, tmp_path / "run", ignore=lambda *_: ["page"])

    def diverged(*args, **options):
        run = load_run(*args, **options)
        for weight in run.model.parameters():
            weight.data.fill_(torch.nan)
        return run

    monkeypatch.setattr(run_pictures, "load_run", diverged)
    left_out = write_pictures(tmp_path / "run", images=images, device="cpu")
    assert set(left_out) == set(KINDS)
    assert all("logits that are not finite for 1 of 1 images" in why for why in left_out.values())
    key = am.RecipeKey("cifar10", "r18", "alignmixup-ae", "fast")
    result = am.Result("accuracy", "top1_last", 9.0, key=key)
    assert "not finite" in write_page([result], [tmp_path / "run"], tmp_path).read_text()


def test_the_page_shows_them_and_says_what_is_missing(made, tmp_path):
    folder, _, left_out = made
    key = am.RecipeKey("cifar10", "r18", "alignmixup-ae", "fast")
    text = write_page(
        [am.Result("accuracy", "top1_last", 9.0, key=key)], [folder], tmp_path
    ).read_text()
    for kind in ("interpolations", "transport", "confusion"):
        assert f'data-kind="{kind}"' in text
    assert 'data-kind="localization"' not in text
    assert left_out["localization"][:30] in text
    assert "no run folder was given" not in text


def test_without_the_images_every_kind_has_the_reason(made, tmp_path):
    folder, _, _ = made
    kept = {kind: read_artifact(folder, kind) for kind in KINDS}
    left_out = write_pictures(folder, data_root=tmp_path, device="cpu")
    assert set(left_out) == set(KINDS)
    assert not has_pictures(folder)  # tried again when the images may be there
    for kind, artifact in kept.items():
        write_artifact(folder, kind, artifact)


def test_damaged_artifacts_are_errors_with_their_path(tmp_path):
    (tmp_path / "page").mkdir()
    path = tmp_path / "page" / "confusion.json"
    for text in ("{", "[]", '{"version": 99}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"confusion\.json"):
            read_artifacts([tmp_path])
    with pytest.raises(ValueError, match="unknown kind of artifact"):
        write_artifact(tmp_path, "sound", {})


def test_pictures_of_several_seeds_are_named_after_their_folders(tmp_path):
    folders = [tmp_path / name for name in ("cutmix-seed0", "cutmix-seed1", "input-seed0")]
    for folder in folders:
        folder.mkdir()
        write_artifact(folder, "confusion", {"run": folder.name.partition("-")[0]})
    names = [found["run"] for found in read_artifacts(folders)["confusion"]]
    assert names == ["cutmix-seed0", "cutmix-seed1", "input"]
