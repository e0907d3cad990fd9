"""Telling people how far an attack has come: a bar on a terminal or in a notebook, now and then a line in a pipe."""

from __future__ import annotations

import sys
import time

from dale.bars import Bar

_LINE_EVERY = 30.0  # seconds; a pipe keeps what it is told


class Display(Bar):
    """The progress of one attack over its examples, with the accuracy that is left so far."""

    def __init__(self, name: str, total: int, enabled: bool) -> None:
        super().__init__(enabled, total=total, desc=name, unit="ex", mininterval=0.5, leave=False)
        self.done, self.total = 0, total
        self._said = time.monotonic()

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
