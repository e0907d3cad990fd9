"""docs/theory.md names functions, tests and pictures: all of them exist, and one script draws the pictures."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "theory.md").read_text()
FUNCTIONS = sorted(set(re.findall(r"`(dale\.[\w.]+)`", TEXT)))
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)*)`", TEXT)))
IMAGES = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", TEXT)


def test_the_page_is_full_of_references() -> None:
    assert len(FUNCTIONS) > 25
    assert len(TESTS) > 35
    assert len(IMAGES) == 3


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_exists(name: str) -> None:
    parts = name.split(".")
    module = importlib.import_module("dale")
    while len(parts) > 1 and isinstance(module, ModuleType):
        try:
            module = importlib.import_module(f"{module.__name__}.{parts[1]}")
        except ModuleNotFoundError:
            break
        parts = parts[1:]
    found = reduce(getattr, parts[1:], module)
    assert callable(found)
    assert found.__doc__


@cache
def defined(path: Path) -> frozenset[tuple[str, ...]]:
    """The classes, functions and methods of a file, by their names."""
    names: set[tuple[str, ...]] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add((node.name,))
        if isinstance(node, ast.ClassDef):
            names |= {(node.name, inner.name) for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return frozenset(names)


@pytest.mark.parametrize("name", TESTS)
def test_every_test_exists(name: str) -> None:
    file, *parts = name.split("::")
    assert (ROOT / file).is_file()
    assert not parts or tuple(parts) in defined(ROOT / file)
    assert not parts or parts[-1].startswith("test_")


@pytest.fixture(scope="module")
def pictures() -> Iterator[ModuleType]:
    """The script, as a module."""
    pytest.importorskip("matplotlib", reason="the pictures need matplotlib, the extra `figures`")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield importlib.import_module("pictures")
    sys.modules.pop("pictures")


def test_every_picture_is_there_and_drawn_by_the_script(pictures: ModuleType, tmp_path: Path) -> None:
    written = pictures.write_pictures(tmp_path)
    assert sorted(f"images/{path.name}" for path in written) == sorted(IMAGES)
    starts = {".svg": b"<?xml", ".png": b"\x89PNG"}
    for path in written:
        for made in (path, ROOT / "docs" / "images" / path.name):
            content = made.read_bytes()
            assert content.startswith(starts[path.suffix])
            assert 5_000 < len(content) < 500_000


def test_the_same_bytes_again(pictures: ModuleType, tmp_path: Path) -> None:
    """The quickest picture twice: no date, no random ids."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "PICTURES", {"primal-dual-path.svg": pictures.draw_path})
        first, second = (pictures.write_pictures(tmp_path / name)[0].read_bytes() for name in ("one", "two"))
    assert first == second


def test_the_table_of_measurements_is_that_of_the_results() -> None:
    summary = json.loads((ROOT / "benchmarks" / "results" / "optimal.json").read_text())["summary"]
    assert len(summary) == 3
    for name, found in summary.items():
        robust, clean = (
            f"{100 * found[key]['mean']:.1f} ± {100 * found[key]['standard_deviation']:.1f}%"
            for key in ("robust_accuracy", "clean_accuracy")
        )
        loss = f"{found['validation_loss']['mean']:.3f} (at most {found['validation_loss']['largest']:.3f})"
        test = f"{found['test_loss']['mean']:.3f}"
        assert f"| {name} | {robust} | {clean} | {loss} | {test} | {found['multiplier']['mean']:.2f} |" in TEXT
        assert (found["seeds"], found["validation_loss_within_rho"]) == (5, 5)


def test_the_table_of_starts_is_that_of_the_results() -> None:
    results = ROOT / "benchmarks" / "results"
    found = json.loads((results / "start.json").read_text())
    assert (found["n"], len(found["seeds"]), len(found["variants"])) == (200, 3, 5)
    assert f"({100 * found['clean_accuracy']:.1f}% right without attack)" in TEXT
    for name, variant in found["variants"].items():
        divergence, accuracy, surer = (variant[key]["mean"] for key in ("divergence", "accuracy", "surer"))
        assert f"| {name} | {divergence:.3f} | {100 * accuracy:.1f}% | {100 * surer:.0f}% |" in TEXT
    (digits,) = json.loads((results / "start-digits.json").read_text())["summary"].values()
    plain = json.loads((results / "optimal.json").read_text())["summary"]["dale"]
    text = " ".join(TEXT.split())
    for key in ("robust_accuracy", "clean_accuracy"):
        pair = (
            f"{100 * one[key]['mean']:.1f} ± {100 * one[key]['standard_deviation']:.1f}%" for one in (digits, plain)
        )
        assert " for ".join(pair) in text
    losses = " for ".join(f"{one['validation_loss']['mean']:.3f}" for one in (digits, plain))
    above = {2: "two"}[digits["seeds"] - digits["validation_loss_within_rho"]]
    assert f"held-out loss {losses} ({above} of five above rho = {digits['rho']})" in text
    assert "nu " + " for ".join(f"{one['multiplier']['mean']:.2f}" for one in (digits, plain)) in text
    assert digits["seeds"] == plain["seeds"] == 5


def test_the_convex_problem_of_the_picture_is_solved(pictures: ModuleType) -> None:
    """The path ends where the caption says: at rho, on the curve, with the price as multiplier."""
    nominal, robust, multiplier = pictures.primal_dual_path(5.0)[-1]
    best = pictures.best_response(multiplier)
    assert nominal == pytest.approx(pictures.RHO, abs=1e-3)
    assert robust == pytest.approx(best[1], abs=1e-3)
    assert nominal == pytest.approx(best[0], abs=1e-3)
