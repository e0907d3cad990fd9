"""Constraints on nominal performance, and the dual variables that enforce them.

A constraint asks E[loss] <= rho, for everybody or for every class or group g. With the per-batch violation

    v_g = mean over the batch of 1[group = g] * (loss - rho_g)

the Lagrangian gains the term sum_g nu_g v_g and dual ascent moves nu_g <- [nu_g + eta_d v_g]+. A group that is absent
from a batch contributes nothing to either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dale.components import Component
from dale.errors import UsageError, require, require_choice, require_non_negative, require_positive
from dale.losses import CrossEntropy, Loss, ZeroOne

DUAL_BUDGET = 10.0  # how far a multiplier may travel in a whole run at a violation of one: see `Constraint.step_size`
DEFAULT_STEP_SIZE = 0.01  # where the length of the run is unknown


@dataclass(frozen=True, kw_only=True)
class Constraint(Component):
    """E[measure] <= limit, held by one multiplier per group.

    `loss` is what the primal descends. `measure` is what the limit speaks of and the dual follows: the loss itself
    (None), or the 0-1 error where the promise is an accuracy (a proxy constraint). `by`: one multiplier for all, one
    per `class`, or one per `group` given with the data; `limit` is then one number or one per group.

    Dual ascent: `step_size` = eta_d, per `step` on the batch's estimate or per `epoch` on the epoch's average
    (Algorithm 1 as printed); the same eta_d means very different things under the two. None chooses 10 over the number
    of ascents of the run (times the number of groups), so that the large violations of the first steps do not wind the
    multiplier up. `initial` =
    nu_0; `upper` bounds the multiplier. `tighten`: train at the limit minus the gap between held-out and training
    nominal loss, measured every epoch, so that the promise holds on data not trained on.
    """

    loss: Loss = CrossEntropy()
    measure: Loss | None = None
    limit: float | tuple[float, ...]
    by: Literal["all", "class", "group"] = "all"
    step_size: float | None = None
    frequency: Literal["step", "epoch"] = "step"
    initial: float = 0.5
    upper: float | None = None
    tighten: bool = True

    def __post_init__(self) -> None:
        limits = self.limit if isinstance(self.limit, tuple) else (self.limit,)
        require(len(limits) > 0, "Constraint: limit is empty")
        require_non_negative(self, **{f"limit[{i}]" if len(limits) > 1 else "limit": v for i, v in enumerate(limits)})
        floats = tuple(map(float, limits))  # as a file has them
        object.__setattr__(self, "limit", floats if isinstance(self.limit, tuple) else floats[0])
        require_non_negative(self, initial=self.initial)
        require_positive(self, step_size=self.step_size, upper=self.upper)
        require_choice(self, ("all", "class", "group"), by=self.by)
        require_choice(self, ("step", "epoch"), frequency=self.frequency)
        require(self.by != "all" or len(limits) == 1, f"Constraint: one limit for all, got {len(limits)}")
        if self.upper is not None:
            require(self.initial <= self.upper, f"Constraint: initial {self.initial} lies above upper {self.upper}")

    @property
    def measured(self) -> Loss:
        """The loss that the limit speaks of."""
        return self.loss if self.measure is None else self.measure

    @property
    def on_accuracy(self) -> bool:
        """Whether the limit is one on the 0-1 error."""
        return isinstance(self.measured, ZeroOne)

    def num_groups(self, num_classes: int | None, num_groups: int | None) -> int:
        """How many multipliers there are."""
        if self.by == "all":
            return 1
        count = num_classes if self.by == "class" else num_groups
        if not count:
            raise UsageError(f"Constraint: by={self.by!r} needs to know how many; the data has no {self.by} labels")
        if isinstance(self.limit, tuple) and len(self.limit) not in (1, count):
            raise UsageError(f"Constraint: {len(self.limit)} limits for {count} values of {self.by!r}")
        return count

    def limits(self, count: int, like: Tensor | None = None) -> Tensor:
        """The limit of each group, (G,)."""
        values = self.limit if isinstance(self.limit, tuple) else (self.limit,)
        device = torch.device("cpu") if like is None else like.device
        # filled there, value by value: a copy from the host would stop a captured graph
        filled = [torch.full((1,), value, dtype=torch.float32, device=device) for value in values]
        return filled[0].expand(count) if len(filled) == 1 else torch.cat(filled)

    def membership(self, labels: Tensor, groups: Tensor | None, count: int) -> Tensor:
        """1[group of example i = g], as (B, G) floats."""
        if self.by == "all":
            return torch.ones(len(labels), 1, device=labels.device)
        if self.by == "group" and groups is None:
            raise UsageError("Constraint: by='group', and the batch carries no groups")
        member = labels if self.by == "class" or groups is None else groups
        return (member.unsqueeze(1) == torch.arange(count, device=labels.device)).float()


def loss_limit(rho: float | tuple[float, ...], **options: object) -> Constraint:
    """Return the constraint E[cross-entropy] <= rho; options are fields of `Constraint`."""
    return Constraint(limit=rho, **options)  # type: ignore[arg-type]  # checked by Constraint itself


def accuracy_limit(min_accuracy: float | tuple[float, ...], **options: object) -> Constraint:
    """Return the constraint accuracy >= min_accuracy: the dual follows the 0-1 error, the primal the cross-entropy."""
    values = min_accuracy if isinstance(min_accuracy, tuple) else (min_accuracy,)
    for value in values:
        require(0.0 < value <= 1.0, f"min_accuracy is a share in (0, 1], such as 0.85; got {value!r}")
    limits = tuple(1.0 - value for value in values)
    limit = limits if isinstance(min_accuracy, tuple) else limits[0]
    return Constraint(limit=limit, measure=ZeroOne(), **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Dual:
    """The dual state of one constraint: multipliers, how far its limits are tightened, and the epoch's running sums.

    All are (G,) tensors on the model's device (`count` has one number), updated there without a synchronisation.
    """

    multiplier: Tensor
    margin: Tensor
    total: Tensor
    count: Tensor

    def to(self, device: torch.device | str) -> Dual:
        """Return the state on another device."""
        return Dual(*(t.to(device) for t in (self.multiplier, self.margin, self.total, self.count)))


def initial_dual(constraint: Constraint, count: int, device: torch.device | str = "cpu") -> Dual:
    """Return the dual state at the start of a run."""
    zeros = torch.zeros(count, device=device)
    return Dual(zeros + constraint.initial, zeros.clone(), zeros.clone(), torch.zeros(1, device=device))


@dataclass(frozen=True)
class Violation:
    """Sums over a batch: 1[group = g] * (measure - limit_g), the same of the measure alone, members, and batch size.

    Sums and not means, so that shares of a batch on several processes add up exactly.
    """

    excess: Tensor
    measure: Tensor
    members: Tensor
    size: Tensor

    def mean(self) -> Tensor:
        """v_g, the mean over the whole batch."""
        return self.excess / self.size.clamp_min(1.0)

    def estimate(self) -> Tensor:
        """The mean of the measure over the members of each group; NaN where a group is absent."""
        return self.measure / self.members


def violation(constraint: Constraint, dual: Dual, measure: Tensor, member: Tensor) -> Violation:
    """Sum up a batch: `measure` is (B,), `member` is (B, G)."""
    limits = constraint.limits(member.shape[1], measure) - dual.margin
    excess = (member * (measure.unsqueeze(1) - limits)).sum(dim=0)
    total = (member * measure.unsqueeze(1)).sum(dim=0)
    return Violation(excess, total, member.sum(dim=0), measure.new_full((1,), float(len(measure))))


def _ascend(constraint: Constraint, multiplier: Tensor, mean: Tensor) -> Tensor:
    step_size = DEFAULT_STEP_SIZE if constraint.step_size is None else constraint.step_size
    return (multiplier + step_size * mean).clamp(0.0, constraint.upper)


def ascend(constraint: Constraint, dual: Dual, batch: Violation) -> Dual:
    """nu <- [nu + eta_d v]+ after a step; under `epoch` only add up, for `ascend_epoch`."""
    if constraint.frequency == "step":
        return replace(dual, multiplier=_ascend(constraint, dual.multiplier, batch.mean()))
    return replace(dual, total=dual.total + batch.excess, count=dual.count + batch.size)


def ascend_epoch(constraint: Constraint, dual: Dual) -> Dual:
    """nu <- [nu + eta_d * (average of the epoch)]+, and start the sums anew; nothing under `step`."""
    if constraint.frequency == "step":
        return dual
    multiplier = _ascend(constraint, dual.multiplier, dual.total / dual.count.clamp_min(1.0))
    return Dual(multiplier, dual.margin, torch.zeros_like(dual.total), torch.zeros_like(dual.count))


def tightened(constraint: Constraint, dual: Dual, held_out: Tensor, trained: Tensor) -> Dual:
    """Set the margin to the gap between held-out and training measure, at most half the limit, never widening it."""
    if not constraint.tighten:
        return dual
    gap = torch.nan_to_num(held_out - trained, nan=0.0).to(dual.margin)
    limits = constraint.limits(len(gap), gap)
    # half the limit at most: a margin of the whole limit would ask for a loss of zero
    return replace(dual, margin=torch.minimum(gap.clamp_min(0.0), 0.5 * limits))


def dual_bound(bound: float, rho: float, nominal: float, share: float = 1.0) -> float:
    """The a-priori bound nu* <= B / (share * (rho - nominal loss of a strictly feasible model)), for a loss in [0, B].

    `share`: of the examples that the multiplier is about, 1 with one for all; a class or a group has its own limit and
    nominal loss. `rho` is the limit that training follows: where it is tightened, the tightened one, half of it at the
    least.
    """
    require(0.0 < bound < float("inf"), f"the bound B of the loss must be a finite number above 0, got {bound!r}")
    require(0.0 < share <= 1.0, f"share is a part of the examples in (0, 1], got {share!r}")
    if not nominal < rho:
        raise UsageError(
            f"the model is not strictly feasible: its nominal loss {nominal:.4g} is not below rho {rho:.4g}"
        )
    return bound / (share * (rho - nominal))
