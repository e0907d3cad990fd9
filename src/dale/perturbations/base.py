"""What a perturbation set knows: Delta, the steepest direction in it, the projection onto it, and G(x, delta)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dale import random
from dale.components import Component
from dale.random import Key


@dataclass(frozen=True, kw_only=True)
class PerturbationSet(Component, ABC):
    """A set Delta of perturbations and the way they act on an image, x' = G(x, delta).

    Everything here is batched over examples: `x` is (B, C, H, W) in [0, 1] and `delta` is (B, *shape). Nothing above
    this room assumes that delta has the image's shape, so a set of three rotation angles is as good as a norm ball.
    A set of your own needs `shape`, `sample`, `project`, `contains` and `apply`; for a box of parameters derive from
    `ParameterBox` and write `apply` alone.
    """

    @property
    @abstractmethod
    def radius(self) -> float:
        """The natural size of the set: the default step of a chain is a quarter of it."""

    @abstractmethod
    def shape(self, image_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one example's delta, for one image of shape (C, H, W)."""

    @abstractmethod
    def sample(self, x: Tensor, key: Key, index: Tensor) -> Tensor:
        """Draw one delta per example, uniformly from Delta, or as nearly so as the set says."""

    @abstractmethod
    def project(self, delta: Tensor, x: Tensor) -> Tensor:
        """Return the nearest point of Delta (and of the image box, where delta is added to the image)."""

    @abstractmethod
    def contains(self, delta: Tensor, x: Tensor, tolerance: float = 1e-6) -> Tensor:
        """Tell per example, as (B,) booleans, whether delta lies in the set."""

    @abstractmethod
    def apply(self, x: Tensor, delta: Tensor) -> Tensor:
        """Return the perturbed images G(x, delta)."""

    def steepest(self, gradient: Tensor) -> Tensor:
        """Return the direction of steepest ascent, of unit length in the set's own norm; zero for a zero gradient."""
        return gradient.sign()

    def ascent(self, gradient: Tensor, delta: Tensor, x: Tensor) -> Tensor:
        """Return the direction in which a step from delta climbs; here the steepest one, wherever delta is.

        A set overrides it where a direction that leads into a wall would take the place of one that does not.
        """
        del delta, x
        return self.steepest(gradient)

    def reflect(self, delta: Tensor, momentum: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Fold a point that left the set back at its border and turn its momentum; here: leave it outside.

        Samplers reject what is still outside afterwards, which is correct for any set. An override must follow the
        billiard path of the straight move exactly (reversible, keeping volumes), or the draws of HMC are biased.
        """
        del x
        return delta, momentum


def fold_into(low: Tensor, high: Tensor, delta: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
    """Reflect coordinates at the walls of the box [low, high], as often as they hit one, turning their momentum."""
    width = (high - low).clamp_min(torch.finfo(delta.dtype).tiny)
    phase = torch.remainder(delta - low, 2 * width)
    turned = phase > width
    inside = torch.where(turned, 2 * width - phase, phase)
    return torch.minimum(low + inside, high), torch.where(turned, -momentum, momentum)


@dataclass(frozen=True, kw_only=True)
class ParameterBox(PerturbationSet):
    """Perturbations with a few parameters, each in [-1, 1]: the base for transformations, and for sets of your own.

    A subclass sets `num_parameters` and writes `apply`, in which it scales each parameter by a limit of its own.
    """

    num_parameters: ClassVar[int]

    @property
    def radius(self) -> float:
        """Half the width of the box: 1."""
        return 1.0

    def shape(self, image_shape: Sequence[int]) -> tuple[int, ...]:
        """One number per parameter, whatever the image."""
        del image_shape
        return (self.num_parameters,)

    def sample(self, x: Tensor, key: Key, index: Tensor) -> Tensor:
        """Draw uniformly from the box."""
        return random.uniform(key, index, (self.num_parameters,), low=-1.0, high=1.0).to(x)

    def project(self, delta: Tensor, x: Tensor) -> Tensor:
        """Clamp each parameter to [-1, 1]."""
        del x
        return delta.clamp(-1.0, 1.0)

    def contains(self, delta: Tensor, x: Tensor, tolerance: float = 1e-6) -> Tensor:
        """Tell whether every parameter lies in [-1, 1]."""
        del x
        return (delta.abs() <= 1.0 + tolerance).all(dim=1)

    def reflect(self, delta: Tensor, momentum: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Reflect at the walls of the box."""
        del x
        return fold_into(-torch.ones_like(delta), torch.ones_like(delta), delta, momentum)
