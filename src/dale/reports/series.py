"""The numbers behind the page's charts: one compact mapping per run, thinned out to what a screen can show."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from dale.reports import facts
from dale.reports.runs import RunFiles, dig, mappings, number, numbers

POINTS = 400  # per curve of a single run; many runs share ten times as many, thirty at least
RULES = 8  # limits that a chart draws, each with its number beside it
PICTURES = 3_500_000  # characters of gallery, shared by all runs


@cache
def paper() -> dict[str, Any]:
    """The numbers printed in the paper, by table."""
    plain: dict[str, Any] = json.loads(resources.files("dale.reports").joinpath("paper.json").read_text("utf-8"))
    return plain


def paper_curves() -> list[dict[str, Any]]:
    """The paper's points of the trade-off, [clean, FGSM, PGD] in percent: Table 1, and the lines of Table 6."""
    first, sixth = paper()["table1"], paper()["table6_rho_tradeoff_cifar10"]
    attacks = {"mnist": "PGD-10, l-infinity 0.3", "cifar10": "PGD-20, l-infinity 8/255"}
    sources = [
        ("Paper, MNIST (Table 1)", "mnist", first["mnist"]),
        ("Paper, CIFAR-10 (Table 1)", "cifar10", first["cifar10"]),
        *(
            (f"Paper, CIFAR-10, {name} (Table 6)", "cifar10", {f"dale rho={rho}": v for rho, v in sixth[key].items()})
            for name, key in (("ResNet-18", "resnet18"), ("ResNet-50", "resnet50"))
        ),
    ]
    return [
        {
            "name": name,
            "dataset": dataset,
            "attack": attacks[dataset],
            "line": "Table 6" in name,
            "points": [{"label": label, "values": v} for label, v in rows.items() if label != "attack"],
        }
        for name, dataset, rows in sources
    ]


def short(value: float | None) -> float | None:
    """Five significant digits: more than a chart can show."""
    return None if value is None else float(f"{value:.5g}")


