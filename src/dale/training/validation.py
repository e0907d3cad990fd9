"""Validation: the weights that will be shipped, in eval mode, on held-out data.

Measures every constraint on held-out and on training data (the gap tightens the limit), and accuracy, clean and under a
short PGD attack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dale.batch import Batch
from dale.components import Component
from dale.constraints import Constraint, tightened
from dale.data import Split
from dale.errors import require
from dale.files import finite
from dale.losses import CrossEntropy
from dale.modes import evaluating
from dale.objectives import Duals, Objective
from dale.random import Key
from dale.samplers import Chain, pgd
from dale.training import distributed
from dale.training.selection import Candidate

Precision = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class Validation(Component):
    """How checkpoints are validated: every `every` epochs, by PGD of `steps` steps on at most `examples` images.

    None for `examples` takes a tenth of the training set's size, at least 200, so that validating costs a small share
    of training. Clean measures always use the whole held-out split.
    """

    every: int = 1
    steps: int = 10
    examples: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("steps", self.steps), ("examples", self.examples)):
            require(value is None or value >= 1, f"Validation: {name} must be at least 1, got {value!r}")

    def attack(self) -> Chain:
        """The attack that robust accuracy is measured with."""
        return pgd(self.steps)

    def count(self, train: Split, held_out: Split) -> int:
        """How many held-out images are attacked."""
        return min(len(held_out), max(200, len(train) // 10) if self.examples is None else self.examples)


@dataclass(frozen=True)
class Measure:
    """A constraint's measure on a split, per group: mean, standard error of the mean, and members."""

    mean: Tensor
    error: Tensor
    members: Tensor


_LARGEST = 1e300  # and no infinity: a candidate is written to a checkpoint as JSON


def _violation(constraint: Constraint, found: Measure) -> float:
    """The largest of any group, less its standard error; a measure that is no number is the largest there is."""
    excess = (found.mean - constraint.limits(len(found.mean)) - found.error).nan_to_num(_LARGEST)
    return float(torch.where(found.members > 0, excess, -math.inf).max())


@dataclass(frozen=True)
class Validated:
    """What one validation found. `robust` is NaN where there is no perturbation set."""

    clean: float
    nominal: float
    robust: float
    measures: tuple[Measure, ...]
    trained: tuple[Measure, ...]

    def candidate(self, epoch: int, objective: Objective) -> Candidate:
        """Turn it into a candidate for selection."""
        excess = [_violation(c, m) for c, m in zip(objective.constraints, self.measures, strict=True)]
        score = self.robust if objective.robust and math.isfinite(self.robust) else self.clean
        return Candidate(epoch, score, max(excess, default=0.0))

    def to_plain(self) -> dict[str, Any]:
        """The numbers for a log line."""
        plain: dict[str, Any] = {"clean_accuracy": self.clean, "nominal_loss": self.nominal}
        if math.isfinite(self.robust):
            plain["robust_accuracy"] = self.robust
        plain["constraints"] = [
            {"measure": m.mean.tolist(), "standard_error": m.error.tolist()}
            | ({} if t is m else {"train": t.mean.tolist()})  # measured where a limit is tightened by it
            for m, t in zip(self.measures, self.trained, strict=True)
        ]
        return finite(plain)  # type: ignore[no-any-return]


def _batches(split: Split, batch_size: int, device: torch.device) -> Iterator[Batch]:
    for batch in split.batches(batch_size):
        yield batch.to(device)


@torch.no_grad()
def predict(model: nn.Module, split: Split, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and groups (labels where there are none) of a whole split, in eval mode, on the CPU.

    Several processes take a part of the split each, and all get the whole.
    """
    part = distributed.share(split)
    logits = []
    with evaluating(model):
        for batch in _batches(part, batch_size, device):
            logits.append(model(batch.images).float().cpu())
    whole = distributed.gathered(torch.cat(logits) if logits else torch.zeros(0, 0))
    return whole, split.labels.cpu(), (split.labels if split.groups is None else split.groups).cpu()


def measure(constraint: Constraint, count: int, logits: Tensor, labels: Tensor, groups: Tensor) -> Measure:
    """Measure a constraint, per group, with the standard error of each mean."""
    values = constraint.measured(logits, logits, labels).double()
    member = constraint.membership(labels, groups, count).double()
    members = member.sum(dim=0)
    mean = (member * values.unsqueeze(1)).sum(dim=0) / members
    spread = (member * (values.unsqueeze(1) - mean).square()).sum(dim=0) / (members - 1.0).clamp_min(1.0)
    return Measure(mean, (spread / members).sqrt(), members)


def robust_accuracy(
    model: nn.Module,
    split: Split,
    objective: Objective,
    attack: Chain,
    key: Key,
    batch_size: int,
    device: torch.device,
    precision: Precision = nullcontext,
) -> float:
    """The share of examples that stay right under an attack from one random start.

    The attack climbs in the `precision` of training, a fraction of float32's cost; what it finds is judged in float32.
    """
    assert objective.perturbations is not None
    correct = torch.zeros((), device=device)
    with evaluating(model):
        for batch in _batches(distributed.share(split), batch_size, device):
            with precision():
                delta = attack(model, batch, objective.perturbations, CrossEntropy(), key=key)[0]
            with torch.no_grad():
                perturbed = model(objective.perturbations.apply(batch.images, delta))
                right = (perturbed.argmax(dim=1) == batch.labels) & (model(batch.images).argmax(dim=1) == batch.labels)
                correct += right.sum()
    return float(distributed.total(correct)[0]) / len(split)


def validate(
    model: nn.Module,
    objective: Objective,
    duals: Duals,
    train: Split,
    held_out: Split,
    config: Validation,
    *,
    key: Key,
    batch_size: int,
    precision: Precision = nullcontext,
) -> Validated:
    """Validate the weights that will be shipped; `precision` is the context in which training runs the model."""
    device = next(model.parameters()).device
    logits, labels, groups = predict(model, held_out, batch_size, device)
    counts = [len(dual.multiplier) for dual in duals]
    measures = tuple(measure(c, n, logits, labels, groups) for c, n in zip(objective.constraints, counts, strict=True))
    trained = measures
    if any(c.tighten for c in objective.constraints):
        seen = predict(model, train.first(max(4 * len(held_out), 1)), batch_size, device)
        trained = tuple(measure(c, n, *seen) for c, n in zip(objective.constraints, counts, strict=True))
    robust = math.nan
    if objective.perturbations is not None:
        attacked = held_out.first(config.count(train, held_out))
        robust = robust_accuracy(model, attacked, objective, config.attack(), key, batch_size, device, precision)
    clean = float((logits.argmax(dim=1) == labels).double().mean())
    nominal = float(objective.nominal_loss(logits, logits, labels).double().mean())
    return Validated(clean, nominal, robust, measures, trained)


def tighten(objective: Objective, duals: Duals, seen: Validated) -> Duals:
    """Re-estimate how far each limit must be tightened for the promise to hold on held-out data."""
    return tuple(
        tightened(c, dual, held_out.mean.to(dual.margin), trained.mean.to(dual.margin))
        for c, dual, held_out, trained in zip(objective.constraints, duals, seen.measures, seen.trained, strict=True)
    )
