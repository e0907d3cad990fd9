"""Geometric transformations: identities on the pixel grid, composition, and gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dale import random
from dale.errors import UsageError
from dale.perturbations import L2, Composition, Rotation, Scaling, Translation

SETS = (
    Rotation(degrees=45.0),
    Translation(fraction=0.25),
    Scaling(limit=0.5),
    Composition(parts=(Rotation(degrees=20.0), Translation(), Scaling())),
)


def images(count: int = 2, height: int = 8, width: int = 8, dtype=torch.float64) -> torch.Tensor:
    return random.uniform(random.key(2), torch.arange(count), (3, height, width)).to(dtype)


def smooth(height: int, width: int) -> torch.Tensor:
    """A blurred spot well inside the image, off its centre, so that bilinear resampling is nearly exact."""
    rows = torch.arange(height, dtype=torch.float64)[:, None] - (height - 1) / 2
    columns = torch.arange(width, dtype=torch.float64)[None, :] - (width - 1) / 2
    spot = torch.exp(-((rows - 4.0) ** 2 + (columns - 6.0) ** 2) / 30.0)
    return spot[None, None]


@pytest.mark.parametrize("perturbations", SETS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("size", [(8, 8), (9, 6)])
def test_zero_is_the_identity(perturbations, size):
    x = images(2, *size)
    delta = torch.zeros(2, *perturbations.shape(x.shape[1:]), dtype=x.dtype)
    torch.testing.assert_close(perturbations.apply(x, delta), x, atol=1e-12, rtol=0.0)
    torch.testing.assert_close(perturbations.apply(x.float(), delta.float()), x.float(), atol=2e-6, rtol=0.0)


@pytest.mark.parametrize("quarter", [-2, -1, 1, 2])
def test_quarter_turns_are_rot90(quarter):
    x = images()
    delta = torch.full((2, 1), quarter / 2.0, dtype=x.dtype)
    turned = Rotation(degrees=180.0).apply(x, delta)
    torch.testing.assert_close(turned, torch.rot90(x, quarter, (2, 3)), atol=1e-12, rtol=0.0)


def test_rotation_keeps_lengths_in_images_that_are_not_square():
    """A spot 4 below and 6 right of the centre turns to 6 above and 4 right of it, whatever the image's sides."""
    x = smooth(40, 60)
    turned = Rotation(degrees=90.0).apply(x, torch.ones(1, 1, dtype=x.dtype))
    rows = torch.arange(40, dtype=x.dtype)[:, None] - 19.5
    columns = torch.arange(60, dtype=x.dtype)[None, :] - 29.5
    expected = torch.exp(-((rows + 6.0) ** 2 + (columns - 4.0) ** 2) / 30.0)
    torch.testing.assert_close(turned[0, 0], expected, atol=0.01, rtol=0.0)


@pytest.mark.parametrize("shift", [(1, 0), (0, 2), (-3, 1), (8, 0)])
def test_translation_by_whole_pixels_is_a_shift(shift):
    """Positive numbers look further right and down, so that the image moves left and up; black comes in."""
    x = images(1, 10, 8)
    delta = torch.tensor([[shift[0] / 8, shift[1] / 10]], dtype=x.dtype)
    moved = Translation(fraction=1.0).apply(x, delta)
    expected = F.pad(x, (8, 8, 10, 10))[:, :, 10 + shift[1] : 20 + shift[1], 8 + shift[0] : 16 + shift[0]]
    torch.testing.assert_close(moved, expected, atol=1e-12, rtol=0.0)


def test_scaling_by_two_is_pooling():
    """Shrinking to half the size averages blocks of two by two around the centre."""
    x = images(1, 8, 8)
    small = Scaling(limit=1.0).apply(x, torch.ones(1, 1, dtype=x.dtype))
    torch.testing.assert_close(small[:, :, 2:6, 2:6], F.avg_pool2d(x, 2), atol=1e-12, rtol=0.0)
    assert not small[:, :, 0].any()


def test_the_parts_of_a_composition_undo_each_other():
    x = images(2, 8, 8)
    turn = Rotation(degrees=90.0)
    both = Composition(parts=(turn, turn))
    angles = torch.tensor([[0.37, -0.37], [-0.8, 0.8]], dtype=x.dtype)
    torch.testing.assert_close(both.apply(x, angles), x, atol=1e-12, rtol=0.0)
    there = Composition(parts=(Translation(), Scaling(), Scaling(), Translation()))
    way = torch.tensor([[0.3, -0.7, 0.4, -0.4, -0.3, 0.7]], dtype=x.dtype).expand(2, 6)
    torch.testing.assert_close(there.apply(x, way), x, atol=1e-12, rtol=0.0)


@pytest.mark.parametrize("size", [(8, 8), (8, 16)])
def test_the_first_part_comes_first(size):
    """On whole pixels, where nothing is interpolated, the composition equals the parts one after another."""
    x = images(1, *size)
    turn, move = Rotation(degrees=180.0), Translation(fraction=1.0)
    angle, shift = torch.ones(1, 1, dtype=x.dtype), torch.tensor([[2 / size[1], 1 / size[0]]], dtype=x.dtype)
    one_by_one = move.apply(turn.apply(x, angle), shift)
    at_once = Composition(parts=(turn, move)).apply(x, torch.cat([angle, shift], dim=1))
    torch.testing.assert_close(at_once, one_by_one, atol=1e-12, rtol=0.0)
    other = Composition(parts=(move, turn)).apply(x, torch.cat([shift, angle], dim=1))
    torch.testing.assert_close(other, turn.apply(move.apply(x, shift), angle), atol=1e-12, rtol=0.0)
    assert float((other - at_once).abs().max()) > 0.1


@pytest.mark.parametrize("perturbations", SETS, ids=lambda s: type(s).__name__)
def test_gradients_with_respect_to_parameters_and_images(perturbations):
    # a smooth image and parameters off the grid's kinks: bilinear interpolation is not differentiable on them
    x = images(2, 5, 5).requires_grad_(True)
    delta = random.uniform(random.key(9), torch.arange(2), perturbations.shape((3, 5, 5)), low=-0.9, high=0.9).double()
    assert torch.autograd.gradcheck(perturbations.apply, (x, delta.requires_grad_(True)), eps=1e-7, atol=1e-5)


def test_the_limits_are_reached_at_one():
    one = torch.ones(1, 1, dtype=torch.float64)
    angle = Rotation(degrees=30.0).matrix(one)[0]
    assert float(angle[0, 0]) == pytest.approx(math.cos(math.radians(30)))
    assert float(angle[1, 0]) == pytest.approx(0.5)
    assert float(Scaling(limit=0.25).matrix(one)[0, 0, 0]) == pytest.approx(1.25)
    assert float(Scaling(limit=0.25).matrix(-one)[0, 0, 0]) == pytest.approx(0.8)
    # a tenth of the image is a fifth of a grid that runs from -1 to 1
    assert Translation(fraction=0.1).matrix(one.expand(1, 2))[0, :2, 2].tolist() == [0.2, 0.2]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rotation(degrees=181.0), "at most 180"),
        (lambda: Translation(fraction=1.5), "at most 1"),
        (lambda: Scaling(limit=-0.1), "above 0"),
        (lambda: Composition(parts=()), "parts is empty"),
        (lambda: Composition(parts=(L2(epsilon=1.0),)), "affine transformations"),
    ],
)
def test_bad_options(build, message):
    with pytest.raises(UsageError, match=message):
        build()
