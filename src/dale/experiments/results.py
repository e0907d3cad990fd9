"""The state and the results of a sweep: all of it read from the run folders, so that nothing else must survive."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dale.errors import DaleError, UsageError
from dale.experiments.sweep import SweepRun
from dale.files import read_json, write_json, write_text

MARK = "sweep.json"  # in the folder of a run that ended well
_TAIL = 16_384  # bytes of a log or of metrics that are looked at


@dataclass(frozen=True)
class Place:
    """Where a run of a sweep lies: its folder, and beside it the log of its process."""

    out: Path
    run: SweepRun

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.out / self.run.name

    @property
    def log(self) -> Path:
        """What its process said."""
        return self.out / "logs" / f"{self.run.name}.log"

    @property
    def finished(self) -> bool:
        """Whether it ended well, evaluation included."""
        return (self.folder / MARK).is_file() and (self.folder / "summary.json").is_file()

    @property
    def begun(self) -> bool:
        """Whether there is something to continue."""
        return (self.folder / "config.yaml").is_file()

    def mark_finished(self, seconds: float) -> None:
        """Note that the run ended well."""
        write_json(self.folder / MARK, {"run": self.run.name, "seconds": round(seconds, 3)})

    def progress(self) -> str:
        """How far the run has come: "epoch 3/40", or what it is doing before and after its epochs."""
        lines = _tail(self.folder / "metrics.jsonl")
        for line in reversed(lines):
            try:
                record = json.loads(line)
                return f"epoch {record['epoch']}/{record['epochs']}"
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
        return "starting"

    def last_error(self) -> str:
        """The last line of the log that says what went wrong, else its last line."""
        lines = [line.strip() for line in _tail(self.log) if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        return (errors or lines or ["no output"])[-1][:500]


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL))
            return file.read().decode("utf-8", "replace").replace("\r", "\n").splitlines()
    except OSError:
        return []


def claim(out: Path, runs: Sequence[SweepRun]) -> list[Place]:
    """Return the places of runs below `out`; a run that was configured otherwise there is refused."""
    path = out / "sweep.json"
    known: dict[str, Any] = {}
    if path.exists():
        plain = read_json(path)
        known = plain if isinstance(plain, dict) else {}
    for run in runs:
        before = known.get(run.name)
        if before is not None and before != _plain(run.options):
            raise UsageError(f"{out / run.name} is a run of other options; choose another --out for this sweep")
    write_json(path, known | {run.name: _plain(run.options) for run in runs})
    return [Place(out, run) for run in runs]


@contextlib.contextmanager
def held(out: Path, *, alone: bool) -> Iterator[None]:
    """Hold the folder of a sweep: alone, or beside others that bring one run each to its end, as tasks of a cluster."""
    try:
        file = (out / ".lock").open("w")
    except OSError as error:
        raise DaleError(f"cannot write in {out}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:
            raise DaleError(f"{out} is in use: another `dale sweep` is at work in it") from error
        yield


def _plain(options: Any) -> Any:
    return json.loads(json.dumps(options, default=str))


def row_of(place: Place, error: str | None = None, running: bool = False) -> dict[str, Any]:
    """One line of the table: what sets the run apart, its state, accuracies, the constraint, seconds."""
    row: dict[str, Any] = {"run": place.run.name, **place.run.varied}
    if not place.finished:
        state = "failed" if error is not None else "interrupted" if place.begun else "waiting"
        state = "running" if running else state
        return row | {"state": state, "error": error or ""}
    row["state"] = "finished"
    try:
        summary, path = read_json(place.folder / "summary.json"), place.folder / "evaluation.json"
        evaluation = read_json(path) if path.is_file() else {}
        held = summary.get("validation") or {}
        row["clean"] = (evaluation.get("clean") or {}).get("accuracy", held.get("clean_accuracy"))
        for attack in evaluation.get("attacks") or []:
            row[attack["name"]] = attack["accuracy"]["accuracy"]
        row["worst"] = (evaluation.get("worst") or {}).get("accuracy")
        row["held_out_loss"] = held.get("nominal_loss")
        row["feasible"] = summary.get("feasible")
        row["seconds"] = summary.get("seconds")
    except (DaleError, AttributeError, KeyError, TypeError) as problem:
        row |= {"state": "unreadable", "error": str(problem)[:500]}
    return row


def write_results(
    places: Sequence[Place], errors: dict[str, str], running: Container[str] = ()
) -> list[dict[str, Any]]:
    """Write OUT/results.csv anew, whole or not at all; returns its rows."""
    rows = [row_of(place, errors.get(place.run.name), place.run.name in running) for place in places]
    columns = [*dict.fromkeys(name for row in rows for name in row if name != "error"), "error"]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    write_text(places[0].out / "results.csv", text.getvalue())
    return rows


def _cell(value: Any) -> Any:
    # a table program takes a text that begins so for a formula
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@"):
        return "'" + value
    return json.dumps(value) if isinstance(value, (list, dict, bool)) else value


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for a terminal."""
    columns = [name for name in dict.fromkeys(n for row in rows for n in row) if name not in ("run", "error")]
    cells = [columns, *([_shown(row.get(name), name) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    failed = [f"{row['run']}: {row['error']}" for row in rows if row.get("error")]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *(["", "Failed:", *failed] if failed else [])])


def _shown(value: Any, name: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and name not in ("rho", "epsilon"):
        return f"{value:.1f}" if name == "seconds" else f"{value:.4g}"
    return str(value)
