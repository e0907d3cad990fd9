"""APGD (Croce and Hein 2020): gradient ascent whose step size looks after itself, as a kernel of the one loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from dale.errors import require
from dale.perturbations import L1
from dale.random import Key
from dale.samplers import Kernel, Problem, State

_MOMENTUM = 0.75  # the share of the new step
_INCREASES = 0.75  # a window in which fewer steps than this share climbed asks for smaller steps


@lru_cache
def windows(steps: int) -> tuple[int, ...]:
    """Return the lengths of the windows after which step sizes are reconsidered.

    The first is 22% of the steps, every further one 3% shorter, none below 6%: 22, 19, 16, 13, 10, 7, 6, ... of 100.
    """
    length, shortest, less = (max(1, int(share * steps)) for share in (0.22, 0.06, 0.03))
    lengths, total = [], 0
    while total + length <= steps:
        lengths.append(length)
        total += length
        length = max(length - less, shortest)
    return tuple(lengths)


@lru_cache
def checkpoints(steps: int) -> dict[int, int]:
    """Return the step numbers (from 0) at which a window ends, with the window's length."""
    ends, total = {}, 0
    for length in windows(steps):
        total += length
        ends[total - 1] = length
    return ends


def _rows(choice: Tensor, like: Tensor) -> Tensor:
    return choice.view(-1, *([1] * (like.dim() - 1)))


@dataclass(frozen=True, kw_only=True)
class AutoPGD(Kernel):
    """The kernel of APGD: momentum, a step size per example that halves at checkpoints, restarts from the best.

        z = P[ delta + eta * D(grad U) ]
        delta' = P[ delta + 0.75 (z - delta) + 0.25 (delta - delta_before) ],    eta_0 = 2 * radius

    At the end of a window an example whose U rose in at most 75% of the steps, or whose best neither grew nor had its
    step size halved since the last checkpoint, halves eta and goes on from its best point, without momentum.
    """

    steps: int = 100

    def for_steps(self, steps: int) -> Kernel:
        """The schedule for a chain of this length."""
        return replace(self, steps=steps)

    def init(self, problem: Problem, delta: Tensor, key: Key) -> State:
        """Evaluate the start: it is the best so far."""
        value, gradient = problem.value_and_gradient(delta)
        size = len(problem.batch)
        return {
            "delta": delta,
            "before": delta,
            "value": value,
            "gradient": gradient,
            "best": delta,
            "best_value": value,
            "best_gradient": gradient,
            "checked_value": value,
            "eta": delta.new_full((size,), 2.0 * problem.perturbations.radius),
            "increases": delta.new_zeros((size,)),
            "halved": torch.ones(size, dtype=torch.bool, device=delta.device),
        }

    def step(self, problem: Problem, state: State, number: int, key: Key) -> State:
        """Move, evaluate, and at a checkpoint reconsider the step sizes."""
        delta, before = state["delta"], state["before"]
        eta = _rows(state["eta"], delta)
        target = problem.project(delta + eta * problem.perturbations.ascent(state["gradient"], delta, problem.x))
        if number > 0:
            target = problem.project(delta + _MOMENTUM * (target - delta) + (1.0 - _MOMENTUM) * (delta - before))
        value, gradient = problem.value_and_gradient(target)
        state = {
            **state,
            **remember(state, target, value, gradient),
            "before": delta,
            "increases": state["increases"] + (value > state["value"]),
        }
        length = checkpoints(self.steps).get(number)
        return state if length is None else self._reconsider(state, length)

    def _reconsider(self, state: State, length: int) -> State:
        stuck = ~state["halved"] & (state["checked_value"] >= state["best_value"])
        halve = (state["increases"] <= _INCREASES * length) | stuck
        return {
            **state,
            **back_to_best(state, halve),
            "eta": torch.where(halve, state["eta"] / 2, state["eta"]),
            "increases": torch.zeros_like(state["increases"]),
            "checked_value": state["best_value"],
            "halved": halve,
        }

    def result(self, state: State) -> Tensor:
        """The best point."""
        return state["best"]


