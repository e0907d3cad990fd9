"""Norm balls: projections against independent solvers and the variational inequality, directions, distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import brentq

from dale import random
from dale.errors import UsageError
from dale.perturbations import L1, L2, Linf

BALLS = (Linf, L2, L1)
STABLE = settings(derandomize=True, deadline=None, max_examples=60)


def bisected(kind: type, v: np.ndarray, x: np.ndarray, epsilon: float) -> np.ndarray:
    """The projection of one point by root finding on its multiplier: the KKT conditions and no sorting."""
    low, high = -x, 1.0 - x
    if kind is Linf:
        return np.clip(np.clip(v, -epsilon, epsilon), low, high)
    if kind is L2:
        norm, path = np.linalg.norm, (lambda t: np.clip(v / (1.0 + t), low, high))
    else:
        norm, path = (
            (lambda d: np.abs(d).sum()),
            (lambda t: np.clip(np.sign(v) * np.maximum(np.abs(v) - t, 0), low, high)),
        )
    if norm(path(0.0)) <= epsilon:
        return path(0.0)
    top = 1.0 + np.abs(v).max()
    while norm(path(top)) > epsilon:
        top *= 2.0
    return path(brentq(lambda t: norm(path(t)) - epsilon, 0.0, top, xtol=1e-15, rtol=1e-15))


def on_ball(kind: type, v: np.ndarray, epsilon: float) -> np.ndarray:
    """The projection onto the ball alone, for Dykstra's algorithm."""
    if kind is L2:
        return v * min(1.0, epsilon / max(np.linalg.norm(v), 1e-300))
    if np.abs(v).sum() <= epsilon:
        return v
    sizes = np.sort(np.abs(v))[::-1]
    shifts = (np.cumsum(sizes) - epsilon) / np.arange(1, len(v) + 1)
    return np.sign(v) * np.maximum(np.abs(v) - shifts[sizes > shifts][-1], 0.0)


def dykstra(kind: type, v: np.ndarray, x: np.ndarray, epsilon: float, rounds: int = 4000) -> np.ndarray:
    """Alternating projections onto ball and box with Dykstra's corrections: converges to the projection."""
    point, p, q = v.copy(), np.zeros_like(v), np.zeros_like(v)
    for _ in range(rounds):
        ball = on_ball(kind, point + p, epsilon)
        p += point - ball
        point = np.clip(ball + q, -x, 1.0 - x)
        q += ball - point
    return point


coordinate = st.one_of(st.sampled_from([0.0, 1.0, 0.5, 1e-3]), st.floats(0.0, 1.0))
displacement = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 1e-9]), st.floats(-2.0, 2.0), st.floats(-1e4, 1e4))


@st.composite
def problems(draw):
    size = draw(st.integers(1, 8))
    x = draw(st.lists(coordinate, min_size=size, max_size=size))
    v = draw(st.lists(displacement, min_size=size, max_size=size))
    epsilon = draw(st.sampled_from([0.01, 0.1, 0.5, 1.0, 2.5]))
    return np.array(v), np.array(x), epsilon


def project(kind: type, v: np.ndarray, x: np.ndarray, epsilon: float, dtype=torch.float64) -> np.ndarray:
    point = kind(epsilon=epsilon).project(torch.tensor(v, dtype=dtype)[None], torch.tensor(x, dtype=dtype)[None])
    assert point.dtype == dtype
    return point[0].double().numpy()


@pytest.mark.parametrize("kind", BALLS)
@STABLE
@given(problem=problems())
def test_projection_is_the_nearest_feasible_point(kind, problem):
    v, x, epsilon = problem
    ball, point = kind(epsilon=epsilon), project(kind, *problem)
    inside = torch.tensor(point)[None], torch.tensor(x)[None]
    assert bool(ball.contains(*inside, tolerance=1e-12))
    np.testing.assert_allclose(point, bisected(kind, v, x, epsilon), atol=1e-9)
    np.testing.assert_allclose(project(kind, point, x, epsilon), point, atol=1e-12)  # idempotent
    # the variational inequality <v - P v, z - P v> <= 0, and the distance, against other feasible points z
    origin = torch.tensor(x).expand(64, -1)
    others = [ball.sample(origin, random.key(1), torch.arange(64)), torch.zeros(1, len(x), dtype=torch.float64)]
    corners = torch.tensor(np.random.default_rng(0).integers(0, 2, (64, len(x)))) - origin  # of the image box
    others.append(ball.project(corners, origin))
    for z in torch.cat(others).numpy():
        assert np.dot(v - point, z - point) <= 1e-9 * max(1.0, np.linalg.norm(v))
        assert np.linalg.norm(v - point) <= np.linalg.norm(v - z) * (1 + 1e-12) + 1e-9


