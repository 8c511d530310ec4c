"""A run folder that is packed, moved and unpacked is the same, or an error."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "transport.py"
spec = importlib.util.spec_from_file_location("transport", SCRIPT)
transport = importlib.util.module_from_spec(spec)
spec.loader.exec_module(transport)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "some-run-seed0"
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "checkpoint.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "tensorboard" / "events").write_bytes(b"x")
    return folder


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_unpacked_equals_packed(run, tmp_path):
    parts = transport.pack(run, tmp_path / "parts", part_bytes=3000)
    assert len(parts) > 3
    assert all(part.stat().st_size <= 3000 for part in parts[:-1])
    (back,) = transport.unpack(tmp_path / "parts", tmp_path / "elsewhere")
    assert back == tmp_path / "elsewhere" / run.name
    assert contents(back) == contents(run)
    with pytest.raises(ValueError, match="exists: move it away"):
        transport.unpack(tmp_path / "parts", tmp_path / "elsewhere")


@pytest.mark.parametrize("damage", ["missing", "flipped", "short"])
def test_a_damaged_part_leaves_no_run(run, tmp_path, damage):
    part = transport.pack(run, tmp_path / "parts", part_bytes=3000)[1]
    content = bytearray(part.read_bytes())
    if damage == "missing":
        part.unlink()
    else:
        content[7] ^= 1
        part.write_bytes(content if damage == "flipped" else content[:-1])
    with pytest.raises(ValueError, match=f"{part.name} is missing or damaged"):
        transport.unpack(tmp_path / "parts", tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_only_a_run_folder_is_packed(tmp_path):
    with pytest.raises(ValueError, match=r"it has no run\.json"):
        transport.pack(tmp_path, tmp_path / "parts")
    with pytest.raises(ValueError, match="has no manifest"):
        transport.unpack(tmp_path, tmp_path)
