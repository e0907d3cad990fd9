"""Telling people how far an attack has come: a bar on a terminal or in a notebook, now and then a line in a pipe."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

_LINE_EVERY = 30.0  # seconds; a pipe keeps what it is told


class Display:
    """The progress of one attack over its examples, with the accuracy that is left so far."""

    def __init__(self, name: str, total: int, enabled: bool) -> None:
        self.enabled = enabled
        self.done, self.total = 0, total
        self._said = time.monotonic()
        shown = enabled and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self.bar: tqdm[Any] | None = (
            tqdm(total=total, desc=name, unit="ex", mininterval=0.5, leave=False, dynamic_ncols=True) if shown else None
        )

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, title: str, count: int, left: int, accuracy: float) -> None:
        """Show that `count` more examples are done and `left` are left, and that the accuracy is at most so much."""
        self.done += count
        self.total = self.done + left
        text = f"accuracy at most {100 * accuracy:.2f}%"
        if self.bar is not None:
            self.bar.total = self.total
            self.bar.set_description(title, refresh=False)
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(count)
        elif self.enabled and time.monotonic() - self._said >= _LINE_EVERY:
            print(f"{title}: {self.done} of {self.total} examples, {text}", file=sys.stderr, flush=True)
            self._said = time.monotonic()
