"""No file runs code, and nothing is written outside the folder it is meant for.

Archives: ``tests/datasets/test_datasets_download.py``; pickles of CIFAR:
``test_datasets_cifar.py``; images that would start a program: ``test_faults_images.py``.
"""

import dataclasses
import io
import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

import alignmixup as am
from alignmixup.experiments.run_folder import RUN, read_run
from alignmixup.experiments.sweep import sweep
from alignmixup.ops.adain import load_adain
from alignmixup.recipes.catalog import find_recipe
from alignmixup.training.checkpoint import CHECKPOINT, load_checkpoint

NAME = "cifar10-r18-baseline-fast"


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def pickled(path):
    return pickle.dumps(Bomb(path), protocol=2)


def in_torch(path):
    file = io.BytesIO()
    torch.save({"0.weight": torch.zeros(1), "bomb": Bomb(path)}, file)
    return file.getvalue()


@pytest.mark.parametrize("make", [pickled, in_torch])
def test_a_pickle_in_place_of_weights_is_not_run(tmp_path, make):
    mark = tmp_path / "ran"
    (tmp_path / CHECKPOINT).write_bytes(make(mark))
    with pytest.raises(ValueError, match="is damaged or no checkpoint"):
        load_checkpoint(tmp_path / CHECKPOINT)
    for name in ("vgg_normalized.pth", "decoder.pth"):
        (tmp_path / name).write_bytes(make(mark))
    with pytest.raises(ValueError, match=r"\.pth"):
        load_adain(tmp_path)
    assert not mark.exists()


def record(folder, **changes):
    folder.mkdir(exist_ok=True)
    (folder / RUN).write_text(json.dumps({**find_recipe(NAME).to_json(), **changes}))
    return folder


@pytest.mark.parametrize("how", ["absolute", "relative", "module", "package"])
def test_code_that_comes_with_a_run_is_not_run_for_its_sake(tmp_path, monkeypatch, how):
    folder = tmp_path / "run"
    place = folder / "evil" / "__init__.py" if how == "package" else folder / "evil.py"
    name = {"absolute": str(place), "relative": "evil.py"}.get(how, "evil")
    record(folder, plugins=[name])
    place.parent.mkdir(exist_ok=True)
    place.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ValueError, match=r"names a plugin in its own folder.*--plugin"):
        am.load_run(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("plugins", ["os", [["os"]], {"os": 1}, [3]])
def test_plugins_of_another_type_are_named(tmp_path, plugins):
    with pytest.raises(ValueError, match="plugins must be"):
        read_run(record(tmp_path / "run", plugins=plugins))


@pytest.mark.parametrize("kind", ["os.system", "__import__", "builtins.exec", "Recipe"])
def test_a_record_names_registered_classes_only(tmp_path, kind):
    mixer = {**find_recipe(NAME).to_json()["mixer"], "kind": kind}
    with pytest.raises(ValueError, match="unknown mixer"):
        read_run(record(tmp_path / "run", mixer=mixer))


@pytest.mark.parametrize("part", ["../../x", "/etc/x", "a/../../x", "..\\x", "x\0"])
def test_a_recipe_whose_name_is_a_path_chooses_no_folder(tmp_path, monkeypatch, part):
    recipe = find_recipe(NAME)
    key = dataclasses.replace(recipe.key, variant=part)
    monkeypatch.setattr(
        "alignmixup.experiments.sweep.open_recipe", lambda _: dataclasses.replace(recipe, key=key)
    )
    with pytest.raises(ValueError, match="contains a slash"):
        sweep([NAME], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_classes_named_like_paths_are_written_nowhere(tmp_path):
    """A class name is text in a record, never part of a path."""
    from alignmixup.datasets import shapes

    names = tuple(f"../../escaped{i}" for i in range(10))
    sets = [dataclasses.replace(shapes(s, 32), class_names=names) for s in ("train", "test")]
    small = {"net.width": 4, "train.epochs": 1, "train.batch_size": 16, "train.device": "cpu"}
    run = am.train(
        NAME, tmp_path / "a" / "b" / "run", sets=am.Sets(*sets), changes=small, quiet=True
    )
    run.export(tmp_path / "a" / "b" / "weights.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert am.load_run(run.folder).class_names == names


def test_a_zip_in_place_of_weights_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / CHECKPOINT, "w") as file:
        file.writestr("archive/data.pkl", pickled(tmp_path / "ran"))
    with pytest.raises(ValueError, match="is damaged or no checkpoint"):
        load_checkpoint(tmp_path / CHECKPOINT)
    assert not (tmp_path / "ran").exists()
