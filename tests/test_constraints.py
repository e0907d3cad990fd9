"""Constraints: violations and dual steps worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dale import constraints
from dale.components import from_plain, to_plain
from dale.constraints import (
    Constraint,
    accuracy_limit,
    ascend,
    ascend_epoch,
    dual_bound,
    initial_dual,
    loss_limit,
    tightened,
    violation,
)
from dale.errors import UsageError
from dale.losses import KL, CrossEntropy, ZeroOne

LOSSES = torch.tensor([1.0, 2.0, 3.0, 6.0])
LABELS = torch.tensor([0, 2, 2, 2])


def seen(constraint: Constraint, dual, losses: torch.Tensor = LOSSES, labels: torch.Tensor = LABELS):
    return violation(constraint, dual, losses, constraint.membership(labels, None, len(dual.multiplier)))


def test_one_multiplier_by_hand():
    constraint = loss_limit(2.0, step_size=0.1, initial=0.5)
    dual = initial_dual(constraint, 1)
    batch = seen(constraint, dual)
    assert batch.mean().tolist() == [1.0]  # (1 + 2 + 3 + 6) / 4 - 2
    assert batch.estimate().tolist() == [3.0]
    assert ascend(constraint, dual, batch).multiplier.tolist() == pytest.approx([0.6])


def test_one_multiplier_per_class_and_absent_classes_stay():
    constraint = loss_limit((0.5, 1.0, 2.0), by="class", step_size=1.0, initial=0.25)
    dual = initial_dual(constraint, constraint.num_groups(3, None))
    batch = seen(constraint, dual)
    # means over the whole batch: (1 - 0.5) / 4, nothing, (0 + 1 + 4) / 4
    assert batch.mean().tolist() == [0.125, 0.0, 1.25]
    assert batch.members.tolist() == [1.0, 0.0, 3.0]
    estimate = batch.estimate()
    assert estimate[0] == 1.0
    assert estimate[1].isnan()
    assert float(estimate[2]) == pytest.approx(11 / 3)
    assert ascend(constraint, dual, batch).multiplier.tolist() == [0.375, 0.25, 1.5]


def test_one_multiplier_per_group():
    constraint = loss_limit(1.0, by="group")
    assert constraint.num_groups(None, 2) == 2
    member = constraint.membership(LABELS, torch.tensor([1, 0, 1, 1]), 2)
    assert member.tolist() == [[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    dual = initial_dual(constraint, 2)
    assert violation(constraint, dual, LOSSES, member).mean().tolist() == [0.25, 1.75]
    with pytest.raises(UsageError, match="carries no groups"):
        constraint.membership(LABELS, None, 2)
    with pytest.raises(UsageError, match="no group labels"):
        constraint.num_groups(3, None)
    with pytest.raises(UsageError, match="2 limits for 3 values of 'class'"):
        loss_limit((0.1, 0.2), by="class").num_groups(3, None)


def test_shares_of_a_batch_add_up():
    """Sums and not means, so that processes with shares of different sizes agree with one that has all."""
    constraint = loss_limit((0.5, 1.0, 2.0), by="class")
    dual = initial_dual(constraint, 3)
    parts = [seen(constraint, dual, LOSSES[rows], LABELS[rows]) for rows in (slice(0, 1), slice(1, 4))]
    whole = seen(constraint, dual)
    for name in ("excess", "measure", "members", "size"):
        assert torch.equal(sum(getattr(part, name) for part in parts), getattr(whole, name))


def test_multipliers_stay_between_zero_and_the_upper_bound():
    constraint = loss_limit(2.0, step_size=10.0, initial=0.5, upper=0.75)
    dual = initial_dual(constraint, 1)
    assert ascend(constraint, dual, seen(constraint, dual)).multiplier.tolist() == [0.75]
    assert ascend(constraint, dual, seen(constraint, dual, torch.zeros(4))).multiplier.tolist() == [0.0]


def test_once_an_epoch_on_the_epochs_average():
    constraint = loss_limit(2.0, step_size=1.0, frequency="epoch", initial=0.5)
    dual = initial_dual(constraint, 1)
    for losses in (torch.tensor([4.0, 4.0, 4.0]), torch.tensor([0.0])):  # batches of three and of one
        dual = ascend(constraint, dual, seen(constraint, dual, losses, LABELS[: len(losses)]))
        assert dual.multiplier.tolist() == [0.5]
    dual = ascend_epoch(constraint, dual)
    assert dual.multiplier.tolist() == [1.5]  # the average over the examples is 3
    assert (dual.total.tolist(), dual.count.tolist()) == ([0.0], [0.0])
    # an epoch without batches moves nothing, and under `step` the end of an epoch does nothing
    assert ascend_epoch(constraint, dual).multiplier.tolist() == [1.5]
    assert ascend_epoch(loss_limit(2.0), dual) is dual


def test_an_open_step_size_has_a_default():
    dual = initial_dual(loss_limit(2.0), 1)
    moved = ascend(loss_limit(2.0), dual, seen(loss_limit(2.0), dual))
    assert moved.multiplier.tolist() == pytest.approx([0.5 + constraints.DEFAULT_STEP_SIZE])


def test_tightening_trains_at_the_limit_minus_the_gap():
    constraint = loss_limit((1.0, 1.0, 1.0, 1.0), by="class")
    dual = initial_dual(constraint, 4)
    held_out = torch.tensor([0.9, 0.5, 3.0, torch.nan])
    moved = tightened(constraint, dual, held_out, torch.tensor([0.7, 0.6, 0.5, 0.5]))
    # a gap of 0.2; a negative gap widens nothing; at most half the limit; an absent class is left alone
    torch.testing.assert_close(moved.margin, torch.tensor([0.2, 0.0, 0.5, 0.0]))
    batch = violation(constraint, moved, torch.ones(4), torch.eye(4))
    torch.testing.assert_close(batch.excess, torch.tensor([0.2, 0.0, 0.5, 0.0]))
    assert tightened(loss_limit(1.0, tighten=False), dual, held_out, held_out) is dual


def test_accuracy_is_a_limit_on_the_error():
    constraint = accuracy_limit(0.85)
    assert constraint.limit == pytest.approx(0.15)
    assert (constraint.loss, constraint.measured, constraint.on_accuracy) == (CrossEntropy(), ZeroOne(), True)
    several = accuracy_limit((0.9, 0.5), by="class", initial=1.0)
    assert several.limit == pytest.approx((0.1, 0.5))
    assert not loss_limit(0.1).on_accuracy
    assert loss_limit(0.1).measured == CrossEntropy()
    for value in (0.0, 1.5, -0.1, float("nan"), 85.0):
        with pytest.raises(UsageError, match="share in"):
            accuracy_limit(value)


def test_the_bound_on_the_multiplier():
    assert dual_bound(4.0, 1.0, 0.5) == 8.0
    assert dual_bound(4.0, 1.0, 0.5, share=0.1) == 80.0
    with pytest.raises(UsageError, match=r"part of the examples in \(0, 1\], got 0.0"):
        dual_bound(4.0, 1.0, 0.5, share=0.0)
    with pytest.raises(UsageError, match="not strictly feasible"):
        dual_bound(4.0, 0.5, 0.5)
    with pytest.raises(UsageError, match="finite number above 0"):
        dual_bound(float("inf"), 1.0, 0.5)


@pytest.mark.parametrize("share", [0.1, 0.25, 1.0])
def test_the_bound_holds_for_a_group_of_any_share(share):
    """One model for each t in [0, 1], of robust loss 1 - t and loss t of the group: nu* is 1 / share."""
    rho, t, grid = 0.5, np.linspace(0.0, 1.0, 1001), np.linspace(0.0, 30.0, 3001)
    lagrangian = np.array([(1.0 - t + nu * share * (t - rho)).min() for nu in grid])
    found = grid[lagrangian.argmax()]
    assert found == pytest.approx(1.0 / share, abs=0.02)
    assert found <= dual_bound(1.0, rho, 0.0, share)
    assert share == 1.0 or found > dual_bound(1.0, rho, 0.0)


def test_limits_are_the_numbers_of_a_file():
    for given in (1, np.float32(0.5), (1, 0.25)):
        made = Constraint(limit=given, by="class" if isinstance(given, tuple) else "all")
        assert made == from_plain(to_plain(made), Constraint)
        assert all(type(v) is float for v in (made.limit if isinstance(made.limit, tuple) else (made.limit,)))


def test_a_state_moves_to_a_device_as_a_whole():
    dual = initial_dual(loss_limit(1.0, by="class"), 3).to("cpu")
    assert [len(t) for t in (dual.multiplier, dual.margin, dual.total, dual.count)] == [3, 3, 3, 1]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Constraint(limit=-0.1), "limit must be a finite number of at least 0"),
        (lambda: Constraint(limit=float("nan")), "limit must be a finite number"),
        (lambda: Constraint(limit=(0.1, float("inf")), by="class"), r"limit\[1\] must be"),
        (lambda: Constraint(limit=()), "limit is empty"),
        (lambda: Constraint(limit=(0.1, 0.2)), "one limit for all, got 2"),
        (lambda: Constraint(limit=0.1, by="classes"), "did you mean 'class'"),
        (lambda: Constraint(limit=0.1, frequency="steps"), "did you mean 'step'"),
        (lambda: Constraint(limit=0.1, step_size=0.0), "above 0"),
        (lambda: Constraint(limit=0.1, initial=-1.0), "at least 0"),
        (lambda: Constraint(limit=0.1, initial=2.0, upper=1.0), "lies above upper"),
        (lambda: Constraint(limit=0.1, loss=KL(), upper=0.0), "above 0"),
    ],
)
def test_bad_options(build, message):
    with pytest.raises(UsageError, match=message):
        build()
