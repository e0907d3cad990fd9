"""The optimal density lambda* in closed form: on a finite sample, and on a grid over a one- or two-dimensional Delta.

The density is relative to the uniform distribution on Delta and maximises ``E[lambda loss] - gamma / 2 E[lambda^2]``
(expectations under the uniform distribution, ``E[lambda] = 1``):

    lambda*(delta) = [ (loss(delta) - mu) / gamma ]_+ ,   mu such that E[lambda*] = 1.

For K candidates drawn uniformly from Delta, with losses l_1..l_K and weights w_k = lambda_k / K, that reads

    maximise  sum_k w_k l_k - (K gamma / 2) sum_k w_k^2   over the simplex:   w_k = [ (l_k - mu) / (K gamma) ]_+ ,

the Euclidean projection of l / (K gamma) onto the simplex. The factor K makes the expected loss converge as K grows;
without it the weights drift to the argmax. gamma -> 0 is the maximum (ties share equally), gamma -> infinity the mean.
With candidates that are not uniform on Delta (states of a chain) the weights are a heuristic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dale.errors import require, unknown

Gamma = float | Tensor


def weights(losses: Tensor, gamma: Gamma) -> Tensor:
    """Return w = [ (l - mu) / (K gamma) ]_+ for `losses` of shape (K, B) or (K,): a point of the simplex per example.

    `gamma` is one number or one per example, in [0, infinity]; both ends mean their limits. Exact, by sorting:
    O(K log K) per example, without host synchronisation.
    """
    scaled = _scaled(losses, gamma)
    w = (scaled - _threshold(scaled)).clamp_min(0)
    return w / w.sum(0)  # the sum is 1 up to rounding, which grows with K


def mu(losses: Tensor, gamma: Gamma) -> Tensor:
    """Return the level mu of each example, above which a loss has weight: sum_k [ (l_k - mu) / (K gamma) ]_+ = 1.

    The limits are max_k l_k at gamma = 0 and -infinity at gamma = infinity.
    """
    return losses.amax(0) + _temperature(losses, gamma) * _threshold(_scaled(losses, gamma))


def value(losses: Tensor, gamma: Gamma) -> Tensor:
    """Return the regularised maximum, max over the simplex of sum w l - (K gamma / 2) sum w^2, one per example.

    Differentiable: by Danskin's theorem its gradient with respect to the losses is w itself. `gamma` must be finite.
    """
    w = weights(losses.detach(), gamma)
    return (w * losses).sum(0) - 0.5 * len(losses) * gamma * w.square().sum(0)


def norm(w: Tensor) -> Tensor:
    """Return E_uniform[lambda^2] = mean_k (K w_k)^2 of weights (K, ...): 1 for the mean, K for a single candidate."""
    return len(w) * w.square().sum(0)


def gamma_for_budget(losses: Tensor, norm_budget: float) -> Tensor:
    """Return, per example, the gamma at which mean_k (K w_k)^2 = `norm_budget` (at least 1).

    The norm falls as gamma grows, from K / #ties of the maximum (gamma = 0) to 1 (gamma = infinity); a budget beyond
    either end gives that end. In between the root is bracketed and then solved for: with l_1 >= l_2 >= ... and
    S_m = sum_{i<m} (l_i - l_m), the m-th candidate gains weight at gamma = S_m / K, so the norm at these K breakpoints
    tells how many candidates m have weight, and on that piece

        norm = K / m + V_m / (K gamma^2),   V_m = sum of squared deviations of the m largest losses,

    is solved for gamma, which is held to its bracket against rounding. All sums are of terms that are not negative,
    so nothing cancels; no loop and no host synchronisation.
    """
    require(norm_budget >= 1, f"norm_budget must be at least 1 (the norm of the uniform density), got {norm_budget!r}")
    num = len(losses)
    ordered = losses.detach().double().sort(0, descending=True).values
    shape = (num - 1, *[1] * (losses.ndim - 1))
    rank = torch.arange(1, num, dtype=torch.float64, device=losses.device).reshape(shape)
    drop = ordered[:-1] - ordered[1:]
    zero = torch.zeros_like(ordered[:1])
    first = torch.cat([zero, (rank * drop).cumsum(0)])  # S_m, m = 1..K
    second = torch.cat([zero, (2 * drop * first[:-1] + rank * drop.square()).cumsum(0)])  # sum_{i<m} (l_i - l_m)^2
    deviations = torch.cat([zero, (first[1:].square() / (rank * (rank + 1))).cumsum(0)])  # V_m, by Welford's update
    # at breakpoint m the norm is K second / first^2; written as a product so that ties of the maximum (0 >= 0) count
    has_weight = num * second >= norm_budget * first.square()
    count = has_weight.sum(0, keepdim=True).clamp_min(1)
    lower = first.gather(0, count - 1) / num
    beyond = torch.cat([first, torch.full_like(zero, torch.inf)])
    upper = beyond.gather(0, count) / num
    spread = deviations.gather(0, count - 1)
    excess = (norm_budget - num / count.double()).clamp_min(0)
    root = (spread / (num * excess)).sqrt()
    root = torch.where(spread == 0, torch.zeros_like(root), root).clamp(lower, upper)
    return root.squeeze(0).to(torch.promote_types(losses.dtype, torch.float32))


def _temperature(losses: Tensor, gamma: Gamma) -> Gamma:
    """Return K gamma, kept above zero: the limit gamma -> 0 is reached long before the smallest number."""
    tiny = torch.finfo(losses.dtype).tiny
    if isinstance(gamma, Tensor):
        return (len(losses) * gamma.to(losses.dtype)).clamp_min(tiny)
    return max(len(losses) * gamma, tiny)  # a number stays one: no copy to the device, so a graph can capture this


def _scaled(losses: Tensor, gamma: Gamma) -> Tensor:
    """Return l / (K gamma), moved so that the largest is 0: the projection does not see a shift, but rounding does."""
    return (losses - losses.amax(0)) / _temperature(losses, gamma)


def _threshold(scaled: Tensor) -> Tensor:
    """Return tau with sum_k [z_k - tau]_+ = 1: tau = (z_(1) + .. + z_(m) - 1) / m, m the largest that keeps z_(m)."""
    ordered = scaled.sort(0, descending=True).values
    total = ordered.cumsum(0)
    rank = torch.arange(1, len(scaled) + 1, dtype=scaled.dtype, device=scaled.device)
    rank = rank.reshape(-1, *[1] * (scaled.ndim - 1))
    count = (1 + rank * ordered > total).sum(0, keepdim=True).clamp_min(1)
    return ((total.gather(0, count - 1) - 1) / count).squeeze(0)


@dataclass(frozen=True, eq=False)
class GridDensity:
    """lambda* on a grid of N cells of equal volume: exact for the loss that is constant on each cell.

    `points` (N, d) are the midpoints, `losses` (N,) the loss there, `density` (N,) is relative to the uniform
    distribution (its mean is 1), `mu` and `gamma` are those of lambda* = [ (loss - mu) / gamma ]_+.
    """

    points: Tensor
    losses: Tensor
    density: Tensor
    mu: float
    gamma: float

    @property
    def expected_loss(self) -> float:
        """E_uniform[lambda* loss]: between `mean_loss` (gamma = infinity) and `max_loss` (gamma = 0)."""
        return float((self.density * self.losses).mean())

    @property
    def mean_loss(self) -> float:
        """The limit gamma -> infinity: the expected loss under the uniform distribution."""
        return float(self.losses.mean())

    @property
    def max_loss(self) -> float:
        """The limit gamma -> 0: the worst case."""
        return float(self.losses.max())

    @property
    def norm(self) -> float:
        """E_uniform[lambda*^2], what `norm_budget` bounds."""
        return float(self.density.square().mean())


def grid(
    loss_fn: Callable[[Tensor], Tensor],
    *,
    lower: Sequence[float],
    upper: Sequence[float],
    resolution: int,
    gamma: float | None = None,
    norm_budget: float | None = None,
    shape: Literal["box", "l2", "l1"] = "box",
) -> GridDensity:
    """Compute lambda* in float64 on a one- or two-dimensional Delta, for a gamma in [0, infinity] or a norm budget.

    Delta is the box from `lower` to `upper`, or the l2 or l1 ball (ellipse, rhombus) inscribed in it; `resolution` is
    the number of cells a side. `loss_fn` takes points (N, d) and returns N losses.
    """
    if shape not in ("box", "l2", "l1"):
        raise unknown("shape of a grid", shape, ("box", "l2", "l1"))
    require(len(lower) == len(upper) and len(lower) in (1, 2), "grid: lower and upper must both have 1 or 2 entries")
    require(all(a < b for a, b in zip(lower, upper, strict=True)), f"grid: lower {lower} must lie below upper {upper}")
    require(resolution >= 1, f"grid: resolution must be at least 1, got {resolution}")
    require((gamma is None) != (norm_budget is None), "grid: give either gamma or norm_budget")
    require(gamma is None or gamma >= 0, f"grid: gamma must be at least 0, got {gamma!r}")
    side = (torch.arange(resolution, dtype=torch.float64) + 0.5) / resolution * 2 - 1
    unit = torch.cartesian_prod(*[side] * len(lower)).reshape(-1, len(lower))
    if shape != "box":
        unit = unit[torch.linalg.vector_norm(unit, ord=2 if shape == "l2" else 1, dim=1) <= 1]
    low, high = torch.tensor(lower, dtype=torch.float64), torch.tensor(upper, dtype=torch.float64)
    points = low + (high - low) * (unit + 1) / 2
    with torch.no_grad():
        losses = loss_fn(points).double()
    require(losses.shape == points.shape[:1], f"grid: loss_fn must return {len(points)} values, got {losses.shape}")
    if norm_budget is not None:
        gamma = float(gamma_for_budget(losses, norm_budget))
    assert gamma is not None
    density = len(losses) * weights(losses, gamma)
    return GridDensity(points, losses, density, float(mu(losses, gamma)), gamma)
