"""Wide 3x3 convolutions in float32 on a CPU, by Winograd's minimal filtering F(4x4, 3x3).

A tile of 4x4 outputs needs 6x6 inputs d and takes 36 products per pair of channels instead of 144:

    Y = A^T [ (G w G^T) * (B^T d B) ] A          (Winograd 1980; Lavin and Gray 2016, the points 0, 1, -1, 2, -2)

The products of all tiles are 36 matrix products, one for each place of a tile; the transformations of tiles are matrix
products too, with B^T kron B^T and A^T kron A^T. Gradients are the transposes of the same maps. From 128 channels on
that is faster than the library's direct convolution, where torch's matrix products are as fast as the products inside
that one (`pays`); the results differ by about 1e-5 of the largest value.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

CHANNELS = 128  # with fewer of them transforming the tiles costs more than it saves
_TILE, _WINDOW = 4, 6
_PLACES = _WINDOW**2
_ROOM = 1 << 22  # numbers in a room for windows or products, 16 MiB: as many images as fit go through together

_INPUT = (
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
_FILTER = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
_ONES = 7  # the place (1, 1) of a tile: what is added there is added to each of its outputs once
_OUTPUT = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))


def _both_ways(rows: tuple[tuple[float, ...], ...]) -> Tensor:
    matrix = torch.tensor(rows, dtype=torch.float64)
    return torch.kron(matrix, matrix).float()


_INPUTS, _FILTERS, _OUTPUTS = _both_ways(_INPUT), _both_ways(_FILTER), _both_ways(_OUTPUT)


def fits(weight: Tensor) -> bool:
    """Whether a 3x3 convolution of stride 1 and padding 1 with these weights is faster this way."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and min(weight.shape[:2]) >= CHANNELS


def _product(matrix: Tensor, numbers: Tensor, into: Tensor | None = None) -> Tensor:
    """A matrix for the places of a tile times the numbers there; `into`, where given, room for the result."""
    return torch.mm(matrix, numbers, out=None if into is None else into.view(len(matrix), -1))


def transform(weight: Tensor, into: Tensor | None = None) -> Tensor:
    """The transformed filters G w G^T, (36, channels in, channels out)."""
    outputs, inputs = weight.shape[:2]
    return _product(_FILTERS, weight.permute(2, 3, 1, 0).reshape(9, -1), into).view(_PLACES, inputs, outputs)


