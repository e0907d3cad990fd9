"""The paper's tables and figures: which rows each has, what the paper printed for them, and which runs they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dale.errors import UsageError, unknown
from dale.reports.series import paper
from dale.reproduction.recipes import DATASETS, Spec, default_model, recipes

ROWS = ("erm", "fgsm", "pgd", "clp", "alp", "trades", "mart", "dale")
# name -> (data sets it is about, what it shows)
TABLES: dict[str, tuple[tuple[str, ...], str]] = {
    "table1": (DATASETS, "Adversarial robustness"),
    "table2": (("cifar10",), "Fixed multiplier: regularised DALE without the dual variable"),
    "table4": (("mnist",), "Seconds of training"),
    "table5": (("cifar10",), "Seconds of training"),
    "table6": (("cifar10",), "The trade-off: accuracy against rho"),
    "table7": (("cifar10",), "Steps of the training attack"),
    "figure1": (("mnist",), "Perturbations along the principal components of the training images"),
    "figure2": (("cifar10",), "The dual variable in training"),
    "best": (DATASETS, "Our best models"),
    "ablation": (DATASETS, "One change at a time"),
}
TIMED = ("table4", "table5")


@dataclass(frozen=True)
class Row:
    """A row of a table: its label, the algorithm with its options, and the paper's [clean, fgsm, pgd] where printed.

    `budget` and `model` are those of a row which has its own, as the best models have.
    """

    label: str
    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)
    printed: Sequence[float] | None = None
    budget: str | None = None
    model: str | None = None

    def spec(self, dataset: str, model: str, budget: str, seed: int) -> Spec:
        """The run behind the row."""
        return Spec(dataset, self.model or model, self.algorithm, self.options, self.budget or budget, seed)


def rows_of(table: str, dataset: str, model: str | None = None) -> list[Row]:
    """The rows of a table or figure on a data set, in the paper's order."""
    if table not in TABLES:
        raise unknown("table", table, (*TABLES, "all"))
    if dataset not in TABLES[table][0]:
        raise UsageError(f"{table} of the paper is about {' and '.join(TABLES[table][0])}, not {dataset}")
    model = model or default_model(dataset)
    numbers = paper()
    if table == "table1":
        return [_row(label, values) for label, values in numbers["table1"][dataset].items() if label != "attack"]
    if table in TIMED:
        return [Row(name, name, {"rho": 0.8} if name == "dale" else {}) for name in ROWS]
    if table == "table2":
        fixed = numbers["table2_regularised_cifar10"].items()
        return [Row(label, "dale-fixed", {"nu": float(label.partition("=")[2])}, values) for label, values in fixed]
    if table == "table6":
        # another model than the paper's two has the same rows, and nothing printed
        printed = numbers["table6_rho_tradeoff_cifar10"]
        chosen = printed.get(model, dict.fromkeys(printed["resnet18"]))
        return [Row(f"rho={rho}", "dale", {"rho": float(rho)}, values) for rho, values in chosen.items()]
    if table == "table7":
        rows = []
        for label, by_steps in numbers["table7_steps_cifar10"].items():
            for steps, values in by_steps.items():
                row = _row(label, values)
                rows.append(Row(f"{label}, {steps} steps", row.algorithm, {**row.options, "steps": int(steps)}, values))
        return rows
    if table in ("figure1", "figure2"):
        return [Row("dale rho=0.8", "dale", {"rho": 0.8})]
    if table == "best":
        found = recipes()["best"][dataset]
        return [
            Row(_label(one), one["algorithm"], one["options"], budget=one["budget"], model=one.get("model"))
            for one in found
        ]
    found = recipes()["ablation"][dataset]
    return [Row(label, one["algorithm"], one["options"]) for label, one in found.items()]


def _row(label: str, values: Sequence[float] | None) -> Row:
    """Read a label such as "dale rho=0.8"."""
    name, *options = label.split()
    pairs = (option.partition("=") for option in options)
    return Row(label, name, {key: float(value) for key, _, value in pairs}, values)


def _label(one: dict[str, Any]) -> str:
    options = " ".join(f"{name}={value}" for name, value in one["options"].items())
    return f"{one['algorithm']} {options} ({', '.join(one[name] for name in ('budget', 'model') if name in one)})"


def chosen(rows: Sequence[Row], names: Sequence[str] | None) -> list[Row]:
    """The rows that names mean: a label, such as "dale rho=0.8", or an algorithm, which means all its rows."""
    if not names:
        return list(rows)
    valid = {row.label for row in rows} | {row.algorithm for row in rows}
    for name in names:
        if name not in valid:
            raise unknown("row", name, valid)
    return [row for row in rows if row.label in names or row.algorithm in names]


def specs_of(
    table: str, dataset: str, model: str, budget: str, seeds: int, names: Sequence[str] | None = None
) -> list[Spec]:
    """The runs that a table needs, those of seed 0 first: an interrupted table has a number in every row early."""
    rows = [] if table in TIMED else chosen(rows_of(table, dataset, model), names)
    return [row.spec(dataset, model, budget, seed) for seed in range(seeds) for row in rows]
