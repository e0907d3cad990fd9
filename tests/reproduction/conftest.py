"""Synthetic result files, whose tables are known exactly, and a run that is small enough to train here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dale.files import write_json
from dale.reproduction import Spec, Stage
from dale.training import Algorithm, DataConfig, RunConfig, Training
from dale.training.recipes import default_config
from dale.training.validation import Validation

ENVIRONMENT = {"gpu": "A GPU", "torch": "2.11.0", "cpu": "A CPU"}


def accuracy(share: float, n: int) -> dict[str, Any]:
    return {"correct": round(share * n), "n": n, "accuracy": share, "lower": share - 0.01, "upper": share + 0.01}


def plain_result(spec: Spec, stages: list[tuple[int, dict[str, float]]], **more: Any) -> dict[str, Any]:
    training = {
        "selected_epoch": 15,
        "epochs": 15,
        "feasible": True if spec.algorithm == "dale" else None,
        "violation": -0.1,
        "held_out_loss": 0.75,
        "multipliers": [[0.25]] if spec.algorithm == "dale" else [],
        "seconds": 60.0,
    }
    return {
        "format": 1,
        "dataset": spec.dataset,
        "model": spec.model,
        "algorithm": spec.algorithm,
        "options": dict(spec.options),
        "budget": spec.budget,
        "seed": spec.seed,
        "stages": [
            {"n": n, "accuracies": {name: accuracy(share, n) for name, share in found.items()}} for n, found in stages
        ],
        "training": training,
        "environment": ENVIRONMENT,
        "config": spec.config().to_yaml(),
        **more,
    }


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Path]:
    """Write a synthetic result of a run below tmp_path/results."""

    def write(spec: Spec, *stages: tuple[int, dict[str, float]], **more: Any) -> Path:
        path = tmp_path / "results" / spec.path
        write_json(path, plain_result(spec, list(stages), **more))
        return path

    return write


@dataclass(frozen=True)
class TinySpec(Spec):
    """A run of a few seconds on the embedded digits, in the place of a run on MNIST."""

    epochs: int = 2

    def config(self) -> RunConfig:
        usual = default_config("digits")
        assert isinstance(usual.objective, Algorithm)
        options = {"steps": 1, **dict(self.options)}
        return replace(
            usual,
            data=DataConfig(train_size=96, validation_size=40, certification_size=1, test_size=40),
            objective=replace(usual.objective, name=self.algorithm, options=options),
            training=Training(
                epochs=self.epochs, batch_size=32, seed=self.seed, validation=Validation(steps=1, examples=10)
            ),
        )

    def stages(self) -> tuple[Stage, ...]:
        return (
            Stage(["fgsm", "pgd2@0.1-last"], checks=False),
            Stage(["pgd2x2"], examples=10, checks=False),
        )


@pytest.fixture
def tiny() -> TinySpec:
    return TinySpec("mnist", "convnet", "dale", {"rho": 0.5}, "short")
