"""`fit`: train a model on data under an objective, in a run folder, from the start or from its last checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from dale.components import import_path, to_plain
from dale.data import Dataset, Loader
from dale.environment import kept_memory, no_denormals, require_bfloat16
from dale.errors import CheckpointError, UsageError, require, unknown
from dale.files import finite, write_json
from dale.objectives import Objective
from dale.training import distributed
from dale.training.averaging import AveragedModel
from dale.training.certification import fingerprints, require_same_splits
from dale.training.checks import check, check_single, remarks, smallest_part
from dale.training.config import DataConfig, ModelConfig, RunConfig, Training
from dale.training.diagnosis import stuck
from dale.training.fast import CapturedStep, Fast, make_step
from dale.training.loggers import make_logger, require_loggers
from dale.training.loop import Trainer
from dale.training.parallel import DistributedStep, leaves_parameters_unused, synchronised
from dale.training.progress import Progress
from dale.training.recipes import default_config
from dale.training.runs import Run, RunFolder, save_model
from dale.training.selection import Selection
from dale.training.state import TrainState
from dale.training.steps import PlainStep


def fit(
    model: nn.Module,
    objective: Objective,
    data: Dataset,
    *,
    out: str | Path | None = None,
    config: RunConfig | None = None,
    device: str | None = None,
    resume: bool = False,
    progress: bool = True,
    fast: Fast = "auto",
    loggers: Sequence[str] = ("tensorboard",),
    **training: Any,
) -> Run:
    """Train `model` and return the run, with the selected weights in `run.model` (which is `model`, in eval mode).

    `training` are fields of `Training`: epochs, batch_size, optimiser, schedule, ...; what is not given is as in the
    data set's default recipe. `out` is the run folder; without it a new one is made under runs/. `config` overrides
    what is recorded as the run's configuration. With `resume` the run in `out` continues from its newest readable
    checkpoint, and ends as if it had never stopped. `fast`: take the fast path where the model and the row allow it
    (`auto`; `on` says why not, and compiles for a short run too), or never (`off`). `loggers`: live views, of
    tensorboard, wandb and mlflow.
    """
    if fast not in get_args(Fast):
        raise unknown("fast", fast, get_args(Fast))
    require_loggers(loggers)
    for name, value, kind in (
        ("model", model, nn.Module),
        ("objective", objective, Objective),
        ("data", data, Dataset),
    ):
        require(isinstance(value, kind), f"fit: {name} must be a {kind.__name__}, got {value!r:.80}")
    config = _config(model, objective, data, config, training)
    settings = config.training
    check(model, objective, data)
    objective.initial_duals(data.num_classes, data.num_groups)  # both refuse what does not fit, before a folder is made
    settings.optimiser.build(model)
    with distributed.connected(device) as place, ExitStack() as stack:
        if place.type == "cpu" and settings.precision == "bfloat16":
            require_bfloat16()
        size = distributed.world_size()
        least = smallest_part(settings.batch_size, settings.accumulate, size)
        if least == 1 and not (settings.sync_batchnorm and size > 1):
            check_single(model, objective, data)
        folder = RunFolder(distributed.told(str(out if out is not None else free_folder(data.name, objective.name))))
        resume = distributed.told("resume" if resume else "") != ""

        splits = fingerprints(data)
        distributed.first(lambda: _enter(stack, folder, config, objective, splits, resume))
        model.to(place)
        devices = [place] if place.type == "cuda" else []
        random_state, bits = torch.random.fork_rng(devices), _determinism(settings.deterministic)
        for context in (random_state, bits, no_denormals(), kept_memory(place)):
            stack.enter_context(context)
        stack.enter_context(synchronised(model, settings.sync_batchnorm))
        loader = Loader(
            data.train,
            settings.batch_size,
            seed=settings.seed,
            augmentation=settings.augmentation,
            device=place,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        filled = objective.for_run(settings.epochs * len(loader), settings.epochs, data.num_classes, data.num_groups)
        step, line = _step(model, filled, settings, loader, fast)
        average = None if settings.averaging is None else AveragedModel(model, settings.averaging)
        state = TrainState(
            model,
            settings.optimiser.build(model, captured=isinstance(step, CapturedStep)),
            filled.initial_duals(data.num_classes, data.num_groups, place),
            average,
        )
        notes = distributed.first(lambda: folder.restore(state)) if resume else None
        if resume:
            distributed.same_state(state)
        distributed.first(lambda: folder.write_metrics(state.history))
        total, done = settings.epochs * len(loader), state.epoch * len(loader) + state.batch
        board = make_logger(loggers, folder.path if distributed.is_main() else None, state.epoch + 1)
        summary: dict[str, Any] | None = None
        try:
            board.start(to_plain(config))
            with Progress(total, done, progress and distributed.is_main()) as bar:
                warnings = (*(notes or ()), *remarks(model, data))
                for note in (*(f"warning: {note}" for note in warnings), line):
                    bar.say(note)
                step.say = bar.say
                Trainer(config, filled, data, state, folder, loader, step, place, bar, board).run()
            summary = _finish(model, filled, data, state, folder, config, splits)
        finally:
            board.finish(summary)
    return Run(folder, model, config, objective, summary)


def _enter(
    stack: ExitStack,
    folder: RunFolder,
    config: RunConfig,
    objective: Objective,
    splits: Mapping[str, str],
    resume: bool,
) -> None:
    """Take the run's folder, a new one or one to go on in, and hold it until the stack is left."""
    if resume:
        folder.require_same(config)
        known, parts = folder.environment().get("splits", {}), ("train", "certification")
        require_same_splits(known, splits, parts, folder.path, "it cannot go on with it")
    elif folder.exists:
        folder.refuse()
    else:
        distributed.begin()
    stack.enter_context(folder.locked())
    if not resume:
        folder.create(config)
    folder.write_environment(objective, splits)


