"""Seconds per step: added row by row, never twice, never mixed between machines."""

from __future__ import annotations

from dale.files import read_json, write_json
from dale.reproduction.timing import find_timing, time_rows, timing_path


def test_rows_are_timed_once(tiny, tmp_path) -> None:
    said: list[str] = []
    time_rows({"dale": tiny}, tmp_path, budget="smoke", device="cpu", say=said.append)
    plain = find_timing(tmp_path, "mnist", "convnet", "smoke")
    row = plain["variants"]["float32"]["dale"]
    assert row["batch"] > 0.0
    assert plain["batches"] == 5  # 96 + 40 + 1 images in batches of 32
    assert abs(row["epoch"] - 5 * row["batch"]) < 1e-3
    assert len(said) == 1
    time_rows({"dale": tiny}, tmp_path, budget="smoke", device="cpu", say=said.append)
    assert len(said) == 1
    assert find_timing(tmp_path, "mnist", "convnet", "smoke") == plain
    assert find_timing(tmp_path, "mnist", "convnet") == {}


def test_another_machine_adds_nothing(tiny, tmp_path) -> None:
    path = timing_path(tmp_path, "mnist", "convnet", "smoke")
    plain = {"format": 1, "variants": {"float32": {}}, "environment": {"gpu": "Another", "torch": "2.0"}}
    write_json(path, plain)
    said: list[str] = []
    time_rows({"dale": tiny}, tmp_path, budget="smoke", device="cpu", say=said.append)
    assert "was timed on Another, torch 2.0: remove it" in said[0]
    assert read_json(path) == plain
