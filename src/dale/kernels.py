"""Triton kernels for convolutions that the vendor's library runs below the speed of the memory.

All are for 3x3 windows of stride 1 and padding 1, in channels-last memory and half precision, with float32 sums.

* Few input channels (a network's first layer): hardly any arithmetic, as much memory traffic as its output. The library
  pads the channels and takes four times as long as writing that output does.
* Sixty-four channels (a network's first stage): the library leaves the ReLU mask and the residual sum of the backward
  pass to passes of their own, each half as long as the convolution. Here they are its last act.

Triton comes with the GPU builds of torch; where it is missing or a shape does not fit, the predicates here say so, and
the library is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

try:
    from dale import programs
except ImportError:  # Triton is missing: a CPU build of torch
    programs = None  # type: ignore[assignment]

CHANNELS = 4  # the most that count as few
WIDE = 64  # channels of a stage that is bound by memory; with more the library is so much faster that it wins
INTERPRETED = False  # tests run the kernels on the CPU, through Triton's interpreter
_PIXELS = 128  # of one program
_HALF = (torch.bfloat16, torch.float16)
_LIMIT = 2**31  # offsets are 32 bits wide


def _usable(device: torch.device, dtype: torch.dtype) -> bool:
    return programs is not None and dtype in _HALF and (device.type == "cuda" or INTERPRETED)


def fits_narrow(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], groups: int) -> bool:
    """Whether `narrow_conv_relu` can take a convolution of x, or `narrow_input_gradient` one of an input as large."""
    outputs, inputs, *window = weight.shape
    return (
        _usable(x.device, x.dtype)
        and inputs <= CHANNELS
        and outputs in (16, 32, 64, 128)
        and (*window, *stride, *padding, groups) == (3, 3, 1, 1, 1, 1, 1)
        and x.shape[0] * x.shape[2] * x.shape[3] * max(outputs, 64) < _LIMIT  # 64: taps, padded
    )


def fits_wide(x: Tensor) -> bool:
    """Whether `wide_input_gradient` can take images of the shape of x, with WIDE channels in and out."""
    size, _, height, width = x.shape
    whole = width in (8, 16, 32, 64) and height % max(1, _PIXELS // width) == 0
    return _usable(x.device, x.dtype) and whole and size * height * width * WIDE < _LIMIT


def blocks_pay(device: torch.device) -> bool:
    """Whether `wide_input_gradient` beats the library: on Hopper and later, whose copy engine cuts boxes out itself."""
    return INTERPRETED or (device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9)


def _like(x: Tensor, channels: int) -> Tensor:
    shape = (x.shape[0], channels, x.shape[2], x.shape[3])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def narrow_conv_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y[p, o] = relu( sum_{r, s, c} x[p + (r - 1, s - 1), c] w[o, c, r, s] + b[o] )."""
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    size, inputs, height, width = x.shape
    outputs, pixels = weight.shape[0], size * height * width
    y = _like(x, outputs)
    window = 32 if inputs <= 3 else 64  # 9 * inputs, rounded up to a power of two
    grid = (programs.cdiv(pixels, _PIXELS),)
    programs.narrow_forward[grid](
        x, weight, bias, y, height, width, pixels, inputs, outputs, window, _PIXELS, num_warps=4
    )
    return y


def narrow_input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """dx[p, c] = sum_{r, s, o} dy[p - (r - 1, s - 1), o] w[o, c, r, s].

    In two passes: the product over o for each pixel and tap, t = dy w, (pixels, 9C), then the sum over the taps. The
    large tensor is read once.
    """
    gradient, weight = (t.contiguous(memory_format=torch.channels_last) for t in (gradient, weight))
    size, outputs, height, width = gradient.shape
    inputs, pixels = weight.shape[1], size * height * width
    window = 32 if inputs <= 3 else 64
    products = torch.empty((pixels, window), dtype=gradient.dtype, device=gradient.device)
    dx = _like(gradient, inputs)
    grid = (programs.cdiv(pixels, _PIXELS),)
    programs.narrow_products[grid](gradient, weight, products, pixels, inputs, outputs, window, _PIXELS, num_warps=4)
    count = pixels * inputs
    programs.narrow_sum[(programs.cdiv(count, 512),)](
        products, dx, height, width, count, inputs, window, 512, num_warps=4
    )
    return dx


def wide_input_gradient(
    gradient: Tensor, weight: Tensor, *, add: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """The gradient with respect to the input of conv(x, weight), plus `add`, and zero where `mask` is not above 0."""
    gradient, weight = (t.contiguous(memory_format=torch.channels_last) for t in (gradient, weight))
    add, mask = (t if t is None else t.contiguous(memory_format=torch.channels_last) for t in (add, mask))
    size, channels, height, width = gradient.shape
    dx = _like(gradient, channels)
    rows = _PIXELS // width
    boxes = programs.TensorDescriptor.from_tensor(gradient.permute(0, 2, 3, 1), [1, rows, width, channels])
    taps = programs.TensorDescriptor.from_tensor(
        weight.permute(0, 2, 3, 1).reshape(channels, 9, channels), [channels, 1, channels]
    )
    # what is not given is not read; something has to stand in its place
    tensors = (boxes, taps, dx if add is None else add, dx if mask is None else mask, dx)
    sizes = (height, channels, rows, width, add is not None, mask is not None)
    programs.wide_backward[(size * height // rows,)](*tensors, *sizes, num_warps=4, num_stages=3)
    return dx
