"""Sweeps: one file, many runs.

    base: {dataset: digits, epochs: 5}                       # options of `dale train`, shared by all runs
    grid: {algorithm: [pgd, dale], seed: [0, 1]}             # every combination is a run
    include: [{algorithm: trades, beta: 3}]                  # further runs
    exclude: [{algorithm: pgd, seed: 1}]                     # combinations to leave out

The file is data: it is read as safe YAML, it cannot say where runs are written, and whatever in it looks like code to
import is refused unless the caller trusts it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dale.components import parse_yaml, refuse_code
from dale.errors import UsageError, unknown
from dale.files import read_text

MAX_RUNS = 10_000
PARTS = ("base", "grid", "include", "exclude")
OURS = frozenset({"out", "resume", "quiet", "trust", "help"})  # options that the sweep itself gives to a run
CLOSING = ("attacks", "examples", "no_evaluate", "no_report", "compare", "device", "fast", "log", "data_dir")
_PATHS = frozenset({"dataset", "init", "config", "data_dir"})  # options whose text is a path, and never code
_SLUG = 80


@dataclass(frozen=True)
class TrainOptions:
    """What `dale train` takes: names of its options, and which are flags or take several values."""

    known: frozenset[str]
    flags: frozenset[str]
    lists: frozenset[str]


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: its name, which is that of its folder; what sets it apart; all its options."""

    name: str
    varied: Mapping[str, Any]
    options: Mapping[str, Any]

    def arguments(self, kinds: TrainOptions, *, resuming: bool = False) -> list[str]:
        """The arguments of `dale train`, without those that the sweep gives; `resuming`: those of its closing part."""
        words: list[str] = []
        for name, value in self.options.items():
            option = "--" + name.replace("_", "-")
            if value is None or value is False or (resuming and name not in CLOSING):
                continue
            if name in kinds.flags:
                words.append(option)
            elif name in kinds.lists:
                words += [option, *(_text(item) for item in (value if isinstance(value, list) else [value]))]
            elif name == "option":
                for pair in value if isinstance(value, list) else [value]:
                    words += [option, _text(pair)]
            else:
                words.append(f"{option}={_text(value)}")  # one word, so that a value may begin with a dash
        return words


def _text(value: Any) -> str:
    if isinstance(value, (Mapping, list)):
        return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    return repr(value) if isinstance(value, float) else str(value)


def read_sweep(path: Path | str, kinds: TrainOptions, *, trust: bool = False) -> list[SweepRun]:
    """Read a sweep file and expand it; anything wrong in it is one line, and no run is returned."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no sweep file {str(path)!r}")
    return expand(parse_yaml(read_text(path), str(path)), kinds, where=str(path), trust=trust)


def expand(plain: Any, kinds: TrainOptions, *, where: str = "sweep", trust: bool = False) -> list[SweepRun]:
    """Expand the content of a sweep file into runs, in the order of the file."""
    if not isinstance(plain, Mapping):
        raise UsageError(f"{where}: expected a mapping with base and grid, got {plain!r:.80}")
    for part in plain:
        if part not in PARTS:
            raise unknown(f"part of {where}", part, PARTS)
    base = _options(plain.get("base") or {}, f"{where}: base", kinds, trust)
    grid = _options(plain.get("grid") or {}, f"{where}: grid", kinds, trust)
    include = _list(plain.get("include"), f"{where}: include", kinds, trust)
    exclude = _list(plain.get("exclude"), f"{where}: exclude", kinds, trust)
    count = 1
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UsageError(f"{where}: grid: {name} needs a list of values, got {values!r:.80}")
        count *= len(values)
        if count > MAX_RUNS:
            raise UsageError(f"{where}: the grid has more than {MAX_RUNS} runs")
    varied = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []
    varied = [one for one in varied if not any(_matches({**base, **one}, out) for out in exclude)] + include
    if not varied and not grid:
        varied = [{}]
    if not varied:
        raise UsageError(f"{where}: every run of the grid is excluded")
    runs = [SweepRun(_slug(one), one, {**base, **one}) for one in varied]
    seen: dict[str, SweepRun] = {}
    for run in runs:
        if run.name in seen:
            raise UsageError(f"{where}: the run {run.name} is listed twice")
        seen[run.name] = run
    return runs


def _matches(options: Mapping[str, Any], pattern: Mapping[str, Any]) -> bool:
    return bool(pattern) and all(options.get(name) == value for name, value in pattern.items())


def _list(plain: Any, where: str, kinds: TrainOptions, trust: bool) -> list[dict[str, Any]]:
    if plain is None:
        return []
    if not isinstance(plain, list):
        raise UsageError(f"{where}: expected a list of mappings, got {plain!r:.80}")
    return [_options(item, f"{where}[{number}]", kinds, trust) for number, item in enumerate(plain)]


def _options(plain: Any, where: str, kinds: TrainOptions, trust: bool) -> dict[str, Any]:
    """Check names, and that nothing names code."""
    if not isinstance(plain, Mapping):
        raise UsageError(f"{where}: expected options of `dale train`, got {plain!r:.80}")
    options = {}
    for key, value in plain.items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name in OURS:
            raise UsageError(f"{where}: {key} is set by the sweep, not by its file")
        if name not in kinds.known:
            raise unknown(f"option in {where}", str(key), kinds.known - OURS)
        if (name in kinds.lists or name == "option") and any(word.startswith("-") for word in _words(value)):
            raise UsageError(f"{where}: {key}: {value!r:.80} begins with a dash, as another option does")
        if not trust and name not in _PATHS:
            for text in _readings(value):
                refuse_code(text, f"{where}: {key}")
        options[name] = value
    return options


def _words(value: Any) -> Iterator[str]:
    """The words of a value, or of several, as they will stand behind an option."""
    for item in value if isinstance(value, list) else [value]:
        yield from _words(item) if isinstance(item, list) else [str(item)]


def _readings(value: Any) -> Iterator[Any]:
    """A value, and what `dale train` will read in its texts: YAML, alone or behind the name of an option."""
    yield value
    if isinstance(value, Mapping):
        for item in (*value, *value.values()):
            yield from _readings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _readings(item)
    elif isinstance(value, str):
        for text in (value, *(value[place + 1 :] for place, letter in enumerate(value) if letter == "=")):
            with contextlib.suppress(UsageError):  # what cannot be read names nothing, and is refused as it is built
                yield parse_yaml(text, "option")


def _slug(varied: Mapping[str, Any]) -> str:
    """A folder's name: what sets the run apart, in characters that are harmless everywhere."""
    if not varied:
        return "run"
    text = ",".join(f"{name}={_text(value)}" for name, value in varied.items())
    safe = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text).strip("._-") or "run"
    if safe == text and len(safe) <= _SLUG:
        return safe
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=4).hexdigest()
    return f"{safe[:_SLUG]}-{digest}"
