"""One training step: perturb, Lagrangian, descent, ascent, average, totals. No number leaves the device here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from dale.batch import Batch
from dale.compiling import Compiler, as_it_is
from dale.constraints import Violation
from dale.objectives import Duals, Objective, Step
from dale.random import Key
from dale.training.state import TrainState
from dale.training.weights import WeightPerturbation


def _unheard(line: str) -> None:
    pass


class PlainStep:
    """The plain path: what every faster one is held to."""

    def __init__(self, objective: Objective, dtype: torch.dtype, device: torch.device) -> None:
        self.objective = objective
        self.dtype = dtype
        self.device = device
        self.weight_perturbation: WeightPerturbation | None = None
        self.compiler: Compiler = as_it_is  # what the parts of the step go through, where it is worth it
        self.say: Callable[[str], None] = _unheard  # where a step has something to tell the user
        self.accumulate = 1  # parts that a batch is differentiated in, one after the other, to save memory

    def precision(self) -> AbstractContextManager[object]:
        """The context in which the model runs: bfloat16 where asked, float32 otherwise."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def perturb(self, model: nn.Module, batch: Batch, key: Key) -> Tensor | None:
        """Draw the perturbations of a batch."""
        return self.objective.perturb(model, batch, key)

    def lagrangian(self, state: TrainState, batch: Batch, delta: Tensor | None) -> Step:
        """Evaluate the Lagrangian on a batch, or a part of one."""
        logits = self.compiler(Objective.predict)(self.objective, state.model, batch, delta)
        step: Step = self.compiler(Objective.evaluate)(self.objective, *logits, batch, state.duals)
        return step

    def descend(self, state: TrainState, batch: Batch, delta: Tensor | None, weight: float, last: bool) -> Step:
        """Add the gradients of a part of a batch, whose mean counts as `weight`; `last`: no other part follows."""
        with self.precision():
            step = self.lagrangian(state, batch, delta)
        (step.loss if weight == 1.0 else step.loss * weight).backward()  # type: ignore[no-untyped-call]
        return replace(step, loss=step.loss.detach())

    def collect(self, state: TrainState, step: Step) -> Step:
        """What all processes saw, given what this one did: the same, where it is alone."""
        return step

    def _gradients(self, state: TrainState, drawn: list[tuple[Batch, Tensor | None]], size: int) -> list[Step]:
        """Compute the gradients of a whole batch, part by part, at the weights of this moment."""
        state.optimiser.zero_grad(set_to_none=True)
        return [
            self.descend(state, part, delta, len(part) / size, last=number == len(drawn))
            for number, (part, delta) in enumerate(drawn, 1)
        ]

    def __call__(self, state: TrainState, batch: Batch, key: Key) -> None:
        """Advance the state by one batch; `key` is the step's own."""
        parts = min(self.accumulate, len(batch))
        bounds = [number * len(batch) // parts for number in range(parts + 1)]
        drawn: list[tuple[Batch, Tensor | None]] = []
        with self.precision():
            for start, end in itertools.pairwise(bounds):
                part = batch if parts == 1 else batch[start:end]
                drawn.append((part, self.perturb(state.model, part, key)))
        seen = self._gradients(state, drawn, len(batch))
        if self.weight_perturbation is not None:
            with self.weight_perturbation.applied(state.model):
                self._gradients(state, drawn, len(batch))
        step = self.collect(state, merged(seen))
        state.optimiser.step()
        state.duals, sums = self.compiler(_conclude)(self.objective, state.duals, step)
        if state.average is not None:
            state.average.update(state.model, self.compiler)
        add_totals(state.totals, sums)


def merged(steps: list[Step]) -> Step:
    """One step of the parts of a batch: means weighted by size, sums added."""
    if len(steps) == 1:
        return steps[0]
    size = sum(step.size for step in steps)

    def mean(name: str) -> Tensor:
        return torch.stack([getattr(step, name) * (step.size / size) for step in steps]).sum(dim=0)

    def count(name: str) -> Tensor:
        return torch.stack([getattr(step, name) for step in steps]).sum(dim=0)

    violations = tuple(
        Violation(*(torch.stack(sums).sum(dim=0) for sums in zip(*(vars(v).values() for v in parts), strict=True)))
        for parts in zip(*(step.violations for step in steps), strict=True)
    )
    means = (mean("loss"), mean("robust"), mean("nominal"))
    return Step(*means, count("clean_correct"), count("robust_correct"), violations, size)


def _conclude(objective: Objective, duals: Duals, step: Step) -> tuple[Duals, dict[str, Tensor]]:
    """The multipliers after a step, and what it adds to the epoch's running sums."""
    sums = {
        "loss": step.loss * step.size,
        "robust_loss": step.robust * step.size,
        "nominal_loss": step.nominal * step.size,
        "clean_correct": step.clean_correct,
        "robust_correct": step.robust_correct,
        "size": torch.full_like(step.loss, float(step.size)),
    }
    for number, seen in enumerate(step.violations):
        sums[f"measure.{number}"] = seen.measure
        sums[f"members.{number}"] = seen.members
    return objective.ascend(duals, step), sums


def add_totals(totals: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
    """Add to the running sums, in place, by one operation for all; those that are new start here."""
    known = [name for name in sums if name in totals]
    if known:
        torch._foreach_add_([totals[name] for name in known], [sums[name] for name in known])
    totals.update((name, value.clone()) for name, value in sums.items() if name not in totals)
