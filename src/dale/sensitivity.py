"""The dual side: how large the multiplier can be, and what it says about the trade-off.

Let P(rho) be the smallest robust loss among models whose nominal loss is at most rho. Two facts tie it to nu*:

    nu* <= B / (rho - nominal loss of theta')       for losses in [0, B] and any strictly feasible theta'
    dP / drho = -nu*                                nu* is the price of rho

The first holds for every dual optimum, convex or not: with the dual function d, 0 <= d(0) <= d(nu*) <= robust(theta')
- nu* (rho - nominal(theta')), and robust(theta') <= B. The second holds where strong duality does, as on a convex
problem; P is then convex and falling, so that the chords of a sweep on either side of rho bracket -nu*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from dale.constraints import dual_bound
from dale.data.splits import Split
from dale.errors import UsageError, require
from dale.losses import Clipped, CrossEntropy, Loss
from dale.modes import evaluating


def clipped_loss(
    model: nn.Module, split: Split, clip: float, loss: Loss = CrossEntropy(), batch_size: int = 512
) -> float:
    """The mean of min(loss, clip) of a model's predictions on clean images, in eval mode, summed in float64."""
    require(len(split) > 0, "the split is empty; a nominal loss is a mean over at least one example")
    bounded = Clipped(loss=loss, bound=clip)
    parameter = next(model.parameters(), None)
    device = split.labels.device if parameter is None else parameter.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(model), torch.no_grad():
        for batch in split.batches(batch_size):
            moved = batch.to(device)
            logits = model(moved.images)
            total += bounded(logits, logits, moved.labels).sum(dtype=torch.float64)
    return float(total) / len(split)


def bound_from_model(model: nn.Module, split: Split, rho: float, clip: float, loss: Loss = CrossEntropy()) -> float:
    """The bound nu* <= clip / (rho - nominal loss of the model), from a model that is strictly feasible on `split`.

    It speaks of the problem in which both losses are clipped at `clip` = B. Any model whose clipped nominal loss lies
    below rho will do, such as one trained without a robust term; the lower its loss, the tighter the bound. Use it as
    `Constraint(upper=...)`, with the training split, where one limit on all examples is not tightened; `rho / 2` in the
    place of rho covers all that tightening may do. Per class or group, `dual_bound` takes the share and loss of each.
    """
    return dual_bound(clip, rho, clipped_loss(model, split, clip, loss))


@dataclass(frozen=True)
class SweepPoint:
    """What a solution at one limit gives: the limit, the robust loss reached, and the multiplier at the end."""

    rho: float
    robust_loss: float
    multiplier: float


@dataclass(frozen=True)
class Price:
    """The price of rho at one point of a sweep: the multiplier, and slopes of the trade-off curve to hold it against.

    `slope` is dP / drho by the parabola through the point and its neighbours; `left` and `right` are the slopes of
    the chords to the neighbours, NaN at the ends of the sweep.
    """

    rho: float
    multiplier: float
    slope: float
    left: float
    right: float

    @property
    def gap(self) -> float:
        """slope + multiplier: zero where the multiplier is the price of rho."""
        return self.slope + self.multiplier

    def bracketed(self, tolerance: float = 0.0) -> bool:
        """Tell whether left <= -multiplier <= right, as convexity demands of exact solutions (ends: one side)."""
        above = np.isnan(self.left) or self.left - tolerance <= -self.multiplier
        below = np.isnan(self.right) or -self.multiplier <= self.right + tolerance
        return bool(above and below)


def price_of_rho(points: Sequence[SweepPoint]) -> list[Price]:
    """Return the slope of the optimal robust loss as a function of rho next to -nu, in the order of rho.

    The sweep has at least three different limits. On a convex problem solved to the end, slope = -multiplier up to the
    second order of the spacing. On networks both sides carry the error of training, and duality holds nearly only:
    there the comparison is a measurement and not a theorem.
    """
    ordered = sorted(points, key=lambda point: point.rho)
    rho = np.array([point.rho for point in ordered], dtype=np.float64)
    robust = np.array([point.robust_loss for point in ordered], dtype=np.float64)
    if len(ordered) < 3 or not bool((np.diff(rho) > 0).all()):
        raise UsageError(f"price_of_rho: expected at least three different limits rho, got {rho.tolist()}")
    require(bool(np.isfinite(robust).all()), f"price_of_rho: the robust losses must be finite, got {robust.tolist()}")
    slopes = np.gradient(robust, rho, edge_order=2)
    chords = [float("nan"), *(np.diff(robust) / np.diff(rho)).tolist(), float("nan")]
    return [
        Price(point.rho, point.multiplier, float(slope), left, right)
        for point, slope, left, right in zip(ordered, slopes, chords[:-1], chords[1:], strict=True)
    ]
