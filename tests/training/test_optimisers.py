"""Optimisers and schedules: groups, one step by hand, values at hand-computed points."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dale.components import dump_yaml, load_yaml
from dale.errors import UsageError
from dale.training import SGD, Adadelta, AdamW, Constant, Cosine, OneCycle, Optimiser, Piecewise, Schedule
from dale.training.optimisers import set_learning_rate


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 3))


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        (Constant(), {0.0: 1.0, 3.7: 1.0, 10.0: 1.0}),
        (Piecewise(milestones=(2, 5), drop=0.1), {0.0: 1.0, 1.99: 1.0, 2.0: 0.1, 4.9: 0.1, 5.0: 0.01, 9.0: 0.01}),
        (Cosine(), {0.0: 1.0, 2.5: (1 + math.cos(math.pi / 4)) / 2, 5.0: 0.5, 10.0: 0.0}),
        (Cosine(warmup=2.0, final=0.2), {0.0: 0.0, 1.0: 0.5, 2.0: 1.0, 6.0: 0.6, 10.0: 0.2}),
        (Cosine(warmup=50.0), {0.0: 0.0, 0.5: 0.5, 1.0: 1.0, 5.5: 0.5, 10.0: 0.0}),  # a tenth of ten epochs
        (OneCycle(peak=0.2, start=0.1, final=0.0), {0.0: 0.1, 1.0: 0.55, 2.0: 1.0, 6.0: 0.5, 10.0: 0.0}),
        (OneCycle(peak=0.5, start=0.0, final=0.4), {0.0: 0.0, 5.0: 1.0, 7.5: 0.7, 10.0: 0.4, 11.0: 0.4}),
    ],
)
def test_schedules_at_points_worked_out_by_hand(schedule: Schedule, points: dict[float, float]) -> None:
    for progress, expected in points.items():
        assert schedule.factor(progress, 10) == pytest.approx(expected, abs=1e-12)


def test_decay_spares_biases_and_normalisation_when_asked() -> None:
    model = _model()
    plain = SGD(weight_decay=0.3).build(model)
    assert [(len(g["params"]), g["weight_decay"]) for g in plain.param_groups] == [(6, 0.3)]
    spared = SGD(weight_decay=0.3, decay_all=False).build(model)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {g["weight_decay"]: {names[id(p)] for p in g["params"]} for g in spared.param_groups}
    assert found == {0.3: {"0.weight", "3.weight"}, 0.0: {"0.bias", "1.weight", "1.bias", "3.bias"}}


def test_frozen_parameters_are_left_out_and_a_model_without_any_is_refused() -> None:
    model = _model()
    model[0].requires_grad_(False)
    assert sum(len(g["params"]) for g in AdamW().build(model).param_groups) == 4
    with pytest.raises(UsageError, match="no parameters to train"):
        AdamW().build(nn.Flatten())


def test_sgd_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    model = nn.Module()
    model.weight = weight
    optimiser = SGD(learning_rate=0.1, momentum=0.5, weight_decay=0.01).build(model)
    expected, velocity = 2.0, 0.0
    for gradient in (1.0, -3.0, 0.5):
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimiser.step()
        velocity = 0.5 * velocity + gradient + 0.01 * expected
        expected -= 0.1 * velocity
        assert weight.item() == pytest.approx(expected, rel=1e-14)


def test_adamw_by_hand() -> None:
    model = nn.Module()
    model.weight = weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimiser = AdamW(learning_rate=0.1, betas=(0.8, 0.9), weight_decay=0.05).build(model)
    value, m, v = 2.0, 0.0, 0.0
    for t, gradient in enumerate((1.0, -3.0, 0.5), 1):
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimiser.step()
        m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
        value = value * (1 - 0.1 * 0.05) - 0.1 * (m / (1 - 0.8**t)) / (math.sqrt(v / (1 - 0.9**t)) + 1e-8)
        assert weight.item() == pytest.approx(value, rel=1e-12)


def test_adadelta_by_hand() -> None:
    model = nn.Module()
    model.weight = weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimiser = Adadelta(learning_rate=0.7, decay=0.8).build(model)
    value, squares, steps = 2.0, 0.0, 0.0
    for gradient in (1.0, -3.0, 0.5):
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimiser.step()
        squares = 0.8 * squares + 0.2 * gradient**2
        step = math.sqrt(steps + 1e-6) / math.sqrt(squares + 1e-6) * gradient
        steps = 0.8 * steps + 0.2 * step**2
        value -= 0.7 * step
        assert weight.item() == pytest.approx(value, rel=1e-12)


def test_the_learning_rate_is_set_in_every_group_and_in_place_where_it_is_a_tensor() -> None:
    optimiser = SGD(decay_all=False).build(_model())
    device_rate = torch.tensor(0.5)
    optimiser.param_groups[1]["lr"] = device_rate
    set_learning_rate(optimiser, 0.25)
    assert optimiser.param_groups[0]["lr"] == 0.25
    assert optimiser.param_groups[1]["lr"] is device_rate
    assert device_rate.item() == 0.25


@pytest.mark.parametrize(
    "component",
    [SGD(nesterov=True), AdamW(betas=(0.5, 0.9)), Adadelta(decay=0.95), Piecewise(), Cosine(warmup=1.5), OneCycle()],
)
def test_components_are_read_back_equal(component: Optimiser | Schedule) -> None:
    assert load_yaml(dump_yaml(component), type(component).__mro__[1]) == component


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SGD(learning_rate=0.0),
        lambda: SGD(learning_rate=math.nan),
        lambda: SGD(weight_decay=-1.0),
        lambda: SGD(momentum=1.0),
        lambda: SGD(momentum=0.0, nesterov=True),
        lambda: AdamW(betas=(0.9, 1.0)),
        lambda: Adadelta(decay=-0.1),
        lambda: Piecewise(milestones=(5, 3)),
        lambda: Piecewise(milestones=(0,)),
        lambda: Piecewise(drop=0.0),
        lambda: Cosine(warmup=-1.0),
        lambda: Cosine(final=2.0),
        lambda: OneCycle(peak=1.0),
        lambda: OneCycle(start=-0.1),
    ],
)
def test_values_out_of_range_are_refused(wrong: object) -> None:
    with pytest.raises(UsageError):
        wrong()  # type: ignore[operator]
