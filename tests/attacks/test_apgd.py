"""APGD's kernels, worked out by hand: checkpoints, momentum, halving, the way back to the best point, sparse steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dale import random
from dale.attacks import AutoPGD, SparseAutoPGD
from dale.attacks.apgd import checkpoints, windows
from dale.batch import Batch
from dale.errors import UsageError
from dale.losses import Margin
from dale.perturbations import L1, Linf
from dale.samplers import Problem

KEY = random.key(0)


class Line(nn.Module):
    """Logits (0, weights . x), so that the margin of class 0 climbs along the weights."""

    def __init__(self, *weights: float) -> None:
        super().__init__()
        self.weights = torch.tensor(weights)

    def forward(self, x: Tensor) -> Tensor:
        score = (x.flatten(1) * self.weights).sum(dim=1)
        return torch.stack([torch.zeros_like(score), score], dim=1)


def problem(ball: Linf | L1, *weights: float, at: float = 0.5) -> Problem:
    images = torch.full((1, 1, 1, len(weights)), at)
    return Problem(Line(*weights), Batch.of(images, torch.tensor([0])), ball, Margin())


def test_checkpoints_by_hand() -> None:
    assert windows(100) == (22, 19, 16, 13, 10, 7, 6, 6)
    # the paper's shares of the budget: 0.22, 0.41, 0.57, 0.70, 0.80, 0.87, 0.93, 0.99
    assert [number + 1 for number in checkpoints(100)] == [22, 41, 57, 70, 80, 87, 93, 99]
    assert windows(50) == (11, 10, 9, 8, 7)
    assert windows(10) == (2, 1, 1, 1, 1, 1, 1, 1, 1)
    assert windows(1) == (1,)


def test_first_step_has_no_momentum_and_the_next_has() -> None:
    task, kernel = problem(Linf(epsilon=0.2), 1.0), AutoPGD(steps=100)
    state = kernel.init(task, torch.zeros(1, 1, 1, 1), KEY)
    assert state["eta"].item() == pytest.approx(0.4)  # twice the radius
    state["eta"] = torch.tensor([0.02])
    state = kernel.step(task, state, 0, KEY)
    assert state["delta"].item() == pytest.approx(0.02)
    state = kernel.step(task, state, 1, KEY)
    assert state["delta"].item() == pytest.approx(0.02 + 0.75 * 0.02 + 0.25 * 0.02)
    assert state["before"].item() == pytest.approx(0.02)
    assert state["increases"].item() == 2.0


def test_halving_at_every_checkpoint_once_nothing_climbs() -> None:
    """On a line the first step ends at the wall; no window has three quarters of rises: nine halvings in ten steps."""
    task, kernel = problem(Linf(epsilon=0.2), 1.0), AutoPGD(steps=10)
    state = kernel.init(task, torch.zeros(1, 1, 1, 1), KEY)
    etas = []
    for number in range(10):
        state = kernel.step(task, state, number, KEY)
        etas.append(state["eta"].item())
    assert state["best"].item() == pytest.approx(0.2)
    expected = [0.4, *(0.4 / 2**k for k in range(1, 10))]
    assert etas == pytest.approx(expected)


def test_a_window_of_rises_keeps_the_step() -> None:
    task, kernel = problem(Linf(epsilon=0.4), 1.0), AutoPGD(steps=10)
    state = kernel.init(task, torch.full((1, 1, 1, 1), -0.4), KEY)
    state["eta"] = torch.tensor([0.01])
    for number in range(2):  # the first window is two steps, and both climb
        state = kernel.step(task, state, number, KEY)
    assert state["eta"].item() == pytest.approx(0.01)
    assert not state["halved"].item()
    assert state["increases"].item() == 0.0  # counted anew


def test_a_best_that_has_not_grown_halves_unless_it_was_just_halved() -> None:
    """The second condition: all steps climbed, yet the best is that of the last checkpoint."""
    task, kernel = problem(Linf(epsilon=0.4), 1.0), AutoPGD(steps=100)
    state = kernel.init(task, torch.zeros(1, 1, 1, 1), KEY)
    state["increases"] = torch.tensor([22.0])
    for halved, expected in ((False, True), (True, False)):
        state["halved"] = torch.tensor([halved])
        after = kernel._reconsider(dict(state), 22)
        assert after["halved"].item() is expected
        assert after["eta"].item() == pytest.approx(0.4 if expected else 0.8)


def test_back_to_the_best_point_at_rest() -> None:
    task, kernel = problem(Linf(epsilon=0.4), 1.0), AutoPGD(steps=10)
    state = kernel.init(task, torch.full((1, 1, 1, 1), 0.3), KEY)
    state["delta"], state["before"] = torch.full((1, 1, 1, 1), -0.1), torch.full((1, 1, 1, 1), -0.2)
    after = kernel._reconsider(state, 2)
    assert after["delta"].item() == after["before"].item() == pytest.approx(0.3)
    assert after["value"].item() == pytest.approx(0.8)


def test_sparse_steps_move_the_largest_coordinates() -> None:
    """Of five coordinates the share 0.4: the two with the largest weights get half of epsilon each."""
    task, kernel = problem(L1(epsilon=0.2), 1.0, -5.0, 2.0, 0.5, -4.0), SparseAutoPGD(steps=100)
    state = kernel.init(task, torch.zeros(1, 1, 1, 5), KEY)
    state["active"], state["eta"] = torch.tensor([0.4]), torch.tensor([0.2])
    state = kernel.step(task, state, 0, KEY)
    assert state["delta"].flatten().tolist() == pytest.approx([0.0, -0.1, 0.0, 0.0, -0.1])


def test_sparse_checkpoints_by_hand() -> None:
    task, kernel = problem(L1(epsilon=0.3), *[1.0] * 20), SparseAutoPGD(steps=100)
    state = kernel.init(task, torch.zeros(1, 1, 1, 20), KEY)
    best = torch.zeros(1, 1, 1, 20)
    best[..., :6] = 0.05
    state["best"], state["count"], state["eta"] = best, torch.tensor([20.0]), torch.tensor([0.1])
    sparser = kernel._reconsider(task, dict(state))
    assert sparser["eta"].item() == pytest.approx(0.3)  # from 20 coordinates to 6: large steps again
    assert sparser["active"].item() == pytest.approx(6 / 20 / 1.5)
    assert torch.equal(sparser["delta"], best)
    same = kernel._reconsider(task, {**state, "count": torch.tensor([6.0])})
    assert same["eta"].item() == pytest.approx(0.1 / 1.5)
    small = kernel._reconsider(task, {**state, "count": torch.tensor([6.0]), "eta": torch.tensor([0.031])})
    assert small["eta"].item() == pytest.approx(0.03)  # never below a tenth of the radius


def test_sparse_steps_are_for_the_l1_ball() -> None:
    with pytest.raises(UsageError, match="l1 ball"):
        SparseAutoPGD().init(problem(Linf(epsilon=0.1), 1.0), torch.zeros(1, 1, 1, 1), KEY)
