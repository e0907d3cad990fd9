"""A picture sheet: many images in one PNG, to look at."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor

from dale.errors import DataError, require

_CELL = 64  # small images are enlarged, each pixel to a square, to about this many pixels


def write_sheet(images: Tensor, path: str | os.PathLike[str], *, columns: int | None = None) -> Path:
    """Write images, (N, C, H, W) in [0, 1] with 1 or 3 channels, as a PNG with grey lines between; return the path.

    The sheet is about square unless `columns` says how many stand side by side.
    """
    from PIL import Image

    require(images.ndim == 4 and len(images) > 0, f"a sheet needs images (N, C, H, W), got {tuple(images.shape)}")
    count, channels, height, width = images.shape
    require(channels in (1, 3), f"a sheet needs images of 1 or 3 channels, got {channels}")
    columns = math.ceil(math.sqrt(count)) if columns is None else columns
    require(columns >= 1, f"columns must be at least 1, got {columns}")
    zoom = max(1, _CELL // max(height, width))
    pixels = (images.detach().to("cpu", torch.float32).clamp(0, 1) * 255).round().to(torch.uint8).expand(-1, 3, -1, -1)
    pixels = pixels.repeat_interleave(zoom, dim=2).repeat_interleave(zoom, dim=3)
    rows, high, wide = math.ceil(count / columns), height * zoom + 2, width * zoom + 2
    sheet = torch.full((rows * high, columns * wide, 3), 128, dtype=torch.uint8)
    for number in range(count):
        top, left = number // columns * high + 1, number % columns * wide + 1
        sheet[top : top + height * zoom, left : left + width * zoom] = pixels[number].permute(1, 2, 0)
    target = Path(path)
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(sheet.numpy()).save(part, format="PNG")
        os.replace(part, target)
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error.strerror or error})") from error
    return target
