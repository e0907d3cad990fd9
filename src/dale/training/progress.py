"""Telling people what happens: a bar on a terminal or in a notebook, a line an epoch in a pipe."""

from __future__ import annotations

import math
import sys
from typing import Any

from dale.bars import Bar


def format_record(record: dict[str, Any]) -> str:
    """One epoch in one line."""
    parts = [f"epoch {record['epoch']}/{record['epochs']}"]
    names = (("loss", "loss", 3), ("robust_loss", "robust", 3), ("nominal_loss", "nominal", 3))
    parts += [f"{label} {record[key]:.{digits}f}" for key, label, digits in names if _is_number(record.get(key))]
    for constraint in record["constraints"]:
        # what the multiplier follows: the limit less its margin, if it is tightened
        margins = [m or 0.0 for m in constraint.get("margin") or [0.0] * len(constraint["limit"])]
        limits = [limit - margin for limit, margin in zip(constraint["limit"], margins, strict=True)]
        violations = [v if v is None else v + m for v, m in zip(constraint["violation"], margins, strict=True)]
        tightened = f" (tightened from {_brief(constraint['limit'])})" if any(margins) else ""
        parts.append(f"{constraint['name']} <= {_brief(limits)}{tightened}: {_brief(constraint['measure'])}")
        parts.append(f"nu {_brief(constraint['multiplier'])}, violation {_brief(violations, sign=True)}")
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


class Progress(Bar):
    """A bar over all steps of a run; in a pipe, where a bar would be noise, a line after every epoch."""

    def __init__(self, total: int, done: int, enabled: bool) -> None:
        super().__init__(enabled, total=total, initial=done, unit="step", smoothing=0.05)

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
