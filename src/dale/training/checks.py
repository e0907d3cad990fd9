"""What is refused before a run begins, because it could only fail later; and what is said of its model and data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dale import random
from dale.batch import Batch
from dale.data import Dataset
from dale.errors import DaleError, UsageError, require, told_of
from dale.models.weights import stored_tensors
from dale.modes import evaluating, sampling_mode
from dale.objectives import Objective


def check(model: nn.Module, objective: Objective, data: Dataset) -> None:
    """Refuse what could only fail later: a model whose outputs do not fit the labels, a promise nobody could judge."""
    logits = _logits(model, data)
    require(isinstance(logits, Tensor), f"the model returned {type(logits).__name__}; expected a tensor of logits")
    require(
        logits.dim() == 2 and len(logits) == 1,
        f"the model returned shape {tuple(logits.shape)} for one image; expected (1, {data.num_classes})",
    )
    require(
        logits.shape[1] >= data.num_classes,
        f"the model has {logits.shape[1]} outputs, {data.name} has {data.num_classes} classes",
    )
    require(bool(logits.isfinite().all()), "the model's logits are not finite, before it was trained at all")
    stored_tensors(model)  # what no checkpoint could hold is said now
    try:
        objective.perturb(model, _first(model, data, 2), random.key(0))  # two: some models have no train mode for one
    except DaleError:  # a gradient that leads nowhere, say
        raise
    except Exception as error:
        raise UsageError(f"no perturbation can be drawn for this model: {told_of(error)}") from error
    for constraint in objective.constraints:
        count = constraint.num_groups(data.num_classes, data.num_groups)
        trained, held_out = (
            constraint.membership(part.labels, part.groups, count).any(dim=0) for part in (data.train, data.validation)
        )
        missing = (trained & ~held_out).nonzero().flatten().tolist()
        require(
            not missing,
            f"no validation example of {constraint.by} {', '.join(map(str, missing))}: whether its limit is met could "
            f"not be seen; raise validation_size, which is {len(data.validation)}",
        )


def smallest_part(batch_size: int, accumulate: int, processes: int) -> int:
    """How many examples the smallest part of a batch has, of those that a process works through one after the other."""
    share = batch_size // processes
    require(share >= 1, f"batch_size {batch_size} is no example for each of {processes} processes: raise it")
    require(
        accumulate <= share,
        f"accumulate must lie between 1 and {share}, the part of a batch of {batch_size} that each of {processes} "
        f"processes has, got {accumulate}",
    )
    return share // accumulate


def check_single(model: nn.Module, objective: Objective, data: Dataset) -> None:
    """Refuse steps on one example where BatchNorm has but one value of a channel then, say; nothing of it is left."""
    batch = _first(model, data)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng([]), sampling_mode(model, "train"):
            delta = objective.perturb(model, batch, random.key(0))
            with torch.no_grad():
                objective.predict(model, batch, delta)
    except Exception as error:
        raise UsageError(
            "the model cannot be trained on one example at a time; raise batch_size or lower accumulate: "
            + told_of(error)
        ) from error
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)


def _first(model: nn.Module, data: Dataset, count: int = 1) -> Batch:
    """The first training examples, where the model is."""
    example = next(iter(data.train.first(count).batches(count)))
    return example.to(next((p.device for p in model.parameters()), example.images.device))


def _logits(model: nn.Module, data: Dataset) -> Tensor:
    """What the model returns for the first training example, in eval mode."""
    image = _first(model, data).images
    try:
        with torch.no_grad(), evaluating(model):
            return model(image)  # type: ignore[no-any-return]
    except Exception as error:  # a model of the user's may raise anything
        shape = "x".join(map(str, data.image_shape))
        told = told_of(error)
        raise UsageError(f"the model does not accept images of {shape}, the shape of {data.name}: {told}") from error


def remarks(model: nn.Module, data: Dataset) -> list[str]:
    """What to say of a model and data that go together, but hardly as they were meant."""
    return [*_homeless(model), *_idle(model, data), *_empty(data)]


def _homeless(model: nn.Module) -> list[str]:
    if type(model).__module__ != "__main__":
        return []
    name = type(model).__name__
    return [f"{name} is defined in the program itself: to load or resume this run elsewhere, move it to a module"]


def _idle(model: nn.Module, data: Dataset) -> list[str]:
    outputs = _logits(model, data).shape[1]
    if outputs == data.num_classes:
        return []
    return [
        f"the model has {outputs} outputs for {data.num_classes} classes: {outputs - data.num_classes} are never right"
    ]


def _empty(data: Dataset) -> list[str]:
    # names or labels with gaps make such
    missing = (torch.bincount(data.train.labels.cpu(), minlength=data.num_classes) == 0).nonzero().flatten().tolist()
    if not missing:
        return []
    shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
    return [f"{len(missing)} of {data.num_classes} classes have no training example: {shown}; labels count from 0"]
