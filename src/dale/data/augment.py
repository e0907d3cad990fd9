"""Augmentation: batched, on the device, different for every image.

An augmentation draws a few numbers per image from (key, example index) and then applies them to a whole batch, so an
image's augmentation does not depend on the batch it is in, the process that sees it, or where a run was resumed.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from dale import random
from dale.components import Component
from dale.errors import UsageError, require
from dale.random import Key

_TABLE = 1 << 20  # the largest table of crop masks worth keeping, in pixels


@dataclass(frozen=True, kw_only=True)
class Augmentation(Component):
    """A random change of images in [0, 1] that keeps their shape and their class.

    A subclass says `draw`, the numbers per image, and `apply`, what they do. One that only moves pixels, or sets
    them to zero, says `moves_only`: it is then applied to stored bytes, before they become floats, with equal results.
    One that says `compiles` as well is tensor operations only, whose results a compiler does not change (no float is
    rounded on the way); where the fast path compiles, the loader has it compiled too.
    """

    moves_only: ClassVar[bool] = False
    compiles: ClassVar[bool] = False

    @final
    def __call__(self, images: Tensor, key: Key, index: Tensor) -> Tensor:
        """Return the augmented images: (B, C, H, W) floats in [0, 1], as given; `index` holds the example numbers."""
        augmented = self.apply(images.detach().clone(), self.draw(key, index))
        return augmented if self.moves_only else augmented.clamp_(0.0, 1.0)

    @abstractmethod
    def draw(self, key: Key, index: Tensor) -> Tensor:
        """Return the random numbers of each image, (B, ...)."""

    def gather(self, stored: Tensor, places: Tensor, numbers: Tensor) -> Tensor:
        """Return `apply(stored[places], numbers)`; a subclass may do both in one pass over memory."""
        return self.apply(stored.index_select(0, places), numbers)

    @abstractmethod
    def apply(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Return the images changed by the numbers that `draw` gave for them; `images` itself may be overwritten."""


@dataclass(frozen=True, kw_only=True)
class RandomCrop(Augmentation):
    """Pad by `padding` black pixels on each side and cut the original size out at a uniformly random place."""

    padding: int = 4
    moves_only: ClassVar[bool] = True
    compiles: ClassVar[bool] = True

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
        if torch.compiler.is_compiling():
            return self._pick(images, numbers)
        guard = images.new_zeros(self.padding * (images.shape[3] + 1))
        flat = torch.cat((guard, images.reshape(-1), guard))
        size = images[0].numel()
        starts = torch.arange(0, len(images) * size, size, device=images.device) + self._shift(images, numbers)
        return self._cut(flat, starts.add_(len(guard)), images, numbers)

    def gather(self, stored: Tensor, places: Tensor, numbers: Tensor) -> Tensor:
        """Cut straight out of the stored images; the few that reach over their ends are done by `apply`."""
        if stored.device.type != "cpu" or not stored.is_contiguous():
            return super().gather(stored, places, numbers)
        size = stored[0].numel()
        wanted = places * size + self._shift(stored, numbers)
        starts = wanted.clamp(0, stored.numel() - size)
        cut = self._cut(stored.view(-1), starts, stored, numbers)
        over = (starts != wanted).nonzero().squeeze(1)
        if len(over):
            cut[over] = self.apply(stored.index_select(0, places[over]), numbers[over])
        return cut

    def _pick(self, images: Tensor, numbers: Tensor) -> Tensor:
        """The same pixel by pixel, for a compiler: with the selection before it, one read of each stored pixel."""
        places, inside = [], []
        for axis, length in enumerate(images.shape[2:]):
            place = torch.arange(length, device=images.device) + (numbers[:, axis : axis + 1] - self.padding)
            places.append(place)
            inside.append((place >= 0) & (place < length))
        return _looked_up(images, places, inside)

    def _shift(self, images: Tensor, numbers: Tensor) -> Tensor:
        """How many pixels later in memory each shifted image begins."""
        width = images.shape[3]
        return (numbers[:, 0] * width).add_(numbers[:, 1]).sub_(self.padding * (width + 1))

    def _cut(self, flat: Tensor, starts: Tensor, like: Tensor, numbers: Tensor) -> Tensor:
        """Copy the stretches of memory at `starts`, and blacken what does not belong to the image."""
        shape, side = like.shape[1:], 2 * self.padding + 1
        size, (height, width) = shape.numel(), shape[1:]
        moved = flat.as_strided((len(flat) - size + 1, size), (1, 1)).index_select(0, starts)
        row, column = numbers.unbind(1)
        if side * side * height * width <= _TABLE:  # the masks of all offsets, and of them the one of each image
            table = _masks(self.padding, height, width, like.dtype, like.device)
            mask = table.index_select(0, (row * side).add_(column))
        else:
            rows, columns = (_inside(n, self.padding, like.dtype, like.device) for n in (height, width))
            mask = rows[row].unsqueeze(2) * columns[column].unsqueeze(1)
        return moved.view(-1, *shape).mul_(mask.view(-1, 1, height, width))


