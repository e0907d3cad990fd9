"""Norm balls around the image, intersected with the image box [0, 1].

Each projection is the exact Euclidean one onto the *intersection* of ball and box: projecting onto the ball and then
clipping to the box is the projection for l-infinity only. With lo = -x <= 0 <= hi = 1 - x, the KKT conditions give

    l-infinity   delta_i = clip(v_i, max(lo_i, -eps), min(hi_i, eps))
    l2           delta_i = clip(s v_i, lo_i, hi_i)                    s in (0, 1] with ||delta||_2 = eps
    l1           delta_i = sign(v_i) clip(|v_i| - m, 0, b_i)          m >= 0 with ||delta||_1 = eps

where b_i is the room on the side of v_i. Both searches are done by sorting the points at which a coordinate meets a
bound; between two of them the equation is solved in closed form, so no iteration is left to converge.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dale import random
from dale.errors import UsageError, require_positive
from dale.perturbations.base import PerturbationSet, fold_into
from dale.random import Key


def _flat(values: Tensor) -> Tensor:
    """View (B, ...) as (B, n) in at least float32: sums over thousands of pixels need the digits."""
    flat = values.flatten(1)
    return flat if flat.dtype == torch.float64 else flat.float()


def _length(flat: Tensor) -> Tensor:
    """The l2 norm of each row of (B, n), as (B, 1)."""
    length: Tensor = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    return length


def _room(v: Tensor, x: Tensor) -> Tensor:
    """How far a coordinate may move on the side of v before it leaves the image box."""
    return torch.where(v > 0, 1.0 - x, x).clamp_min(0.0)


@dataclass(frozen=True, kw_only=True)
class _Ball(PerturbationSet):
    """A ball of radius epsilon in which G(x, delta) = x + delta."""

    epsilon: float

    def __post_init__(self) -> None:
        require_positive(self, epsilon=self.epsilon)

    @property
    def radius(self) -> float:
        """The radius epsilon."""
        return self.epsilon

    def shape(self, image_shape: Sequence[int]) -> tuple[int, ...]:
        """Delta has the image's shape."""
        return tuple(image_shape)

    def apply(self, x: Tensor, delta: Tensor) -> Tensor:
        """G(x, delta) = x + delta."""
        return x + delta

    @abstractmethod
    def norm(self, delta: Tensor) -> Tensor:
        """The norm of each example's delta, as (B,)."""

    def _folded(self, delta: Tensor, x: Tensor) -> Tensor:
        """Turn what leaves the image box back at its walls: no coordinate grows, and none comes to lie on a wall.

        At a wall the ball is symmetric, so that a uniform draw stays uniform; projected, it would be on the wall.
        """
        inside, _ = fold_into(-x, 1.0 - x, delta, delta)
        return self.project(inside, x)  # which takes off what rounding left over

    def contains(self, delta: Tensor, x: Tensor, tolerance: float = 1e-6) -> Tensor:
        """Tell whether ||delta|| <= epsilon and x + delta in [0, 1], up to a tolerance (of an epsilon over 1)."""
        moved = (x + delta).flatten(1)
        in_box = ((moved >= -tolerance) & (moved <= 1.0 + tolerance)).all(dim=1)
        return in_box & (self.norm(delta) <= self.epsilon + tolerance * max(1.0, self.epsilon))


