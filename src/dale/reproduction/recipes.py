"""Recipes as data: what a row of the paper is trained and evaluated with, by data set and budget (recipes.yaml)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from importlib import resources
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from dale.components import parse_yaml
from dale.errors import unknown

if TYPE_CHECKING:
    from dale.training.config import RunConfig

BUDGETS = ("full", "short", "smoke", "best", "mixed", "deeper", "regularised", "long", "augmented", "retuned")
DATASETS = ("mnist", "cifar10")
# how an option is written in a file's name; those that are not here by their own names
_SHORT = {"noise_scale": "noise", "dual_frequency": "dual", "dual_step_size": "eta", "step_size": "step"}


@cache
def recipes() -> dict[str, Any]:
    """The whole file, as plain values."""
    text = resources.files("dale.reproduction").joinpath("recipes.yaml").read_text("utf-8")
    plain: dict[str, Any] = parse_yaml(text, "recipes.yaml")
    return plain


@dataclass(frozen=True)
class Spec:
    """One run: a row with its options, on a data set and a model, at a budget, with a seed."""

    dataset: str
    model: str
    algorithm: str
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: str = "short"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS:
            raise unknown("data set of the paper", self.dataset, DATASETS)
        if self.budget not in recipes()[self.dataset]["budgets"]:
            raise unknown(f"budget for {self.dataset}", self.budget, recipes()[self.dataset]["budgets"])

    @property
    def row(self) -> str:
        """What sets the row apart, as in a file's name: "dale-rho0.8-steps5". The recipe's own values are left out."""
        usual = dict(chain.from_iterable(layer.items() for layer in self._layers()))
        parts = [self.algorithm]
        for name, value in self.options.items():
            if name not in usual or usual[name] != value:
                text = re.sub(r"[^A-Za-z0-9.]+", "-", str(value)).strip("-")
                parts.append(f"{_SHORT.get(name, name)}{'' if text[:1].isdigit() else '-'}{text}")
        return "-".join(parts)

    def _layers(self) -> list[Mapping[str, Any]]:
        """The recipe's options, one on top of the other: of the data set, of the budget, of the budget for this row."""
        budget = _budget(self)
        by_row = (budget.get("rows") or {}).get(self.algorithm)
        return [recipes()[self.dataset]["options"], budget.get("options") or {}, by_row or {}]

    @property
    def slug(self) -> str:
        """The name of the run's result: row, budget and seed."""
        return f"{self.row}-{self.budget}-seed{self.seed}"

    @property
    def path(self) -> str:
        """Where the result lies, below the folder of results."""
        return f"{self.dataset}/{self.model}/{self.slug}.json"

    def config(self) -> RunConfig:
        """The configuration of the run."""
        from dale.algorithms import find_row, options_of
        from dale.algorithms.options import overlay
        from dale.components import from_plain
        from dale.perturbations import PerturbationSet
        from dale.training.config import Algorithm, DataConfig, ModelConfig, RunConfig, Training

        base, budget = recipes()[self.dataset], _budget(self)
        taken = options_of(find_row(self.algorithm))
        by_rho = (budget.get("by_rho") or {}).get(self.options.get("rho")) or {}
        usual = [{k: v for k, v in layer.items() if k in taken} for layer in (*self._layers(), by_rho)]
        nothing: dict[str, Any] = {}
        options = reduce(overlay, (*usual, self.options), nothing)
        data = {**base["data"], **(budget.get("data") or {})}
        training: Training = from_plain({**budget["training"], "seed": self.seed}, Training, where="recipes.yaml")
        return RunConfig(
            data=DataConfig(dataset=self.dataset, **data),
            model=ModelConfig(name=self.model, init=budget.get("init")),
            objective=Algorithm(
                name=self.algorithm,
                perturbations=from_plain(base["set"], PerturbationSet, where="recipes.yaml"),
                options=options,
            ),
            training=training,
        )

    @property
    def fast(self) -> Literal["auto", "on", "off"]:
        """Which path training takes."""
        found: Literal["auto", "on", "off"] = _budget(self).get("fast", "auto")
        return found

    def stages(self) -> tuple[Stage, ...]:
        """The stages of its evaluation."""
        return tuple(Stage(**one) for one in _budget(self).get("stages") or recipes()[self.dataset]["stages"])


@dataclass(frozen=True)
class Stage:
    """A part of the evaluation: attacks on the first so many test images (None: all), with checks or without."""

    attacks: list[str]
    examples: int | None = None
    checks: bool = True


def paper_attack(dataset: str, column: str) -> str:
    """How an attack of the paper's columns, fgsm or pgd, is called here."""
    return str(recipes()[dataset]["paper"][column])


def default_model(dataset: str) -> str:
    """The model of a data set in the paper's Table 1."""
    return str(recipes()[dataset]["model"])


def _budget(spec: Spec) -> Mapping[str, Any]:
    found: Mapping[str, Any] = recipes()[spec.dataset]["budgets"][spec.budget]
    return found
