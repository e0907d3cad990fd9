"""nu is the price of rho: sweeps over rho on two convex problems, solved by the product's own dual ascent."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from dale import algorithms, random
from dale.batch import Batch
from dale.constraints import Constraint, ascend, initial_dual, violation
from dale.data.splits import Split
from dale.errors import UsageError
from dale.losses import CrossEntropy
from dale.perturbations import Linf
from dale.samplers import fgsm
from dale.sensitivity import Price, SweepPoint, bound_from_model, clipped_loss, price_of_rho


def solve_quadratic(a: torch.Tensor, b: torch.Tensor, rho: float) -> SweepPoint:
    """Minimise |theta - a|^2 / 2 subject to |theta - b|^2 / 2 <= rho by gradient descent and dual ascent in turn."""
    constraint = Constraint(limit=rho, step_size=0.1, initial=0.0, tighten=False)
    dual, theta, member = initial_dual(constraint, 1), a.clone(), torch.ones(1, 1)
    for _ in range(1500):
        theta = theta - 0.1 * ((theta - a) + dual.multiplier * (theta - b))
        nominal = (theta - b).square().sum().view(1) / 2
        dual = ascend(constraint, dual, violation(constraint, dual, nominal, member))
    return SweepPoint(rho, float((theta - a).square().sum() / 2), float(dual.multiplier))


class TestQuadratic:
    """P(rho) = (D - sqrt(2 rho))^2 / 2 and nu* = D / sqrt(2 rho) - 1 with D = |a - b|; slack once sqrt(2 rho) >= D."""

    a, b = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 2.0, 0.0])  # D = 3

    def sweep(self, limits):
        return [solve_quadratic(self.a, self.b, rho) for rho in limits]

    def test_primal_dual_dynamics_find_the_solution(self):
        for point in self.sweep([0.5, 1.0, 2.0, 4.0]):
            root = math.sqrt(2 * point.rho)
            assert point.multiplier == pytest.approx(3 / root - 1, rel=1e-4)
            assert point.robust_loss == pytest.approx((3 - root) ** 2 / 2, rel=1e-4)

    def test_the_slope_of_the_trade_off_is_minus_the_multiplier(self):
        prices = price_of_rho(self.sweep(np.linspace(1.0, 2.0, 9).tolist()))
        for price in prices[1:-1]:
            assert price.slope == pytest.approx(-price.multiplier, rel=0.005)
            assert abs(price.gap) < 0.005 * price.multiplier
        for price in (prices[0], prices[-1]):  # one-sided at the ends: a larger constant before the same order
            assert price.slope == pytest.approx(-price.multiplier, rel=0.01)
        assert all(price.bracketed() for price in prices)

    def test_an_inactive_limit_costs_nothing(self):
        prices = price_of_rho(self.sweep([5.0, 6.0, 7.0]))
        assert [(price.multiplier, price.slope) for price in prices] == [(0.0, 0.0)] * 3

    def test_the_bound_holds(self):
        """At theta' = b the nominal loss is 0 and the robust loss D^2 / 2, the bound B of this problem."""
        for point in self.sweep([0.5, 1.0, 2.0]):
            assert point.multiplier < 4.5 / point.rho


# Logistic regression under l-infinity perturbations: the worst case has the closed form softplus(-margin + eps |w|_1).
EPSILON = 0.08
LABELS = torch.arange(60) % 2
IMAGES = (
    0.5
    + (LABELS.double() - 0.5).view(-1, 1) * torch.tensor([0.16, 0.12])
    + 0.09 * random.normal(random.key(8), torch.arange(60), (2,)).double()
).clamp(EPSILON, 1 - EPSILON)


def losses(parameters: np.ndarray) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Robust and nominal loss of (w, b) and their gradients, in numpy: nothing shared with the code under test."""
    x, sign = IMAGES.numpy() - 0.5, 2.0 * LABELS.numpy() - 1.0
    w, b = parameters[:2], parameters[2]
    found = []
    for eps in (EPSILON, 0.0):
        margin = sign * (x @ w + b) - eps * np.abs(w).sum()
        pull = -1 / (1 + np.exp(margin))
        gradient = np.append((pull[:, None] * (sign[:, None] * x - eps * np.sign(w))).mean(0), (pull * sign).mean())
        found.append((np.logaddexp(0, -margin).mean(), gradient))
    return found[0][0], found[1][0], found[0][1], found[1][1]


def reference(rho: float) -> tuple[float, float]:
    """P(rho) and nu* by a general-purpose solver and the condition grad R + nu grad N = 0."""
    solution = minimize(
        lambda p: losses(p)[0],
        np.array([8.0, 6.0, 0.0]),
        jac=lambda p: losses(p)[2],
        constraints={"type": "ineq", "fun": lambda p: rho - losses(p)[1], "jac": lambda p: -losses(p)[3]},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    robust, _, robust_gradient, nominal_gradient = losses(solution.x)
    return robust, -float(robust_gradient @ nominal_gradient / (nominal_gradient @ nominal_gradient))


class Linear(nn.Module):
    """Two logits, 0 and w (x - 1/2) + b."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([6.0, 5.0], dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, images):
        score = (images.flatten(1) - 0.5) @ self.weight + self.bias
        return torch.stack([torch.zeros_like(score), score], dim=1)


