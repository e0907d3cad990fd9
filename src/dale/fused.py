"""Convolutions of frozen networks with what follows them: one operation forward, and one backward to the input.

    conv_relu        y = relu(conv(x) + b [+ z])
    pointwise_conv   y = conv(x) [+ b],   windows of 1x1, strided                 the shortcut between two stages
    basic_block      y = relu(conv2(h) + b2 + x),   h = relu(conv1(x) + b1)       the residual block of two convolutions

Weights get no gradient. Each runs as few kernels as the device has: the vendor's fused ones, those of `kernels.py`, or
plain operations.

The mask of a ReLU may be applied on either side of its output. An operation told `premasked` takes a gradient that is
zero already where its output is; one told `mask_input` hands down one that is zero where its input is not above 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dale import kernels

_threshold_backward: Callable[..., Tensor] = torch.ops.aten.threshold_backward


@torch.library.custom_op("dale::conv_relu", mutates_args=())
def conv_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    z: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
    premasked: bool,
    spread: bool = False,
) -> Tensor:
    """relu(conv(x, weight) + bias + z); dilation 1. `spread`: windows of 1x1, with the gradient of `pointwise_conv`."""
    if z is None and kernels.fits_narrow(x, weight, stride, padding, groups):
        return kernels.narrow_conv_relu(x, weight, bias)
    if x.device.type == "cuda" and torch.backends.cudnn.enabled:
        if z is None:
            fused: Tensor = torch.cudnn_convolution_relu(x, weight, bias, stride, padding, (1, 1), groups)
            return fused
        added: Tensor = torch.cudnn_convolution_add_relu(x, weight, z, 1.0, bias, stride, padding, (1, 1), groups)
        return added
    plain = F.conv2d(x, weight, bias, list(stride), list(padding), 1, groups)
    return (plain if z is None else plain.add_(z)).relu_()


@conv_relu.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    z: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
    premasked: bool,
    spread: bool = False,
) -> Tensor:
    return F.conv2d(x, weight, bias, list(stride), list(padding), 1, groups)


@torch.library.custom_op("dale::narrow_gradient", mutates_args=())
def narrow_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], groups: int
) -> Tensor:
    """The gradient with respect to x of conv(x, weight), where x has few channels."""
    if kernels.fits_narrow(gradient, weight, stride, padding, groups):
        return kernels.narrow_input_gradient(gradient, weight)
    return _input_gradient(gradient, x, weight, stride, padding, groups)


@narrow_gradient.register_fake
def _(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], groups: int
) -> Tensor:
    return torch.empty_like(x)


def _input_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], groups: int
) -> Tensor:
    """The library's, which the compiler knows as well."""
    inner: Tensor = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, stride, padding, (1, 1), False, (0, 0), groups, (True, False, False)
    )[0]
    return inner


def _spread_gradient(gradient: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int]) -> Tensor:
    """dx[p * stride] = w' dy[p], and zero elsewhere: the gradient of strided windows of 1x1.

    A product at the small resolution, spread by operations that a compiler makes a condition of the next loop. The
    library writes the zeros out, to be read again by the sum with the other branch's gradient.
    """
    pixels = gradient.permute(0, 2, 3, 1)
    small = (pixels.flatten(0, 2) @ weight.flatten(1)).view(*pixels.shape[:3], -1).permute(0, 3, 1, 2)
    zeros = torch.zeros_like(x)  # in the memory layout of x, which the sum inherits
    return zeros.slice_scatter(zeros[:, :, :: stride[0]].slice_scatter(small, 3, step=stride[1]), 2, step=stride[0])


def spreading_pays(x: Tensor) -> bool:
    """Whether `_spread_gradient` beats the library: on a GPU under a compiler, which joins it to what follows."""
    return x.device.type == "cuda" and torch.compiler.is_compiling()


