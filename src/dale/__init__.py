"""Robust image classifiers under a guaranteed nominal performance.

Names load on first use, so that `dale --help` and reports start without torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "L1": "dale.perturbations",
    "L2": "dale.perturbations",
    "Linf": "dale.perturbations",
    "Rotation": "dale.perturbations",
    "Translation": "dale.perturbations",
    "Scaling": "dale.perturbations",
    "Composition": "dale.perturbations",
    "ParameterBox": "dale.perturbations",
    "PerturbationSet": "dale.perturbations",
    "Loss": "dale.losses",
    "Sampler": "dale.samplers",
    "Chain": "dale.samplers",
    "Kernel": "dale.samplers",
    "Langevin": "dale.samplers",
    "Constraint": "dale.constraints",
    "Objective": "dale.objectives",
    "Step": "dale.objectives",
    "Batch": "dale.batch",
    "Key": "dale.random",
    "key": "dale.random",
    "Dataset": "dale.data",
    "Split": "dale.data",
    "load_dataset": "dale.data",
    "create_model": "dale.models",
    "check_model": "dale.models",
    "load_model": "dale.zoo",
    "load_run": "dale.training",
    "fit": "dale.training",
    "Run": "dale.training",
    "Training": "dale.training",
    "Evaluation": "dale.evaluation",
    "evaluate": "dale.evaluation",
    "DaleError": "dale.errors",
    "UsageError": "dale.errors",
}

_MODULES = (
    "aggregators",
    "algorithms",
    "attacks",
    "certificates",
    "components",
    "constraints",
    "data",
    "evaluation",
    "lambda_star",
    "losses",
    "models",
    "objectives",
    "perturbations",
    "random",
    "samplers",
    "training",
)

__all__ = [*_MODULES, *_NAMES]  # noqa: PLE0604 (all of them are strings)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"dale.{name}")
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'dale' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
