"""Geometric transformations with a few parameters, differentiable in them through a sampling grid.

Each acts on the output grid by a 2x3 matrix; a composition multiplies the matrices and interpolates once.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dale.errors import UsageError, require, require_positive
from dale.perturbations.base import ParameterBox


@dataclass(frozen=True, kw_only=True)
class _Affine(ParameterBox):
    """An affine map of the image plane, given by parameters in [-1, 1]."""

    @abstractmethod
    def matrix(self, delta: Tensor, aspect: float = 1.0) -> Tensor:
        """The (B, 3, 3) homogeneous matrix that takes an output position to its input position.

        Positions run from -1 to 1 along both sides of the image; `aspect` is its width over its height.
        """

    def apply(self, x: Tensor, delta: Tensor) -> Tensor:
        """Resample the image bilinearly; what comes from outside the image is black."""
        full = torch.promote_types(x.dtype, torch.float32)
        theta = self.matrix(delta.to(full), x.shape[-1] / x.shape[-2])[:, :2]
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return F.grid_sample(x.to(full), grid, align_corners=False).to(x.dtype)


def _assemble(delta: Tensor, rows: Sequence[Sequence[Tensor | float]]) -> Tensor:
    """Stack scalars and (B,) tensors into (B, 3, 3), with the last row of a homogeneous matrix."""
    zero = torch.zeros_like(delta[:, 0])
    full = [[entry if isinstance(entry, Tensor) else zero + entry for entry in row] for row in (*rows, (0.0, 0.0, 1.0))]
    return torch.stack([torch.stack(row, dim=1) for row in full], dim=1)


@dataclass(frozen=True, kw_only=True)
class Rotation(_Affine):
    """Rotation about the centre by an angle in [-degrees, degrees], counter-clockwise where it is positive."""

    degrees: float = 30.0
    num_parameters: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require_positive(self, degrees=self.degrees)
        require(self.degrees <= 180.0, f"Rotation: degrees is at most 180, got {self.degrees!r}")

    def matrix(self, delta: Tensor, aspect: float = 1.0) -> Tensor:
        """[[cos a, -sin a / r, 0], [r sin a, cos a, 0], [0, 0, 1]] with a = degrees * delta and aspect r.

        Without r, which turns positions into lengths and back, an image that is not square would be sheared.
        """
        angle = math.radians(self.degrees) * delta[:, 0]
        cos, sin = angle.cos(), angle.sin()
        return _assemble(delta, ((cos, -sin / aspect, 0.0), (aspect * sin, cos, 0.0)))


@dataclass(frozen=True, kw_only=True)
class Translation(_Affine):
    """Translation by up to `fraction` of the image's width and height."""

    fraction: float = 0.1
    num_parameters: ClassVar[int] = 2

    def __post_init__(self) -> None:
        require_positive(self, fraction=self.fraction)
        require(self.fraction <= 1.0, f"Translation: fraction is at most 1, got {self.fraction!r}")

    def matrix(self, delta: Tensor, aspect: float = 1.0) -> Tensor:
        """[[1, 0, t_x], [0, 1, t_y], [0, 0, 1]] with t = 2 * fraction * delta: the grid is two units wide."""
        shift = 2.0 * self.fraction * delta
        return _assemble(delta, ((1.0, 0.0, shift[:, 0]), (0.0, 1.0, shift[:, 1])))


@dataclass(frozen=True, kw_only=True)
class Scaling(_Affine):
    """Scaling about the centre by a factor between 1 / (1 + limit) and 1 + limit."""

    limit: float = 0.2
    num_parameters: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require_positive(self, limit=self.limit)

    def matrix(self, delta: Tensor, aspect: float = 1.0) -> Tensor:
        """diag(s, s, 1) with s = (1 + limit)^delta: enlarging and shrinking are alike."""
        factor = torch.exp(math.log1p(self.limit) * delta[:, 0])
        return _assemble(delta, ((factor, 0.0, 0.0), (0.0, factor, 0.0)))


@dataclass(frozen=True, kw_only=True)
class Composition(_Affine):
    """Several transformations one after another, the first one first; interpolated once."""

    parts: tuple[_Affine, ...]

    def __post_init__(self) -> None:
        require(len(self.parts) > 0, "Composition: parts is empty; give at least one transformation")
        for part in self.parts:
            if not isinstance(part, _Affine):
                raise UsageError(f"Composition: parts are affine transformations (Rotation, ...), got {part!r}")

    def shape(self, image_shape: Sequence[int]) -> tuple[int, ...]:
        """The parameters of all parts in a row."""
        return (sum(part.shape(image_shape)[0] for part in self.parts),)

    @property
    def num_parameters(self) -> int:  # type: ignore[override]  # a constant of the class elsewhere, of the parts here
        """The number of parameters of all parts."""
        return sum(part.num_parameters for part in self.parts)

    def matrix(self, delta: Tensor, aspect: float = 1.0) -> Tensor:
        """The product of the parts' matrices; they map output to input, so the first part stands leftmost."""
        pieces = torch.split(delta, [part.num_parameters for part in self.parts], dim=1)
        product = self.parts[0].matrix(pieces[0], aspect)
        for part, piece in zip(self.parts[1:], pieces[1:], strict=True):
            product = product @ part.matrix(piece, aspect)
        return product