def _looked_up(images: Tensor, places: list[Tensor], inside: list[Tensor]) -> Tensor:
    """Each pixel from its row and column, (B, H) and (B, W), where both are inside; black elsewhere."""
    rows, columns = (place.clamp(0, length - 1) for place, length in zip(places, images.shape[2:], strict=True))
    picked = images.gather(2, rows[:, None, :, None].expand_as(images))
    picked = picked.gather(3, columns[:, None, None, :].expand_as(images))
    return torch.where((inside[0].unsqueeze(2) & inside[1].unsqueeze(1)).unsqueeze(1), picked, 0)


@functools.lru_cache(maxsize=32)
def _inside(length: int, padding: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ones where place + offset - padding lies in 0 .. length - 1, else zeros: (2 * padding + 1, length)."""
    place = torch.arange(length, device=device) + torch.arange(2 * padding + 1, device=device).unsqueeze(1)
    return ((place >= padding) & (place < length + padding)).to(dtype)


@functools.lru_cache(maxsize=8)
def _masks(padding: int, height: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return for each pair of offsets the pixels that come from inside the image: ((2 * padding + 1)^2, H * W)."""
    rows, columns = (_inside(length, padding, dtype, device) for length in (height, width))
    return (rows[:, None, :, None] * columns[None, :, None, :]).flatten(2).flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class RandomCropShift(Augmentation):
    """Cut a window out of each image and put it down anywhere in a black one of the same size (Li and Spratling, 2023).

    `strength` is the most pixels that are lost, rows and columns together: how many is uniform on 0 .. strength, the
    share of columns uniform on what was drawn, and both places uniform on where the window fits. Where RandomCrop loses
    a border only by shifting the image, here the two are independent, which adversarial training over-fits less to.
    """

    strength: int = 10
    moves_only: ClassVar[bool] = True
    compiles: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.strength >= 1, f"RandomCropShift: strength must be at least 1, got {self.strength}")

    def draw(self, key: Key, index: Tensor) -> Tensor:
        """For rows, then columns: how many pixels are lost, where the window begins, and where it is put."""
        lost, split, *places = random.uniform(key, index, (6,)).unbind(1)
        total = (lost * (self.strength + 1)).to(torch.int64)
        columns = (split * (total + 1)).to(torch.int64)
        given = []
        for pixels, taken, put in ((total - columns, *places[:2]), (columns, *places[2:])):
            given += [pixels, *((place * (pixels + 1)).to(torch.int64) for place in (taken, put))]
        return torch.stack(given, dim=1).view(-1, 2, 3)

    def apply(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Look each pixel up where it comes from; black where the window does not reach."""
        height, width = images.shape[2:]
        if self.strength >= min(height, width):
            raise UsageError(
                f"RandomCropShift: strength {self.strength} leaves nothing of images of {height} x {width}: "
                f"at most {min(height, width) - 1}"
            )
        sources, inside = [], []
        for axis, length in enumerate((height, width)):
            lost, taken, put = numbers[:, axis].unsqueeze(2).unbind(1)
            place = torch.arange(length, device=images.device) - put
            sources.append(place + taken)
            inside.append((place >= 0) & (place < length - lost))
        return _looked_up(images, sources, inside)


@dataclass(frozen=True, kw_only=True)
class RandomFlip(Augmentation):
    """Mirror left and right with probability 1/2."""

    moves_only: ClassVar[bool] = True
    compiles: ClassVar[bool] = True

    def draw(self, key: Key, index: Tensor) -> Tensor:
        """One bit per image."""
        return random.bits(key, index) < 0

    def apply(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Mirror the images whose bit is set."""
        if images.device.type != "cpu" or torch.compiler.is_compiling():
            return torch.where(numbers.view(-1, 1, 1, 1), images.flip(3), images)
        # on a CPU only those are touched, and NumPy writes them back whole where torch would go pixel by pixel
        chosen = numbers.nonzero().squeeze(1)
        images.numpy()[chosen.numpy()] = images.index_select(0, chosen).flip(3).numpy()
        return images


@dataclass(frozen=True, kw_only=True)
class RandomCutout(Augmentation):
    """Blacken a square of `size` pixels centred at a uniformly random pixel; it may reach over the border."""

    size: int = 8
    moves_only: ClassVar[bool] = True
    compiles: ClassVar[bool] = True

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
        return images.masked_fill_(hole.unsqueeze(1), 0)