def solve_logistic(model: Linear, rho: float, multiplier: float) -> SweepPoint:
    """Train the row `dale` on the whole set as one batch; FGSM is the exact worst case of a linear model."""
    objective = algorithms.dale(
        Linf(epsilon=EPSILON),
        rho=rho,
        loss="cross-entropy",
        sampler=fgsm(EPSILON),
        dual_step_size=2.0,
        dual_initial=multiplier,
        tighten=False,
    )
    batch = Batch.of(IMAGES.view(-1, 1, 1, 2), LABELS)
    duals = objective.initial_duals()
    scale = {"weight": 60.0, "bias": 2.0}  # pixels vary by 0.1: the loss is a hundred times flatter in the weights
    for _ in range(400):
        step = objective.lagrangian(model, batch, objective.perturb(model, batch, 0), duals)
        gradients = torch.autograd.grad(step.loss, list(model.parameters()))
        with torch.no_grad():
            for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
                parameter.sub_(scale[name] / (1.0 + float(duals[0].multiplier)) * gradient)
        duals = objective.ascend(duals, step)
    return SweepPoint(rho, float(step.robust), float(duals[0].multiplier))


@pytest.fixture(scope="module")
def sweep():
    model, multiplier, points = Linear(), 0.4, []
    for rho in (0.40, 0.38, 0.36, 0.34, 0.32):  # 0.19 is the least any model reaches, 0.53 that of the most robust
        points.append(solve_logistic(model, rho, multiplier))
        multiplier = points[-1].multiplier
    return points


class TestRobustLogisticRegression:
    def test_dynamics_reach_the_solution_of_a_general_solver(self, sweep):
        for point in sweep:
            robust, multiplier = reference(point.rho)
            assert point.robust_loss == pytest.approx(robust, rel=1e-6)
            assert point.multiplier == pytest.approx(multiplier, rel=1e-4)

    def test_the_slope_of_the_trade_off_is_minus_the_multiplier(self, sweep):
        prices = price_of_rho(sweep)
        assert [price.rho for price in prices] == sorted(point.rho for point in sweep)
        for price in prices[1:-1]:
            assert price.multiplier > 0.4
            assert price.slope == pytest.approx(-price.multiplier, rel=0.015)
            assert price.bracketed()


def test_slopes_by_hand_on_uneven_limits():
    """The parabola is exact for a quadratic curve; chords are (P1 - P0) / (rho1 - rho0)."""
    points = [SweepPoint(rho, (rho - 3) ** 2, 2 * (3 - rho)) for rho in (2.5, 0.0, 1.0)]
    prices = price_of_rho(points)
    assert [price.rho for price in prices] == [0.0, 1.0, 2.5]
    assert [price.slope for price in prices] == pytest.approx([-6.0, -4.0, -1.0])
    assert (prices[1].left, prices[1].right) == pytest.approx((-5.0, -2.5))
    assert math.isnan(prices[0].left)
    assert math.isnan(prices[2].right)
    assert [price.gap for price in prices] == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)


def test_bracket_tells_a_wrong_multiplier():
    assert Price(1.0, 4.0, -4.0, -5.0, -2.5).bracketed()
    assert not Price(1.0, 2.0, -4.0, -5.0, -2.5).bracketed()
    assert not Price(1.0, 6.0, -4.0, -5.0, -2.5).bracketed()
    assert Price(1.0, 2.0, -4.0, -5.0, -2.5).bracketed(tolerance=0.5)


@pytest.mark.parametrize("limits", [[0.1, 0.2], [0.1, 0.2, 0.2], []])
def test_sweeps_that_have_no_slope_are_refused(limits):
    with pytest.raises(UsageError, match="at least three different limits"):
        price_of_rho([SweepPoint(rho, 1.0, 0.0) for rho in limits])


class TestBoundFromModel:
    """A model whose cross-entropy is known: 0 where the first pixel gives the label away, and beyond B elsewhere."""

    split = Split.of(torch.tensor([0.0, 1.0, 1.0, 0.0]).view(4, 1, 1, 1), torch.tensor([0, 1, 1, 1]))

    @staticmethod
    def model() -> nn.Module:
        linear = nn.Linear(1, 2)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor([[-100.0], [100.0]]))
            linear.bias.copy_(torch.tensor([50.0, -50.0]))
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.9), linear)

    def test_by_hand(self):
        """One example of four has loss 100, clipped at 2: nominal 0.5, and nu* <= 2 / (0.75 - 0.5)."""
        assert clipped_loss(self.model(), self.split, 2.0) == 0.5
        assert clipped_loss(self.model(), self.split, 2.0, batch_size=3) == 0.5
        assert bound_from_model(self.model(), self.split, rho=0.75, clip=2.0) == 8.0

    def test_model_keeps_its_mode(self):
        model = self.model()
        bound_from_model(model, self.split, rho=0.75, clip=2.0)
        assert all(module.training for module in model.modules())

    def test_an_infeasible_model_gives_no_bound(self):
        with pytest.raises(UsageError, match=r"not strictly feasible: its nominal loss 0.5 is not below rho 0.5"):
            bound_from_model(self.model(), self.split, rho=0.5, clip=2.0)

    def test_bounds_the_multiplier_of_the_logistic_problem(self):
        """From the model of least nominal loss, with a B above every loss of either model."""
        least = minimize(lambda p: losses(p)[1], np.array([8.0, 6.0, 0.0]), jac=lambda p: losses(p)[3], tol=1e-12)
        model = Linear().float()
        with torch.no_grad():
            model.weight.copy_(torch.tensor(least.x[:2]))
            model.bias.fill_(least.x[2])
        split = Split.of(IMAGES.float().view(-1, 1, 1, 2), LABELS)
        rho = 1.05 * float(least.fun)
        bound = bound_from_model(model, split, rho, clip=6.0, loss=CrossEntropy())
        assert bound == pytest.approx(6.0 / (rho - float(least.fun)), rel=1e-3)
        assert 0.0 < reference(rho)[1] < bound
