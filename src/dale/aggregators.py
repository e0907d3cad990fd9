"""Aggregators: from the losses of K perturbations of each example to weights on the simplex.

The robust loss of an example is sum_k w_k l_k. The weights carry no gradient: for the maximum and its regularised
relatives Danskin's theorem says that the gradient of the optimal value is the weighted gradient of the losses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dale import lambda_star
from dale.components import Component
from dale.errors import require, require_non_negative, require_positive


@dataclass(frozen=True, kw_only=True)
class Aggregator(Component, ABC):
    """Weights on the simplex over K, for each example on its own.

    Calling it is final: losses (K, B) of any floating type -> weights (K, B), in float32 at least, without gradient.
    An example with a loss of NaN or +infinity gets all its weight on the first such candidate, so that its weighted
    loss shows the trouble; other examples are untouched. A loss of -infinity counts as a very small one.
    """

    @final
    def __call__(self, losses: Tensor) -> Tensor:
        """Return the weights of `losses` (K, B): not negative, with sum 1 over K."""
        require(
            losses.ndim == 2 and len(losses) > 0,
            f"{type(self).__name__} needs losses of shape (K, B) with K >= 1, got {tuple(losses.shape)}",
        )
        losses = losses.detach().to(torch.promote_types(losses.dtype, torch.float32))
        broken = losses.isnan() | losses.isposinf()
        w = self.weigh(torch.where(broken, 0.0, losses).clamp_min(-1e30))
        return torch.where(broken.any(0), _one_hot(broken.to(losses.dtype)), w)

    @abstractmethod
    def weigh(self, losses: Tensor) -> Tensor:
        """Return weights for finite losses (K, B)."""


@dataclass(frozen=True, kw_only=True)
class MeanOf(Aggregator):
    """w_k = 1 / K: the expected loss under the sampler's distribution."""

    def weigh(self, losses: Tensor) -> Tensor:
        """Return uniform weights."""
        return torch.full_like(losses, 1 / len(losses))


@dataclass(frozen=True, kw_only=True)
class MaxOf(Aggregator):
    """All weight on the largest loss (the first of equal ones): the worst of K."""

    def weigh(self, losses: Tensor) -> Tensor:
        """Return one-hot weights."""
        return _one_hot(losses)


@dataclass(frozen=True, kw_only=True)
class LambdaStar(Aggregator):
    """w_k = [ (l_k - mu) / (K gamma) ]_+, the optimal density lambda* on a uniform sample (see `dale.lambda_star`).

    Give `gamma` (the same smoothness for every example), or `norm_budget` >= 1, which chooses each example's gamma such
    that mean_k (K w_k)^2 equals the budget: 1 is the mean, K the maximum. With candidates that are not drawn uniformly
    from Delta the weights are a heuristic.
    """

    gamma: float | None = None
    norm_budget: float | None = None

    def __post_init__(self) -> None:
        require(
            (self.gamma is None) != (self.norm_budget is None),
            f"LambdaStar: give either gamma or norm_budget, got gamma={self.gamma}, norm_budget={self.norm_budget}",
        )
        require_positive(self, gamma=self.gamma, norm_budget=self.norm_budget)
        require(
            self.norm_budget is None or self.norm_budget >= 1,
            f"LambdaStar: norm_budget must be at least 1 (1 is the mean), got {self.norm_budget!r}",
        )

    def weigh(self, losses: Tensor) -> Tensor:
        """Return the projection of l / (K gamma) onto the simplex."""
        if self.gamma is not None:
            return lambda_star.weights(losses, self.gamma)
        assert self.norm_budget is not None
        return lambda_star.weights(losses, lambda_star.gamma_for_budget(losses, self.norm_budget))


@dataclass(frozen=True, kw_only=True)
class CVaR(Aggregator):
    """Uniform on the worst fraction beta: with m = beta K, the r-th largest loss has weight min(1, [m - r + 1]_+) / m.

    Where m is not whole, the loss at the quantile gets the fraction that is left, so that sum w l is the conditional
    value at risk of the K losses exactly. beta = 1 is the mean; beta <= 1 / K is the maximum.
    """

    beta: float

    def __post_init__(self) -> None:
        require(0 < self.beta <= 1, f"CVaR: beta must be in (0, 1] (1 is the mean), got {self.beta!r}")

    def weigh(self, losses: Tensor) -> Tensor:
        """Return the weights by rank, put back in the candidates' order."""
        mass = max(self.beta * len(losses), 1.0)
        if math.isclose(mass, round(mass), rel_tol=1e-9):  # 0.3 * 10 is meant to be 3
            mass = round(mass)
        order = losses.sort(dim=0, descending=True, stable=True).indices
        by_rank = (mass - torch.arange(len(losses), dtype=losses.dtype, device=losses.device)).clamp(0, 1) / mass
        return torch.zeros_like(losses).scatter(0, order, by_rank[:, None].expand_as(losses))


@dataclass(frozen=True, kw_only=True)
class Tilted(Aggregator):
    """w = softmax(t * l): the tilted (exponential) mean; t = 0 is the mean, t -> infinity the maximum."""

    t: float

    def __post_init__(self) -> None:
        require_non_negative(self, t=self.t)

    def weigh(self, losses: Tensor) -> Tensor:
        """Return the softmax over the candidates."""
        t = min(self.t, torch.finfo(losses.dtype).max)  # infinity times zero is no number
        return (t * (losses - losses.amax(0))).softmax(0)


def _one_hot(scores: Tensor) -> Tensor:
    """Return 1 at the first maximum of each column, 0 elsewhere."""
    return torch.zeros_like(scores).scatter(0, scores.argmax(0, keepdim=True), 1.0)
