"""Bring one run to its end: train or continue, evaluate in stages, write its result. Each part survives a kill."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dale import random
from dale.attacks import parse
from dale.data import Dataset
from dale.environment import environment, no_denormals
from dale.errors import DaleError
from dale.evaluation import evaluate
from dale.files import finite, read_json, write_json
from dale.models import create_model
from dale.modes import evaluating, frozen
from dale.reproduction.paper_mode import train_mode_accuracies
from dale.reproduction.recipes import Spec, Stage
from dale.reproduction.results import compose
from dale.training import Run, fit, load_run
from dale.training.artefacts import projection


def work(
    spec: Spec,
    folder: Path,
    result: Path,
    *,
    device: str | None = None,
    data_dir: str | None = None,
    paper_mode: bool = False,
    shared_by: int = 1,
    progress: bool = False,
) -> None:
    """Train, evaluate and write `result`; the run lies in `folder`, from which an interrupted one continues.

    `shared_by` is how many processes had the device, which the seconds in the result depend on.
    """
    began = time.perf_counter()
    with no_denormals():
        data = spec.config().data.load(data_dir)
        run = trained(spec, folder, data, device, progress)
        stages = [_stage(run, data, stage, number, progress) for number, stage in enumerate(spec.stages())]
        more: dict[str, Any] = {}
        if paper_mode:
            more["paper_mode"] = train_mode_accuracies(run.model, data.test, spec)
        if spec.dataset == "mnist" and spec.algorithm == "dale":  # the paper's Figure 1 is drawn from it
            assert run.objective.perturbations is not None
            key = random.key(spec.seed).fold("artefacts").fold("projection")
            with evaluating(run.model), frozen(run.model):
                more["projection"] = projection(run, data, run.objective.perturbations, key)
    plain = compose(
        spec,
        run.config.to_yaml(),
        run.summary,
        run.metrics(),
        stages,
        environment(),
        wall_seconds=round(time.perf_counter() - began, 2),
        shared_by=shared_by,
        **more,
    )
    write_json(result, finite(plain))
    # the weights stay, what was there to continue from goes: a table would fill a disk
    shutil.rmtree(run.path / "checkpoints", ignore_errors=True)


def trained(spec: Spec, folder: Path, data: Dataset, device: str | None, progress: bool = False) -> Run:
    """The finished run of a spec: loaded where it is finished, continued where it was begun, trained otherwise."""
    config = spec.config()
    if (folder / "model.safetensors").is_file() and (folder / "summary.json").is_file():
        run = load_run(folder, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if run.config != config:
            raise DaleError(f"{folder} was trained by another recipe; remove it, or choose another --runs")
        return run
    model = create_model(config.model.name, data, seed=spec.seed, init=config.model.init)
    return fit(
        model,
        config.build_objective(),
        data,
        out=folder,
        config=config,
        device=device,
        fast=spec.fast,
        resume=(folder / "config.yaml").is_file(),
        progress=progress,
        loggers=(),
    )


def _stage(run: Run, data: Dataset, stage: Stage, number: int, progress: bool) -> Mapping[str, Any]:
    """One stage of the evaluation, read from the run folder where it is there already."""
    path = run.path / ("evaluation.json" if number == 0 else f"evaluation-{number + 1}.json")
    count = len(data.test) if stage.examples is None else min(stage.examples, len(data.test))
    if path.is_file():
        plain: dict[str, Any] = read_json(path)
        asked = [parse(attack).name for attack in stage.attacks]
        if (plain["n"], [a["name"] for a in plain["attacks"]], plain["seed"]) == (count, asked, 0):
            return plain
    assert run.objective.perturbations is not None
    return evaluate(
        run.model,
        data,
        run.objective.perturbations,
        stage.attacks,
        examples=count,
        rho=run.objective.rho,
        checks=stage.checks,
        out=path,
        progress=progress,
    ).to_plain()
