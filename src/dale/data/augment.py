"""Augmentation: batched, on the device, different for every image.

An augmentation draws a few numbers per image from (key, example index) and then applies them to a whole batch, so an
image's augmentation does not depend on the batch it is in, the process that sees it, or where a run was resumed.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from dale import random
from dale.components import Component
from dale.errors import UsageError, require
from dale.random import Key


@dataclass(frozen=True, kw_only=True)
class Augmentation(Component):
    """A random change of images in [0, 1] that keeps their shape and their class.

    A subclass says `draw`, the numbers per image, and `apply`, what they do. One that only moves pixels, or sets
    them to zero, says `moves_only`: it is then applied to stored bytes, before they become floats, with equal results.
    """

    moves_only: ClassVar[bool] = False

    @final
    def __call__(self, images: Tensor, key: Key, index: Tensor) -> Tensor:
        """Return the augmented images: (B, C, H, W) floats in [0, 1], as given; `index` holds the example numbers."""
        augmented = self.apply(images, self.draw(key, index))
        return augmented if self.moves_only else augmented.clamp_(0.0, 1.0)

    @abstractmethod
    def draw(self, key: Key, index: Tensor) -> Tensor:
        """Return the random numbers of each image, (B, ...)."""

    @abstractmethod
    def apply(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Return new images, changed by the numbers that `draw` gave for them."""


@dataclass(frozen=True, kw_only=True)
class RandomCrop(Augmentation):
    """Pad by `padding` black pixels on each side and cut the original size out at a uniformly random place."""

    padding: int = 4
    moves_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.padding >= 1, f"RandomCrop: padding must be at least 1, got {self.padding}")

    def draw(self, key: Key, index: Tensor) -> Tensor:
        """Row and column offsets, uniform on 0 .. 2 * padding."""
        return random.integers(key, index, 2 * self.padding + 1, (2,))

    def apply(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Cut each image out of its padded self at its offsets.

        A row ends where the next begins, so the shifted image is one stretch of memory that starts earlier or later,
        copied whole; what it took from beyond its own borders is then set to zero.
        """
        channels, height, width = images.shape[1:]
        size, side = channels * height * width, 2 * self.padding + 1
        guard = images.new_zeros(self.padding * (width + 1))
        flat = torch.cat((guard, images.reshape(-1), guard))
        stretches = flat.as_strided((len(flat) - size + 1, size), (1, 1))
        starts = torch.arange(len(images), device=images.device) * size + numbers[:, 0] * width + numbers[:, 1]
        moved = stretches.index_select(0, starts).view(images.shape)
        rows, columns = (_inside(n, self.padding, images) for n in (height, width))
        if side * side <= len(images):  # the mask of every offset, then the one of each image
            masks = rows.view(side, 1, height, 1) * columns.view(1, side, 1, width)
            mask = masks.view(side * side, -1).index_select(0, numbers[:, 0] * side + numbers[:, 1])
        else:
            mask = rows[numbers[:, 0]].unsqueeze(2) * columns[numbers[:, 1]].unsqueeze(1)
        return moved.mul_(mask.view(-1, 1, height, width))


def _inside(length: int, padding: int, like: Tensor) -> Tensor:
    """Return ones where place + offset - padding lies in 0 .. length - 1, else zeros: (2 * padding + 1, length)."""
    place = torch.arange(length, device=like.device) + torch.arange(2 * padding + 1, device=like.device).unsqueeze(1)
    return ((place >= padding) & (place < length + padding)).to(like.dtype)


@dataclass(frozen=True, kw_only=True)
class RandomFlip(Augmentation):
    """Mirror left and right with probability 1/2."""

    moves_only: ClassVar[bool] = True

    def draw(self, key: Key, index: Tensor) -> Tensor:
        """One bit per image."""
        return random.bits(key, index) < 0

    def apply(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Mirror the images whose bit is set."""
        place = torch.arange(len(images), device=images.device)
        # picking whole images from both kinds copies blocks of memory, where a mask would go pixel by pixel
        return torch.cat((images, images.flip(3))).index_select(0, place + len(images) * numbers)


@dataclass(frozen=True, kw_only=True)
class RandomCutout(Augmentation):
    """Blacken a square of `size` pixels centred at a uniformly random pixel; it may reach over the border."""

    size: int = 8
    moves_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.size >= 1, f"RandomCutout: size must be at least 1, got {self.size}")

    def draw(self, key: Key, index: Tensor) -> Tensor:
        """The centre as two numbers in (0, 1)."""
        return random.uniform(key, index, (2,))

    def apply(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Set the square of each image to zero."""
        height, width = images.shape[2:]
        if self.size > max(height, width):
            raise UsageError(f"RandomCutout: size {self.size} is larger than the images, {height} x {width}")
        inside = []
        for axis, length in enumerate((height, width)):
            start = (numbers[:, axis : axis + 1] * length).to(torch.int64) - self.size // 2
            place = torch.arange(length, device=images.device)
            inside.append((place >= start) & (place < start + self.size))
        hole = inside[0].unsqueeze(2) & inside[1].unsqueeze(1)
        return images.masked_fill(hole.unsqueeze(1), 0)
