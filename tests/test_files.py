"""Files are whole or not there, and reading them executes nothing."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path

import pytest
import torch

from dale import files
from dale.errors import CheckpointError, DaleError


def test_an_interrupted_write_leaves_the_old_content_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.txt"
    files.write_text(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(DaleError, match=r"cannot write .*file\.txt: No space left on device"):
                files.write_text(path, "new")
        assert path.read_text() == "old"
        assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


def test_missing_folders_are_made_and_others_may_read(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.txt"
    files.write_text(path, "grün")
    assert files.read_text(path) == "grün"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_file_in_the_place_of_a_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DaleError, match="cannot write"):
        files.write_text(tmp_path / "file" / "below", "text")


def test_json_refuses_nan_and_finite_replaces_it(tmp_path: Path) -> None:
    value = {"a": [1.0, math.nan, (math.inf, 2)], "b": {"c": -math.inf, "d": "text", "e": None, "f": True}}
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "x.json", value)
    files.write_json(tmp_path / "x.json", files.finite(value))
    assert files.read_json(tmp_path / "x.json") == {
        "a": [1.0, None, [None, 2]],
        "b": {"c": None, "d": "text", "e": None, "f": True},
    }


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[" * 100_000])
def test_json_that_is_none_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        files.read_json(tmp_path / "x.json")
    assert len(str(caught.value).splitlines()) == 1
    assert "x.json" in str(caught.value)


def test_a_text_beyond_all_measure_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_JSON", 2**20)
    (tmp_path / "x").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(CheckpointError, match="larger than 1 MiB"):
        files.read_text(tmp_path / "x")


TENSORS = {
    "float": torch.arange(6.0).reshape(2, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "long": torch.tensor(2**40),
    "bool": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
    "strided": torch.arange(12.0).reshape(3, 4).T,
}


def test_tensors_and_facts_come_back_equal(tmp_path: Path) -> None:
    shared = torch.ones(3)
    facts = {"epoch": 3, "history": [{"loss": 0.1, "x": None}], "text": "grün"}
    tensors = TENSORS | {"one": shared, "two": shared}
    files.write_tensors(tmp_path / "t", tensors, facts)
    found, meta = files.read_tensors(tmp_path / "t")
    assert meta == facts
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_facts_with_nan_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.write_tensors(tmp_path / "t", TENSORS, {"loss": math.nan})
    assert not (tmp_path / "t").exists()


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t"
    files.write_tensors(path, TENSORS, {"epoch": 3})
    data = path.read_bytes()
    silent = []
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            found, meta = files.read_tensors(path)
        except CheckpointError:
            continue
        # a byte that carries nothing may change: what is read must not
        if meta != {"epoch": 3} or any(not torch.equal(found[n], t) for n, t in TENSORS.items()):
            silent.append(place)
    assert silent == []


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t"
    files.write_tensors(path, TENSORS, {"epoch": 3})
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
            files.read_tensors(path)


def test_foreign_and_missing_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "foreign")
    with pytest.raises(CheckpointError, match="was not written by dale"):
        files.read_tensors(tmp_path / "foreign")
    with pytest.raises(CheckpointError, match="does not exist"):
        files.read_tensors(tmp_path / "missing")
    torch.save({"a": torch.ones(1)}, tmp_path / "pickled")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        files.read_tensors(tmp_path / "pickled")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError):
        files.read_tensors(tmp_path / "folder")
    # facts that are no record, with a checksum that fits
    save_file({}, tmp_path / "list", {"dale": "[1]", "digest": files.digest({}, "[1]")})
    with pytest.raises(CheckpointError, match="damaged"):
        files.read_tensors(tmp_path / "list")
