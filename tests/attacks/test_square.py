"""Square: the schedule of sizes, the patterns, proposals in the ball, and queries that only help."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dale import random
from dale.attacks import Square
from dale.attacks.hunt import Hunt
from dale.attacks.square import bump, side_of, window
from dale.batch import Batch
from dale.perturbations import L1, L2, Linf, PerturbationSet

BALLS: dict[str, PerturbationSet] = {"linf": Linf(epsilon=0.15), "l2": L2(epsilon=0.8), "l1": L1(epsilon=2.0)}
Victim = tuple[nn.Module, object]


def test_schedule_by_hand() -> None:
    """The share 0.8 of the pixels, halved after 10, 50, 200, 500, 1000, 2000, 4000, ... queries; sides are its root."""
    assert [side_of(n, 28, 28) for n in (0, 10, 11, 50, 51, 200, 201, 501, 1001, 2001, 4001)] == [
        *(25, 25),  # sqrt(0.8 * 784) = 25.04
        *(18, 18),  # sqrt(0.4 * 784) = 17.7
        *(13, 13),  # 12.5 rounds to the even 12 in exact arithmetic; 12.52 to 13
        *(9, 6, 4, 3, 2),
    ]
    assert [side_of(n, 32, 32) for n in (0, 6001, 8001)] == [29, 2, 1]
    assert side_of(4001, 8, 8) == 1
    # l2 and l1: odd, and at least 3
    assert [side_of(n, 28, 28, smallest=3) for n in (0, 11, 4001)] == [25, 19, 3]


@pytest.mark.parametrize(("power", "order"), [(2, 2), (4, 1)])
def test_patterns(power: int, order: int) -> None:
    pattern = bump(7, power)
    assert torch.linalg.vector_norm(pattern, ord=order).item() == pytest.approx(1.0)
    assert (pattern[:3] > 0).all()
    assert (pattern[3:] < 0).all()
    # the half's centre is its largest, by 1 / 1 + 1 / 2^power + ... over the tail that the ring begins with
    upper = bump(7, power)[:3]
    assert upper.argmax().item() == 1 * 7 + 3
    weights = [1.0 / (k + 1) ** power for k in range(4)]
    assert (upper[1, 2] / upper[1, 3]).item() == pytest.approx(sum(weights[1:]) / sum(weights))


@pytest.mark.parametrize(("power", "order"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("side", [3, 5, 8, 19])
def test_both_halves_of_a_pattern_weigh_the_same(power: int, order: int, side: int) -> None:
    pattern = bump(side, power)
    halves = [torch.linalg.vector_norm(half, ord=order).item() for half in (pattern[: side // 2], pattern[side // 2 :])]
    assert halves == pytest.approx([0.5 ** (1 / order)] * 2)


def test_window_by_hand() -> None:
    places, inside = window(torch.tensor([1, 3]), 2, 5)
    assert inside.tolist() == [[False, True, True, False, False], [False, False, False, True, True]]
    assert places.tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]


@pytest.mark.parametrize("name", BALLS)
def test_every_proposal_lies_in_the_ball(name: str, victim: Victim, batch: Batch) -> None:
    model, ball, attack = victim[0], BALLS[name], Square(queries=60)
    asked: list[torch.Tensor] = []

    class Watched(Hunt):
        def query(self, delta: torch.Tensor) -> torch.Tensor:
            asked.append(ball.contains(delta, self.x, 1e-6))
            return super().query(delta)

        def query_rows(self, delta: torch.Tensor, rows: torch.Tensor) -> None:
            asked.append(ball.contains(delta, self.x, 1e-6))
            super().query_rows(delta, rows)

    hunt = Watched(model, batch, ball, None, False, model(batch.images).detach())
    with torch.no_grad():
        attack.search(hunt, 0, random.key(0))
    assert len(asked) > 40
    assert all(inside.all() for inside in asked)


def test_squares_are_set_to_the_corners(victim: Victim, batch: Batch) -> None:
    """l-infinity: every pixel of the result moved by epsilon, or to the wall of the box."""
    ball = Linf(epsilon=0.15)
    delta = Square(queries=50)(victim[0], batch, ball, 0)
    moved = delta.flatten(1).abs().amax(1) > 0  # wrong ones are left alone
    high, low = (
        ball.project(torch.full_like(delta, 1.0), batch.images),
        ball.project(torch.full_like(delta, -1.0), batch.images),
    )
    at_corner = torch.isclose(delta, high) | torch.isclose(delta, low)
    assert at_corner[moved].all()


def test_more_queries_begin_as_fewer_and_help(victim: Victim, batch: Batch) -> None:
    model, ball = victim[0], Linf(epsilon=0.15)
    fooled = []
    for queries in (1, 30, 300):
        delta = Square(queries=queries)(model, batch, ball, 0)
        fooled.append(model(batch.images + delta).argmax(1) != batch.labels)
    assert (fooled[1] | ~fooled[0]).all()
    assert (fooled[2] | ~fooled[1]).all()
    assert fooled[0].sum() < fooled[2].sum()
