"""Fixed distributions: random data augmentation as a special case of a sampler (no loss is climbed).

Free noise is held to the image box alone; `UniformNoise` stays in the set.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dale import random
from dale.components import code_path, import_object
from dale.errors import UsageError, require, require_positive
from dale.random import Key
from dale.samplers.base import Problem, Sampler


@dataclass(frozen=True, kw_only=True)
class UniformNoise(Sampler):
    """delta uniform on Delta, as the set draws it."""

    num_samples: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_samples >= 1, f"{type(self).__name__}: num_samples is at least 1, got {self.num_samples!r}")

    @property
    def num_draws(self) -> int:
        """The number of draws per example."""
        return self.num_samples

    def draw(self, problem: Problem, key: Key) -> Tensor:
        """Draw from the set."""
        wide = problem.repeat(self.num_samples)
        delta = wide.perturbations.sample(wide.x, key, wide.index)
        return delta.view(self.num_samples, -1, *delta.shape[1:])


@dataclass(frozen=True, kw_only=True)
class _FreeNoise(UniformNoise):
    """Additive noise on the image, clipped so that x + delta stays in [0, 1]."""

    @property
    def free(self) -> bool:
        """Noise leaves the set, not the box."""
        return True

    @abstractmethod
    def noise(self, x: Tensor, key: Key, index: Tensor) -> Tensor:
        """Return the noise for each image, before clipping to the box."""

    def draw(self, problem: Problem, key: Key) -> Tensor:
        """Draw the noise and clip it to the box."""
        if problem.shape != tuple(problem.x.shape[1:]):
            raise UsageError(
                f"{type(self).__name__} is added to the image; {problem.perturbations!r} takes {problem.shape} numbers"
            )
        wide = problem.repeat(self.num_samples)
        delta = self.noise(wide.x, key, wide.index).to(wide.x)
        delta = torch.minimum(torch.maximum(delta, -wide.x), 1.0 - wide.x)
        return delta.view(self.num_samples, -1, *delta.shape[1:])


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(_FreeNoise):
    """delta ~ N(0, diag(std^2)); `std` is one number, one per channel, or one per pixel of the flattened image."""

    std: float | tuple[float, ...] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        values = self.std if isinstance(self.std, tuple) else (self.std,)
        require(len(values) > 0, "GaussianNoise: std is empty")
        require_positive(self, **{f"std[{i}]": value for i, value in enumerate(values)})

    def noise(self, x: Tensor, key: Key, index: Tensor) -> Tensor:
        """std * N(0, I)."""
        if not isinstance(self.std, tuple):
            return self.std * random.normal(key, index, x.shape[1:]).to(x)
        # filled there, value by value: a copy from the host would stop a captured graph
        std = torch.cat([x.new_full((1,), value) for value in self.std])
        if len(std) > 1:
            sizes = {x.shape[1]: (-1, 1, 1), x[0].numel(): tuple(x.shape[1:])}
            if len(std) not in sizes:
                raise UsageError(f"GaussianNoise: std has {len(std)} values; expected 1, or one of {sorted(sizes)}")
            std = std.view(sizes[len(std)])
        return std * random.normal(key, index, x.shape[1:]).to(x)


def _window(x: Tensor, key: Key, index: Tensor, size: int, inside: bool) -> Tensor:
    """A random square window per image as a (B, 1, H, W) mask; `inside`: wholly inside the image."""
    height, width = x.shape[-2:]
    masks = []
    for name, length in (("row", height), ("column", width)):
        low, count = (0, length - min(size, length) + 1) if inside else (-(size // 2), length)
        first = low + random.integers(key.fold(name), index, count)
        place = torch.arange(length, device=x.device)
        masks.append((place >= first.unsqueeze(1)) & (place < first.unsqueeze(1) + size))
    return (masks[0].unsqueeze(2) & masks[1].unsqueeze(1)).unsqueeze(1)


@dataclass(frozen=True, kw_only=True)
class PatchNoise(_FreeNoise):
    """Gaussian noise on a random square patch of `size` pixels (Patch Gaussian), zero elsewhere."""

    std: float = 0.5
    size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, std=self.std, size=self.size)

    def noise(self, x: Tensor, key: Key, index: Tensor) -> Tensor:
        """std * N(0, I) inside the window."""
        mask = _window(x, key.fold("place"), index, self.size, inside=True)
        return self.std * random.normal(key, index, x.shape[1:]).to(x) * mask


@dataclass(frozen=True, kw_only=True)
class CutoutNoise(_FreeNoise):
    """Cutout: a random square of `size` pixels, its centre anywhere in the image, is set to `fill`."""

    size: int = 8
    fill: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, size=self.size)
        require(0.0 <= self.fill <= 1.0, f"CutoutNoise: fill is a grey level in [0, 1], got {self.fill!r}")

    def noise(self, x: Tensor, key: Key, index: Tensor) -> Tensor:
        """fill - x inside the window."""
        return (self.fill - x) * _window(x, key, index, self.size, inside=False)


@dataclass(frozen=True, kw_only=True)
class GeneratorNoise(_FreeNoise):
    """delta = g(z) with z ~ N(0, std^2 I) of `latent` numbers; `generator` names g, a module, by import path."""

    generator: str = code_path()
    latent: int
    std: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, latent=self.latent, std=self.std)

    def noise(self, x: Tensor, key: Key, index: Tensor) -> Tensor:
        """Run the generator on Gaussian codes, one per example."""
        generator = import_object(self.generator)
        if isinstance(generator, type) and issubclass(generator, nn.Module):
            raise UsageError(f"{self.generator} is a class; name a module instance (made once, with its weights)")
        delta: Tensor = generator(self.std * random.normal(key, index, (self.latent,)).to(x))
        require(
            delta.shape == x.shape, f"{self.generator} returned shape {tuple(delta.shape)}, expected {tuple(x.shape)}"
        )
        return delta
