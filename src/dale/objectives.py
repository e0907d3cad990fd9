"""The objective: one Lagrangian of which every algorithm is a row.

    L(theta, nu) = robust_weight * E[ sum_k w_k robust_loss(x'_k) ] + nominal_weight * E[ nominal_loss(x) ]
                   + sum over constraints c and groups g of  nu_cg * E[ 1[group = g] (loss_c(x) - rho_cg) ]

with x'_k = G(x, delta_k), perturbations drawn by a sampler that climbs `perturbation_loss`, and weights w on the
simplex given by an aggregator. An objective has two halves, `perturb` and `lagrangian`: weight perturbation wraps the
second, distributed training wraps a module whose one forward is the second, the fast path speeds up the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dale import constraints as duality
from dale.aggregators import Aggregator, MeanOf
from dale.batch import Batch
from dale.components import Component, require_component
from dale.constraints import Constraint, Dual, Violation
from dale.errors import require, require_choice, require_non_negative
from dale.losses import CrossEntropy, Loss
from dale.perturbations import PerturbationSet
from dale.random import Key
from dale.samplers import Sampler
from dale.samplers.base import Classifier

Duals = tuple[Dual, ...]


@dataclass(frozen=True)
class Step:
    """What one evaluation of the Lagrangian gives: the loss to descend, and detached device tensors to read later.

    `robust` and `nominal` are means over the batch, NaN where the row does not compute them; `clean_correct` and
    `robust_correct` count right predictions (of the first perturbation), NaN likewise.
    """

    loss: Tensor
    robust: Tensor
    nominal: Tensor
    clean_correct: Tensor
    robust_correct: Tensor
    violations: tuple[Violation, ...]
    size: int


@dataclass(frozen=True, kw_only=True)
class Objective(Component):
    """A row of the table of algorithms: set, sampler, aggregator, three losses, weights and constraints.

    `batchnorm`: clean and perturbed images pass BatchNorm in training as one batch (`joint`) or one after the other
    (`separate`).
    """

    name: str = "custom"
    perturbations: PerturbationSet | None = None
    sampler: Sampler | None = None
    perturbation_loss: Loss | None = None
    robust_loss: Loss | None = None
    robust_weight: float = 1.0
    aggregator: Aggregator = MeanOf()
    nominal_loss: Loss = CrossEntropy()
    nominal_weight: float = 0.0
    constraints: tuple[Constraint, ...] = ()
    batchnorm: Literal["joint", "separate"] = "joint"

    def __post_init__(self) -> None:
        require_non_negative(self, robust_weight=self.robust_weight, nominal_weight=self.nominal_weight)
        require_choice(self, ("joint", "separate"), batchnorm=self.batchnorm)
        require_component(self, PerturbationSet, perturbations=self.perturbations)
        require_component(self, Sampler, sampler=self.sampler)
        require_component(self, Loss, perturbation_loss=self.perturbation_loss, robust_loss=self.robust_loss)
        if self.robust:
            require(
                self.sampler is not None and self.perturbations is not None,
                f"objective {self.name!r} has a robust loss: it needs a perturbation set and a sampler",
            )
        if self.sampler is not None and self.sampler.needs_loss:
            loss = self.perturbation_loss
            require(loss is not None, f"objective {self.name!r}: the sampler climbs a loss; give perturbation_loss")
            assert loss is not None
            require(
                loss.non_negative or not self.sampler.log,
                f"objective {self.name!r}: {type(loss).__name__} can be negative and has no logarithm; "
                "give the sampler climb_log=False",
            )
        require(
            self.robust or self.nominal_weight > 0.0 or len(self.constraints) > 0,
            f"objective {self.name!r} has nothing to minimise",
        )

    @property
    def robust(self) -> bool:
        """Whether the row has a robust term at all."""
        return self.robust_loss is not None and self.robust_weight > 0.0

    @property
    def needs_clean(self) -> bool:
        """Whether the Lagrangian reads predictions on clean images."""
        compares = self.robust and self.robust_loss is not None and self.robust_loss.needs_clean
        return compares or self.nominal_weight > 0.0 or len(self.constraints) > 0

    @property
    def rho(self) -> float | None:
        """The one limit on the nominal loss of all examples, where the row has one: what a report compares with."""
        for constraint in self.constraints:
            if constraint.by == "all" and constraint.measured == CrossEntropy():
                return constraint.limit[0] if isinstance(constraint.limit, tuple) else constraint.limit
        return None

    def initial_duals(
        self, num_classes: int | None = None, num_groups: int | None = None, device: torch.device | str = "cpu"
    ) -> Duals:
        """Return the multipliers at the start of a run, one state per constraint."""
        return tuple(duality.initial_dual(c, c.num_groups(num_classes, num_groups), device) for c in self.constraints)

    def for_run(
        self, num_steps: int, num_epochs: int, num_classes: int | None = None, num_groups: int | None = None
    ) -> Objective:
        """Return the objective with dual step sizes that were left open filled in for a run of this length.

        A multiplier of one group of G moves along a mean over the whole batch, of which the group has a share, a G-th
        if all are alike: its steps are G times as long, and the multiplier of a small group moves less far.
        """
        filled = []
        for constraint in self.constraints:
            ascents = num_steps if constraint.frequency == "step" else num_epochs
            budget = duality.DUAL_BUDGET * constraint.num_groups(num_classes, num_groups)
            step_size = constraint.step_size or budget / max(1, ascents)
            filled.append(replace(constraint, step_size=step_size))
        return replace(self, constraints=tuple(filled))

    def perturb(self, model: Classifier, batch: Batch, key: Key | int) -> Tensor | None:
        """Draw the perturbations of a batch, (K, B, *shape); None for a row without a robust term."""
        if not self.robust or self.sampler is None or self.perturbations is None:
            return None
        return self.sampler(model, batch, self.perturbations, self.perturbation_loss, key=key)

    def lagrangian(self, model: Classifier, batch: Batch, delta: Tensor | None, duals: Duals) -> Step:
        """Evaluate L on a batch whose perturbations are given."""
        return self.evaluate(*self.predict(model, batch, delta), batch, duals)

    def predict(self, model: Classifier, batch: Batch, delta: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return logits on clean images, (B, classes), and on perturbed ones, (K, B, classes), as far as L needs them.

        The passes through the network, and nothing of the row's weights and limits: compiled once, they serve them all.
        """
        if delta is None or self.perturbations is None:
            return model(batch.images), None
        perturbed = torch.cat([self.perturbations.apply(batch.images, draw) for draw in delta])
        shape = (len(delta), len(batch), -1)
        if not self.needs_clean:
            return None, model(perturbed).view(shape)
        if self.batchnorm == "separate":
            return model(batch.images), model(perturbed).view(shape)
        logits = model(torch.cat([batch.images, perturbed]))
        return logits[: len(batch)], logits[len(batch) :].view(shape)

    def evaluate(self, clean: Tensor | None, perturbed: Tensor | None, batch: Batch, duals: Duals) -> Step:
        """Evaluate L on the logits that `predict` returned."""
        nan = torch.full((), torch.nan, device=batch.images.device)
        loss = torch.zeros((), device=batch.images.device)
        robust, nominal, clean_correct, robust_correct = nan, nan, nan, nan
        if perturbed is not None and self.robust_loss is not None:
            value, robust_correct = self._robust(clean, perturbed, batch.labels)
            loss = loss + self.robust_weight * value
            robust = value.detach()
        violations: list[Violation] = []
        if clean is not None:
            values = self.nominal_loss(clean, clean, batch.labels)
            nominal = values.mean().detach()
            clean_correct = _count_correct(clean, batch.labels)
            if self.nominal_weight > 0.0:
                loss = loss + self.nominal_weight * values.mean()
            for constraint, dual in zip(self.constraints, duals, strict=True):
                term, seen = self._constraint(constraint, dual, clean, batch)
                loss = loss + term
                violations.append(seen)
        return Step(loss, robust, nominal, clean_correct, robust_correct, tuple(violations), len(batch))

    def __call__(
        self,
        model: Classifier,
        x: Tensor,
        y: Tensor,
        duals: Duals = (),
        *,
        key: Key | int,
        groups: Tensor | None = None,
    ) -> Step:
        """Draw perturbations and evaluate the Lagrangian: one step of a training loop of your own."""
        batch = Batch.of(x, y, groups=groups)
        return self.lagrangian(model, batch, self.perturb(model, batch, key), duals)

    def ascend(self, duals: Duals, step: Step) -> Duals:
        """Move the multipliers along the violation seen in a step (those that move per step)."""
        return tuple(
            duality.ascend(c, dual, seen)
            for c, dual, seen in zip(self.constraints, duals, step.violations, strict=True)
        )

    def ascend_epoch(self, duals: Duals) -> Duals:
        """Move the multipliers that move once an epoch."""
        return tuple(duality.ascend_epoch(c, dual) for c, dual in zip(self.constraints, duals, strict=True))

    def _robust(self, clean: Tensor | None, perturbed: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The robust loss, weighted over the draws and averaged over the batch; right predictions of the first draw."""
        assert self.robust_loss is not None
        losses = torch.stack([self.robust_loss(logits, clean, labels) for logits in perturbed])
        # one draw has weight 1 whatever the aggregator: sampling alone
        value = (losses if len(losses) == 1 else (self.aggregator(losses) * losses).sum(dim=0)).mean()
        return value, _count_correct(perturbed[0], labels)

    @staticmethod
    def _constraint(constraint: Constraint, dual: Dual, clean: Tensor, batch: Batch) -> tuple[Tensor, Violation]:
        """The constraint's term in the Lagrangian, and what dual ascent will see."""
        member = constraint.membership(batch.labels, batch.groups, len(dual.multiplier))
        values = constraint.loss(clean, clean, batch.labels)
        descended = duality.violation(constraint, dual, values, member)
        term = (dual.multiplier * descended.mean()).sum()
        if constraint.measure is not None:
            values = constraint.measure(clean, clean, batch.labels)
        return term, duality.violation(constraint, dual, values.detach(), member)


def _count_correct(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.detach().argmax(dim=1) == labels).sum().float()