def _step(
    model: nn.Module, objective: Objective, settings: Training, loader: Loader, fast: Fast
) -> tuple[PlainStep, str]:
    """The step of this run, and a line about it."""
    place, batch_size = loader.device, loader.batch_size
    step: PlainStep
    if distributed.active():
        unused = leaves_parameters_unused(model, next(iter(loader.split.first(1).batches(1))).to(place).images)
        step = DistributedStep(objective, settings.dtype, place, model, batch_size, unused=unused)
        size = distributed.world_size()
        line = f"{size} process{'es' if size > 1 else ''}, {batch_size} examples a step together" + (
            "; the plain path, for the captured step is one process's" if place.type == "cuda" else ""
        )
    else:
        # on a CPU, where the plain path's bits are promised, the fast one is taken only when asked for
        chosen: Fast = "off" if fast == "auto" and place.type == "cpu" else fast
        steps, by_trial = len(loader) * settings.epochs, not settings.deterministic
        shape = tuple(loader.split.images.shape[1:])
        step, line = make_step(model, shape, objective, settings.dtype, place, chosen, steps, by_trial=by_trial)
    step.accumulate = settings.accumulate
    step.weight_perturbation = settings.weight_perturbation
    return step, line


def _finish(
    model: nn.Module,
    objective: Objective,
    data: Dataset,
    state: TrainState,
    folder: RunFolder,
    config: RunConfig,
    splits: Mapping[str, str],
) -> dict[str, Any]:
    """Keep the last weights and the selected ones, and say what was selected and whether the limits are met."""

    def keep() -> str:
        save_model(state.shipped, folder.path / "last.safetensors", config, data)
        candidates, lost = Selection(dict(state.selection.candidates)), []
        while (best := candidates.best) is not None:
            try:
                folder.load_candidate(model, best.epoch)
                break
            except CheckpointError as error:  # the next best, rather than nothing
                lost.append(f"{error}; the next best epoch was selected")
                del candidates.candidates[best.epoch]
        if best is None:  # the last epoch is always validated: something was lost
            raise CheckpointError(
                f"{lost[0].partition(';')[0]}, and no other is left; the last epoch's weights are safe"
            )
        save_model(model, folder.path / "model.safetensors", config, data)
        return json.dumps([best.epoch, lost])

    epoch, lost = json.loads(distributed.told(distributed.first(keep) or ""))
    best = state.selection.candidates[epoch]
    distributed.same_weights(model)
    model.eval()
    last = state.history[-1]
    summary = {
        "selected_epoch": best.epoch,
        "epochs": config.training.epochs,
        "score": best.score,
        "feasible": best.feasible if objective.constraints else None,
        "violation": best.violation if objective.constraints else None,
        "validation": next(r["validation"] for r in state.history if r["epoch"] == best.epoch),
        "multipliers": [constraint["multiplier"] for constraint in last["constraints"]],
        "warnings": lost + stuck(state.history, config.training.epochs),
        "splits": dict(splits),
        "seconds": sum(r["seconds"]["total"] for r in state.history),
    }
    distributed.first(lambda: write_json(folder.path / "summary.json", finite(summary)))
    return summary


def _config(
    model: nn.Module, objective: Objective, data: Dataset, config: RunConfig | None, training: dict[str, Any]
) -> RunConfig:
    """The configuration to record: the given one, or one that describes the objects at hand."""
    if config is None:
        name = getattr(model, "dale_name", None) or import_path(type(model))
        config = RunConfig(
            data=DataConfig(
                dataset=data.source or data.name,
                train_size=len(data.train),
                validation_size=len(data.validation),
                certification_size=len(data.certification),
                test_size=len(data.test),
                seed=data.seed,
            ),
            model=ModelConfig(
                name=name,
                activation=getattr(model, "dale_activation", "relu"),
                init=getattr(model, "dale_init", None),
            ),
            objective=objective,
            training=default_config(data.name).training,
        )
    try:
        return replace(config, training=replace(config.training, **training))
    except TypeError as error:
        valid = ", ".join(Training.__dataclass_fields__)
        raise UsageError(f"{str(error).partition('() ')[2] or error}; options of training are: {valid}") from error


def free_folder(dataset: str, algorithm: str) -> Path:
    """The first free folder runs/DATASET-ALGORITHM-NNN."""
    stem = Path(dataset).stem or "data"
    name = algorithm.rpartition(":")[2]
    number = 1
    while (path := Path("runs") / f"{stem}-{name}-{number:03d}").exists():
        number += 1
    return path


class _determinism:  # noqa: N801 (a context manager, used like a function)
    """Ask torch for the same bits on a GPU, while inside."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted

    def __enter__(self) -> None:
        self.before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
        )
        if self.wanted:
            # cuBLAS is deterministic only with a workspace of its own per stream, and reads this when it starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self.before[0], warn_only=self.before[1])
        torch.backends.cudnn.benchmark = self.before[2]
