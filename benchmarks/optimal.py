"""The closed form against the chain: `dale-optimal` beside `dale` on the embedded digits, over seeds.

    python benchmarks/optimal.py [--variants NAME ...] [--seeds 0 1 2 3 4] [--validation] [--out FILE]

Each run is that of `dale train --algorithm ROW` with the options of its variant: the data set's own model, schedule,
limit and selection, with the seed in the model and in the training. What counts is on the test split: accuracy under
PGD-20 with 10 restarts. Whether the nominal loss meets rho is read on the validation split, which selected the
checkpoint, and again on two splits that selected nothing, certification and test. Results are written as they come, and
runs already in the file are not repeated, so that an interrupted measurement continues. `--validation` attacks the
validation split instead of the test split: that is how defaults are chosen.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dale.components import to_plain
from dale.data import Dataset, Split
from dale.environment import environment, no_denormals
from dale.evaluation import evaluate
from dale.files import read_json, write_json
from dale.losses import CrossEntropy
from dale.models import create_model
from dale.training import Run, fit
from dale.training.config import Algorithm
from dale.training.recipes import default_config, with_algorithm
from dale.training.validation import predict

RESULTS = Path(__file__).parent / "results"
ATTACK = "pgd20x10"


def _uniform(num_samples: int) -> dict[str, Any]:
    return {"type": "UniformNoise", "num_samples": num_samples}


def _chain(burn_in: int) -> dict[str, Any]:
    """The sampler of `dale`, with the states after the first few instead of the last alone."""
    kernel = {"type": "Langevin", "noise_scale": 1e-4}
    return {"type": "Chain", "kernel": kernel, "steps": 10, "keep": "all", "burn_in": burn_in}


# what is compared: a row and its options
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dale": ("dale", {}),
    "dale-optimal, 8 uniform draws": ("dale-optimal", {"sampler": _uniform(8), "norm_budget": 4.0}),
    "dale-optimal, 4 last states of a chain": ("dale-optimal", {"sampler": _chain(6), "norm_budget": 2.0}),
    "dale-optimal, 8 last states of a chain": ("dale-optimal", {"sampler": _chain(2), "norm_budget": 4.0}),
    "dale, chains that start away from the label": ("dale", {"start": "away"}),
}


def measure(name: str, seed: int, *, validation: bool) -> dict[str, Any]:
    """Train one variant with one seed and evaluate what was selected."""
    row, options = VARIANTS[name]
    config = with_algorithm(default_config("digits"), row)
    assert isinstance(config.objective, Algorithm)
    config = replace(
        config,
        objective=replace(config.objective, options=config.objective.options | options),
        training=replace(config.training, seed=seed),
    )
    data = config.data.load()
    model = create_model(config.model.name, data, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run = fit(model, config.build_objective(), data, out=out, config=config, device="cpu", progress=False)
        return record(name, run, data, validation=validation)


def record(name: str, run: Run, data: Dataset, *, validation: bool) -> dict[str, Any]:
    """Evaluate a run that is there."""
    objective = run.objective
    assert objective.perturbations is not None
    split = data.validation if validation else data.test
    attacked = evaluate(run.model, split, objective.perturbations, [ATTACK], progress=False, checks=False)
    (limit,) = objective.constraints
    return {
        "variant": name,
        "row": objective.name,
        "seed": run.config.training.seed,
        "rho": limit.limit,
        "perturbations": to_plain(objective.perturbations),
        "sampler": to_plain(objective.sampler),
        "aggregator": to_plain(objective.aggregator),
        "epochs": run.config.training.epochs,
        "selected_epoch": run.summary["selected_epoch"],
        "multiplier": run.summary["multipliers"][0][0],
        "loss": {part: _loss(run.model, getattr(data, part)) for part in ("validation", "certification", "test")},
        "clean_accuracy": attacked.clean.to_plain(),
        "attack": ATTACK,
        "attacked_split": "validation" if validation else "test",
        "robust_accuracy": attacked[ATTACK].accuracy.to_plain(),
    }


def _loss(model: torch.nn.Module, split: Split) -> dict[str, float]:
    """The mean nominal loss on a split, with its standard error."""
    logits, labels, _ = predict(model, split, 256, torch.device("cpu"))
    losses = CrossEntropy()(logits, None, labels).double()
    return {
        "mean": losses.mean().item(),
        "standard_error": (losses.std() / len(losses) ** 0.5).item(),
        "n": len(losses),
    }


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of each variant's figures."""
    names = dict.fromkeys(run["variant"] for run in runs)
    return {name: _of_variant([run for run in runs if run["variant"] == name]) for name in names}


def _of_variant(runs: list[dict[str, Any]]) -> dict[str, Any]:
    losses = {
        f"{name}_loss": [run["loss"][name]["mean"] for run in runs] for name in ("validation", "certification", "test")
    }
    figures = {
        "robust_accuracy": [run["robust_accuracy"]["accuracy"] for run in runs],
        "clean_accuracy": [run["clean_accuracy"]["accuracy"] for run in runs],
        **losses,
        "multiplier": [run["multiplier"] for run in runs],
    }
    rho = runs[0]["rho"]
    return {
        "seeds": len(runs),
        "rho": rho,
        "validation_loss_within_rho": sum(value <= rho for value in losses["validation_loss"]),
        **{
            name: {
                "mean": statistics.fmean(values),
                "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
                "smallest": min(values),
                "largest": max(values),
            }
            for name, values in figures.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--validation", action="store_true", help="attack the validation split: to choose a default")
    parser.add_argument("--out", type=Path, help="default: optimal.json, or optimal-validation.json, under results/")
    args = parser.parse_args()
    out = args.out or RESULTS / ("optimal-validation.json" if args.validation else "optimal.json")
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = read_json(out)["runs"] if out.exists() else []
    for seed in args.seeds:
        for name in args.variants:
            if any(run["variant"] == name and run["seed"] == seed for run in runs):
                continue
            with no_denormals():
                runs.append(measure(name, seed, validation=args.validation))
            write_json(out, {"environment": environment(), "runs": runs, "summary": summarise(runs)})
            last = runs[-1]
            print(
                f"{name}, seed {seed}: {ATTACK} {last['robust_accuracy']['accuracy']:.3f}, clean "
                f"{last['clean_accuracy']['accuracy']:.3f}, held-out loss {last['loss']['validation']['mean']:.3f}, "
                f"nu {last['multiplier']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
