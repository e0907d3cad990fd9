"""Fetching against a server of our own on this machine: whole, broken off, resumed, wrong, absent."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from dale.data import load_dataset, sources
from dale.data.fetch import ensure, extract
from dale.data.sources import Source
from dale.errors import DataError


class _Server:
    """Files by path; `cut` sends only so many bytes of the next answer; `ranges` honours requests for the rest."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.cut: int | None = None
        self.ranges = True
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                outer.asked.append((self.path, wanted))
                content = outer.files.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and outer.ranges else 0
                if start >= len(content) > 0:
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                cut, outer.cut = outer.cut, None
                self.wfile.write(content[start:][:cut])

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "DALE_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    served = _Server()
    thread = threading.Thread(target=served.http.serve_forever, args=(0.02,))
    thread.start()
    yield served
    served.http.shutdown()
    thread.join()
    served.http.server_close()


_CONTENT = np.random.default_rng(0).bytes(700_000)


def _md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def _source(*mirrors: str, content: bytes = _CONTENT) -> Source:
    return Source("toy", "svhn", ("toy",), {"toy.bin": _md5(content)}, mirrors, ("a", "b"))


def test_a_missing_file_is_fetched_once(server: _Server, tmp_path: Path) -> None:
    server.files["/toy.bin"] = _CONTENT
    source = _source(server.url)
    folder = ensure(source, tmp_path)
    assert (folder / "toy.bin").read_bytes() == _CONTENT
    assert ensure(source, tmp_path) == folder
    assert len(server.asked) == 1
    assert [p.name for p in folder.iterdir()] == ["toy.bin"]


def test_a_broken_download_is_resumed(server: _Server, tmp_path: Path) -> None:
    server.files["/toy.bin"] = _CONTENT
    server.cut = 300_000
    folder = ensure(_source(server.url), tmp_path)
    assert (folder / "toy.bin").read_bytes() == _CONTENT
    assert server.asked[0][1] is None
    assert server.asked[1][1] is not None
    assert 0 < int(server.asked[1][1].removeprefix("bytes=").removesuffix("-")) <= 300_000


def test_a_partial_file_of_an_earlier_process_is_resumed(server: _Server, tmp_path: Path) -> None:
    server.files["/toy.bin"] = _CONTENT
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "toy.bin.part").write_bytes(_CONTENT[:500_000])
    ensure(_source(server.url), tmp_path)
    assert server.asked == [("/toy.bin", "bytes=500000-")]
    assert (tmp_path / "toy" / "toy.bin").read_bytes() == _CONTENT


@pytest.mark.parametrize("part", [b"wrong bytes", _CONTENT + b"too long"])
def test_a_wrong_partial_file_is_started_again(server: _Server, tmp_path: Path, part: bytes) -> None:
    server.files["/toy.bin"] = _CONTENT
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "toy.bin.part").write_bytes(part)
    ensure(_source(server.url), tmp_path)
    assert (tmp_path / "toy" / "toy.bin").read_bytes() == _CONTENT


def test_a_server_without_ranges_sends_it_all(server: _Server, tmp_path: Path) -> None:
    server.files["/toy.bin"], server.ranges = _CONTENT, False
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "toy.bin.part").write_bytes(_CONTENT[:500_000])
    ensure(_source(server.url), tmp_path)
    assert (tmp_path / "toy" / "toy.bin").read_bytes() == _CONTENT


def test_the_next_mirror_is_asked(server: _Server, tmp_path: Path) -> None:
    server.files["/wrong/toy.bin"], server.files["/right/toy.bin"] = b"something else", _CONTENT
    ensure(_source(f"{server.url}/absent", f"{server.url}/wrong", f"{server.url}/right"), tmp_path)
    assert [path for path, _ in server.asked] == ["/absent/toy.bin", "/wrong/toy.bin", "/right/toy.bin"]


def test_a_mirror_of_ones_own_comes_first(server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/lab/toy/toy.bin"] = _CONTENT
    monkeypatch.setenv("DALE_MIRROR", f"{server.url}/lab/")
    ensure(_source("http://127.0.0.1:9"), tmp_path)
    assert server.asked == [("/lab/toy/toy.bin", None)]


def test_wrong_everywhere_leaves_nothing_behind(server: _Server, tmp_path: Path) -> None:
    server.files["/toy.bin"] = b"something else"
    with pytest.raises(DataError, match=r"toy\.bin is missing and cannot be fetched; put it at .*wrong md5") as caught:
        ensure(_source(server.url), tmp_path)
    assert str(tmp_path / "toy" / "toy.bin") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "toy").iterdir()) == []