@pytest.mark.parametrize("kind", BALLS)
@STABLE
@given(problem=problems())
def test_projection_in_float32(kind, problem):
    v, x, epsilon = (np.float64(np.float32(part)) for part in problem)
    point = project(kind, v, x, float(epsilon), torch.float32)
    ball = kind(epsilon=float(epsilon))
    assert bool(ball.contains(torch.tensor(point).float()[None], torch.tensor(x).float()[None]))
    np.testing.assert_allclose(point, bisected(kind, v, x, float(epsilon)), atol=1e-5)
    again = project(kind, point, x, float(epsilon), torch.float32)
    np.testing.assert_allclose(again, point, atol=1e-6)


@pytest.mark.parametrize("kind", [L2, L1])
def test_projection_equals_alternating_projections(kind):
    rng = np.random.default_rng(3)
    for size in (2, 3, 6):
        for scale in (0.5, 2.0):
            x, v = rng.random(size).round(1), scale * rng.standard_normal(size)
            for epsilon in (0.2, 0.6):
                found = project(kind, v, x, epsilon)
                np.testing.assert_allclose(found, dykstra(kind, v, x, epsilon), atol=1e-5)


@pytest.mark.parametrize("kind", [L2, L1])
def test_projecting_and_then_clipping_is_not_the_projection(kind):
    """The trap that the exact projection avoids: the clipped point has room left in the ball."""
    x, v = np.array([1.0, 0.5]), np.array([3.0, 3.0])
    naive = np.clip(on_ball(kind, v, 0.3), -x, 1.0 - x)
    np.testing.assert_allclose(project(kind, v, x, 0.3), [0.0, 0.3], atol=1e-12)
    assert np.abs(naive - [0.0, 0.3]).max() > 0.05


@pytest.mark.parametrize("kind", [L2, L1])
def test_corners_of_the_box(kind):
    # x in a corner: only the coordinates that point inwards may move
    corner = np.array([0.0, 1.0, 0.0, 1.0])
    np.testing.assert_array_equal(project(kind, np.array([-1.0, 2.0, -3.0, 4.0]), corner, 0.5), np.zeros(4))
    inwards = project(kind, np.array([1.0, -1.0, -3.0, 4.0]), corner, 0.5)
    share = 0.5 / math.sqrt(2.0) if kind is L2 else 0.25
    np.testing.assert_allclose(inwards, [share, -share, 0.0, 0.0], atol=1e-12)
    # a ball that contains the box: only the box is left
    np.testing.assert_allclose(project(kind, np.full(4, 9.0), np.full(4, 0.25), 5.0), np.full(4, 0.75), atol=1e-12)


@pytest.mark.parametrize(("kind", "size"), [(Linf, 1e36), (L2, 1e20), (L2, 1e36), (L1, 1e4), (L1, 1e8)])
def test_points_far_away_are_projected_too(kind, size):
    x = torch.full((1, 4), 0.5)
    point = kind(epsilon=0.4).project(torch.full((1, 4), size), x)
    each = {Linf: 0.4, L2: 0.2, L1: 0.1}[kind]
    torch.testing.assert_close(point, torch.full((1, 4), each), atol=1e-6, rtol=0.0)


def test_the_l1_shift_keeps_its_digits():
    v = np.array([1e8 + 8.0, 1e8, 0.9])
    np.testing.assert_allclose(project(L1, v, np.full(3, 0.5), 1.2, torch.float32), [0.5, 0.5, 0.2], atol=1e-6)


def test_points_so_far_that_differences_alone_count():
    """Beyond 2^53 epsilons a shift taken off |v| itself would be lost in its digits."""
    for first, expected in (((1e16, 5e15, 1.0), (0.25, 0.0, 0.0)), ((1e16, 1e16, 1.0), (0.125, 0.125, 0.0))):
        point = project(L1, np.array(first), np.full(3, 0.5), 0.25)
        np.testing.assert_allclose(point, expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [1e10, 1e20, 1e30])
@pytest.mark.parametrize("kind", [L2, L1])
def test_a_coordinate_without_room_does_not_hide_the_others(kind, far, dtype):
    point = project(kind, np.array([far, 3.0, 4.0]), np.array([1.0, 0.5, 0.5]), 0.25, dtype)
    np.testing.assert_allclose(point, [0.0, 0.15, 0.2] if kind is L2 else [0.0, 0.0, 0.25], atol=1e-6)


