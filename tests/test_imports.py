"""Imports point down only: one ordered table of the rooms, checked on every import statement of the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dale

ROOT = Path(dale.__file__).parent

# Bottom up. A room imports from its own level and from those below it; the rooms of one line count as one level.
ROOMS = (
    (
        "errors",
        "components",
        "random",
        "batch",
        "modes",
        "compiling",
        "programs",
        "kernels",
        "fused",
        "folded",
        "winograd",
        "folding",
        "faithful",
        "files",
        "environment",
        "bars",
    ),
    ("perturbations",),
    ("losses",),
    ("samplers",),
    ("lambda_star",),
    ("aggregators",),
    ("constraints",),
    ("objectives",),
    ("algorithms",),
    ("certificates",),
    ("models",),
    ("data",),
    ("sensitivity",),
    ("attacks",),
    ("evaluation",),
    ("training",),
    ("benchmark",),
    ("zoo",),
    ("experiments",),
    ("reports",),
    ("export",),
    ("reproduction",),
    ("cli",),
    ("__main__", "__init__"),
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}

# (room, what it may not import although it lies below)
FORBIDDEN = (
    ("aggregators", "samplers"),
    ("lambda_star", "samplers"),
    ("losses", "perturbations"),
)

MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    """The dotted name of a module's file."""
    parts = ["dale", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path): path for path in MODULES}


def room_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path: Path, *, top_only: bool = False) -> set[str]:
    """Every module that a file imports, wherever the statement stands; those of dale by their full names.

    With `top_only`: only what is imported when the module is.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    inside = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or _for_types(scope)
        for node in ast.walk(scope)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if top_only and id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            found.add(base)
            # `from dale import random` imports the module dale.random, and so does `from dale.attacks import base`
            names = {f"{base}.{alias.name}" for alias in node.names if alias.name != "__version__"}
            found |= {name for name in names if base == "dale" or name in NAMES}
    return found


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def of_dale(names: set[str]) -> set[str]:
    return {name for name in names if name == "dale" or name.startswith("dale.")}


def test_every_room_has_its_place_in_the_table():
    assert {room_of(name) for name in NAMES} <= set(LEVEL)


@pytest.mark.parametrize("path", MODULES, ids=[name_of(path) for path in MODULES])
def test_imports_point_down(path):
    room = room_of(name_of(path))
    for imported in of_dale(imports_of(path)):
        if imported == "dale":
            continue  # what was taken from it is listed beside it, by its full name
        target = room_of(imported)
        assert target in LEVEL, f"{name_of(path)} takes {target} from the package: name the room it lives in"
        assert target == room or LEVEL[target] <= LEVEL[room], f"{name_of(path)} imports {imported}, which lies above"
        assert (room, target) not in FORBIDDEN, f"{name_of(path)} may not import {imported}"


def test_the_lowest_rooms_have_no_cycles():
    """Rooms of one level may import one another, but never in a circle (statements inside functions aside)."""
    graph = {name: of_dale(imports_of(path, top_only=True)) & set(NAMES) - {name} for name, path in NAMES.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"imported in a circle: {' -> '.join((*trail, name))}"
        if name in done or name == "dale":
            return
        # a package's __init__ imports its modules, which runs it first: only edges between different rooms count here
        for other in graph[name]:
            if room_of(other) != room_of(name):
                visit(other, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_reports_never_reach_torch():
    pending = {name for name in NAMES if room_of(name) == "reports"}
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        seen.add(name)
        imported = imports_of(NAMES[name], top_only=room_of(name) != "reports")
        assert not any(other.partition(".")[0] == "torch" for other in imported), f"{name} imports torch"
        for other in of_dale(imported):
            # importing a.b.c runs a and a.b first
            parts = other.split(".")
            pending |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)} & set(NAMES) - seen


def test_import_dale_starts_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, dale, dale.errors, dale.components; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


def test_the_checker_sees_every_form_of_import(tmp_path, monkeypatch):
    """An import checker that overlooks a form of import would pass everything."""
    module = tmp_path / "losses.py"
    module.write_text(
        "import dale.training\nfrom dale import cli\nfrom . import attacks\nfrom .data import load\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dale.models\n"
        "def f():\n    from dale.evaluation import evaluate\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setitem(NAMES, "dale.cli", module)
    found = imports_of(module)
    assert {"dale.training", "dale.cli", "dale.attacks", "dale.data", "dale.models", "dale.evaluation"} <= found
    assert not {"dale.models", "dale.evaluation"} & imports_of(module, top_only=True)