@dataclass(frozen=True, kw_only=True)
class Linf(_Ball):
    """The l-infinity ball: every pixel may change by at most epsilon.

    `sample` is uniform on the intersection of ball and box, which is itself a box.
    """

    def norm(self, delta: Tensor) -> Tensor:
        """max_i |delta_i|."""
        return _flat(delta).abs().amax(dim=1)

    def _bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (-x).clamp(-self.epsilon, 0.0), (1.0 - x).clamp(0.0, self.epsilon)

    def sample(self, x: Tensor, key: Key, index: Tensor) -> Tensor:
        """Draw uniformly from the intersection of ball and box."""
        low, high = self._bounds(x)
        return low + (high - low) * random.uniform(key, index, x.shape[1:]).to(x)

    def project(self, delta: Tensor, x: Tensor) -> Tensor:
        """Clip every coordinate to the ball and the box."""
        low, high = self._bounds(x)
        return torch.minimum(torch.maximum(delta, low), high)

    def reflect(self, delta: Tensor, momentum: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Reflect at the walls: the intersection of ball and box is a box."""
        return fold_into(*self._bounds(x), delta, momentum)


@dataclass(frozen=True, kw_only=True)
class L2(_Ball):
    """The l2 ball.

    `sample` is uniform on the ball, folded at the walls of the image box: uniform on Delta where each pixel stands at a
    wall or farther than epsilon from it, and nearly so elsewhere.
    """

    def norm(self, delta: Tensor) -> Tensor:
        """sqrt(sum_i delta_i^2)."""
        return _length(_flat(delta)).squeeze(1)

    def sample(self, x: Tensor, key: Key, index: Tensor) -> Tensor:
        """Draw a Gaussian direction and a radius epsilon * u^(1/n), uniform on the ball; then fold."""
        direction = random.normal(key, index, x.shape[1:]).to(x)
        size = x[0].numel()
        radius = self.epsilon * random.uniform(key.fold("radius"), index).to(x) ** (1.0 / size)
        scale = radius / self.norm(direction).to(x)
        return self._folded(direction * _column(scale, x), x)

    def steepest(self, gradient: Tensor) -> Tensor:
        """The gradient over its l2 norm."""
        flat = _flat(gradient)
        # dividing by the largest entry first keeps the squares of tiny gradients from underflowing to zero
        scaled = flat / flat.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
        norm = _length(scaled).clamp_min(torch.finfo(flat.dtype).tiny)
        return (scaled / norm).view_as(gradient).to(gradient.dtype)

    def project(self, delta: Tensor, x: Tensor) -> Tensor:
        """Solve sum_i clip(s v_i, lo_i, hi_i)^2 = eps^2 for s by sorted breakpoints."""
        v = _flat(delta)
        length, room = v.abs(), _room(v, _flat(x))
        # only the direction of v matters from here on, where there is room; with a largest entry of 1 no square
        # overflows, and none underflows that counts
        largest = torch.where(room > 0, length, 0.0).amax(dim=1, keepdim=True)
        size = (length / largest.clamp_min(torch.finfo(v.dtype).tiny)).clamp_max(1.0)
        # coordinate i moves as s * size_i until s = room_i / size_i, and stays at room_i from there on
        reach = torch.where(size > 0, room / size.clamp_min(torch.finfo(v.dtype).tiny), torch.inf)
        reach, order = reach.sort(dim=1)
        room_squared = room.gather(1, order).square()
        size_squared = size.gather(1, order).square()
        fixed = room_squared.cumsum(1) - room_squared  # of the coordinates that met their bound before this one
        moving = size_squared.flip(1).cumsum(1).flip(1)  # of this one and all later ones
        budget = self.epsilon**2
        # the segment in which the norm reaches epsilon: the first breakpoint at which it is already there
        at_breakpoint = fixed + torch.where(reach.isinf(), torch.inf, reach.square()) * moving
        segment = (at_breakpoint < budget).sum(dim=1, keepdim=True).clamp_max(v.shape[1] - 1)
        left = (budget - fixed.gather(1, segment)).clamp_min(0.0)
        scale = (left / moving.gather(1, segment).clamp_min(torch.finfo(v.dtype).tiny)).sqrt()
        clipped = torch.minimum(length, room)
        outside = _length(clipped) > self.epsilon
        result = torch.where(outside, torch.minimum(size * scale, room), clipped)
        # scaling towards zero stays in the box; it takes off what rounding in the sums left over
        norm = _length(result)
        result = result * (self.epsilon / norm.clamp_min(torch.finfo(v.dtype).tiny)).clamp_max(1.0)
        return (result * v.sign()).view_as(delta).to(delta.dtype)


@dataclass(frozen=True, kw_only=True)
class L1(_Ball):
    """The l1 ball, whose steepest direction moves the `active` share of coordinates with the largest gradient.

    `sample` is uniform on the ball, folded at the walls of the image box: uniform on Delta where each pixel stands at a
    wall or farther than epsilon from it, and nearly so elsewhere.
    """

    active: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.active <= 1.0:
            raise UsageError(f"L1: active is a share of the coordinates in (0, 1], got {self.active!r}")

    def norm(self, delta: Tensor) -> Tensor:
        """sum_i |delta_i|."""
        return _flat(delta).abs().sum(dim=1)

    def sample(self, x: Tensor, key: Key, index: Tensor) -> Tensor:
        """Draw Laplace coordinates over their sum plus one more exponential: uniform on the ball; then fold."""
        noise = random.laplace(key, index, x.shape[1:]).to(x)
        slack = -torch.log(random.uniform(key.fold("slack"), index)).to(x)
        return self._folded(noise * _column(self.epsilon / (self.norm(noise).to(x) + slack), x), x)

    def steepest(self, gradient: Tensor) -> Tensor:
        """The signs of the largest coordinates, over their number."""
        flat = _flat(gradient)
        count = max(1, round(self.active * flat.shape[1]))
        top = flat.abs().topk(count, dim=1).indices
        signs = flat.gather(1, top).sign()
        share = signs.abs().sum(dim=1, keepdim=True).clamp_min(1.0)  # of those with a gradient
        direction = torch.zeros_like(flat).scatter(1, top, signs / share)
        return direction.view_as(gradient).to(gradient.dtype)

    def ascent(self, gradient: Tensor, delta: Tensor, x: Tensor) -> Tensor:
        """The steepest direction among the coordinates that can move: a few at a wall would be chosen for ever."""
        free = _room(gradient, x + delta) > torch.finfo(x.dtype).eps  # a wall is reached up to the rounding of the sum
        return self.steepest(torch.where(free, gradient, 0.0))

    def project(self, delta: Tensor, x: Tensor) -> Tensor:
        """Solve sum_i clip(|v_i| - m, 0, b_i) = eps for m by sorted breakpoints."""
        # m is as large as |v|, and its digits below eps decide: float32 has none left after a long step
        v = _flat(delta).double()
        room = _room(v, _flat(x).double())
        clipped = torch.minimum(v.abs(), room)
        outside = clipped.sum(dim=1, keepdim=True) > self.epsilon
        # only differences of |v| matter for a point outside: from the largest down, no digits are lost far away
        size = v.abs() - torch.where(room > 0, v.abs(), 0.0).amax(dim=1, keepdim=True)
        # going down from m = infinity, coordinate i starts to grow at m = size_i and stops at m = size_i - room_i
        points = torch.cat([size, size - room], dim=1)
        slopes = torch.cat([torch.ones_like(size), -torch.ones_like(size)], dim=1)
        points, order = points.sort(dim=1, descending=True)
        slope = slopes.gather(1, order).cumsum(1)  # growing coordinates just below each point
        gaps = torch.cat([points[:, :-1] - points[:, 1:], torch.zeros_like(points[:, :1])], dim=1)
        total = (slope * gaps).cumsum(1)  # the norm at the next point
        segment = (total < self.epsilon).sum(dim=1, keepdim=True).clamp_max(points.shape[1] - 1)
        before = torch.where(segment > 0, total.gather(1, (segment - 1).clamp_min(0)), torch.zeros_like(total[:, :1]))
        rest = (self.epsilon - before) / slope.gather(1, segment).clamp_min(1.0)
        shift = points.gather(1, segment) - rest
        result = torch.where(outside, torch.minimum((size - shift).clamp_min(0.0), room), clipped)
        norm = result.sum(dim=1, keepdim=True)
        result = result * (self.epsilon / norm.clamp_min(torch.finfo(v.dtype).tiny)).clamp_max(1.0)
        return (result * v.sign()).view_as(delta).to(delta.dtype)


def _column(values: Tensor, x: Tensor) -> Tensor:
    """View (B,) as (B, 1, ..., 1), to multiply images."""
    return values.view(-1, *([1] * (x.dim() - 1)))
