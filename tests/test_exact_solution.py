"""Primal-dual training reaches the known solution (theta*, nu*) of convex constrained problems."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, minimize
from torch import Tensor, nn

from dale import algorithms
from dale.batch import Batch
from dale.constraints import Constraint, accuracy_limit, dual_bound, loss_limit, tightened
from dale.losses import Clipped, CrossEntropy, Loss, ZeroOne
from dale.objectives import Objective
from dale.perturbations import Linf
from dale.samplers import fgsm


@dataclass(frozen=True, kw_only=True)
class Quadratic(Loss):
    """(theta_y - target)^2 / 2, of a model whose logits are theta: each class has a parameter of its own."""

    target: float

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        return 0.5 * (logits.gather(1, labels[:, None])[:, 0] - self.target) ** 2


class Parameters(nn.Module):
    """Logits that do not look at the image."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(count, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.expand(len(x), -1)


def train(objective, model, batch, *, steps=400, rate=0.05, duals=None, per_epoch=1, classes=None, groups=None):
    """Full-batch descent and ascent; `per_epoch` steps make an epoch."""
    duals = duals or objective.initial_duals(num_classes=classes, num_groups=groups)
    for number in range(steps):
        delta = objective.perturb(model, batch, key=number)
        step = objective.lagrangian(model, batch, delta, duals)
        gradients = torch.autograd.grad(step.loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(rate * gradient)
        duals = objective.ascend(duals, step)
        if (number + 1) % per_epoch == 0:
            duals = objective.ascend_epoch(duals)
    return duals, step


def images(count: int) -> Tensor:
    return torch.full((count, 1, 1, 1), 0.5, dtype=torch.float64)


def closed_form(goal: float, anchor: float, rho: float) -> tuple[float, float]:
    """min (theta - goal)^2 / 2 subject to (theta - anchor)^2 / 2 <= rho, and its multiplier."""
    radius = math.sqrt(2.0 * rho)
    if abs(goal - anchor) <= radius:
        return goal, 0.0
    theta = anchor + math.copysign(radius, goal - anchor)
    return theta, (goal - theta) / (theta - anchor)


@pytest.mark.parametrize("rho", [0.02, 0.125, 0.5])
@pytest.mark.parametrize(("frequency", "per_epoch"), [("step", 1), ("epoch", 1), ("epoch", 5)])
def test_quadratic_in_closed_form(rho, frequency, per_epoch):
    theta, nu = closed_form(2.0, 0.5, rho)
    assert nu > 0.1
    # steps in proportion to the curvatures at the solution, for quick convergence
    eta = 0.1 * (1.0 + nu) / (2.0 * rho)
    constraint = Constraint(loss=Quadratic(target=0.5), limit=rho, step_size=eta, frequency=frequency, initial=0.0)
    objective = Objective(nominal_loss=Quadratic(target=2.0), nominal_weight=1.0, constraints=(constraint,))
    model, batch = Parameters(1), Batch.of(images(3), torch.zeros(3).long())
    duals, step = train(objective, model, batch, per_epoch=per_epoch, steps=300 * per_epoch, rate=0.5 / (1.0 + nu))
    assert model.theta.item() == pytest.approx(theta, abs=1e-5)
    assert duals[0].multiplier.item() == pytest.approx(nu, abs=1e-4)
    # complementary slackness, and the constraint met with equality
    assert step.violations[0].mean().item() == pytest.approx(0.0, abs=1e-5)
    assert step.violations[0].estimate().item() == pytest.approx(rho, abs=1e-5)


def test_an_inactive_constraint_ends_at_zero():
    constraint = Constraint(loss=Quadratic(target=0.5), limit=3.0, step_size=0.2, initial=2.0)
    objective = Objective(nominal_loss=Quadratic(target=2.0), nominal_weight=1.0, constraints=(constraint,))
    model, batch = Parameters(1), Batch.of(images(3), torch.zeros(3).long())
    duals, step = train(objective, model, batch, rate=0.2)
    assert duals[0].multiplier.item() == 0.0
    assert model.theta.item() == pytest.approx(2.0, abs=1e-6)
    assert step.violations[0].mean().item() == pytest.approx(0.5 * 1.5**2 - 3.0, abs=1e-6)


@pytest.mark.parametrize("by", ["class", "group"])
def test_every_group_has_its_own_solution(by):
    """Shares of the batch cancel between the Lagrangian's terms, so the multipliers are those of each group alone."""
    limits, sizes = (0.18, 0.5, 3.0, 0.125), (1, 2, 3, 0)  # the third is inactive, the fourth absent
    groups = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    batch = Batch.of(images(6), groups, groups=groups.flip(0) if by == "group" else None)
    labels = batch.labels if by == "class" else batch.groups
    batch = Batch(batch.images, labels, batch.index, batch.groups)
    constraint = Constraint(loss=Quadratic(target=0.5), limit=limits, by=by, step_size=2.0, initial=0.25)
    objective = Objective(nominal_loss=Quadratic(target=2.0), nominal_weight=1.0, constraints=(constraint,))
    model = Parameters(4)
    duals, step = train(objective, model, batch, steps=500, rate=0.6, classes=4, groups=4)
    for g in range(3):
        theta, nu = closed_form(2.0, 0.5, limits[g])
        assert model.theta[g].item() == pytest.approx(theta, abs=1e-4)
        assert duals[0].multiplier[g].item() == pytest.approx(nu, abs=1e-3)
    assert duals[0].multiplier[3].item() == 0.25
    assert model.theta[3].item() == 0.0
    assert step.violations[0].mean()[3].item() == 0.0


def test_the_upper_bound_holds_and_leaves_the_constraint_violated():
    constraint = Constraint(loss=Quadratic(target=0.5), limit=0.02, step_size=0.2, initial=0.0, upper=1.0)
    objective = Objective(nominal_loss=Quadratic(target=2.0), nominal_weight=1.0, constraints=(constraint,))
    model, batch = Parameters(1), Batch.of(images(2), torch.zeros(2).long())
    duals, step = train(objective, model, batch, rate=0.2)
    assert duals[0].multiplier.item() == 1.0
    assert model.theta.item() == pytest.approx(1.25, abs=1e-6)  # the minimiser of (t - 2)^2 + (t - 0.5)^2
    assert step.violations[0].mean().item() > 0.2


def test_tightening_moves_the_solution():
    constraint = Constraint(loss=Quadratic(target=0.5), limit=0.25, step_size=1.0, initial=0.0)
    objective = Objective(nominal_loss=Quadratic(target=2.0), nominal_weight=1.0, constraints=(constraint,))
    model, batch = Parameters(1), Batch.of(images(2), torch.zeros(2).long())
    (dual,) = objective.initial_duals()
    dual = tightened(constraint, dual, torch.tensor([0.3]), torch.tensor([0.175]))
    duals, _ = train(objective, model, batch, rate=0.2, duals=(dual,))
    theta, nu = closed_form(2.0, 0.5, 0.125)
    assert model.theta.item() == pytest.approx(theta, abs=1e-5)
    assert duals[0].multiplier.item() == pytest.approx(nu, abs=1e-4)


EPSILON, RHO = 0.05, 0.255


class Logistic(nn.Module):
    """Logits (0, 8 <w, x - 1/2> + b): features of a size near one, for quick convergence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1).double()
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        score = self.layer(8.0 * (x.flatten(1) - 0.5))
        return torch.cat([torch.zeros_like(score), score], dim=1)


def logistic_data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    x = np.clip(0.5 + 0.12 * (2 * y[:, None] - 1) * [1.0, 0.6] + 0.13 * rng.standard_normal((40, 2)), 0.06, 0.94)
    return x, y


def risks(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Nominal and robust logistic risk; the worst l-infinity perturbation takes epsilon |w|_1 off the margin."""
    margins = (2 * y - 1) * (8.0 * (x - 0.5) @ w[:2] + w[2])
    return np.logaddexp(0, -margins).mean(), np.logaddexp(0, -margins + 8.0 * EPSILON * np.abs(w[:2]).sum()).mean()


def exact_logistic(rho: float) -> tuple[np.ndarray, float]:
    """(theta*, nu*): minimise the Lagrangian for each nu, and find the nu at which the constraint is met."""
    x, y = logistic_data()

    def primal(nu: float) -> np.ndarray:
        # in the orthant where both weights are positive, as the data make them, the problem is smooth and convex
        def value(w):
            nominal, robust = risks(w, x, y)
            return robust + nu * nominal

        return minimize(value, [1.0, 1.0, 0.0], method="BFGS", options={"gtol": 1e-9}).x

    nu = brentq(lambda nu: risks(primal(nu), x, y)[0] - rho, 0.0, 50.0, xtol=1e-8)
    return primal(nu), nu


def test_robust_logistic_regression_under_a_nominal_constraint():
    """P-CON itself: for a linear model one step of size epsilon is the exact inner maximum."""
    x, y = logistic_data()
    theta, nu = exact_logistic(RHO)
    assert nu > 0.2
    assert (theta[:2] > 0.1).all()
    objective = Objective(
        perturbations=Linf(epsilon=EPSILON),
        sampler=fgsm(EPSILON),
        perturbation_loss=CrossEntropy(),
        robust_loss=CrossEntropy(),
        constraints=(loss_limit(RHO, step_size=5.0, initial=0.0),),
    )
    batch = Batch.of(torch.tensor(x).view(40, 2, 1, 1), torch.tensor(y))
    model = Logistic()
    duals, step = train(objective, model, batch, steps=800, rate=0.5)
    reached = np.append(model.layer.weight.detach().numpy(), model.layer.bias.item())
    np.testing.assert_allclose(reached, theta, atol=2e-3)
    assert duals[0].multiplier.item() == pytest.approx(nu, abs=2e-3)
    nominal, robust = risks(reached, x, y)
    assert step.nominal.item() == pytest.approx(nominal, abs=1e-5)
    assert step.robust.item() == pytest.approx(robust, abs=1e-5)
    assert nominal == pytest.approx(RHO, abs=1e-4)
    # the optimum is a saddle point: the robust risk is the smallest among feasible neighbours
    for move in np.random.default_rng(1).standard_normal((50, 3)) * 0.05:
        other = risks(theta + move, x, y)
        assert other[0] > RHO - 1e-9 or other[1] >= risks(theta, x, y)[1] - 1e-7
    # the a-priori bound on the multiplier, with the clipped loss and the unconstrained minimiser as the witness
    witness = minimize(lambda w: risks(w, x, y)[0], np.zeros(3), method="BFGS").x
    assert nu <= dual_bound(risks(witness, x, y)[1], RHO, risks(witness, x, y)[0])


def test_the_dale_row_reaches_the_same_solution():
    """The named row, with one noiseless step of size epsilon and the cross-entropy, is that problem."""
    theta, nu = exact_logistic(RHO)
    x, y = logistic_data()
    row = algorithms.dale(
        Linf(epsilon=EPSILON),
        rho=RHO,
        loss="cross-entropy",
        sampler=fgsm(EPSILON),
        dual_step_size=5.0,
        dual_initial=0.0,
    )
    model = Logistic()
    duals, _ = train(row, model, Batch.of(torch.tensor(x).view(40, 2, 1, 1), torch.tensor(y)), steps=800, rate=0.5)
    np.testing.assert_allclose(model.layer.weight.detach().numpy()[0], theta[:2], atol=2e-3)
    assert duals[0].multiplier.item() == pytest.approx(nu, abs=2e-3)


def test_accuracy_dual_follows_the_error_and_the_gradient_is_the_surrogates():
    x, y = logistic_data()
    batch = Batch.of(torch.tensor(x).view(40, 2, 1, 1), torch.tensor(y))
    model = Logistic()
    with torch.no_grad():
        model.layer.weight.copy_(torch.tensor([[1.0, 0.3]]))
        model.layer.bias.fill_(1.5)
    objective = Objective(constraints=(accuracy_limit(0.9, step_size=0.5, initial=0.75),))
    duals = objective.initial_duals()
    step = objective.lagrangian(model, batch, None, duals)
    wrong = ((model(batch.images).argmax(dim=1) != batch.labels).double()).mean().item()
    assert wrong > 0.1
    assert step.violations[0].mean().item() == pytest.approx(wrong - 0.1, abs=1e-6)
    assert objective.ascend(duals, step)[0].multiplier.item() == pytest.approx(0.75 + 0.5 * (wrong - 0.1), abs=1e-6)
    ours = torch.autograd.grad(step.loss, model.layer.weight)[0]
    surrogate = 0.75 * nn.functional.cross_entropy(model(batch.images), batch.labels)
    torch.testing.assert_close(ours, torch.autograd.grad(surrogate, model.layer.weight)[0])
    assert not step.violations[0].excess.requires_grad


def test_an_accuracy_that_can_be_kept_is_kept():
    """A row that would rather be constant (a clipped loss pulls theta to zero) is held to 85% by the dual."""
    x, y = logistic_data()
    batch = Batch.of(torch.tensor(x).view(40, 2, 1, 1), torch.tensor(y))

    @dataclass(frozen=True, kw_only=True)
    class Small(Loss):
        def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
            return 0.5 * (logits[:, 1] - 3.0) ** 2  # prefers class 1 for everybody

    objective = Objective(
        nominal_loss=Small(), nominal_weight=1.0, constraints=(accuracy_limit(0.85, step_size=0.5, initial=0.0),)
    )
    free, model = Logistic(), Logistic()
    train(replace(objective, constraints=()), free, batch, rate=0.1)
    duals, _ = train(objective, model, batch, steps=1500, rate=0.05)
    errors = [float(ZeroOne()(m(batch.images), None, batch.labels).mean()) for m in (free, model)]
    assert errors[0] == 0.5
    assert errors[1] <= 0.2
    assert duals[0].multiplier.item() > 1.0


def test_a_clipped_constraint_is_the_clipped_loss():
    batch = Batch.of(images(2), torch.zeros(2).long())
    clipped = Clipped(loss=Quadratic(target=0.5), bound=0.1)
    objective = Objective(
        nominal_loss=Quadratic(target=2.0), nominal_weight=1.0, constraints=(Constraint(loss=clipped, limit=0.05),)
    )
    step = objective.lagrangian(Parameters(1), batch, None, objective.initial_duals())
    assert step.violations[0].estimate().item() == pytest.approx(0.1)
