"""What the numbers say: the paper's claims as comparisons of results, each with a verdict that the numbers give.

A difference of two accuracies counts when it exceeds two standard errors, each of the images or the seeds (the larger);
otherwise the numbers do not decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from dale.reproduction.catalogue import Row, rows_of
from dale.reproduction.recipes import DATASETS, default_model, paper_attack, recipes
from dale.reproduction.results import Summary, find_results, summarise
from dale.reproduction.tables import NAMES, percent


@dataclass(frozen=True)
class Claim:
    """A claim: the row `left`, (table, label), is above the row `right` under an attack, or not below it."""

    text: str
    dataset: str
    left: tuple[str, str]
    right: tuple[str, str]
    attack: str
    expected: str = "above"


def claims(dataset: str) -> list[Claim]:
    """The claims that our tables can speak of, on a data set: `claims` of recipes.yaml."""
    found = []
    for plain in recipes()["claims"]:
        if dataset in plain.get("datasets", DATASETS):
            attack = paper_attack(dataset, "pgd") if plain["attack"] == "pgd" else plain["attack"]
            left, right = ((str(table), str(label)) for table, label in (plain["left"], plain["right"]))
            found.append(Claim(plain["text"], dataset, left, right, attack, plain.get("expected", "above")))
    return found


def measured(root: Path, dataset: str, place: tuple[str, str], attack: str, budget: str) -> Summary | None:
    """The number behind one side of a claim; "best" is the row of its table with the highest one."""
    table, label = place
    rows = rows_of(table, dataset)
    if label != "best":
        rows = [row for row in rows if row.label == label]
    found = [one for row in rows if (one := _number(root, dataset, row, attack, budget)) is not None]
    if label == "best" and len(found) < len(rows):
        return None  # the best of some is not the best
    return max(found, key=lambda one: one.mean, default=None)


def _number(root: Path, dataset: str, row: Row, attack: str, budget: str) -> Summary | None:
    return summarise(find_results(root, row.spec(dataset, default_model(dataset), budget, 0)), attack)


def verdict(claim: Claim, left: Summary | None, right: Summary | None) -> str:
    """Whether the claim holds: "holds", "does not hold", "not decided" or "not run"."""
    if left is None or right is None:
        return "not run"
    difference, error = left.mean - right.mean, math.hypot(left.error, right.error)
    if claim.expected == "not below":
        return "does not hold" if difference < -2 * error else "holds"
    if abs(difference) <= 2 * error:
        return "not decided"
    return "holds" if difference > 0 else "does not hold"


def claims_table(root: Path, dataset: str, budget: str) -> str:
    """The claims with their numbers and verdicts, as Markdown."""
    lines = ["| claim | attack | this | that | difference | verdict |", "|---|---|---:|---:|---:|---|"]
    for claim in claims(dataset):
        left = measured(root, dataset, claim.left, claim.attack, budget)
        right = measured(root, dataset, claim.right, claim.attack, budget)
        gap = "-"
        if left is not None and right is not None:
            error = math.hypot(left.error, right.error)
            gap = f"{100 * (left.mean - right.mean):+.1f} (± {200 * error:.1f})"
        text = claim.text.replace("*", "\\*")
        shown = (text, NAMES.get(claim.attack, claim.attack), _side(claim.left, left), _side(claim.right, right), gap)
        lines.append(f"| {' | '.join(shown)} | {verdict(claim, left, right)} |")
    return "\n".join(lines) + "\n"


def _side(place: tuple[str, str], found: Summary | None) -> str:
    label = f"best of {place[0]}" if place[1] == "best" else place[1]
    return f"{label}: {percent(found)}".replace("*", "\\*")


def trend(points: Sequence[tuple[float, Summary]], rising: bool) -> str:
    """Say whether a column is monotone in rho, up to noise: no step back beyond two standard errors."""
    if len(points) < 3:
        return f"not decided: {len(points)} values of rho were run"
    ordered = sorted(points, key=lambda point: point[0])
    back = 0
    for (_, before), (_, after) in pairwise(ordered):
        step = after.mean - before.mean if rising else before.mean - after.mean
        back += step < -2 * math.hypot(before.error, after.error)
    first, last = ordered[0][1].mean, ordered[-1][1].mean
    word = "rises" if rising else "falls"
    through = f"from {100 * first:.1f} to {100 * last:.1f} over {len(ordered)} values of rho"
    if back or (last < first) == rising:
        return f"does not hold: {through}, with {back} step{'s' if back != 1 else ''} back beyond noise"
    return f"holds: it {word} {through}, with no step back beyond noise"


def trends(root: Path, model: str, budget: str) -> list[str]:
    """Table 6's two trends on CIFAR-10, a line each."""
    found: dict[str, list[tuple[float, Summary]]] = {"clean": [], paper_attack("cifar10", "pgd"): []}
    for row in rows_of("table6", "cifar10", model):
        results = find_results(root, row.spec("cifar10", model, budget, 0))
        for attack, points in found.items():
            if (one := summarise(results, attack)) is not None:
                points.append((row.options["rho"], one))
    clean, robust = found.values()
    return [
        f"- clean accuracy falls as rho grows: {trend(clean, rising=False)}",
        f"- accuracy under PGD-20 rises with rho: {trend(robust, rising=True)}",
    ]
