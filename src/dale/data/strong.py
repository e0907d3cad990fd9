"""Strong augmentation: random colour and geometry in the manner of AutoAugment, in batched tensor operations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dale import random
from dale.data.augment import Augmentation
from dale.errors import require
from dale.random import Key

_LUMA = (0.299, 0.587, 0.114)
_GEOMETRY = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
_BLEND = ("brightness", "saturation", "contrast", "sharpness")
_TONE = ("posterise", "solarise", "autocontrast")
OPERATIONS: tuple[str, ...] = ("identity", *_GEOMETRY, *_BLEND, *_TONE)
"""What a slot of `StrongAugment` chooses from, uniformly."""


@dataclass(frozen=True, kw_only=True)
class StrongAugment(Augmentation):
    """Apply `num_operations` random operations to each image, one after another.

    Each is drawn uniformly from `OPERATIONS`, with magnitude m ~ U(-strength, strength) of its own: shear by 0.3 m,
    shift by 0.3 m of the side, rotation by 30 m degrees; blending x -> d + (1 + 0.9 m) (x - d) with black
    (brightness), grey (saturation), mean grey (contrast) or a blurred image (sharpness) as d; fewer grey levels (down
    to 2^4), inversion above 1 - |m|, and stretching each channel to [0, 1].
    """

    num_operations: int = 2
    strength: float = 1.0

    def __post_init__(self) -> None:
        require(
            self.num_operations >= 1, f"StrongAugment: num_operations must be at least 1, got {self.num_operations}"
        )
        require(0.0 < self.strength <= 1.0, f"StrongAugment: strength must be in (0, 1], got {self.strength}")

    def draw(self, key: Key, index: Tensor) -> Tensor:
        """For each operation in turn: a number in (0, 1) that chooses it, and one that sets its magnitude."""
        return random.uniform(key, index, (self.num_operations, 2))

    def apply(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Apply each image's operations; every kind is computed for all and kept where it was chosen."""
        for slot in range(self.num_operations):
            choice = (numbers[:, slot, 0] * len(OPERATIONS)).to(torch.int64).view(-1, 1, 1, 1)
            magnitude = ((2.0 * numbers[:, slot, 1] - 1.0) * self.strength).view(-1, 1, 1, 1)
            warped = _warp(images, choice, magnitude)
            blended = _blend(images, choice, magnitude)
            toned = _tone(images, choice, magnitude)
            images = torch.where(_one_of(choice, _GEOMETRY), warped, images)
            images = torch.where(_one_of(choice, _BLEND), blended, images)
            images = torch.where(_one_of(choice, _TONE), toned, images).clamp(0.0, 1.0)
        return images


def _is(choice: Tensor, name: str) -> Tensor:
    return choice == OPERATIONS.index(name)


def _one_of(choice: Tensor, names: tuple[str, ...]) -> Tensor:
    first = OPERATIONS.index(names[0])
    return (choice >= first) & (choice < first + len(names))


def _warp(images: Tensor, choice: Tensor, magnitude: Tensor) -> Tensor:
    """Sample each image at an affine map of its pixel places, about its centre; black outside."""
    height, width = images.shape[2:]
    choice, magnitude = choice.view(-1, 1, 1), magnitude.view(-1, 1, 1)
    zero = torch.zeros_like(magnitude)
    angle = torch.where(_is(choice, "rotate"), magnitude * math.radians(30.0), zero)
    shear_x = torch.where(_is(choice, "shear_x"), 0.3 * magnitude, zero)
    shear_y = torch.where(_is(choice, "shear_y"), 0.3 * magnitude, zero)
    shift_x = torch.where(_is(choice, "translate_x"), 0.3 * width * magnitude, zero)
    shift_y = torch.where(_is(choice, "translate_y"), 0.3 * height * magnitude, zero)
    x = torch.arange(width, device=images.device).view(1, 1, -1) - (width - 1) / 2
    y = torch.arange(height, device=images.device).view(1, -1, 1) - (height - 1) / 2
    # written out by element: a matrix product could round differently for another batch size
    source_x = angle.cos() * x + (shear_x - angle.sin()) * y + shift_x
    source_y = (shear_y + angle.sin()) * x + angle.cos() * y + shift_y
    grid = torch.stack((source_x * (2.0 / width), source_y * (2.0 / height)), dim=-1)
    return F.grid_sample(images, grid.to(images.dtype), mode="bilinear", padding_mode="zeros", align_corners=False)


def _blend(images: Tensor, choice: Tensor, magnitude: Tensor) -> Tensor:
    """Move each image away from, or towards, its black, grey, mean or blurred version."""
    channels = images.shape[1]
    grey = images.mean(dim=1, keepdim=True)
    if channels == 3:
        grey = sum(weight * images[:, k : k + 1] for k, weight in enumerate(_LUMA))  # type: ignore[assignment]
    # in float64, so that the mean does not depend on how the sum is cut among threads
    mean = grey.to(torch.float64).mean(dim=(2, 3), keepdim=True).to(images.dtype)
    blurred = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    base = torch.where(_is(choice, "saturation"), grey, torch.zeros_like(images))
    base = torch.where(_is(choice, "contrast"), mean, base)
    base = torch.where(_is(choice, "sharpness"), blurred, base)
    return base + (1.0 + 0.9 * magnitude) * (images - base)


def _tone(images: Tensor, choice: Tensor, magnitude: Tensor) -> Tensor:
    """Change the scale of grey levels: fewer of them, inverted at the top, or stretched."""
    step = 2.0 ** (4.0 * magnitude.abs()).round()
    posterised = (images * 255.0 / step + 1e-3).floor() * step / 255.0
    solarised = torch.where(images >= 1.0 - magnitude.abs(), 1.0 - images, images)
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    stretched = torch.where(high > low, (images - low) / (high - low).clamp_min(1e-6), images)
    toned = torch.where(_is(choice, "posterise"), posterised, solarised)
    return torch.where(_is(choice, "autocontrast"), stretched, toned)
