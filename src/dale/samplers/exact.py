"""Exact samplers: kernels of the one loop that leave the density proportional to loss^(1/T) on Delta invariant.

With the potential U = log loss (`Chain(climb_log=True)`, the default) the target on Delta is

    pi(delta)  proportional to  exp(U(delta) / T) = loss(delta)^(1/T),

at T = 1 the over-smoothed density, proportional to the loss; with `climb_log=False` the potential is the loss itself
and the target is exp(loss / T). A proposal is accepted with the Metropolis probability, so the step size decides how
fast a chain forgets its start and nothing else. Three things make that true at the border of Delta:

- a proposal outside Delta has density zero and is rejected: the chain stays where it is, and that state counts again.
  Projecting the proposal instead would pile up mass on the border;
- where a set folds a path back exactly (`reflect`: l-infinity within the image box, boxes of parameters), HMC follows
  the billiard path, which is reversible and keeps volumes, so that no proposal is lost at the walls;
- elsewhere (l2, l1) HMC's path may pass outside Delta; only where it ends counts.

The density is a fixed one in eval mode only: dropout, or the batch statistics of train mode, change it at every call.
A logarithm that is cut at a floor (`dale.losses.LOG_FLOOR`, for a KL divergence near zero) is the target as cut.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from dale import random
from dale.errors import NumericsError, require, require_positive
from dale.random import Key
from dale.samplers.base import Problem
from dale.samplers.chain import Kernel, State


@dataclass(frozen=True, kw_only=True)
class _Metropolis(Kernel):
    """Propose, and accept with probability min(1, exp(log_ratio)) where the proposal lies in Delta; else stay.

    The state holds the position `delta`, U there (`value`), its `gradient`, and how many proposals each chain has
    `accepted`. Each example decides for itself, and nothing is read back from the device.
    """

    step_size: float
    temperature: float = 1.0

    def __post_init__(self) -> None:
        require_positive(self, step_size=self.step_size, temperature=self.temperature)

    def init(self, problem: Problem, delta: Tensor, key: Key) -> State:
        """Evaluate the potential at the start, where the density must not be zero."""
        value, gradient = problem.value_and_gradient(delta)
        if value.device.type == "cpu" and not bool(value.isfinite().all()):
            example = int((~value.isfinite()).nonzero()[0])
            raise NumericsError(
                f"{type(self).__name__}: the log-density at the start of chain {example} is {float(value[example])}; "
                "expected a finite number (start elsewhere: start='uniform' or 'gaussian')"
            )
        return {
            "delta": delta,
            "value": value,
            "gradient": gradient,
            "accepted": torch.zeros(len(value), dtype=torch.int64, device=value.device),
        }

    @abstractmethod
    def propose(self, problem: Problem, state: State, key: Key) -> tuple[State, Tensor]:
        """Return the proposal (its `delta`, `value`, `gradient`) and the log of its Metropolis ratio, (B,)."""

    def step(self, problem: Problem, state: State, number: int, key: Key) -> State:
        """Move each chain to its proposal or leave it where it is."""
        proposal, log_ratio = self.propose(problem, state, key)
        # without tolerance: what is accepted lies in Delta to the last bit, and a projection leaves it alone
        inside = problem.perturbations.contains(proposal["delta"], problem.x, tolerance=0.0)
        threshold = random.uniform(key.fold("accept"), problem.index).log()
        # a potential or gradient that is not a number compares as false: such a proposal is rejected
        accept = inside & (threshold < log_ratio)
        moved: State = {"accepted": state["accepted"] + accept}
        for name, new in proposal.items():
            moved[name] = torch.where(accept.view(-1, *[1] * (new.dim() - 1)), new, state[name])
        return moved


@dataclass(frozen=True, kw_only=True)
class Mala(_Metropolis):
    """The Metropolis-adjusted Langevin algorithm: Langevin's step, without projection, as a proposal.

        delta' = delta + eta * g + sqrt(2 * eta * T) * xi,    xi ~ N(0, I),    g = grad U(delta)
        log ratio = (U(delta') - U(delta)) / T + log q(delta | delta') - log q(delta' | delta)

    with q(. | delta) the Gaussian of the first line. Proposals outside Delta are rejected. `step_size` = eta; the
    acceptance rate is best near 0.57 (`dale.samplers.diagnose` reports it).
    """

    def propose(self, problem: Problem, state: State, key: Key) -> tuple[State, Tensor]:
        """One Langevin step and its ratio."""
        delta, gradient = state["delta"], state["gradient"]
        scale = (2.0 * self.step_size * self.temperature) ** 0.5
        noise = random.normal(key, problem.index, problem.shape).to(delta)
        new = delta + self.step_size * gradient + scale * noise
        value, new_gradient = problem.value_and_gradient(new)
        # |m - eta g|^2 - |m + eta g'|^2 over 4 eta T, with the move m = delta' - delta: as a product, which does not
        # subtract two large squares from one another
        total, change = gradient + new_gradient, new_gradient - gradient
        correction = _dot(total, 2.0 * (new - delta) + self.step_size * change).to(value) / 4.0
        log_ratio = (value - state["value"] - correction) / self.temperature
        return {"delta": new, "value": value, "gradient": new_gradient}, log_ratio


@dataclass(frozen=True, kw_only=True)
class Hmc(_Metropolis):
    """Hamiltonian Monte Carlo: a momentum p ~ N(0, I), then `leapfrog_steps` times, with s = `step_size`,

        p <- p + s/2 * grad U(delta) / T;    delta, p <- reflect(delta + s * p, p);    p <- p + s/2 * grad U(delta) / T
        log ratio = (U(delta') - U(delta)) / T - (|p'|^2 - |p|^2) / 2

    The momentum is drawn anew at every step of the chain. Where the set reflects exactly (boxes), paths bounce off its
    walls; elsewhere a path that ends outside Delta is rejected. One leapfrog step is `Mala` with eta = s^2 / (2 T),
    up to reflection. The acceptance rate is best between 0.6 and 0.9.
    """

    leapfrog_steps: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.leapfrog_steps >= 1,
            f"Hmc: leapfrog_steps must be a whole number of at least 1, got {self.leapfrog_steps!r}",
        )

    def propose(self, problem: Problem, state: State, key: Key) -> tuple[State, Tensor]:
        """Follow the leapfrog path and return where it ends."""
        delta, value, gradient = state["delta"], state["value"], state["gradient"]
        momentum = random.normal(key, problem.index, problem.shape).to(delta)
        kinetic = _dot(momentum, momentum)
        kick = 0.5 * self.step_size / self.temperature
        for _ in range(self.leapfrog_steps):
            momentum = momentum + kick * gradient
            delta, momentum = problem.perturbations.reflect(delta + self.step_size * momentum, momentum, problem.x)
            value, gradient = problem.value_and_gradient(delta)
            momentum = momentum + kick * gradient
        change = (_dot(momentum, momentum) - kinetic).to(value)
        log_ratio = (value - state["value"]) / self.temperature - 0.5 * change
        return {"delta": delta, "value": value, "gradient": gradient}, log_ratio


def _dot(first: Tensor, second: Tensor) -> Tensor:
    """The inner product of each example's tensors, (B,), summed in at least float32."""
    product = first.flatten(1) * second.flatten(1)
    return product.sum(dim=1, dtype=torch.promote_types(product.dtype, torch.float32))
