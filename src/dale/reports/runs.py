"""Reading run folders: whatever files are there, as plain values, with a note for each that cannot be read.

A report is made of other people's files as often as of one's own, of runs that are still training and of runs made by
another version: nothing in here assumes that a field is present or has the type it should have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dale.components import parse_yaml
from dale.errors import DaleError, UsageError
from dale.files import read_json, read_text

DEPTH = 3  # levels of folders below a given one that are searched for runs
_SKIPPED = ("checkpoints", "node_modules")


@dataclass(frozen=True)
class RunFiles:
    """What lies in a run folder. `notes` says which files could not be read, and why."""

    path: Path
    name: str
    config_text: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[Mapping[str, Any], ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    artefacts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def dig(value: Any, *keys: str | int) -> Any:
    """Follow keys and positions into nested values; None where the way ends."""
    for key in keys:
        if isinstance(key, str) and isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(key, int) and isinstance(value, (list, tuple)) and -len(value) <= key < len(value):
            value = value[key]
        else:
            return None
    return value


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:
            return None
        return found if math.isfinite(found) else None
    return None


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list; nothing for anything else."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, (list, tuple)) else []


def numbers(value: Any) -> list[float | None]:
    """The entries of a list as numbers, None for those that are none."""
    return [number(item) for item in value] if isinstance(value, (list, tuple)) else []


def find_runs(places: Iterable[str | Path]) -> tuple[list[Path], list[str]]:
    """Return the run folders at or below the given places, and a line for each place without one.

    A run comes with those it was compared with (`compare/` inside it). The order is that of the places, then by name.
    A run is found once, however many of the places lead to it, and by whatever spelling.
    """
    found: dict[Path, Path] = {}
    lines = []
    for place in map(Path, places):
        below = _search(place, DEPTH)
        if not below:
            what = "does not exist" if not place.exists() else "is not a run folder, nor does it hold any"
            lines.append(f"{place} {what}")
        for folder in below:
            found.setdefault(folder.resolve(), folder)
    return list(found.values()), lines


def _search(place: Path, depth: int) -> list[Path]:
    if not place.is_dir():
        return []
    if (place / "config.yaml").is_file():
        return [place, *(_search(place / "compare", 1) if (place / "compare").is_dir() else [])]
    if depth == 0:
        return []
    try:
        below = sorted(child for child in place.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError:
        return []
    return [run for child in below if child.name not in _SKIPPED for run in _search(child, depth - 1)]


def read_run(path: str | Path, name: str | None = None) -> RunFiles:
    """Read a run folder. What is damaged or missing is left out and noted; a folder without a configuration is refused.

    `name` is what the report calls the run (default: the folder's name).
    """
    path = Path(path)
    if not (path / "config.yaml").is_file():
        raise UsageError(f"{path} is not a run folder: it has no config.yaml")
    notes: list[str] = []
    text = _attempt(lambda: read_text(path / "config.yaml"), "", notes)
    config = _attempt(lambda: parse_yaml(text, "config.yaml"), {}, notes)
    plain = {
        part: _attempt(lambda part=part: read_json(path / f"{part}.json"), {}, notes)
        for part in ("environment", "summary", "evaluation", "artefacts")
        if (path / f"{part}.json").exists()
    }
    return RunFiles(
        path=path,
        name=name if name is not None else path.resolve().name,
        config_text=text,
        config=_mapping(config),
        metrics=tuple(_metrics(path / "metrics.jsonl", notes)),
        notes=tuple(notes),
        **{part: _mapping(value) for part, value in plain.items()},
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _attempt(read: Any, default: Any, notes: list[str]) -> Any:
    try:
        return read()
    except DaleError as error:
        notes.append(str(error).splitlines()[0])
        return default


def _metrics(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    """The log lines; one cut short by a crash, or by a run still writing, is left out."""
    if not path.exists():
        return []
    records: list[Mapping[str, Any]] = []
    for line in _attempt(lambda: read_text(path), "", notes).splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, Mapping) and number(record.get("epoch")) is not None:
            records.append(record)
    return records


def read_runs(places: Sequence[str | Path]) -> tuple[list[RunFiles], list[str]]:
    """Read every run at or below the given places, under names that tell them apart; also lines of warning."""
    folders, lines = find_runs(places)
    if not folders:
        raise UsageError("; ".join(lines) if lines else "no run folder was given")
    return [replace(read_run(folder), name=name) for folder, name in zip(folders, _names(folders), strict=True)], lines


def _names(folders: Sequence[Path]) -> list[str]:
    """Each folder by its path below what all have in common; a single one by its own name."""
    resolved = [folder.resolve() for folder in folders]
    if len(resolved) == 1:
        return [resolved[0].name]
    parts = [path.parts for path in resolved]
    common = 0
    while common < min(map(len, parts)) and len({part[common] for part in parts}) == 1:
        common += 1
    # the run that the others were compared with lies above them: it keeps its folder's name
    return ["/".join(part[common:]) or part[-1] for part in parts]
