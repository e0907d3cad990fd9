"""Telling people what happens: a bar on a terminal or in a notebook, a line an epoch in a pipe, and TensorBoard."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

from dale.errors import DaleError


def _interactive() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def format_record(record: dict[str, Any]) -> str:
    """One epoch in one line."""
    parts = [f"epoch {record['epoch']}/{record['epochs']}"]
    names = (("loss", "loss", 3), ("robust_loss", "robust", 3), ("nominal_loss", "nominal", 3))
    parts += [f"{label} {record[key]:.{digits}f}" for key, label, digits in names if _is_number(record.get(key))]
    for constraint in record["constraints"]:
        parts.append(f"{constraint['name']} <= {_brief(constraint['limit'])}: {_brief(constraint['measure'])}")
        parts.append(f"nu {_brief(constraint['multiplier'])}, violation {_brief(constraint['violation'], sign=True)}")
    held = record.get("validation")
    if held:
        parts.append(f"held-out clean {held['clean_accuracy']:.1%}, loss {held['nominal_loss']:.3f}")
        if "robust_accuracy" in held:
            parts.append(f"robust {held['robust_accuracy']:.1%}")
    return "  ".join(parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _brief(values: list[float | None], *, sign: bool = False) -> str:
    """One value, or the range of several."""
    numbers = [v for v in values if v is not None]
    form = "{:+.3f}" if sign else "{:.3f}"
    if not numbers:
        return "-"
    if len(numbers) == 1:
        return form.format(numbers[0])
    return f"{form.format(min(numbers))} .. {form.format(max(numbers))}"


class Progress:
    """A bar over all steps of a run; in a pipe, where a bar would be noise, a line after every epoch."""

    def __init__(self, total: int, done: int, enabled: bool) -> None:
        self.enabled = enabled
        self.bar = (
            tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, smoothing=0.05)
            if enabled and _interactive()
            else None
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def step(self) -> None:
        """Count a step."""
        if self.bar is not None:
            self.bar.update()

    def epoch(self, record: dict[str, Any]) -> None:
        """Show the end of an epoch."""
        line = format_record(record)
        if self.bar is not None:
            self.bar.set_postfix_str(line, refresh=False)
        else:
            self.say(line)

    def say(self, line: str) -> None:
        """Say something that stays on the screen."""
        if not self.enabled or not line:
            return
        if self.bar is not None:
            self.bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)


class TensorBoard:
    """Scalars of every epoch in TensorBoard's format; `after` drops what a resumed run will write again.

    Without a folder, as in all processes of a run but the first, nothing is written.
    """

    def __init__(self, folder: Path | None, after: int) -> None:
        self.folder = folder
        if folder is None:
            self.writer = None
            return
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
        except ImportError:  # an optional convenience on machines where nothing can be installed
            self.writer = None
            return
        # not SummaryWriter: its thread and its work at exit meet a full disk with tracebacks of their own
        self.writer = EventsWriter(str(folder / "events"))
        self.writer.write_event(Event(step=after, session_log=SessionLog(status=SessionLog.START)))

    def epoch(self, record: dict[str, Any]) -> None:
        """Write an epoch's numbers."""
        if self.writer is None:
            return
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        try:
            for name, value in _scalars(record):
                event = Event(wall_time=time.time(), step=record["epoch"], summary=scalar(name, value))
                self.writer.write_event(event)
            self.writer.flush()
        except OSError as error:
            raise DaleError(f"cannot write {self.folder}/events.*: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file."""
        if self.writer is not None:
            with contextlib.suppress(OSError):  # of a full disk, which the last epoch has reported
                self.writer.close()


def _scalars(record: dict[str, Any]) -> list[tuple[str, float]]:
    """The numbers of a record under names that group well."""
    found = [(f"train/{key}", record[key]) for key in ("loss", "robust_loss", "nominal_loss", "learning_rate")]
    found += [(f"train/{key}", record[key]) for key in ("clean_accuracy", "robust_accuracy")]
    held = record.get("validation") or {}
    found += [(f"validation/{key}", held.get(key)) for key in ("clean_accuracy", "robust_accuracy", "nominal_loss")]
    for constraint in record["constraints"]:
        for key in ("multiplier", "violation", "measure"):
            for group, value in enumerate(constraint[key]):
                suffix = f"/{group}" if len(constraint[key]) > 1 else ""
                found.append((f"constraint/{constraint['name']}/{key}{suffix}", value))
    return [(name, value) for name, value in found if _is_number(value)]