def thin(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    step = (len(items) - 1) / (count - 1)
    return [items[round(i * step)] for i in range(count)]


def curves(run: RunFiles, count: int = POINTS) -> dict[str, list[list[float]]]:
    """Curves over the epochs, by name: [epoch, value] where a value was logged."""
    records = thin(run.metrics, count)

    def curve(*keys: str | int) -> list[list[float]]:
        pairs = ((short(number(r.get("epoch"))), short(number(dig(r, *keys)))) for r in records)
        return [[epoch, value] for epoch, value in pairs if epoch is not None and value is not None]

    found = {
        "nominal_loss": curve("nominal_loss"),
        "robust_loss": curve("robust_loss"),
        "held_out_loss": curve("validation", "nominal_loss"),
        "clean_accuracy": curve("validation", "clean_accuracy"),
        "robust_accuracy": curve("validation", "robust_accuracy"),
        "train_clean_accuracy": curve("clean_accuracy"),
        "train_robust_accuracy": curve("robust_accuracy"),
        "learning_rate": curve("learning_rate"),
        "seconds": curve("seconds", "total"),
        "seconds_train": curve("seconds", "train"),
    }
    return {name: points for name, points in found.items() if points}


def rules(limits: Sequence[float]) -> list[float]:
    """The heights of a constraint's limits in a chart: each once, of too many the lowest and the highest.

    The highest alone would let a mean pass for kept that is above the limit of some group.
    """
    heights = sorted({float(f"{limit:.5g}") for limit in limits})
    return heights if len(heights) <= RULES else [heights[0], heights[-1]]


def constraint_curves(run: RunFiles, count: int = POINTS) -> list[dict[str, Any]]:
    """Per constraint: limits, multipliers and measures over the epochs, one curve per class or group."""
    records = thin(run.metrics, count)
    found = []
    for place, limit in enumerate(facts.limits(run)):
        groups = len(limit.values)
        entry: dict[str, Any] = {"name": limit.name, "by": limit.by, "limits": [short(v) for v in limit.values]}
        entry["rules"] = rules(limit.values)
        for key in ("multiplier", "measure", "margin"):
            lines: list[list[list[float]]] = [[] for _ in range(groups)]
            for record in records:
                epoch = number(record.get("epoch"))
                values = numbers(dig(record, "constraints", place, key))
                for group, value in enumerate(values[:groups]):
                    if value is not None and epoch is not None:
                        lines[group].append([epoch, short(value) or 0.0])
            entry[key] = lines
        found.append(entry)
    return found


def radius_curve(run: RunFiles) -> list[list[float | None]]:
    """Accuracy against epsilon, [epsilon, accuracy, lower, upper], from the evaluation's curve.

    Without one, the two points that every evaluation knows: clean, and the worst case at the radius of the set.
    """
    points: list[list[float | None]] = []
    for entry in mappings(run.evaluation.get("curve")):
        epsilon, found = number(entry.get("epsilon")), facts.score("", entry.get("accuracy"))
        if epsilon is not None and found is not None:
            points.append([short(v) for v in (epsilon, found.value, found.lower, found.upper)])
    clean, worst = facts.clean(run), facts.robust(run)
    radius = number(dig(run.evaluation, "perturbations", "epsilon"))
    if clean is not None and not any(point[0] == 0 for point in points):
        points.append([0.0, short(clean.value), short(clean.lower), short(clean.upper)])
    if not mappings(run.evaluation.get("curve")) and worst is not None and radius is not None:
        points.append([short(v) for v in (radius, worst.value, worst.lower, worst.upper)])
    return sorted(points, key=lambda point: point[0] or 0.0)


def per_class(run: RunFiles) -> dict[str, Any]:
    """Accuracy of every class: clean, worst case and under each attack."""
    names = run.evaluation.get("class_names")
    sources = {"clean": run.evaluation.get("clean_per_class"), "worst case": run.evaluation.get("worst_per_class")}
    for attack in mappings(run.evaluation.get("attacks")):
        sources[str(attack.get("name", "attack"))] = attack.get("per_class")
    found: dict[str, list[list[float | None] | None]] = {}
    for name, source in sources.items():
        if isinstance(source, list) and source:
            entries = [facts.score("", item) for item in source]
            if any(entry is not None for entry in entries):
                found[name] = [
                    None if entry is None else [short(entry.value), short(entry.lower), short(entry.upper)]
                    for entry in entries
                ]
    if not found:
        return {}
    count = max(len(entries) for entries in found.values())
    labels = [str(name) for name in names] if isinstance(names, list) else []
    return {"names": labels[:count] + [str(k) for k in range(len(labels), count)], "series": found}


def gallery(run: RunFiles, budget: int = PICTURES) -> dict[str, Any]:
    """The pictures, as many as the budget of characters allows, with every field of the type the page expects."""
    plain = run.artefacts.get("gallery")
    radii = [value for value in numbers(dig(plain, "radii")) if value is not None]
    examples: list[dict[str, Any]] = []
    for entry in mappings(dig(plain, "examples")):
        levels = [level for level in map(_level, mappings(entry.get("levels"))) if level is not None]
        if not radii or len(levels) != len(radii):
            continue
        label, picture = number(entry.get("label")), _base64(entry.get("clean"))
        budget -= len(picture) + sum(len(level["perturbed"]) + len(level["delta"]) + 60 for level in levels)
        if budget < 0:
            break
        examples.append(
            {
                "index": number(entry.get("index")),
                "label": None if label is None else int(label),
                "clean": picture,
                "reach": short(number(entry.get("reach"))),
                "levels": levels,
            }
        )
    if not examples:
        return {}
    names = run.artefacts.get("class_names")
    return {
        "attack": str(dig(plain, "attack") or ""),
        "unit": str(dig(plain, "unit") or "epsilon"),
        "radii": radii,
        "trained": number(dig(plain, "trained")),
        "names": [str(name) for name in names] if isinstance(names, list) else [],
        "examples": examples,
    }


def _level(level: Mapping[str, Any]) -> dict[str, Any] | None:
    pairs = [numbers(pair) for pair in level["top"]] if isinstance(level.get("top"), list) else []
    top = [[int(pair[0]), pair[1]] for pair in pairs if len(pair) == 2 and pair[0] is not None and pair[1] is not None]
    if not top:
        return None
    return {"perturbed": _base64(level.get("perturbed")), "delta": _base64(level.get("delta")), "top": top}


def _base64(value: Any) -> str:
    """Base64 text and nothing else: it becomes part of an address."""
    return value if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9+/]*={0,2}", value) else ""


def projection(run: RunFiles, count: int = POINTS) -> dict[str, Any]:
    """Perturbations along the first two principal components, by sampler."""
    plain = dig(run.artefacts, "projection")
    series = dig(plain, "series")
    found = {}
    for name, points in series.items() if isinstance(series, Mapping) else ():
        pairs = [numbers(point)[:2] for point in points] if isinstance(points, list) else []
        kept = [[short(x), short(y)] for x, y in (p for p in pairs if len(p) == 2) if x is not None and y is not None]
        if kept:
            found[str(name)] = thin(kept, count)
    if not found:
        return {}
    return {"explained": numbers(dig(plain, "explained"))[:2], "series": found}


def trade_off(run: RunFiles) -> dict[str, Any]:
    """The run's point on the trade-off curve: clean against robust accuracy, with intervals."""
    clean, worst = facts.clean(run), facts.robust(run)
    if clean is None or worst is None:
        return {}
    return {
        "clean": [short(clean.value), short(clean.lower), short(clean.upper)],
        "robust": [short(worst.value), short(worst.lower), short(worst.upper)],
        "attack": worst.name,
    }


def page_data(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Everything the page's script draws from."""
    points = max(30, min(POINTS, 10 * POINTS // max(1, len(runs))))
    budget = PICTURES // max(1, len(runs))
    return {
        "paper": paper_curves(),
        "runs": [
            {
                "name": run.name,
                "dataset": facts.dataset(run),
                "algorithm": facts.algorithm(run),
                "curves": curves(run, points),
                "constraints": constraint_curves(run, points)[:8],
                "selected": number(run.summary.get("selected_epoch")),
                "radius": radius_curve(run),
                "trade": trade_off(run),
                "classes": per_class(run),
                "gallery": gallery(run, budget),
                "projection": projection(run, points),
                "attacks": [[s.name, short(s.seconds)] for s in facts.scores(run) if s.seconds is not None],
            }
            for run in runs
        ],
    }