@pytest.mark.parametrize("kind", BALLS)
def test_large_images_in_float32(kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4, 3, 32, 32, generator=generator)
    v = 0.2 * torch.randn(4, 3, 32, 32, generator=generator)
    epsilon = {Linf: 0.1, L2: 1.5, L1: 30.0}[kind]
    point = kind(epsilon=epsilon).project(v, x)
    assert point.shape == x.shape
    exact = kind(epsilon=epsilon).project(v.double(), x.double())
    torch.testing.assert_close(point.double(), exact, atol=1e-6, rtol=0.0)
    for row in range(2):
        reference = bisected(kind, v[row].double().flatten().numpy(), x[row].double().flatten().numpy(), epsilon)
        np.testing.assert_allclose(exact[row].flatten().numpy(), reference, atol=1e-8)


@pytest.mark.parametrize("ball", [Linf(epsilon=1.0), L2(epsilon=1.0), L1(epsilon=1.0, active=1e-9)])
def test_steepest_direction_is_the_argmax_of_the_linear_form(ball):
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(64, 3, 4, generator=generator)
    direction = ball.steepest(gradient)
    torch.testing.assert_close(ball.norm(direction), torch.ones(64))
    dual = {"Linf": 1, "L2": 2, "L1": torch.inf}[type(ball).__name__]
    reached = (gradient * direction).flatten(1).sum(dim=1)
    torch.testing.assert_close(reached, torch.linalg.vector_norm(gradient.flatten(1), ord=dual, dim=1))
    rivals = torch.randn(1000, 12, generator=generator)
    rivals = rivals / ball.norm(rivals)[:, None]
    assert bool((gradient.flatten(1) @ rivals.T <= reached[:, None] + 1e-5).all())
    assert not ball.steepest(torch.zeros(2, 3, 4)).any()


def test_l1_moves_the_share_it_was_given():
    gradient = torch.arange(1.0, 41.0).view(1, 40) * torch.tensor([1.0, -1.0]).repeat(20)
    direction = L1(epsilon=1.0, active=0.1).steepest(gradient)
    expected = torch.zeros(1, 40)
    expected[0, -4:] = torch.tensor([0.25, -0.25, 0.25, -0.25])
    assert torch.equal(direction, expected)
    few = torch.zeros(1, 40)
    few[0, 7] = -2.0  # one of the four coordinates has a gradient: a step of unit length goes along it
    assert torch.equal(L1(epsilon=1.0, active=0.1).steepest(few), few.sign())
    for active in (0.0, 1.5, float("nan")):
        with pytest.raises(UsageError, match="active is a share"):
            L1(epsilon=1.0, active=active)


def test_l1_leaves_out_what_stands_at_a_wall():
    ball = L1(epsilon=1.0, active=0.25)
    x = torch.tensor([[0.7, 0.2, 0.5, 0.5]])
    gradient = torch.tensor([[4.0, -3.0, 2.0, 1.0]])
    for delta, expected in (
        ([0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]),
        ([0.3, 0.0, 0.0, 0.0], [0.0, -1.0, 0.0, 0.0]),  # the first is white
        ([0.3, -0.2, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]),  # and the second black
        ([-0.7, 0.8, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]),  # from the other wall there is a way
        ([0.3, -0.2, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0]),
    ):
        assert torch.equal(ball.ascent(gradient, torch.tensor([delta]), x), torch.tensor([expected]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_l1_knows_a_wall_that_the_projection_reached(dtype):
    """Whatever the rounding of x + delta: the projection's room is none of ascent's."""
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(50, 64, generator=generator).to(dtype)
    ball = L1(epsilon=100.0, active=1.0)
    outwards = torch.randn(50, 64, generator=generator).to(dtype)
    corner = ball.project(10.0 * outwards.sign(), x)
    assert not ball.ascent(outwards, corner, x).any()
    assert torch.equal(ball.ascent(-outwards, corner, x), ball.steepest(-outwards))


@pytest.mark.parametrize("ball", [Linf(epsilon=0.5), L2(epsilon=0.5)])
def test_the_other_balls_climb_along_the_steepest_direction_everywhere(ball):
    gradient, x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3)), torch.tensor([[0.0, 1.0, 0.5] * 2] * 4)
    assert torch.equal(ball.ascent(gradient, torch.zeros(4, 6), x), ball.steepest(gradient))


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e30])
def test_l2_direction_of_tiny_and_huge_gradients(size):
    direction = L2(epsilon=1.0).steepest(torch.tensor([[3.0 * size, 4.0 * size]]))
    torch.testing.assert_close(direction, torch.tensor([[0.6, 0.8]]))


def test_contains_and_norms_by_hand():
    delta, x = torch.tensor([[0.3, -0.4]]), torch.full((1, 2), 0.5)
    for ball, norm in ((Linf, 0.4), (L2, 0.5), (L1, 0.7)):
        assert float(ball(epsilon=1.0).norm(delta)) == pytest.approx(norm)
        assert bool(ball(epsilon=norm + 1e-4).contains(delta, x))
        assert not bool(ball(epsilon=norm - 1e-4).contains(delta, x))
        assert not bool(ball(epsilon=1.0).contains(delta, torch.tensor([[0.5, 0.3]])))
        assert not bool(ball(epsilon=1.0).contains(delta, torch.tensor([[0.8, 0.5]])))
        assert float(ball(epsilon=0.3).radius) == 0.3


