"""The registry: names, the data root, and fetching from a server of our own to a loaded set."""

import hashlib
import http.server
import io
import tarfile
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from PIL import Image

from alignmixup.contracts import ImageSet
from alignmixup.datasets import check, fetch, find, load, names
from alignmixup.datasets.cifar import CIFAR10, check_cifar, load_cifar
from alignmixup.datasets.loading.layout import data_root
from alignmixup.registry import DATASETS

SMALL = replace(CIFAR10, train_records=2, test_records=2, python_folder="cifar-10-batches-bin")


@pytest.fixture
def small_cifar(monkeypatch):
    """Put a source of a few images, in the official binary files, in the place of cifar10."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in [*SMALL.train_files, *SMALL.test_files]:
            content = np.arange(2 * 3073).astype(np.uint8)
            content[::3073] = 7
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content.tobytes()))
    source = find("cifar10")
    archive = replace(
        source.archive,
        checksum="sha256:" + hashlib.sha256(packed.getvalue()).hexdigest(),
        folder=SMALL.binary_folder,
    )
    small = replace(
        source,
        function=partial(load_cifar, SMALL),
        check=partial(check_cifar, SMALL),
        archive=archive,
    )
    monkeypatch.setitem(DATASETS._entries, "cifar10", small)
    return packed.getvalue()


@pytest.fixture
def server(small_cifar):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.requests += 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(small_cifar)))
            self.end_headers()
            self.wfile.write(small_cifar)

        def log_message(self, *_args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests = 0
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_fetch_brings_a_set_that_loads_and_mends_one_that_is_damaged(server, tmp_path):
    url = f"http://127.0.0.1:{server.server_address[1]}/mirror"
    assert len(check("cifar10", tmp_path)) == 1
    seen = []
    folder = fetch("cifar10", tmp_path, lambda *p: seen.append(p), url=url)
    assert folder == tmp_path / "cifar-10-batches-bin"
    assert seen[-1][0] == seen[-1][1]
    assert check("cifar10", tmp_path) == []
    assert load("cifar10", "train", tmp_path).labels.tolist() == [7] * 10
    fetch("cifar10", tmp_path, url=url)
    assert server.requests == 1  # nothing to do
    (folder / "data_batch_4.bin").write_bytes(b"spoilt")
    assert "data_batch_4.bin" in check("cifar10", tmp_path)[0]
    fetch("cifar10", tmp_path, url=url)
    assert check("cifar10", tmp_path) == []
    assert server.requests == 1  # the archive was kept


def test_fetch_leaves_a_set_alone_that_is_complete_in_another_layout(server, tmp_path, monkeypatch):
    url = f"http://127.0.0.1:{server.server_address[1]}/mirror"
    folder = fetch("cifar10", tmp_path, url=url)
    entry = find("cifar10")
    other = replace(entry, archive=replace(entry.archive, folder="another-layout"))
    monkeypatch.setitem(DATASETS._entries, "cifar10", other)
    assert fetch("cifar10", tmp_path, url=url) == folder
    assert server.requests == 1


def test_fetch_mends_the_folder_of_the_set_itself(server, tmp_path):
    url = f"http://127.0.0.1:{server.server_address[1]}/mirror"
    folder = tmp_path / SMALL.binary_folder
    assert fetch("cifar10", tmp_path, url=url) == fetch("cifar10", folder, url=url) == folder
    assert server.requests == 1
    (folder / "test_batch.bin").unlink()
    assert fetch("cifar10", folder, url=url) == folder
    assert check("cifar10", folder) == []
    assert not (folder / SMALL.binary_folder).exists()


def test_every_name_has_a_source_that_says_what_it_is():
    assert set(names()) >= {"cifar10", "cifar100", "tiny", "imagenet", "shapes", "folder:PATH"}
    for name in names():
        source = find(name)
        assert source.name == name
        assert source.description
    assert find("cifar100").num_classes == 100
    assert find("tiny").image_size == 64
    assert find("folder:PATH").num_classes is None
    for name in ("cifar10", "cifar100", "tiny"):
        assert len(find(name).archive.checksum) == len("sha256:") + 64


def test_file_names_of_the_official_archives():
    urls = [find(name).archive.url.rsplit("/", 1)[1] for name in ("cifar10", "cifar100", "tiny")]
    assert urls == ["cifar-10-python.tar.gz", "cifar-100-python.tar.gz", "tiny-imagenet-200.zip"]


@pytest.mark.parametrize("action", [find, check, fetch, lambda name: load(name, "train")])
def test_an_unknown_name_suggests_what_was_meant(action):
    with pytest.raises(
        ValueError, match=r"unknown data set 'cifar11'; did you mean 'cifar10' or 'cifar100'\?"
    ):
        action("cifar11")
    with pytest.raises(ValueError, match=r"choose from cifar10, .*tiny, folder:PATH"):
        action("mnist")
    with pytest.raises(ValueError, match="folder:PATH"):
        action("folder:")
    with pytest.raises(ValueError, match=r"unknown data set '\.'; did you mean folder:\.\?"):
        action(".")


def test_shapes_load_without_a_root_and_need_no_fetching():
    got = load("shapes", "test")
    assert isinstance(got, ImageSet)
    assert (got.name, got.split, len(got), got.num_classes) == ("shapes", "test", 1000, 10)
    assert check("shapes") == []
    with pytest.raises(ValueError, match="nothing to download"):
        fetch("shapes")
    with pytest.raises(ValueError, match="unknown split 'val'"):
        load("shapes", "val")


def test_a_folder_is_loaded_at_the_size_named(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split / "ant").mkdir(parents=True)
        Image.new("RGB", (9, 7), (1, 2, 3)).save(tmp_path / split / "ant" / "a.png")
    assert load(f"folder:{tmp_path}", "test").images.shape == (1, 3, 64, 64)
    assert load(f"folder:{tmp_path}@5", "train").images.shape == (1, 3, 5, 5)
    assert check(f"folder:{tmp_path}@5") == []
    (tmp_path / "test" / "ant" / "a.png").write_bytes(b"")
    assert "a.png is empty" in check(f"folder:{tmp_path}")[0]


def test_the_root_comes_from_the_call_the_environment_or_the_working_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("ALIGNMIXUP_DATA", raising=False)
    assert str(data_root()) == "datasets"
    monkeypatch.setenv("ALIGNMIXUP_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert data_root("elsewhere").name == "elsewhere"
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load("cifar100", "train")