def remember(state: State, delta: Tensor, value: Tensor, gradient: Tensor) -> State:
    """The new position, and the best so far with its value and gradient."""
    better = value > state["best_value"]
    rows = _rows(better, delta)
    return {
        "delta": delta,
        "value": value,
        "gradient": gradient,
        "best": torch.where(rows, delta, state["best"]),
        "best_value": torch.where(better, value, state["best_value"]),
        "best_gradient": torch.where(rows, gradient, state["best_gradient"]),
    }


def back_to_best(state: State, chosen: Tensor) -> State:
    """Put the chosen examples back to their best point, at rest."""
    rows = _rows(chosen, state["delta"])
    delta = torch.where(rows, state["best"], state["delta"])
    return {
        "delta": delta,
        "before": torch.where(rows, delta, state["before"]),
        "value": torch.where(chosen, state["best_value"], state["value"]),
        "gradient": torch.where(rows, state["best_gradient"], state["gradient"]),
    }


@dataclass(frozen=True, kw_only=True)
class SparseAutoPGD(Kernel):
    """The kernel of APGD for the l1 ball (Croce and Hein 2021): steps along few coordinates, how few adapts.

        delta' = P[ delta + eta * sign(g) / ||sign(g)||_1 ],    g: the share `active` of largest coordinates of grad U

    Every 4% of the steps the share becomes that of the best point's non-zero coordinates over 1.5. Where the best
    point got sparser (below 95% of the number at the last check) eta returns to epsilon and the search to the best
    point, else eta shrinks by 1.5, not below epsilon / 10.
    """

    steps: int = 100

    def for_steps(self, steps: int) -> Kernel:
        """The schedule for a chain of this length."""
        return replace(self, steps=steps)

    def init(self, problem: Problem, delta: Tensor, key: Key) -> State:
        """Evaluate the start; a start in few coordinates says how many to move."""
        require(isinstance(problem.perturbations, L1), f"SparseAutoPGD is for the l1 ball, not {problem.perturbations}")
        value, gradient = problem.value_and_gradient(delta)
        total = delta[0].numel()
        count = (delta != 0).flatten(1).sum(dim=1).to(delta)
        dense = count > total / 2  # a random start tells nothing
        return {
            "delta": delta,
            "before": delta,
            "value": value,
            "gradient": gradient,
            "best": delta,
            "best_value": value,
            "best_gradient": gradient,
            "eta": torch.full_like(count, problem.perturbations.radius),
            "active": torch.where(dense, torch.full_like(count, 0.2), count / total / 1.5),
            "count": torch.where(dense, torch.full_like(count, total), count),
        }

    def step(self, problem: Problem, state: State, number: int, key: Key) -> State:
        """Move along the largest coordinates, evaluate, and at a checkpoint reconsider how many."""
        delta, gradient = state["delta"], state["gradient"].flatten(1)
        total = gradient.shape[1]
        order = gradient.abs().sort(dim=1).values
        place = ((1.0 - state["active"]) * total).long().clamp(0, total - 1)
        move = gradient.sign() * (gradient.abs() >= order.gather(1, place.unsqueeze(1)))
        move = move / move.abs().sum(dim=1, keepdim=True).clamp_min(1.0)
        target = problem.project(delta + _rows(state["eta"], delta) * move.view_as(delta))
        state = {**state, **remember(state, target, *problem.value_and_gradient(target)), "before": delta}
        window = max(1, int(0.04 * self.steps))
        return self._reconsider(problem, state) if (number + 1) % window == 0 else state

    def _reconsider(self, problem: Problem, state: State) -> State:
        largest = problem.perturbations.radius
        count = (state["best"] != 0).flatten(1).sum(dim=1).to(state["eta"])
        sparser = count < 0.95 * state["count"]
        eta = torch.where(sparser, torch.full_like(state["eta"], largest), state["eta"] / 1.5)
        return {
            **state,
            **back_to_best(state, sparser),
            "eta": eta.clamp(largest / 10.0, largest),
            "active": count / state["best"][0].numel() / 1.5,
            "count": count,
        }

    def result(self, state: State) -> Tensor:
        """The best point."""
        return state["best"]
