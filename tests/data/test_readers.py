from __future__ import annotations

import gzip
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch

from dale.data.readers import check_memory, read_cifar, read_idx, read_npz, read_svhn
from dale.errors import DataError


def _idx(path: Path, shape: tuple[int, ...], body: bytes, magic: bytes | None = None) -> Path:
    head = (magic or bytes([0, 0, 8, len(shape)])) + struct.pack(f">{len(shape)}I", *shape)
    path.write_bytes(gzip.compress(head + body))
    return path


def test_idx_round_trip(tmp_path: Path) -> None:
    body = bytes(range(24))
    images = read_idx(_idx(tmp_path / "a.gz", (2, 3, 4), body), 3)
    assert images.dtype == torch.uint8
    assert images.flatten().tolist() == list(body)
    assert images.shape == (2, 3, 4)


def test_hostile_and_damaged_idx(tmp_path: Path) -> None:
    cases = {
        "truncated": _idx(tmp_path / "short.gz", (2, 3, 4), bytes(20)),
        "more data than its header": _idx(tmp_path / "long.gz", (2, 3, 4), bytes(25)),
        "cannot hold": _idx(tmp_path / "huge.gz", (2**31, 2**10, 2**10), bytes(20)),
        "not an IDX file": _idx(tmp_path / "foreign.gz", (2, 3, 4), bytes(24), magic=b"\0\0\x0d\x03"),
        "cannot be read as gzip": tmp_path / "plain.gz",
    }
    cases["cannot be read as gzip"].write_bytes(b"plain text")
    for message, path in cases.items():
        with pytest.raises(DataError, match=message) as caught:
            read_idx(path, 3)
        assert str(path) in str(caught.value)
    half = tmp_path / "half.gz"
    whole = gzip.compress(bytes([0, 0, 8, 1]) + struct.pack(">I", 5000) + np.random.default_rng(0).bytes(5000))
    half.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"half\.gz: cannot be read as gzip"):
        read_idx(half, 1)


def test_cifar_records(tmp_path: Path) -> None:
    path = tmp_path / "batch.bin"
    records = np.random.default_rng(0).integers(0, 10, (3, 3074), dtype=np.uint8)
    path.write_bytes(records.tobytes())
    images, labels = read_cifar(path, 2, 100)
    assert labels.tolist() == records[:, 1].tolist()
    assert torch.equal(images.reshape(3, -1), torch.from_numpy(records[:, 2:].copy()))
    path.write_bytes(records.tobytes()[:-1])
    with pytest.raises(DataError, match=r"batch\.bin: 9221 bytes is not a whole number of 3074-byte"):
        read_cifar(path, 2, 100)
    records[1, 1] = 100
    path.write_bytes(records.tobytes())
    with pytest.raises(DataError, match=r"label 100 is out of range 0 \.\. 99"):
        read_cifar(path, 2, 100)


def test_svhn_files(tmp_path: Path) -> None:
    path = tmp_path / "train_32x32.mat"
    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    scipy.io.savemat(path, {"X": images, "y": np.array([[10], [1], [9], [10]], dtype=np.uint8)})
    got, labels = read_svhn(path)
    assert labels.tolist() == [0, 1, 9, 0]
    assert torch.equal(got[2], torch.from_numpy(images[..., 2].transpose(2, 0, 1).copy()))
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(DataError, match="cannot be read as a MATLAB file"):
        read_svhn(path)
    scipy.io.savemat(path, {"X": images})
    with pytest.raises(DataError, match="has no variable 'y'"):
        read_svhn(path)
    scipy.io.savemat(path, {"X": images[:8], "y": np.ones((4, 1))})
    with pytest.raises(DataError, match=r"shape \(32, 32, 3, N\)"):
        read_svhn(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_round_trip(tmp_path: Path, save: object) -> None:
    path = tmp_path / "a.npz"
    arrays = {
        "images": np.random.default_rng(0).random((4, 3, 2)),
        "labels": np.arange(4, dtype=">i2"),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "class_names": np.array(["one", "two"]),
    }
    save(path, **arrays)  # type: ignore[operator]
    got = read_npz(path, ("images", "labels"), ("fortran", "class_names", "absent"))
    assert set(got) == set(arrays)
    for name, array in arrays.items():
        assert np.array_equal(got[name], array)


def test_npz_without_the_arrays_or_not_one(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros(3))
    with pytest.raises(DataError, match=r"has no array 'images' \(it holds x\)"):
        read_npz(path, ("images", "labels"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"a\.npz: cannot be read as an \.npz file"):
        read_npz(path, ("x",))
    with pytest.raises(DataError, match="no such file"):
        read_npz(tmp_path / "none.npz", ("x",))


def test_npz_never_unpickles(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, images=np.array([{"a": 1}, print], dtype=object))
    with pytest.raises(DataError, match="holds Python objects"):
        read_npz(path, ("images",))


def _header(shape: object, descr: str = "|u1") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_header((2**40,)) + bytes(100), "declares shape"),
        (_header((2**70, 2**70)) + bytes(100), "declares shape"),
        (_header((-1,)) + bytes(100), "objects or no numbers"),
        (_header((100,), "nonsense") + bytes(100), "damaged header"),
        (_header("__import__('os')") + bytes(100), "damaged header"),
        (b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31), "has a header of"),
        (b"not numpy at all", "is not a NumPy array"),
        (b"", "is not a NumPy array"),
    ],
)
def test_hostile_npz_members(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", content)
    tracemalloc.start()
    with pytest.raises(DataError, match=message) as caught:
        read_npz(path, ("images",))
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_a_zip_bomb_is_refused_by_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    content = _header((1000,)) + bytes(1000)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", content)
    raw = path.read_bytes()
    # claim 2 GiB for the member in the zip's directory, as a bomb or a forged archive would
    path.write_bytes(raw.replace(struct.pack("<I", len(content)), struct.pack("<I", 2**31)))
    with pytest.raises(DataError, match="which its compressed size cannot hold"):
        read_npz(path, ("images",))


def test_data_larger_than_the_machine() -> None:
    with pytest.raises(DataError, match=r"mine: declares .* more than this machine's memory"):
        check_memory(1 << 60, "mine")
