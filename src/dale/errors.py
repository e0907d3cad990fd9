"""Errors that a person can act on: one line that names the value, what was expected, and the nearest choice."""

from __future__ import annotations

import difflib
import numbers
import traceback
from collections.abc import Iterable
from pathlib import Path


class DaleError(Exception):
    """Something failed while the request itself was sound (a damaged file, a full disk): exit code 1."""

    exit_code = 1


class UsageError(DaleError, ValueError):
    """The request itself cannot be met (an unknown name, a negative radius): exit code 2."""

    exit_code = 2


class DataError(DaleError):
    """A data set, image or label file is not what it should be; the message names the file."""


class CheckpointError(DaleError):
    """A checkpoint or run folder cannot be read; the message names the file and what to do."""


class NumericsError(DaleError):
    """A loss or gradient stopped being finite."""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that looks most like `name`, or None if nothing comes near."""
    choices = sorted(valid)
    folded = {choice.lower().replace("_", "-"): choice for choice in reversed(choices)}
    found = difflib.get_close_matches(name.lower().replace("_", "-"), folded, n=1, cutoff=0.5)
    return folded[found[0]] if found else None


def unknown(kind: str, name: object, valid: Iterable[str]) -> UsageError:
    """Build the error for an unknown name: the nearest valid one first, then all of them."""
    choices = sorted(valid)
    close = nearest(str(name), choices)
    hint = f"; did you mean {close!r}?" if close else "."
    return UsageError(f"unknown {kind} {name!r}{hint} Valid: {', '.join(choices)}")


def require(condition: bool, message: str) -> None:
    """Raise a `UsageError` with `message` unless `condition` holds."""
    if not condition:
        raise UsageError(message)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def require_positive(owner: object, **values: float | None) -> None:
    """Check that each given value is a finite number above zero (None passes)."""
    for name, value in values.items():
        if value is not None and not (_is_number(value) and 0.0 < value < float("inf")):
            raise UsageError(f"{type(owner).__name__}: {name} must be a finite number above 0, got {value!r}")


def require_non_negative(owner: object, **values: float | None) -> None:
    """Check that each given value is a finite number of at least zero (None passes)."""
    for name, value in values.items():
        if value is not None and not (_is_number(value) and 0.0 <= value < float("inf")):
            raise UsageError(f"{type(owner).__name__}: {name} must be a finite number of at least 0, got {value!r}")


def require_whole(owner: object, **values: object) -> None:
    """Check that each given value is a whole number."""
    for name, value in values.items():
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise UsageError(f"{type(owner).__name__}: {name} must be a whole number, got {value!r}")


def require_choice(owner: object, choices: Iterable[str], **values: str) -> None:
    """Check that each given value is one of `choices`."""
    allowed = tuple(choices)
    for name, value in values.items():
        if value not in allowed:
            raise unknown(f"{type(owner).__name__}.{name}", value, allowed)


def told_of(error: BaseException) -> str:
    """What went wrong in code of the user's, in one line: the error's first line, its kind, and where it was raised."""
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    ours = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    theirs = [frame for frame in frames if not {"site-packages", "dist-packages"} & {*Path(frame.filename).parts}]
    place = f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {text[:200]}{place}" if text else f"{type(error).__name__}{place}"
