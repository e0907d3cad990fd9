"""One training step: perturb, Lagrangian, descent, ascent, average, totals. No number leaves the device here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from dale.batch import Batch
from dale.objectives import Objective, Step
from dale.random import Key
from dale.training.state import TrainState


class PlainStep:
    """The plain path: what every faster one is held to."""

    def __init__(self, objective: Objective, dtype: torch.dtype, device: torch.device) -> None:
        self.objective = objective
        self.dtype = dtype
        self.device = device

    def precision(self) -> AbstractContextManager[object]:
        """The context in which the model runs: bfloat16 where asked, float32 otherwise."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def perturb(self, model: nn.Module, batch: Batch, key: Key) -> Tensor | None:
        """Draw the perturbations of a batch."""
        return self.objective.perturb(model, batch, key)

    def model_of(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """The model as the Lagrangian calls it."""
        return model

    def __call__(self, state: TrainState, batch: Batch, key: Key) -> None:
        """Advance the state by one batch; `key` is the step's own."""
        model = state.model
        with self.precision():
            delta = self.perturb(model, batch, key)
            step = self.objective.lagrangian(self.model_of(model), batch, delta, state.duals)
        state.optimiser.zero_grad(set_to_none=True)
        step.loss.backward()  # type: ignore[no-untyped-call]
        state.optimiser.step()
        state.duals = self.objective.ascend(state.duals, step)
        if state.average is not None:
            state.average.update(model)
        add_totals(state.totals, step)


def add_totals(totals: dict[str, Tensor], step: Step) -> None:
    """Add a step to the epoch's running sums."""
    loss = step.loss.detach()
    sums = {
        "loss": loss * step.size,
        "robust_loss": step.robust * step.size,
        "nominal_loss": step.nominal * step.size,
        "clean_correct": step.clean_correct,
        "robust_correct": step.robust_correct,
        "size": torch.full_like(loss, float(step.size)),
    }
    for number, seen in enumerate(step.violations):
        sums[f"measure.{number}"] = seen.measure
        sums[f"members.{number}"] = seen.members
    for name, value in sums.items():
        totals[name] = totals[name] + value if name in totals else value.clone()
