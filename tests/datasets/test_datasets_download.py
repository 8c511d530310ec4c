"""Downloads and archives, against a server of our own: resumed, checked, and nothing unsafe."""

import contextlib
import errno
import hashlib
import http.server
import io
import re
import tarfile
import threading
import zipfile

import pytest

from alignmixup.datasets.loading import download as download_module
from alignmixup.datasets.loading.download import download, unpack

CONTENT = bytes(range(256)) * 9000  # 2.3 MB: more than two chunks
SHA256 = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT under every path; the first part of the path says how."""

    def do_GET(self):
        self.server.ranges.append(self.headers["Range"])
        manner = self.path.split("/")[1]
        if manner == "gone":
            self.send_error(404)
            return
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        start = int(asked[1]) if asked and manner != "norange" else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            shown = start + 1 if manner == "wrongrange" else start
            self.send_header("Content-Range", f"bytes {shown}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        end = start + 1_200_000 if manner == "broken" else len(CONTENT)
        with contextlib.suppress(ConnectionError):  # the client may have had enough
            self.wfile.write(CONTENT[start:end])

    def log_message(self, *_args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.ranges = []
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_download_is_checked_moved_and_reported(server, tmp_path):
    seen = []
    target = tmp_path / "deep" / "file.bin"
    path = download(f"{server.url}/plain/x", target, SHA256, lambda *p: seen.append(p))
    assert path == target
    assert path.read_bytes() == CONTENT
    assert [p.name for p in target.parent.iterdir()] == ["file.bin"]
    assert [total for _, total in seen] == [len(CONTENT)] * len(seen)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == len(CONTENT)
    download(f"{server.url}/plain/x", target, SHA256)
    assert len(server.ranges) == 1  # a whole file is not fetched again


def test_a_broken_connection_keeps_the_part_and_the_next_try_goes_on(server, tmp_path):
    target, part = tmp_path / "file.bin", tmp_path / "file.bin.part"
    with pytest.raises(OSError, match=r"could not fetch .* 1200000 of 2304000.*file\.bin\.part"):
        download(f"{server.url}/broken/x", target, SHA256)
    assert not target.exists()
    assert part.read_bytes() == CONTENT[:1_200_000]
    seen = []
    download(f"{server.url}/plain/x", target, SHA256, lambda *p: seen.append(p))
    assert server.ranges == [None, "bytes=1200000-"]
    assert seen[0][0] > 1_200_000
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert target.read_bytes() == CONTENT
    assert not part.exists()


def test_a_server_without_ranges_sends_the_whole_file_again(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(b"x" * 1000)
    download(f"{server.url}/norange/x", tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_another_range_than_asked_for_is_not_appended(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    with pytest.raises(OSError, match="another part"):
        download(f"{server.url}/wrongrange/x", tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin.part").stat().st_size == 1000


def test_a_part_that_is_already_whole_is_taken(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    download(f"{server.url}/plain/x", tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("spoilt", [b"", b"y" * 10, b"y" * (len(CONTENT) + 5)])
def test_a_wrong_checksum_leaves_no_file(server, tmp_path, spoilt):
    part = tmp_path / "file.bin.part"
    if spoilt:
        part.write_bytes(spoilt)
    checksum = SHA256 if spoilt else "md5:" + "0" * 32
    with pytest.raises(ValueError, match=r"has the (sha256|md5) .*fetch again"):
        download(f"{server.url}/plain/x", tmp_path / "file.bin", checksum)
    assert list(tmp_path.iterdir()) == []  # so that the next try starts afresh


def test_md5_is_understood_and_a_wrong_file_in_place_is_replaced(server, tmp_path):
    (tmp_path / "file.bin").write_bytes(b"old")
    checksum = "md5:" + hashlib.md5(CONTENT).hexdigest()
    download(f"{server.url}/plain/x", tmp_path / "file.bin", checksum)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_errors_are_one_clear_line(server, tmp_path):
    with pytest.raises(OSError, match=r"could not fetch .*/gone/x: the server answered 404"):
        download(f"{server.url}/gone/x", tmp_path / "file.bin", SHA256)
    with pytest.raises(OSError, match=r"could not fetch .*refused"):
        download("http://127.0.0.1:1/x", tmp_path / "file.bin", SHA256)
    for url in ("http://[::1", f"{server.url}/\u00e9"):
        with pytest.raises(OSError, match=f"could not fetch {re.escape(url)}: "):
            download(url, tmp_path / "file.bin", SHA256)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(OSError, match=r"cannot make the folder .*notes\.txt: a file has its name"):
        download(f"{server.url}/plain/x", tmp_path / "notes.txt" / "file.bin", SHA256)
    with pytest.raises(ValueError, match="http"):
        download("file:///etc/hostname", tmp_path / "file.bin", SHA256)


def test_a_full_disk_is_said_and_the_part_kept(server, tmp_path, monkeypatch):
    def copy(_response, part, *_):
        part.write_bytes(CONTENT[:500])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download_module, "_copy", copy)
    with pytest.raises(OSError, match=r"is full; 500 bytes are kept in .*file\.bin\.part"):
        download(f"{server.url}/plain/x", tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin.part").stat().st_size == 500


def make_tar(path, *members):
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
            info.size = 4 if info.isreg() else 0
            tar.addfile(info, io.BytesIO(b"data") if info.isreg() else None)


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


def make_zip(path, *members):
    with zipfile.ZipFile(path, "w") as file:
        for member in members:
            file.writestr(member, b"data")


def zip_link(name):
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    return info


@pytest.mark.parametrize("make", [make_tar, make_zip])
def test_a_good_archive_is_unpacked_and_repairs_what_is_there(tmp_path, make):
    make(tmp_path / "archive", "set/a/one", "set/b/two")
    unpack(tmp_path / "archive", tmp_path / "data")
    assert (tmp_path / "data/set/a/one").read_bytes() == b"data"
    (tmp_path / "data/set/a/one").write_bytes(b"spoilt")
    (tmp_path / "data/set/mine").write_bytes(b"kept")
    unpack(tmp_path / "archive", tmp_path / "data")
    assert (tmp_path / "data/set/a/one").read_bytes() == b"data"
    assert (tmp_path / "data/set/mine").read_bytes() == b"kept"
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["set"]


@pytest.mark.parametrize(
    ("make", "bad"),
    [
        (make_tar, "../escaped"),
        (make_tar, "set/../../escaped"),
        (make_tar, "/tmp/escaped"),
        (make_tar, special("set/link", tarfile.SYMTYPE, "/etc/hostname")),
        (make_tar, special("set/link", tarfile.SYMTYPE, "good")),
        (make_tar, special("set/link", tarfile.LNKTYPE, "set/good")),
        (make_tar, special("set/device", tarfile.CHRTYPE)),
        (make_tar, special("set/fifo", tarfile.FIFOTYPE)),
        (make_zip, "../escaped"),
        (make_zip, "set/../../escaped"),
        (make_zip, "/tmp/escaped"),
        (make_zip, "..\\escaped"),
        (make_zip, "C:/escaped"),
        (make_zip, zip_link("set/link")),
    ],
)
def test_an_unsafe_member_refuses_the_whole_archive(tmp_path, make, bad):
    make(tmp_path / "archive", "set/good", bad)
    with pytest.raises(ValueError, match=r"archive is unsafe: its member"):
        unpack(tmp_path / "archive", tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["archive", "data"]


@pytest.mark.parametrize("make", [make_tar, make_zip])
@pytest.mark.parametrize("keep", [0, 60])
def test_a_damaged_archive_is_named(tmp_path, make, keep):
    make(tmp_path / "archive", "set/good", "set/other")
    whole = (tmp_path / "archive").read_bytes()
    (tmp_path / "archive").write_bytes(whole[:keep])
    with pytest.raises(ValueError, match=r"archive is damaged"):
        unpack(tmp_path / "archive", tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []
