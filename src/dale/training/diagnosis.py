"""An unreachable limit is diagnosed in plain words, never passed over in silence."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

WINDOW = 3  # the last third of the epochs so far is looked at, and at least this many


def stuck(history: list[dict[str, Any]], epochs: int) -> list[str]:
    """Return a line for each constraint that looks unreachable.

    That is, in the last third of what was trained so far, and past the middle of the run: the measure stayed above its
    limit, it fell by less than a tenth of its excess, and its multiplier only grew, or stood at its upper bound.
    """
    recent = history[-max(WINDOW, len(history) // 3) :]
    if len(history) < WINDOW or 2 * len(history) < epochs:
        return []
    lines = []
    for number, constraint in enumerate(recent[-1]["constraints"]):
        series = [record["constraints"][number] for record in recent]
        for group in range(len(constraint["measure"])):
            measures = [s["measure"][group] for s in series]
            multipliers = [s["multiplier"][group] for s in series]
            if any(m is None for m in measures):
                continue
            limit = constraint["limit"][group]
            excess = [m - limit for m in measures]
            bound = (constraint.get("upper") or math.inf) * (1.0 - 1e-6)  # multipliers have single precision
            bounded = min(multipliers) >= bound
            grown = multipliers[-1] > multipliers[0] and all(b >= a for a, b in pairwise(multipliers))
            if min(excess) > 0.0 and excess[-1] > 0.9 * excess[0] and (grown or bounded):
                where = f" (group {group})" if len(constraint["measure"]) > 1 else ""
                pressed, advice = f"has grown to {multipliers[-1]:.3g}", "Train"
                if multipliers[-1] >= bound:
                    pressed, advice = (
                        f"is at its bound of {multipliers[-1]:.3g}",
                        "Raise the bound (--dual-upper), train",
                    )
                lines.append(
                    f"{constraint['name']} <= {limit:.4g}{where} looks out of reach: it is stuck at {measures[-1]:.4g} "
                    f"while its multiplier {pressed}. {advice} longer or with a larger model, or choose a limit "
                    f"above {measures[-1]:.4g}"
                )
    return lines
