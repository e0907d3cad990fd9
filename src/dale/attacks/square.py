"""Square (Andriushchenko et al. 2020): random search over square patches, by queries alone, without gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dale import random
from dale.attacks.base import Attack, Budget
from dale.attacks.hunt import Hunt
from dale.errors import UsageError, require
from dale.perturbations import L1, L2, Linf, PerturbationSet
from dale.random import Key
from dale.samplers import State

QUERIES = 5000
_FIRST_SHARE = 0.8  # of the image that the first squares cover
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # queries after which the share is halved
_BLOCK = 50  # queries whose random numbers are drawn at once


def side_of(number: int, height: int, width: int, smallest: int = 1) -> int:
    """Return the side of the square of query `number`: the root of the share of the image's pixels."""
    share = _FIRST_SHARE / 2 ** sum(number > limit for limit in _HALVINGS)
    side = max(round(math.sqrt(share * height * width)), smallest)
    return min(side + (side % 2 == 0 and smallest > 1), height, width)


@lru_cache
def bump(side: int, power: int) -> Tensor:
    """Return the (side, side) pattern of two opposite bumps, of unit l2 norm (power 2) or l1 norm (power 4).

    In each half a pixel at Chebyshev distance d from the half's centre weighs sum_{k >= d} 1 / (k + 1)^power.
    """
    order = 2 if power == 2 else 1
    halves = [_half(side // 2, side, power), -_half(side - side // 2, side, power)]
    # as much in one half as in the other, though one has a row more where the side is odd
    even = [half / torch.linalg.vector_norm(half, ord=order) for half in halves if half.numel()]
    pattern = torch.cat(even)
    size: Tensor = torch.linalg.vector_norm(pattern, ord=order)
    return pattern / size


def _half(height: int, width: int, power: int) -> Tensor:
    row, column = height // 2, width // 2
    rings = max(row, column) + 1
    distance = torch.maximum(
        (torch.arange(height) - row).abs().unsqueeze(1), (torch.arange(width) - column).abs().unsqueeze(0)
    )
    weights = torch.tensor([1.0 / (k + 1) ** power for k in range(rings)])
    from_there = weights.flip(0).cumsum(0).flip(0)
    return from_there[distance.clamp_max(rings - 1)]


def window(first: Tensor, side: int, length: int) -> tuple[Tensor, Tensor]:
    """Return for each example the places along an axis relative to its window, and which of them are inside."""
    place = torch.arange(length, device=first.device) - first.unsqueeze(1)
    return place.clamp(0, side - 1), (place >= 0) & (place < side)


@dataclass(frozen=True, kw_only=True)
class Square(Attack):
    """Random search: a proposal changes a random square of the best perturbation so far, and is kept if it is better.

    l-infinity starts from vertical stripes of +-epsilon, and a proposal sets a square to +-epsilon, one sign for each
    channel. l2 and l1 start from a tiling of bumps, and a proposal moves the mass of one square, and what is left of
    the radius, into another, shaped by a bump. The side of the squares shrinks with the queries. Better means a larger
    margin. A proposal that changes nothing is not asked for. `queries` is the number of proposals for each example.
    """

    queries: int = QUERIES

    def __post_init__(self) -> None:
        require(self.queries >= 1, f"Square: queries must be a whole number of at least 1, got {self.queries!r}")

    @property
    def name(self) -> str:
        """square, square1000."""
        return "square" if self.queries == QUERIES else f"square{self.queries}"

    @property
    def stream(self) -> str:
        """A longer search begins as a shorter one."""
        return "square"

    @property
    def white_box(self) -> bool:
        """Queries alone."""
        return False

    def supports(self, perturbations: PerturbationSet) -> None:
        """Norm balls."""
        if not isinstance(perturbations, (Linf, L2, L1)):
            kind = type(perturbations).__name__
            raise UsageError(f"square searches norm balls (Linf, L2, L1), not {kind}; use 'random' or 'grid'")

    def budget(self, num_classes: int) -> Budget:
        """The start and the proposals."""
        return Budget(steps=self.queries, queries=self.queries + 1)

    def search(self, hunt: Hunt, number: int, key: Key) -> None:
        """Search. Random numbers are drawn for many queries at once: the draws, not the model, would take the time."""
        flat = isinstance(hunt.perturbations, Linf)
        hunt.query(self._stripes(hunt, key.fold("start")) if flat else self._tiles(hunt, key.fold("start")))
        state: State = {"index": hunt.index}
        if flat:
            corner = hunt.perturbations.radius * torch.ones_like(hunt.x)
            state |= {"low": hunt.project(-corner), "high": hunt.project(corner)}
        for query in range(self.queries):
            hunt, state = hunt.shed(state)
            if len(hunt.batch) == 0:
                return
            block, place = divmod(query, _BLOCK)
            if place == 0:
                draws = random.uniform(key.fold(block), hunt.index, (_BLOCK, 5 + hunt.x.shape[1]))
                state |= self._squares(hunt, query, draws) if flat else {"draws": draws}
            self._ask(
                hunt, self._square(hunt, state, place) if flat else self._move(hunt, query, state["draws"][:, place])
            )
        hunt.settle()

    def _ask(self, hunt: Hunt, proposal: Tensor) -> None:
        if proposal.device.type != "cpu":  # where asking which proposals change something costs more than it saves
            hunt.query(proposal)
            return
        rows = (proposal != hunt.best).flatten(1).any(dim=1).nonzero().squeeze(1)
        if len(rows) > 0:
            hunt.query_rows(proposal, rows)

    def _stripes(self, hunt: Hunt, key: Key) -> Tensor:
        channels, _, width = hunt.x.shape[1:]
        sign = _signs(random.uniform(key, hunt.index, (channels, 1, width))).to(hunt.x)
        return hunt.project(hunt.perturbations.radius * sign.expand_as(hunt.x))

    @staticmethod
    def _squares(hunt: Hunt, first: int, draws: Tensor) -> State:
        """The rows, columns and signs of a block of squares, for all its queries at once."""
        height, width = hunt.x.shape[2:]
        sides = [side_of(first + place, height, width) for place in range(draws.shape[1])]
        side = torch.tensor(sides, device=draws.device)
        state = {"up": draws[:, :, 5:] < 0.5}
        for axis, (name, length) in enumerate((("rows", height), ("columns", width))):
            start = (draws[:, :, axis] * (length - side + 1)).long().unsqueeze(2)
            place = torch.arange(length, device=draws.device)
            state[name] = (place >= start) & (place < start + side.unsqueeze(1))
        return state

    def _square(self, hunt: Hunt, state: State, place: int) -> Tensor:
        rows, columns = state["rows"][:, place], state["columns"][:, place]
        inside = (rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)
        up = state["up"][:, place].unsqueeze(2).unsqueeze(3)
        return torch.where(inside, torch.where(up, state["high"], state["low"]), hunt.best)

    def _tiles(self, hunt: Hunt, key: Key) -> Tensor:
        channels, height, width = hunt.x.shape[1:]
        side = max(1, min(height, width) // 5)
        tile = bump(side, self._power(hunt)).to(hunt.x)
        down, across = height // side, width // side
        sign = _signs(random.uniform(key, hunt.index, (channels, down, across))).to(hunt.x)
        body = torch.einsum("bcij,rs->bcirjs", sign, tile).reshape(len(sign), channels, down * side, across * side)
        delta = torch.zeros_like(hunt.x)
        top, left = (height - down * side) // 2, (width - across * side) // 2
        delta[:, :, top : top + down * side, left : left + across * side] = body
        return self._fill(hunt, delta)

    def _move(self, hunt: Hunt, query: int, draw: Tensor) -> Tensor:
        channels, height, width = hunt.x.shape[1:]
        order = 2 if isinstance(hunt.perturbations, L2) else 1
        side = side_of(query, height, width, smallest=3)
        r, rows = window((draw[:, 0] * (height - side + 1)).long(), side, height)
        c, columns = window((draw[:, 1] * (width - side + 1)).long(), side, width)
        _, rows2 = window((draw[:, 2] * (height - side + 1)).long(), side, height)
        _, columns2 = window((draw[:, 3] * (width - side + 1)).long(), side, width)
        into = (rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)
        emptied = (rows2.unsqueeze(2) & columns2.unsqueeze(1)).unsqueeze(1)
        pattern = bump(side, self._power(hunt)).to(hunt.x)
        both = torch.stack([pattern, pattern.T])  # upright or lying, as drawn for each example
        shape = both[(draw[:, 4] > 0.5).long().view(-1, 1, 1), r.unsqueeze(2), c.unsqueeze(1)].unsqueeze(1) * into
        sign = _signs(draw[:, 5:]).to(hunt.x).view(-1, channels, 1, 1)
        delta = hunt.best
        kept = delta * into
        fresh = shape * sign + kept / _size(kept, order).clamp_min(1e-12)
        left = (hunt.perturbations.radius**order - _size(delta, order, (1, 2, 3)) ** order).clamp_min(0.0)
        mass = (left / channels + _size(delta * (into | emptied), order) ** order) ** (1.0 / order)
        fresh = fresh / _size(fresh, order).clamp_min(1e-12) * mass
        return self._fill(hunt, torch.where(into, fresh, delta * ~emptied))

    def _fill(self, hunt: Hunt, delta: Tensor) -> Tensor:
        """Stretch to the radius and clip to the box (which shortens): the l2 or l1 ball is not left."""
        order = 2 if isinstance(hunt.perturbations, L2) else 1
        # the radius less a little, so that rounding does not lead out of the ball
        scale = (1.0 - 1e-6) * hunt.perturbations.radius / _size(delta, order, (1, 2, 3)).clamp_min(1e-12)
        return (hunt.x + delta * scale).clamp(0.0, 1.0) - hunt.x

    @staticmethod
    def _power(hunt: Hunt) -> int:
        return 2 if isinstance(hunt.perturbations, L2) else 4


def _signs(draws: Tensor) -> Tensor:
    return torch.where(draws < 0.5, -1.0, 1.0)


def _size(delta: Tensor, order: int, dims: tuple[int, ...] = (2, 3)) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(delta, ord=order, dim=dims, keepdim=True)
    return size
