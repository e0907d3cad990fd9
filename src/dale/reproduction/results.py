"""Results: one JSON file per run, with everything that a table, a figure or a reader may ask about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from dale.errors import CheckpointError, DaleError
from dale.files import read_json
from dale.reproduction.recipes import Spec

FORMAT = 1


@dataclass(frozen=True)
class Result:
    """A result file."""

    path: Path
    plain: Mapping[str, Any]

    def accuracy(self, attack: str) -> Mapping[str, Any] | None:
        """The accuracy under an attack (or "clean") with its counts and interval, from the first stage that has it."""
        for stage in self.plain["stages"]:
            if attack in stage["accuracies"]:
                found: Mapping[str, Any] = stage["accuracies"][attack]
                return found
        return None


def read_result(path: Path) -> Result:
    """Read a result file."""
    plain = read_json(path)
    if not isinstance(plain, dict) or plain.get("format") != FORMAT or not isinstance(plain.get("stages"), list):
        raise CheckpointError(f"{path} is not a result of `dale reproduce`, format {FORMAT}")
    return Result(path, plain)


def find_results(root: Path, spec: Spec) -> list[Result]:
    """The results on file of a row, whatever their seed, in the order of the seeds."""
    stem = spec.slug.rpartition("-seed")[0]
    found = []
    for path in (root / spec.dataset / spec.model).glob(f"{stem}-seed*.json"):
        number = path.stem.rpartition("-seed")[2]
        if number.isdigit() and path.stem.rpartition("-seed")[0] == stem:
            found.append((int(number), path))
    return [read_result(path) for _, path in sorted(found)]


def is_current(result: Result, spec: Spec) -> bool:
    """Whether a result was made by today's recipe of its row, whatever its seed; fields added since count as unset."""
    from dale.training.config import RunConfig

    made, today = str(result.plain.get("config", "")), replace(spec, seed=int(result.plain["seed"])).config().to_yaml()
    try:
        return made == today or RunConfig.from_yaml(made, where=str(result.path)).to_yaml() == today
    except DaleError:
        return False


@dataclass(frozen=True)
class Summary:
    """A number over seeds: mean, standard deviation (None for one seed), seeds, and the fewest images behind a value.

    The variance of the mean is that of the images, p (1 - p) / n, and that of the seeds, spread^2 / seeds, together:
    seeds share the test images, so that more seeds are not more images.
    """

    mean: float
    spread: float | None
    seeds: int
    n: int

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        images = math.sqrt(max(self.mean * (1.0 - self.mean), 0.0) / self.n)
        return math.hypot(images, 0.0 if self.spread is None else self.spread / math.sqrt(self.seeds))


def summarise(results: Sequence[Result], attack: str) -> Summary | None:
    """An accuracy over the seeds of a row; None where no result has it."""
    return summary_of([one for result in results if (one := result.accuracy(attack)) is not None])


def summary_of(found: Sequence[Mapping[str, Any]]) -> Summary | None:
    """The summary of accuracies as they are in results, one for each seed; None where there is none."""
    if not found:
        return None
    values = [float(one["accuracy"]) for one in found]
    return Summary(
        mean(values), stdev(values) if len(values) > 1 else None, len(values), min(int(one["n"]) for one in found)
    )


def compose(
    spec: Spec,
    config: str,
    summary: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    stages: Sequence[Mapping[str, Any]],
    environment: Mapping[str, Any],
    **more: Any,
) -> dict[str, Any]:
    """Put a result together from what a run folder holds; `more` are further parts, such as wall_seconds."""
    return {
        "format": FORMAT,
        "dataset": spec.dataset,
        "model": spec.model,
        "algorithm": spec.algorithm,
        "options": dict(spec.options),
        "budget": spec.budget,
        "seed": spec.seed,
        "stages": [_stage(stage) for stage in stages],
        "training": _training(summary, metrics),
        **more,
        "environment": dict(environment),
        "series": series(metrics),
        "config": config,
    }


def _stage(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an evaluation.json that a result keeps."""
    accuracies = {"clean": evaluation["clean"]}
    accuracies |= {attack["name"]: attack["accuracy"] for attack in evaluation["attacks"]}
    return {
        "n": evaluation["n"],
        "accuracies": accuracies | {"worst": evaluation["worst"]},
        "nominal_loss": evaluation["nominal_loss"],
        "alarms": [alarm for alarm in evaluation["alarms"] if not alarm["passed"]],
        "seconds": round(evaluation["seconds"], 2),
    }


def _training(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    # the first epoch compiles, and the first after a resume does so again: the median is of the others
    seconds = [float(record["seconds"]["train"]) for record in metrics]
    epoch = median(seconds[1:] or seconds)
    batches = int(metrics[0]["step"]) if metrics[0]["epoch"] == 1 else 1
    held = summary["validation"]
    return {
        "selected_epoch": summary["selected_epoch"],
        "epochs": summary["epochs"],
        "feasible": summary["feasible"],
        "violation": summary["violation"],
        "held_out_loss": held["nominal_loss"],
        "held_out_clean": held["clean_accuracy"],
        "held_out_robust": held.get("robust_accuracy"),
        "multipliers": summary["multipliers"],
        "warnings": summary["warnings"],
        "seconds": round(summary["seconds"], 2),
        "seconds_per_epoch": round(epoch, 4),
        "seconds_per_batch": round(epoch / batches, 6),
    }


def series(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Curves over the epochs: losses and accuracies of training, nu and the limit, and what each validation found."""

    def short(value: Any) -> Any:
        return float(f"{value:.5g}") if isinstance(value, float) else value

    names = ("epoch", "nominal_loss", "robust_loss", "clean_accuracy", "robust_accuracy", "learning_rate")
    plain: dict[str, Any] = {name: [short(record.get(name)) for record in metrics] for name in names}
    if metrics and metrics[0]["constraints"]:
        first = [record["constraints"][0] for record in metrics]
        plain["limit"] = first[-1]["limit"][0]
        plain["multiplier"] = [short(one["multiplier"][0]) for one in first]
    seen = [record for record in metrics if "validation" in record]
    plain["validation"] = {
        "epoch": [record["epoch"] for record in seen],
        **{
            name: [short(record["validation"].get(name)) for record in seen]
            for name in ("clean_accuracy", "robust_accuracy", "nominal_loss")
        },
    }
    return plain
