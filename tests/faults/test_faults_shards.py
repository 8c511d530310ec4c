"""Damaged shards, their indexes and the record of a data set: an error with the name, or none."""

from contextlib import suppress

import numpy as np
import pytest
from mutations import damaged
from PIL import Image

from alignmixup import datasets
from alignmixup.datasets import scan_shards, write_shards
from alignmixup.datasets.loading.members import Member


@pytest.fixture
def out(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 2)):
        for i in range(count):
            path = tmp_path / "pictures" / split / "ab"[i % 2] / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (6, 9, 3), dtype=np.uint8)).save(path)
    source = datasets.find(f"folder:{tmp_path}/pictures@16")
    return write_shards(source, tmp_path / "shards", images_per_shard=5)


@pytest.mark.parametrize("name", ["train-000001.json", "dataset.json", "train-000001.tar"])
def test_damage_to_any_file_is_an_error_that_names_it_or_changes_nothing(out, name):
    path = out / name
    if name.endswith(".tar"):
        path.with_suffix(".json").unlink()
    before, data = scan_shards(str(out), "train"), path.read_bytes()
    errors = []
    for what, changed in damaged(data):
        path.write_bytes(changed)
        try:
            after = datasets.find(f"shards:{out}").scan(None, "train")
        except (ValueError, OSError) as error:
            errors.append(str(error))
        else:  # a tar file without its index has no checksums of its bytes
            assert name == "dataset.json" or len(after) == len(before), what
            assert name != "train-000001.json" or after.paths == before.paths, what
            for member in map(Member.of, after.paths[5:10]):
                with suppress(ValueError):
                    member.read()
    assert len(errors) > 20
    assert all(path.stem in error or "classes" in error for error in errors)
