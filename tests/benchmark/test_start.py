"""benchmarks/start.py: numbers of one model never take the place of another's."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "start.py"


@pytest.fixture(scope="module")
def start() -> Iterator[ModuleType]:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("benchmark_start", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_digest_is_that_of_the_weights(start: ModuleType) -> None:
    torch.manual_seed(0)
    one, same, other = (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(3))
    same.load_state_dict(one.state_dict())
    assert start.digest(one) == start.digest(same) != start.digest(other)
    same[1].running_mean += 1.0  # statistics count as well
    assert start.digest(one) != start.digest(same)


def test_the_numbers_of_other_weights_are_left_alone(start: ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(start, "RESULTS", tmp_path)
    assert start.place_for("zoo:a-model", "12", None) == tmp_path / "start-a-model.json"
    assert start.place_for("runs/first/", "12", None) == tmp_path / "start-first.json"
    for recorded in ({"weights": "34"}, {}):
        (tmp_path / "start-a-model.json").write_text(json.dumps(recorded))
        with pytest.raises(SystemExit, match="numbers of other weights"):
            start.place_for("zoo:a-model", "12", None)
    assert start.place_for("zoo:a-model", "34", tmp_path / "elsewhere.json") == tmp_path / "elsewhere.json"
    (tmp_path / "start-a-model.json").write_text(json.dumps({"weights": "12"}))
    assert start.place_for("zoo:a-model", "12", None) == tmp_path / "start-a-model.json"


def test_the_table_of_the_theory_says_of_which_weights_it_is() -> None:
    found = json.loads((SCRIPT.parent / "results" / "start.json").read_text())
    assert len(found["weights"]) == 16
    assert "dale-rho0.45-best" in found["model"]