def _conv_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, z, stride, padding, groups, premasked, spread = inputs
    ctx.save_for_backward(x, weight, output)
    ctx.geometry = (stride, padding, groups)
    ctx.has_z, ctx.premasked, ctx.spread = z is not None, premasked, spread


def _conv_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, output = ctx.saved_tensors
    masked = gradient if ctx.premasked else _threshold_backward(gradient, output, 0)
    if ctx.spread:
        inner = _spread_gradient(masked, x, weight, ctx.geometry[0])
    else:
        narrow = weight.shape[1] <= kernels.CHANNELS and weight.device.type == "cuda"
        inner = (narrow_gradient if narrow else _input_gradient)(masked, x, weight, *ctx.geometry)
    return inner, None, None, masked if ctx.has_z else None, None, None, None, None, None


conv_relu.register_autograd(_conv_backward, setup_context=_conv_setup)


@torch.library.custom_op("dale::pointwise_conv", mutates_args=())
def pointwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int]) -> Tensor:
    """conv(x, weight) + bias for windows of 1x1, without padding: it reads one pixel in prod(stride)."""
    return F.conv2d(x, weight, bias, list(stride))


@pointwise_conv.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int]) -> Tensor:
    return F.conv2d(x, weight, bias, list(stride))


def _pointwise_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.stride = inputs
    ctx.save_for_backward(x, weight)


def _pointwise_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return _spread_gradient(gradient, x, weight, ctx.stride), None, None, None


pointwise_conv.register_autograd(_pointwise_backward, setup_context=_pointwise_setup)

_SAME: tuple[Sequence[int], Sequence[int], int] = ((1, 1), (1, 1), 1)  # stride, padding and groups inside a block


@torch.library.custom_op("dale::basic_block", mutates_args=())
def basic_block(
    x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, premasked: bool, mask_input: bool
) -> tuple[Tensor, Tensor]:
    """relu(conv(h, weight2) + bias2 + x) and h = relu(conv(x, weight1) + bias1): 3x3, as many channels out as in."""
    h = conv_relu(x, weight1, bias1, None, *_SAME, False)
    return conv_relu(h, weight2, bias2, x, *_SAME, False), h


@basic_block.register_fake
def _(
    x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, premasked: bool, mask_input: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("dale::basic_block_gradient", mutates_args=())
def basic_block_gradient(
    masked: Tensor, x: Tensor, h: Tensor, weight1: Tensor, weight2: Tensor, mask_input: bool
) -> Tensor:
    """The gradient with respect to x, given the one to what the last ReLU of the block took in."""
    if kernels.fits_wide(x):
        inner = kernels.wide_input_gradient(masked, weight2, mask=h)
        return kernels.wide_input_gradient(inner, weight1, add=masked, mask=x if mask_input else None)
    inner = _threshold_backward(_input_gradient(masked, h, weight2, *_SAME), h, 0)
    outer = _input_gradient(inner, x, weight1, *_SAME).add_(masked)
    return _threshold_backward(outer, x, 0) if mask_input else outer


@basic_block_gradient.register_fake
def _(masked: Tensor, x: Tensor, h: Tensor, weight1: Tensor, weight2: Tensor, mask_input: bool) -> Tensor:
    return torch.empty_like(x)


def _block_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight1, _, weight2, _, premasked, mask_input = inputs
    ctx.save_for_backward(x, weight1, weight2, *output)
    ctx.premasked, ctx.mask_input = premasked, mask_input


def _block_backward(ctx: Any, gradient: Tensor, inner: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight1, weight2, output, h = ctx.saved_tensors
    # the mask stands outside the operation, where the compiler can join it to the sum that comes before
    masked = gradient if ctx.premasked else _threshold_backward(gradient, output, 0)
    slope = basic_block_gradient(masked, x, h, weight1, weight2, ctx.mask_input)
    return slope, None, None, None, None, None, None


basic_block.register_autograd(_block_backward, setup_context=_block_setup)