def test_offline_one_line_says_which_file_goes_where(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no connection") as caught:
        ensure(_source("http://127.0.0.1:9"), tmp_path)
    assert f"put it at {tmp_path / 'toy' / 'toy.bin'}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="toy: cannot write its files to"):
        ensure(_source("http://127.0.0.1:9"), tmp_path / "file")


def _tar(path: Path, members: dict[str, bytes], link: str | None = None) -> bytes:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(info)
    return path.read_bytes()


def _cifar(count: int, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
    return np.concatenate([(np.arange(count, dtype=np.uint8) % 10)[:, None], images], axis=1).tobytes()


def test_an_archive_is_fetched_unpacked_and_read(
    server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"data_batch_{i}.bin": _cifar(20, i) for i in range(1, 6)} | {"test_batch.bin": _cifar(30, 6)}
    archive = _tar(tmp_path / "a.tar.gz", {f"cifar-10-batches-bin/{k}": v for k, v in files.items()})
    server.files["/cifar-10-binary.tar.gz"] = archive
    real = sources.SOURCES["cifar10"]
    toy = Source(
        "cifar10",
        "cifar10",
        real.folders,
        {name: _md5(content) for name, content in files.items()},
        (server.url,),
        real.class_names,
        ("cifar-10-binary.tar.gz", _md5(archive)),
    )
    monkeypatch.setitem(sources.SOURCES, "cifar10", toy)
    data = load_dataset("cifar10", data_dir=tmp_path / "d", validation_size=10, certification_size=10)
    assert (len(data.train), len(data.test), data.image_shape) == (80, 30, (3, 32, 32))
    assert torch.equal(data.train.labels, data.train.index % 20 % 10)
    folder = tmp_path / "d" / "cifar10"
    assert {p.name for p in (folder / "cifar-10-batches-bin").iterdir()} == set(files)
    # the archive in place of the files is enough, and a damaged one is named
    (tmp_path / "e" / "cifar10").mkdir(parents=True)
    (tmp_path / "e" / "cifar10" / "cifar-10-binary.tar.gz").write_bytes(archive)
    assert len(load_dataset("cifar10", data_dir=tmp_path / "e", validation_size=10, certification_size=10).test) == 30
    assert len(server.asked) == 1
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "cifar-10-binary.tar.gz").write_bytes(archive[:5000])
    with pytest.raises(DataError, match=r"f/cifar-10-binary\.tar\.gz: md5 is"):
        load_dataset("cifar10", data_dir=tmp_path / "f")


@pytest.mark.parametrize(
    ("members", "link", "message"),
    [
        ({"../evil.bin": b"x"}, None, "points outside or is a link"),
        ({"/evil.bin": b"x"}, None, "points outside or is a link"),
        ({"a/toy.bin": b"x"}, "a/link", "points outside or is a link"),
        ({"a/other.bin": b"x"}, None, "has no toy.bin"),
    ],
)
def test_hostile_archives(tmp_path: Path, members: dict[str, bytes], link: str | None, message: str) -> None:
    _tar(tmp_path / "a.tar.gz", members, link)
    with pytest.raises(DataError, match=message) as caught:
        extract(
            tmp_path / "a.tar.gz", {"toy.bin", "evil.bin"} if "evil" in str(members) else {"toy.bin"}, tmp_path / "x"
        )
    assert str(tmp_path / "a.tar.gz") in str(caught.value)
    assert not (tmp_path / "evil.bin").exists()


def test_a_truncated_archive(tmp_path: Path) -> None:
    whole = _tar(tmp_path / "a.tar.gz", {"a/toy.bin": _CONTENT})
    (tmp_path / "a.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.tar\.gz: cannot be unpacked"):
        extract(tmp_path / "a.tar.gz", {"toy.bin"}, tmp_path / "x")
    assert not (tmp_path / "x" / "toy.bin").exists()


def test_mnist_in_the_layout_of_other_tools(server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    sums: dict[str, str | None] = {}
    for part, count in (("train", 60), ("t10k", 20)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        for kind, body, shape in (
            ("images-idx3", images.tobytes(), (count, 28, 28)),
            ("labels-idx1", bytes(i % 10 for i in range(count)), (count,)),
        ):
            head = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
            file = folder / f"{part}-{kind}-ubyte.gz"
            file.write_bytes(gzip.compress(head + body))
            sums[file.name] = _md5(file.read_bytes())
    real = sources.SOURCES["fashion-mnist"]
    toy = Source("fashion-mnist", "idx", real.folders, sums, (server.url,), real.class_names)
    monkeypatch.setitem(sources.SOURCES, "fashion-mnist", toy)
    data = load_dataset("fashion_mnist", data_dir=tmp_path, validation_size=10, certification_size=10)
    assert (len(data.train), len(data.test), data.image_shape) == (40, 20, (1, 28, 28))
    assert data.class_names[9] == "ankle-boot"
    assert server.asked == []


def _cifar100(folder: Path, fine: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, labels in (("train.bin", fine), ("test.bin", fine[: len(fine) // 2])):
        records = np.zeros((len(labels), 3074), dtype=np.uint8)
        records[:, 1] = labels
        (folder / name).write_bytes(records.tobytes())


def test_cifar100_unpacked_is_known_by_its_class_counts(tmp_path: Path, server: _Server) -> None:
    folder = tmp_path / "cifar100" / "cifar-100-binary"
    _cifar100(folder, np.arange(400) % 100)
    data = load_dataset("cifar100", data_dir=tmp_path, validation_size=100, certification_size=100)
    assert (data.num_classes, len(data.train), len(data.test)) == (100, 200, 200)
    assert torch.equal(data.train.labels, data.train.index % 100)
    _cifar100(folder, np.arange(399) % 100)
    with pytest.raises(DataError, match=r"train\.bin: its classes are not equally many"):
        load_dataset("cifar100", data_dir=tmp_path)
    assert server.asked == []
