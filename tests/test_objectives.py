"""The Lagrangian against its formula, written out term by term."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dale import random
from dale.aggregators import CVaR, LambdaStar, MaxOf, MeanOf, Tilted
from dale.batch import Batch
from dale.components import from_plain, to_plain
from dale.constraints import DUAL_BUDGET, Constraint, accuracy_limit, ascend, loss_limit, violation
from dale.errors import UsageError
from dale.losses import DLR, KL, Clipped, CrossEntropy, ErrorProbability, LogitPairing, Mart
from dale.objectives import Objective
from dale.perturbations import Linf, Rotation
from dale.samplers import Chain, UniformNoise, langevin, pgd

BALL = Linf(epsilon=0.1)


def make_model(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3) if norm else nn.Identity(), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(48, 4)).double()


def make_batch(count: int = 6) -> Batch:
    x = random.uniform(random.key(0), torch.arange(count), (1, 6, 6)).double()
    return Batch.of(x, torch.arange(count) % 4, groups=torch.arange(count) % 2)


def gradients(value: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(value, list(model.parameters())))


def uniform_deltas(count: int, batch: Batch) -> Tensor:
    return UniformNoise(num_samples=count)(nn.Identity(), batch, BALL, key=3)


def test_the_lagrangian_term_by_term():
    model, batch = make_model(), make_batch()
    objective = Objective(
        perturbations=BALL,
        sampler=UniformNoise(),
        robust_loss=KL(),
        robust_weight=6.0,
        nominal_loss=CrossEntropy(label_smoothing=0.1),
        nominal_weight=0.5,
        constraints=(loss_limit(0.3, initial=2.0), loss_limit((0.1, 0.2, 0.3, 0.4), by="class", initial=1.5)),
    )
    duals = objective.initial_duals(num_classes=4)
    delta = uniform_deltas(1, batch)
    step = objective.lagrangian(model, batch, delta, duals)
    clean, moved = model(batch.images), model(batch.images + delta[0])
    kl = F.kl_div(moved.log_softmax(1), clean.softmax(1), reduction="none").sum(1).mean()
    nominal = F.cross_entropy(clean, batch.labels, label_smoothing=0.1)
    cross = F.cross_entropy(clean, batch.labels, reduction="none")
    limits = torch.tensor([0.1, 0.2, 0.3, 0.4])[batch.labels]
    by_hand = 6.0 * kl + 0.5 * nominal + 2.0 * (cross - 0.3).mean() + 1.5 * (cross - limits).mean()
    torch.testing.assert_close(step.loss, by_hand, atol=1e-7, rtol=0.0)
    for ours, other in zip(gradients(step.loss, model), gradients(by_hand, model), strict=True):
        torch.testing.assert_close(ours, other, atol=1e-9, rtol=1e-6)
    torch.testing.assert_close(step.robust, kl.detach())
    torch.testing.assert_close(step.nominal, nominal.detach())
    assert step.clean_correct.item() == (clean.argmax(1) == batch.labels).sum().item()
    assert step.robust_correct.item() == (moved.argmax(1) == batch.labels).sum().item()
    assert step.size == 6
    assert len(step.violations) == 2
    assert not (step.robust.requires_grad)
    assert not (step.nominal.requires_grad)


@pytest.mark.parametrize(
    ("constraint", "rho"),
    [
        (loss_limit(1), 1.0),
        (loss_limit((0.5,)), 0.5),
        (loss_limit(0.1, by="class"), None),
        (accuracy_limit(0.9), None),
        (Constraint(loss=ErrorProbability(), limit=0.1), None),
        (Constraint(loss=Clipped(loss=CrossEntropy(), bound=4.0), measure=CrossEntropy(), limit=0.3), 0.3),
    ],
)
def test_one_limit_on_the_nominal_loss_of_all(constraint, rho):
    """What a report compares the mean nominal loss with: no limit of a class, of another loss, or on the error."""
    row = Objective(constraints=(constraint,))
    assert row.rho == rho
    assert from_plain(to_plain(row), Objective).rho == rho
    assert Objective(nominal_weight=1.0).rho is None
    assert Objective(constraints=(accuracy_limit(0.9), loss_limit(0.2))).rho == 0.2


@pytest.mark.parametrize("aggregator", [MeanOf(), MaxOf(), CVaR(beta=0.4), Tilted(t=3.0), LambdaStar(gamma=0.05)])
def test_several_draws_are_weighted_without_gradient_through_the_weights(aggregator):
    model, batch = make_model(), make_batch()
    objective = Objective(
        perturbations=BALL, sampler=UniformNoise(num_samples=5), robust_loss=CrossEntropy(), aggregator=aggregator
    )
    delta = uniform_deltas(5, batch)
    step = objective.lagrangian(model, batch, delta, ())
    losses = torch.stack([F.cross_entropy(model(batch.images + d), batch.labels, reduction="none") for d in delta])
    value = losses.detach()
    weights = {
        MeanOf: lambda: torch.full_like(value, 0.2),
        MaxOf: F.one_hot(value.argmax(0), 5).T.double,
        CVaR: lambda: (value >= value.sort(0, descending=True).values[1]).double() / 2,  # 0.4 of five: the worst two
        Tilted: lambda: (3.0 * value).softmax(0),
        LambdaStar: lambda: aggregator(value),
    }[type(aggregator)]()
    by_hand = (weights * losses).sum(0).mean()
    torch.testing.assert_close(step.loss, by_hand)
    for ours, other in zip(gradients(step.loss, model), gradients(by_hand, model), strict=True):
        torch.testing.assert_close(ours, other)


def test_joint_and_separate_differ_only_by_batchnorm():
    batch = make_batch()
    row = Objective(perturbations=BALL, sampler=UniformNoise(), robust_loss=KL(), nominal_weight=1.0)
    delta = uniform_deltas(1, batch)
    for norm, alike in ((False, True), (True, False)):
        values = []
        for batchnorm in ("joint", "separate"):
            model = make_model(norm)
            values.append(replace(row, batchnorm=batchnorm).lagrangian(model, batch, delta, ()).loss)
        assert torch.allclose(*values, atol=1e-12) == alike
    # joint: statistics of clean and perturbed images together
    model = make_model(norm=True)
    logits = model(torch.cat([batch.images, batch.images + delta[0]]))
    expected = F.cross_entropy(logits[:6], batch.labels) + KL()(logits[6:], logits[:6], batch.labels).mean()
    torch.testing.assert_close(row.lagrangian(make_model(norm=True), batch, delta, ()).loss, expected)


def test_only_what_is_needed_is_computed():
    batch, sizes = make_batch(), []

    def model(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return x.flatten(1)[:, :4]

    adversarial = Objective(perturbations=BALL, sampler=UniformNoise(), robust_loss=CrossEntropy())
    step = adversarial.lagrangian(model, batch, adversarial.perturb(model, batch, 0), ())
    assert sizes == [6]
    assert step.nominal.isnan()
    assert step.clean_correct.isnan()
    sizes.clear()
    paired = replace(adversarial, robust_loss=LogitPairing())
    paired.lagrangian(model, batch, paired.perturb(model, batch, 0), ())
    assert sizes == [12]
    sizes.clear()
    nominal = Objective(nominal_weight=1.0)
    assert nominal.perturb(model, batch, 0) is None
    step = nominal.lagrangian(model, batch, None, ())
    assert sizes == [6]
    assert step.robust.isnan()
    assert step.robust_correct.isnan()


def test_a_loop_of_ones_own():
    """The lines of the documentation: loss down, multipliers along."""
    model, batch = make_model().float(), make_batch()
    x, y = batch.images.float(), batch.labels
    objective = Objective(
        perturbations=BALL,
        sampler=langevin(3),
        perturbation_loss=KL(),
        robust_loss=KL(),
        constraints=(loss_limit(0.2, step_size=0.1, initial=0.5),),
    )
    optimiser, duals, seen = torch.optim.SGD(model.parameters(), lr=0.5), objective.initial_duals(), []
    for k in range(30):
        step = objective(model, x, y, duals, key=k)
        optimiser.zero_grad()
        step.loss.backward()
        optimiser.step()
        expected = max(0.0, duals[0].multiplier.item() + 0.1 * (step.nominal.item() - 0.2))
        duals = objective.ascend(duals, step)
        assert duals[0].multiplier.item() == pytest.approx(expected, abs=1e-6)
        seen.append(step.nominal.item())
    assert seen[-1] < seen[0]
    assert model.training


def test_a_call_is_perturb_and_lagrangian():
    model, batch = make_model(), make_batch()
    objective = Objective(
        perturbations=BALL, sampler=pgd(3), perturbation_loss=CrossEntropy(), robust_loss=CrossEntropy()
    )
    once = objective(model, batch.images, batch.labels, key=5)
    delta = objective.perturb(model, batch, 5)
    assert delta.shape == (1, 6, 1, 6, 6)
    assert torch.equal(once.loss, objective.lagrangian(model, batch, delta, ()).loss)
    by_group = Objective(nominal_weight=1.0, constraints=(loss_limit(0.1, by="group"),))
    step = by_group(model, batch.images, batch.labels, by_group.initial_duals(num_groups=2), key=0, groups=batch.groups)
    assert step.violations[0].members.tolist() == [3.0, 3.0]


def test_open_dual_step_sizes_are_filled_in_for_a_run():
    objective = Objective(
        constraints=(loss_limit(0.1), loss_limit(0.1, frequency="epoch"), loss_limit(0.1, step_size=0.7))
    )
    sizes = [c.step_size for c in objective.for_run(num_steps=1000, num_epochs=10).constraints]
    assert sizes == [DUAL_BUDGET / 1000, DUAL_BUDGET / 10, 0.7]


@pytest.mark.parametrize("by", ["all", "class"])
def test_a_multiplier_travels_as_far_whatever_the_number_of_its_kind(by):
    """A violation of one in every class through a whole run: a multiplier of a class moves as that of all does."""
    objective = Objective(constraints=(loss_limit(0.0, by=by, initial=0.0),)).for_run(20, 1, num_classes=10)
    duals, labels = objective.initial_duals(10), torch.arange(50) % 10
    constraint = objective.constraints[0]
    for _ in range(20):
        member = constraint.membership(labels, None, len(duals[0].multiplier))
        seen = violation(constraint, duals[0], torch.ones(50), member)
        duals = (ascend(constraint, duals[0], seen),)
    torch.testing.assert_close(duals[0].multiplier, torch.full_like(duals[0].multiplier, DUAL_BUDGET))


def test_transformations_and_multiple_draws_have_their_own_shapes():
    model, batch = make_model(), make_batch()
    chain = Chain(steps=4, num_chains=2, keep="all", burn_in=1, climb_log=False)
    objective = Objective(
        perturbations=Rotation(),
        sampler=chain,
        perturbation_loss=CrossEntropy(),
        robust_loss=Mart(),
        aggregator=MaxOf(),
    )
    delta = objective.perturb(model, batch, 0)
    assert delta.shape == (6, 6, 1)
    assert objective.lagrangian(model, batch, delta, ()).loss.isfinite()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to minimise"),
        ({"robust_loss": KL()}, "needs a perturbation set and a sampler"),
        ({"robust_loss": KL(), "perturbations": BALL}, "needs a perturbation set and a sampler"),
        ({"robust_loss": KL(), "perturbations": BALL, "sampler": pgd()}, "give perturbation_loss"),
        (
            {"robust_loss": KL(), "perturbations": BALL, "sampler": langevin(), "perturbation_loss": DLR()},
            "give the sampler climb_log=False",
        ),
        ({"robust_weight": -1.0}, "at least 0"),
        ({"nominal_weight": float("nan")}, "at least 0"),
        ({"nominal_weight": 1.0, "batchnorm": "jont"}, "did you mean 'joint'"),
    ],
)
def test_bad_rows(options, message):
    with pytest.raises(UsageError, match=message):
        Objective(**options)
