"""Attacks by name."""

from __future__ import annotations

import re

from dale.attacks.base import Attack
from dale.attacks.gradient import FGSM, LOSSES, PGD
from dale.errors import unknown

EXAMPLES = ("fgsm", "pgd20", "pgd20x10", "pgd20-margin", "pgd20-dlr", "pgd20-kl", "pgd20-last")

_PGD = re.compile(
    r"pgd(?P<steps>\d+)(?:@(?P<step>[0-9.e+-]+?))?(?:-(?P<loss>ce|margin|dlr|kl))?(?P<zero>-zero)?(?P<last>-last)?"
    r"(?:x(?P<restarts>\d+))?"
)


def parse(name: str | Attack) -> Attack:
    """Return the attack that a name means."""
    if isinstance(name, Attack):
        return name
    text = name.strip().lower().replace("_", "-")
    if text == "fgsm":
        return FGSM()
    if match := _PGD.fullmatch(text):
        return _pgd(match)
    raise unknown("attack", name, EXAMPLES)


def _pgd(match: re.Match[str]) -> PGD:
    step = match["step"]
    try:
        step_size = None if step is None else float(step)
    except ValueError:
        raise unknown("attack", match.string, EXAMPLES) from None
    loss = match["loss"] or "ce"
    assert loss in LOSSES
    return PGD(
        steps=int(match["steps"]),
        restarts=int(match["restarts"] or 1),
        step_size=step_size,
        objective=loss,  # type: ignore[arg-type]  # one of the names, by the pattern
        start="zero" if match["zero"] else "uniform",
        keep_best=not match["last"],
    )