@torch.no_grad()
def transform_both(weight: Tensor, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The filters of a convolution, and of its gradient: turned round, with the channels exchanged.

    `into`: earlier ones, whose memory is used again.
    """
    forward, backward = (None, None) if into is None else into
    return transform(weight, forward), transform(weight.flip(2, 3).transpose(0, 1), backward)


def _tiles(size: int) -> int:
    return -(-size // _TILE)


class _Space(threading.local):
    """Memory that is used again, by each thread its own: fresh pages cost as much as the arithmetic on them."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Room under a name, with whatever it held."""
        size = math.prod(shape)
        if name not in self.kept or self.kept[name].numel() < size:
            self.kept[name] = torch.empty(size)
        return self.kept[name][:size].view(shape)

    def padded(self, x: Tensor) -> Tensor:
        """Images (B, H, W, C) with a border of zeros, of whole tiles."""
        size, height, width, channels = x.shape
        rows, columns = _TILE * _tiles(height) + 2, _TILE * _tiles(width) + 2
        padded = self.take("padded", size, rows, columns, channels)
        padded[:, 0], padded[:, :, 0] = 0.0, 0.0
        padded[:, height + 1 :], padded[:, :, width + 1 :] = 0.0, 0.0
        padded[:, 1 : height + 1, 1 : width + 1] = x
        return padded


_space = _Space()


def _windows(x: Tensor, into: Tensor | None = None) -> Tensor:
    """The transformed windows B^T d B of images (B, H, W, C): (36, tiles, C); `into`, where given, room for them."""
    size, height, width, channels = x.shape
    down, across = _tiles(height), _tiles(width)
    padded = _space.padded(x)
    image, row, column, _ = padded.stride()
    overlapping = padded.as_strided(
        (_WINDOW, _WINDOW, size, down, across, channels), (row, column, image, _TILE * row, _TILE * column, 1)
    )
    windows = _space.take("windows", *overlapping.shape).copy_(overlapping).view(_PLACES, -1)
    return _product(_INPUTS, windows, into).view(_PLACES, -1, channels)


def _outputs(products: Tensor, images: Tensor) -> None:
    """Fill images (B, H, W, C) from the products of their tiles, (36, tiles, C)."""
    size, height, width, channels = images.shape
    down, across = _tiles(height), _tiles(width)
    tiles = _space.take("tiles", _TILE**2, size * down * across * channels)
    _product(_OUTPUTS, products.view(_PLACES, -1), tiles)
    ordered = tiles.view(_TILE, _TILE, size, down, across, channels).permute(2, 3, 0, 4, 1, 5)
    if (height, width) == (_TILE * down, _TILE * across):
        images.view(ordered.shape).copy_(ordered)
    else:
        images.copy_(ordered.reshape(size, _TILE * down, _TILE * across, channels)[:, :height, :width])


def _cut(images: Tensor, height: int, width: int) -> Tensor:
    """The upper left of (B, H, W, C) images, as (B, C, H, W) in channels-last memory."""
    return images[:, :height, :width].contiguous().permute(0, 3, 1, 2)


def _plain(x: Tensor, filters: Tensor, bias: Tensor | None = None) -> Tensor:
    """conv(x) + bias as (B, C, H, W) in channels-last memory, a few images at a time."""
    x = x.permute(0, 2, 3, 1)
    size, height, width, channels = x.shape
    each, wide = _tiles(height) * _tiles(width), filters.shape[2]
    share = max(1, _ROOM // (_PLACES * each * max(channels, wide)))
    y = x.new_empty(size, height, width, wide)
    for first in range(0, size, share):
        part = x[first : first + share]
        count = len(part) * each
        windows = _windows(part, _space.take("transformed", _PLACES, count, channels))
        products = torch.bmm(windows, filters, out=_space.take("products", _PLACES, count, wide))
        if bias is not None:
            products[_ONES] += bias
        _outputs(products, y[first : first + share])
    return y.permute(0, 3, 1, 2)


@functools.cache
@torch.no_grad()
def pays() -> bool:
    """Whether it is faster than the library on this machine: tried out once, on 32 images of 16x16 with 128 channels.

    The two are far apart. On an Intel Xeon it takes half of the library's time; on an AMD EPYC twice that, for torch's
    matrix products come from Intel, which keeps its fast ones to its own processors, and the convolutions do not.
    """
    source = torch.Generator().manual_seed(0)
    x = torch.randn(32, 128, 16, 16, generator=source).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(128, 128, 3, 3, generator=source).contiguous(memory_format=torch.channels_last)
    filters = transform(weight)
    ways: tuple[Callable[[], Tensor], ...] = (lambda: _plain(x, filters), lambda: F.conv2d(x, weight, padding=1))
    best = [math.inf, math.inf]
    for _ in range(5):
        for number, way in enumerate(ways):
            started = time.perf_counter()
            way()
            best[number] = min(best[number], time.perf_counter() - started)
    return best[0] < best[1]


class _Frozen(torch.autograd.Function):
    """relu(conv(x) + bias + z) of fixed filters."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor | None, filters: Tensor, backward: Tensor, bias: Tensor | None, relu: bool
    ) -> Tensor:
        y = _plain(x, filters, bias)
        if z is not None:
            y += z
        if relu:
            y.relu_()
        ctx.save_for_backward(backward, *((y,) if relu else ()))
        ctx.has_z = z is not None
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        backward, *masks = ctx.saved_tensors
        gradient = gradients[0]
        for y in masks:
            gradient = torch.ops.aten.threshold_backward(gradient, y, 0)
        return _plain(gradient, backward), gradient if ctx.has_z else None, None, None, None, None


def frozen_conv(
    x: Tensor, filters: tuple[Tensor, Tensor], bias: Tensor | None, z: Tensor | None = None, *, relu: bool = False
) -> Tensor:
    """conv(x) + bias + z and, where asked, its ReLU; `filters` are `transform_both`'s and get no gradient."""
    result: Tensor = _Frozen.apply(x, z, *filters, bias, relu)  # type: ignore[no-untyped-call]
    return result


class _Trained(torch.autograd.Function):
    """conv(x) of filters that are learnt: the backward pass is the transpose of each map, on the windows kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        windows = _windows(x)
        ctx.save_for_backward(windows, filters)
        ctx.shape = x.shape
        products = torch.bmm(windows, filters, out=_space.take("products", *windows.shape[:2], filters.shape[2]))
        y = x.new_empty(*x.shape[:3], filters.shape[2])
        _outputs(products, y)
        return y.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        windows, filters = ctx.saved_tensors
        size, height, width, channels = ctx.shape
        down, across = _tiles(height), _tiles(width)
        gradient = gradients[0].permute(0, 2, 3, 1)
        gradient = F.pad(gradient, (0, 0, 0, _TILE * across - width, 0, _TILE * down - height))
        tiles = gradient.reshape(size, down, _TILE, across, _TILE, -1).permute(2, 4, 0, 1, 3, 5)
        tiles = _space.take("tiles", *tiles.shape).copy_(tiles).view(_TILE**2, -1)
        products = _space.take("products", *windows.shape[:2], filters.shape[2])
        _product(_OUTPUTS.t(), tiles, products)
        for_filters = torch.bmm(windows.transpose(1, 2), products)
        inputs = torch.bmm(products, filters.transpose(1, 2), out=_space.take("transformed", *windows.shape))
        pieces = _space.take("windows", _WINDOW, _WINDOW, size, down, across, channels)
        _product(_INPUTS.t(), inputs.view(_PLACES, -1), pieces)
        # windows overlap: the last two of six rows and columns are the first two of the next one's
        whole = _space.take("padded", size, down + 1, _TILE, across + 1, _TILE, channels).zero_()
        whole = whole.permute(2, 4, 0, 1, 3, 5)
        whole[:, :, :, :-1, :-1] = pieces[:_TILE, :_TILE]
        whole[:2, :, :, 1:, :-1] += pieces[_TILE:, :_TILE]
        whole[:, :2, :, :-1, 1:] += pieces[:_TILE, _TILE:]
        whole[:2, :2, :, 1:, 1:] += pieces[_TILE:, _TILE:]
        padded = whole.permute(2, 3, 0, 4, 1, 5).reshape(size, _TILE * (down + 1), _TILE * (across + 1), channels)
        return _cut(padded[:, 1:, 1:], height, width), for_filters


def trained_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """conv(x, weight) + bias, differentiable in all of them."""
    y: Tensor = _Trained.apply(x, transform(weight))  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.view(-1, 1, 1)


class MinimalFiltering(TorchFunctionMode):
    """Within this context convolutions that fit run by Winograd's method, whatever model asks for them."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Stand in for `conv2d` where it fits; everything else goes its way."""
        if func is torch.conv2d and not kwargs and _same(*args) and fits(args[1]) and _many(args[0], args[1]):
            return trained_conv(*args[:3])
        return func(*args, **(kwargs or {}))


def _many(x: Tensor, weight: Tensor) -> bool:
    """Whether there are tiles enough to pay for transforming filters that change at every step."""
    tiles = len(x) * _tiles(x.shape[2]) * _tiles(x.shape[3])
    return x.dtype == torch.float32 and tiles >= max(weight.shape[:2])


def _same(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    """Whether the arguments of a `conv2d` ask for a 3x3 convolution of images that keeps their size."""
    ones = all(given in (1, (1, 1)) for given in (stride, padding, dilation))
    return ones and groups == 1 and tuple(weight.shape[2:]) == (3, 3) and x.dim() == 4