@pytest.mark.parametrize("kind", BALLS)
def test_samples_are_uniform_on_the_ball(kind):
    """Away from the walls the volume inside radius r grows as r^n, and the directions are symmetric."""
    count, size, epsilon = 20_000, 3, 0.4
    ball = kind(epsilon=epsilon)
    delta = ball.sample(torch.full((count, size), 0.5), random.key(5), torch.arange(count))
    levels = (ball.norm(delta) / epsilon).double() ** size
    assert stats.kstest(levels.numpy(), "uniform").pvalue > 1e-3
    for axis in range(size):
        signs = torch.bincount((delta[:, axis] > 0).long(), minlength=2).numpy()
        assert stats.chisquare(signs).pvalue > 1e-3
    table = np.corrcoef(torch.cat([delta, delta.abs()], dim=1).T.numpy())
    if kind is Linf:  # a box: coordinates are independent, in size as well
        assert np.abs(table - np.eye(2 * size)).max() < 4.5 / count**0.5
    # the law of one coordinate, from the volume of slices
    slices = {Linf: lambda t: (t + 1) / 2, L2: lambda t: (2 + 3 * t - t**3) / 4, L1: _l1_slice}[kind]
    for axis in range(size):
        assert stats.kstest((delta[:, axis] / epsilon).double().numpy(), slices).pvalue > 1e-3


def _l1_slice(t: np.ndarray) -> np.ndarray:
    """P(delta_1 <= t) in the unit l1 ball of three dimensions: density 3 (1 - |t|)^2 / 2."""
    tail = (1.0 - np.abs(t)) ** 3 / 2.0
    return np.where(t < 0, tail, 1.0 - tail)


@pytest.mark.parametrize("kind", [L2, L1])
def test_samples_at_the_walls_are_uniform_too(kind):
    """With pixels at 0 and 1 Delta is an orthant of the ball: absolute values of a uniform draw, none of them zero."""
    count, epsilon = 20_000, 0.3
    x = torch.tensor([[0.0, 1.0, 0.5]]).expand(count, 3)
    ball = kind(epsilon=epsilon)
    delta = ball.sample(x, random.key(5), torch.arange(count))
    assert bool(ball.contains(delta, x).all())
    assert bool((delta[:, 0] > 0).all())
    assert bool((delta[:, 1] < 0).all())
    levels = (ball.norm(delta) / epsilon).double() ** 3
    assert stats.kstest(levels.numpy(), "uniform").pvalue > 1e-3
    whole = {L2: lambda t: (2 + 3 * t - t**3) / 4, L1: _l1_slice}[kind]
    for axis, sign in ((0, 1.0), (1, -1.0)):
        one_side = (sign * delta[:, axis] / epsilon).double().numpy()
        assert stats.kstest(one_side, lambda t: 2.0 * whole(t) - 1.0).pvalue > 1e-3
    assert stats.kstest((delta[:, 2] / epsilon).double().numpy(), whole).pvalue > 1e-3


def test_linf_samples_are_uniform_on_ball_and_box():
    x = torch.tensor([[0.1, 0.95]]).expand(20_000, 2)
    delta = Linf(epsilon=0.3).sample(x, random.key(5), torch.arange(20_000))
    for axis, (low, high) in enumerate(((-0.1, 0.3), (-0.3, 0.05))):
        levels = (delta[:, axis].double().numpy() - low) / (high - low)
        assert stats.kstest(levels, "uniform").pvalue > 1e-3


def test_reflection_folds_into_ball_and_box():
    ball, x = Linf(epsilon=0.25), torch.tensor([[0.5, 0.0, 1.0, 0.5]])
    momentum = torch.ones(1, 4)
    delta, turned = ball.reflect(torch.tensor([[0.375, -0.125, 0.125, 0.75]]), momentum, x)
    # by hand: 0.375 -> 0.25 - 0.125; -0.125 -> 0.125; the third meets the wall at 0; 0.75 crosses two walls
    assert delta.tolist() == [[0.125, 0.125, -0.125, -0.25]]
    assert turned.tolist() == [[-1.0, -1.0, -1.0, 1.0]]
    inside = torch.tensor([[0.1, 0.2, -0.2, 0.0]])
    kept, same = ball.reflect(inside, momentum, x)
    torch.testing.assert_close(kept, inside)
    assert torch.equal(same, momentum)
