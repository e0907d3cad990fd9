"""FAB: the projection onto a hyperplane in the box against exact solvers, and distances known by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from torch import Tensor, nn

from dale import random
from dale.attacks import FAB, TargetMargin
from dale.attacks.fab import to_hyperplane
from dale.attacks.hunt import Hunt
from dale.batch import Batch
from dale.perturbations import L1, L2, Linf, PerturbationSet

BALLS: dict[str, PerturbationSet] = {"linf": Linf(epsilon=1.0), "l2": L2(epsilon=1.0), "l1": L1(epsilon=1.0)}


def test_projection_by_hand() -> None:
    """w = (1, 1), from (0.5, 0.5) to w . z = 1.8: 0.4 each; from (0.9, 0.5) the first coordinate meets its wall."""
    w, b = torch.ones(2, 2), torch.full((2,), 1.8)
    x = torch.tensor([[0.5, 0.5], [0.9, 0.5]])
    for ball in (Linf(epsilon=1.0), L2(epsilon=1.0)):
        d = to_hyperplane(ball, x, w, b)
        assert torch.allclose(d, torch.tensor([[0.4, 0.4], [0.1, 0.3]]), atol=1e-6)
    steep = torch.tensor([[1.0, 2.0]])
    d = to_hyperplane(L1(epsilon=1.0), torch.tensor([[0.5, 0.5]]), steep, torch.tensor([2.6]))
    assert torch.allclose(d, torch.tensor([[0.1, 0.5]]), atol=1e-6)
    far = to_hyperplane(Linf(epsilon=1.0), x[:1], w[:1], torch.tensor([5.0]))
    assert torch.allclose(far, torch.tensor([[0.5, 0.5]]))


def smallest_norm(norm: str, x: np.ndarray, w: np.ndarray, b: float) -> float:
    """The least norm of d with w . (x + d) = b and x + d in the box, by a linear or quadratic program."""
    n, need = len(x), b - w @ x
    if norm == "l2":
        bounds = list(zip(-x, 1.0 - x, strict=True))
        plane = {"type": "eq", "fun": lambda d: w @ d - need, "jac": lambda d: w}
        done = minimize(
            lambda d: d @ d, np.zeros(n), jac=lambda d: 2 * d, bounds=bounds, constraints=[plane], method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )  # fmt: skip
        assert done.success
        return float(np.sqrt(done.fun))
    count = n if norm == "l1" else 1  # variables: d, and a bound for |d| in common or for each coordinate
    bound = np.eye(n) if norm == "l1" else np.ones((n, 1))
    sides = np.vstack([np.hstack([np.eye(n), -bound]), np.hstack([-np.eye(n), -bound])])
    done = linprog(
        np.r_[np.zeros(n), np.ones(count)],
        A_ub=sides,
        b_ub=np.zeros(2 * n),
        A_eq=np.r_[w, np.zeros(count)][None],
        b_eq=[need],
        bounds=[*zip(-x, 1.0 - x, strict=True), *[(0.0, None)] * count],
    )
    assert done.success
    return float(done.fun)


@pytest.mark.parametrize("norm", BALLS)
def test_projection_is_the_smallest(norm: str) -> None:
    """Forty hyperplanes that meet the box, some of them far from the point, some weights zero."""
    ball, n = BALLS[norm], 7
    rng = np.random.default_rng(3)
    x, w = rng.random((40, n)), rng.normal(size=(40, n))
    w[rng.random((40, n)) < 0.15] = 0.0
    x[rng.random((40, n)) < 0.15] = 1.0  # on a wall
    b = (w * rng.random((40, n)) ** 0.3).sum(1)  # through a point of the box
    rows = [torch.as_tensor(part, dtype=torch.float64) for part in (x, w, b)]
    d = to_hyperplane(ball, *rows)
    assert torch.allclose((rows[1] * (rows[0] + d)).sum(1), rows[2], atol=1e-9)
    assert ((rows[0] + d) >= -1e-12).all()
    assert ((rows[0] + d) <= 1 + 1e-12).all()
    ours = {"linf": d.abs().amax(1), "l2": d.norm(dim=1), "l1": d.abs().sum(1)}[norm]
    exact = torch.tensor([smallest_norm(norm, *row) for row in zip(x, w, b, strict=True)], dtype=torch.float64)
    assert torch.allclose(ours, exact, atol=1e-6)


class Plane(nn.Module):
    """Two classes on either side of w . x = b."""

    def __init__(self, w: Tensor, b: float) -> None:
        super().__init__()
        self.w, self.b = w, b

    def forward(self, x: Tensor) -> Tensor:
        score = x.flatten(1) @ self.w - self.b
        return torch.stack([score, -score], dim=1)


@pytest.mark.parametrize("norm", BALLS)
def test_falls_exactly_beyond_the_distance(norm: str) -> None:
    """On a linear classifier the distance to the boundary is known: just inside all stand, just outside all fall."""
    w = torch.tensor([1.0, -2.0, 0.5, 1.5])
    images = torch.tensor([[0.6, 0.3, 0.5, 0.6], [0.7, 0.2, 0.4, 0.5]]).view(2, 1, 2, 2)
    model = Plane(w, 0.4).eval()
    batch = Batch.of(images, model(images).argmax(1))
    d = to_hyperplane(BALLS[norm], images.flatten(1), w.expand(2, 4), torch.full((2,), 0.4))
    distance = {"linf": d.abs().amax(1), "l2": d.norm(dim=1), "l1": d.abs().sum(1)}[norm]
    for row in range(2):
        for factor, expected in ((0.97, False), (1.03, True)):
            ball = type(BALLS[norm])(epsilon=factor * distance[row].item())  # type: ignore[call-arg]
            one = batch[row : row + 1]
            delta = FAB(steps=20)(model, one, ball, 0)
            assert bool((model(one.images + delta).argmax(1) != one.labels).item()) is expected


def test_a_point_across_is_pulled_back_and_keeps_its_boundary() -> None:
    """On a linear classifier every linearised boundary is the boundary: one step reaches it from the image."""
    w = torch.tensor([1.0, 2.0])
    model = Plane(w, 0.4).eval()
    batch = Batch.of(torch.tensor([[[[0.4, 0.4]]]]), torch.tensor([0]))  # 0.8 from the boundary along w: d = 0.16 w
    hunt = Hunt(model, batch, L2(epsilon=0.1), TargetMargin(rank=1), False, model(batch.images), guard=True)
    attack = FAB()
    with torch.no_grad():
        value, gradient = hunt.value_and_gradient(hunt.zeros())
        first = attack._step(hunt, {"delta": hunt.zeros(), "value": value, "gradient": gradient})
        assert first.flatten().tolist() == pytest.approx([-1.05 * 0.16, -1.05 * 0.32], abs=1e-6)
        state = attack._look(hunt, first)
    assert state["delta"].flatten().tolist() == pytest.approx([-0.9 * 1.05 * 0.16, -0.9 * 1.05 * 0.32], abs=1e-6)
    # the value carried over is the value there, since the classifier is linear
    there = model(batch.images + state["delta"])
    assert state["value"].item() == pytest.approx((there[0, 1] - there[0, 0]).item(), abs=1e-6)
    assert hunt.seen.item() > 0 > hunt.margin.item() == pytest.approx(-1.6)  # across, but outside the ball


def test_spends_what_it_says(victim: tuple[nn.Module, object], batch: Batch) -> None:
    model, attack = victim[0], FAB(steps=4, targets=2)
    found = attack.run_round(
        model, batch, Linf(epsilon=1e-4), 0, random.key(0), clean_logits=model(batch.images).detach()
    )
    assert attack.budget(10).gradients == 2 * 5
    assert attack.budget(10).restarts == 2
    assert found.queries == 0
    # a few of the batch are wrong from the start and are let go at once
    assert 4 * len(batch) < found.gradients <= 5 * len(batch)
