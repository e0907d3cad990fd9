"""What the numbers say: the paper's claims as comparisons of results, each with a verdict that the numbers give.

A difference of two accuracies counts when it exceeds two standard errors, each of the images or the seeds (the larger);
otherwise the numbers do not decide. Against the best of several, chosen by the same numbers, it takes more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

from dale.reproduction.catalogue import rows_of
from dale.reproduction.recipes import DATASETS, default_model, paper_attack, recipes
from dale.reproduction.results import Summary, find_results, is_current, summarise
from dale.reproduction.tables import NAMES, OLD, OLD_NOTE, percent


@dataclass(frozen=True)
class Claim:
    """A claim: the row `left`, (table, label), is above the row `right` under an attack."""

    text: str
    dataset: str
    left: tuple[str, str]
    right: tuple[str, str]
    attack: str


def claims(dataset: str) -> list[Claim]:
    """The claims that our tables can speak of, on a data set: `claims` of recipes.yaml."""
    found = []
    for plain in recipes()["claims"]:
        if dataset in plain.get("datasets", DATASETS):
            attack = paper_attack(dataset, "pgd") if plain["attack"] == "pgd" else plain["attack"]
            left, right = ((str(table), str(label)) for table, label in (plain["left"], plain["right"]))
            found.append(Claim(plain["text"], dataset, left, right, attack))
    return found


@dataclass(frozen=True)
class Side:
    """The number behind one side of a claim, and how many rows it was chosen from, of how many there are.

    `old`: a result behind one of these rows was made by another recipe than today's.
    """

    label: str
    number: Summary | None
    run: int = 1
    rows: int = 1
    old: bool = False

    def __str__(self) -> str:
        part = f" ({self.run} of {self.rows} rows)" if 0 < self.run < self.rows else ""
        mark = f" {OLD}" if self.old else ""
        return f"{self.label}{mark}{part}: {percent(self.number)}".replace("*", "\\*")


def measured(root: Path, dataset: str, place: tuple[str, str], attack: str, budget: str) -> Side:
    """The number behind one side of a claim; "best" is the row of its table with the highest one."""
    table, label = place
    rows = rows_of(table, dataset)
    if label != "best":
        rows = [row for row in rows if row.label == label]
    specs = [row.spec(dataset, default_model(dataset), budget, 0) for row in rows]
    results = [find_results(root, spec) for spec in specs]
    found = [one for of_row in results if (one := summarise(of_row, attack)) is not None]
    best = max(found, key=lambda one: one.mean, default=None)
    old = any(not is_current(one, spec) for spec, of_row in zip(specs, results, strict=True) for one in of_row)
    return Side(f"best of {table}" if label == "best" else label, best, len(found), len(rows), old)


def verdict(left: Side, right: Side) -> str:
    """Whether the left side is above the right one: "holds", "does not hold", "not decided" or "not run".

    The best of some rows is no more than the best of all of them: on the right it can refute the claim, on the left
    confirm it, and no more.
    """
    if left.number is None or right.number is None:
        return "not run"
    difference, noise = _difference(left, left.number, right, right.number)
    if difference < -noise:
        return "does not hold" if left.run == left.rows else "not run"
    if difference > noise:
        return "holds" if right.run == right.rows else "not run"
    return "not decided" if (left.run, right.run) == (left.rows, right.rows) else "not run"


def _difference(left: Side, one: Summary, right: Side, other: Summary) -> tuple[float, float]:
    """The difference of two sides, and what it must exceed to count in favour of the larger.

    That is two standard errors, or as many as the best of the larger side's rows exceeds no more often.
    """
    difference = one.mean - other.mean
    chosen_from = max(1, (left if difference > 0.0 else right).run)
    return difference, NormalDist().inv_cdf(1.0 - NormalDist().cdf(-2.0) / chosen_from) * math.hypot(
        one.error, other.error
    )


def claims_table(root: Path, dataset: str, budget: str) -> str:
    """The claims with their numbers and verdicts, as Markdown."""
    lines, old = ["| claim | attack | this | that | difference | verdict |", "|---|---|---:|---:|---:|---|"], False
    for claim in claims(dataset):
        left, right = (measured(root, dataset, one, claim.attack, budget) for one in (claim.left, claim.right))
        gap = "-"
        if left.number is not None and right.number is not None:
            difference, noise = _difference(left, left.number, right, right.number)
            gap = f"{100 * difference:+.1f} (± {100 * noise:.1f})"
        text = claim.text.replace("*", "\\*")
        shown = (text, NAMES.get(claim.attack, claim.attack), str(left), str(right), gap, verdict(left, right))
        lines.append(f"| {' | '.join(shown)} |")
        old = old or left.old or right.old
    return "\n".join([*lines, *(["", OLD_NOTE] if old else [])]) + "\n"


def trend(points: Sequence[tuple[float, Summary]], rising: bool) -> str:
    """Say whether a column is monotone in rho, up to noise: no step back beyond two standard errors, its ends apart."""
    if len(points) < 3:
        return f"not decided: {len(points)} values of rho were run"
    ordered = sorted(points, key=lambda point: point[0])
    back = 0
    for (_, before), (_, after) in pairwise(ordered):
        step = after.mean - before.mean if rising else before.mean - after.mean
        back += step < -2 * math.hypot(before.error, after.error)
    first, last = ordered[0][1].mean, ordered[-1][1].mean
    noise = 2 * math.hypot(ordered[0][1].error, ordered[-1][1].error)
    word = "rises" if rising else "falls"
    through = f"from {100 * first:.1f} to {100 * last:.1f} over {len(ordered)} values of rho"
    if back:
        return f"does not hold: {through}, with {back} step{'s' if back != 1 else ''} back beyond noise"
    if abs(last - first) <= noise:
        return f"not decided: {through}, which is within noise"
    if (last < first) == rising:
        return f"does not hold: {through}"
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
