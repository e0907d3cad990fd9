"""Attacks by name."""

from __future__ import annotations

import re

from dale.attacks.adaptive import APGD, STEPS
from dale.attacks.base import Attack
from dale.attacks.fab import FAB
from dale.attacks.gradient import FGSM, PGD
from dale.attacks.search import GridSearch, RandomSearch, Transfer
from dale.attacks.sequence import autoattack
from dale.attacks.square import QUERIES, Square
from dale.errors import UsageError, unknown

NAMES: dict[str, str] = {
    "fgsm": "one step of size epsilon along the sign of the gradient",
    "pgd20": "20 gradient steps from a random start, the best iterate kept; any number of steps",
    "pgd20x10": "10 restarts of it, each on what still stands",
    "pgd20-margin": "on the margin (CW) loss; also -dlr and -kl",
    "pgd20-last": "the last iterate alone, as papers count; -zero starts at the image",
    "pgd20@0.01": "with steps of 0.01 instead of epsilon / 4",
    "apgd-ce": "adaptive steps on the cross-entropy, 100 of them; also apgd50-ce, apgd-cex5",
    "apgd-dlr": "adaptive steps on the difference-of-logits ratio",
    "apgd-t": "adaptive steps on the targeted ratio, nine target classes",
    "fab-t": "smallest perturbations by projections onto decision boundaries, nine target classes",
    "square": "random search by 5000 queries, without gradients; also square1000",
    "autoattack": "apgd-ce, apgd-t, fab-t, square with their standard budgets",
    "autoattack-fast": "apgd-ce, apgd-t",
    "noise": "one uniform draw from the set",
    "worst-of-100": "the worst of 100 uniform draws",
    "random": "the worst of 1000 uniform draws",
    "grid": "every point of a grid, for transformations with a few parameters; also grid9",
    "transfer:RUN": "what fools the model of another run, tried on this one",
}
"""The names that `parse` reads, and what they mean; numbers in them may be others."""

_PGD = re.compile(
    r"pgd(?P<steps>\d+)(?:@(?P<size>\d[0-9.]*(?:e-?\d+)?))?(?:-(?P<loss>ce|margin|dlr|kl))?(?P<zero>-zero)?"
    r"(?P<last>-last)?(?:x(?P<restarts>\d+))?"
)
_APGD = re.compile(r"apgd(?P<steps>\d*)-(?P<loss>ce|dlr|t)(?:x(?P<restarts>\d+))?")
_NUMBERED = re.compile(r"(fab(?=\d*-t)|square|worst-of-|grid)(\d*)(?:-t)?")


def parse(name: str | Attack) -> Attack:
    """Return the attack that a name means; an attack passes through."""
    if isinstance(name, Attack):
        return name
    if not isinstance(name, str):
        raise UsageError(f"an attack is a name or a dale.attacks.Attack, got {name!r}")
    if name.startswith("transfer:") and len(name) > len("transfer:"):
        return Transfer(source=name.removeprefix("transfer:"))
    text = name.strip().lower().replace("_", "-")
    plain: dict[str, Attack] = {
        "fgsm": FGSM(),
        "autoattack": autoattack(),
        "autoattack-fast": autoattack(fast=True),
        "noise": RandomSearch(),
        "random": RandomSearch(draws=1000),
    }
    if text in plain:
        return plain[text]
    if match := _PGD.fullmatch(text):
        return PGD(
            steps=int(match["steps"]),
            restarts=int(match["restarts"] or 1),
            step_size=None if match["size"] is None else _number(match["size"], name),
            objective=match["loss"] or "ce",  # type: ignore[arg-type]  # one of the names, by the pattern
            start="zero" if match["zero"] else "uniform",
            keep_best=not match["last"],
        )
    if match := _APGD.fullmatch(text):
        return APGD(
            objective=match["loss"],  # type: ignore[arg-type]
            steps=int(match["steps"] or STEPS),
            restarts=None if match["restarts"] is None else int(match["restarts"]),
        )
    if match := _NUMBERED.fullmatch(text):
        return _numbered(match[1], int(match[2]) if match[2] else None)
    raise unknown("attack", name, NAMES)


def _numbered(family: str, number: int | None) -> Attack:
    if family == "fab":
        return FAB() if number is None else FAB(steps=number)
    if family == "square":
        return Square(queries=QUERIES if number is None else number)
    if family == "grid":
        return GridSearch(points=number)
    return RandomSearch(draws=100 if number is None else number)


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise unknown("attack", name, NAMES) from None
