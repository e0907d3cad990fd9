"""Adversarial weight perturbation: the move by hand, weights that come back, and what it does to training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dale import algorithms, random
from dale.batch import Batch
from dale.errors import UsageError
from dale.perturbations import Linf
from dale.training import SGD, TrainState
from dale.training.steps import PlainStep
from dale.training.weights import WeightPerturbation


def test_weights_move_along_their_gradient_by_a_share_of_their_norm_and_come_back() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        model.bias.fill_(1.0)
    model.weight.grad = torch.tensor([[0.0, 6.0], [8.0, 0.0]])
    model.bias.grad = torch.ones(2)
    before = model.weight.detach().clone()
    with WeightPerturbation(gamma=0.1).applied(model):
        # ||w|| = 5, ||g|| = 10: w + 0.1 * 5 / 10 * g
        assert torch.allclose(model.weight, torch.tensor([[3.0, 0.3], [0.4, 4.0]]))
        assert torch.equal(model.bias.detach(), torch.ones(2))  # one dimension: left alone
    assert torch.equal(model.weight.detach(), before)


def test_weights_come_back_when_an_exception_passes_and_zero_gradients_move_nothing() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.zeros(2, 2)
    before = model.weight.detach().clone()

    def fail() -> None:
        with WeightPerturbation(gamma=0.1).applied(model):
            assert torch.equal(model.weight.detach(), before)
            with torch.no_grad():
                model.weight.add_(1.0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert torch.equal(model.weight.detach(), before)


def test_the_step_descends_the_gradient_taken_at_the_moved_weights() -> None:
    """Against a loop written out by hand, on a model without BatchNorm and dropout."""
    images = random.uniform(random.key(0), torch.arange(16), (1, 4, 4))
    batch = Batch.of(images, torch.arange(16) % 3)
    objective = algorithms.erm()
    gamma, rate = 0.05, 0.1

    def network() -> nn.Sequential:
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        with torch.no_grad():
            model[1].weight.copy_(random.normal(random.key(1), torch.arange(3), (16,)))
            model[1].bias.zero_()
        return model

    model = network()
    step = PlainStep(objective, torch.float32, torch.device("cpu"))
    step.weight_perturbation = WeightPerturbation(gamma=gamma)
    optimiser = SGD(learning_rate=rate, weight_decay=0.0, momentum=0.0).build(model)
    step(TrainState(model, optimiser, ()), batch, random.key(2))

    by_hand = network()
    weight = by_hand[1].weight
    loss = nn.functional.cross_entropy(by_hand(images), batch.labels)
    (gradient,) = torch.autograd.grad(loss, weight)
    start = weight.detach().clone()
    with torch.no_grad():
        weight.add_(gamma * weight.norm() / gradient.norm() * gradient)
    (moved,) = torch.autograd.grad(nn.functional.cross_entropy(by_hand(images), batch.labels), weight)
    assert not torch.allclose(moved, gradient, rtol=1e-3)
    assert torch.allclose(model[1].weight.detach(), start - rate * moved, atol=1e-6)


def test_the_multiplier_and_the_log_see_the_unmoved_weights() -> None:
    images = random.uniform(random.key(0), torch.arange(16), (1, 4, 4))
    batch = Batch.of(images, torch.arange(16) % 3)
    objective = algorithms.dale(Linf(epsilon=0.1), rho=0.1, steps=1, dual_step_size=1.0)
    seen = []
    for gamma in (None, 0.5):
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        with torch.no_grad():
            model[1].weight.copy_(random.normal(random.key(1), torch.arange(3), (16,)))
            model[1].bias.zero_()
        step = PlainStep(objective, torch.float32, torch.device("cpu"))
        step.weight_perturbation = None if gamma is None else WeightPerturbation(gamma=gamma)
        state = TrainState(model, SGD().build(model), objective.initial_duals())
        step(state, batch, random.key(2))
        seen.append((float(state.duals[0].multiplier), float(state.totals["loss"])))
    assert seen[0] == seen[1]


def test_a_share_that_is_not_positive_is_refused() -> None:
    with pytest.raises(UsageError, match="gamma"):
        WeightPerturbation(gamma=0.0)
