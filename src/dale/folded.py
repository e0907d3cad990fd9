"""The layers of a replica: folded, fused, or copied, each with a `refresh` that takes the live weights over."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dale import winograd
from dale.compiling import Compiler, as_it_is
from dale.fused import basic_block, conv_relu, pointwise_conv, spreading_pays
from dale.kernels import fits_wide


class FoldedConv(nn.Module):
    """A convolution with its BatchNorm folded in and, where one follows, the sum and the ReLU after it."""

    weight: Tensor
    bias: Tensor

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None) -> None:
        super().__init__()
        self.conv = (conv,)  # in a tuple: the live model's modules are not ours
        self.norm = (norm,)
        self.relu = False
        self.premasked = False  # a block behind masks the gradient, wherever it runs as one
        self.bare = False  # the convolution that adds this one up carries its bias
        self.carried: tuple[FoldedConv, ...] = ()  # in a tuple: it has its own place in the graph
        self.filters: tuple[Tensor, Tensor] | None = None  # transformed weights, where it runs by Winograd's method
        self.register_buffer("weight", torch.empty_like(conv.weight, requires_grad=False), persistent=False)
        bias = torch.zeros(conv.out_channels, device=conv.weight.device, dtype=conv.weight.dtype)
        self.register_buffer("bias", bias, persistent=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Fold the live weights anew."""
        conv, norm = self.conv[0], self.norm[0]
        weight, bias = conv.weight.float(), conv.bias
        if norm is None:
            self.weight.copy_(weight)
            if bias is not None:
                self.bias.copy_(bias)
            return
        scale, shift = _affine(norm)
        self.weight.copy_(weight * scale.view(-1, 1, 1, 1))
        self.bias.copy_(shift if bias is None else shift + bias.float() * scale)

    def carry(self, other: FoldedConv) -> None:
        """Take the bias of a convolution whose output this one adds up: one pass over that output less."""
        self.carried, other.bare = (other,), True

    @property
    def regular(self) -> bool:
        """Whether it is the common case: no bias, and a BatchNorm with parameters of its own, all in float32."""
        conv, norm = self.conv[0], self.norm[0]
        if norm is None or conv.bias is not None or norm.weight is None or norm.bias is None:
            return False
        return conv.weight.dtype == norm.weight.dtype == torch.float32

    @property
    def same(self) -> bool:
        """Whether it is a 3x3 convolution that keeps the image's size."""
        conv = self.conv[0]
        return (*conv.kernel_size, *conv.stride, *conv.padding, conv.groups) == (3, 3, 1, 1, 1, 1, 1)

    @property
    def skipping(self) -> bool:
        """Whether it is a 1x1 convolution that reads some of the pixels only: a shortcut between stages."""
        conv = self.conv[0]
        return (*conv.kernel_size, conv.groups) == (1, 1, 1) and conv.padding == (0, 0) and conv.stride != (1, 1)

    @property
    def fusable(self) -> bool:
        """Whether the library has one kernel for it with the ReLU."""
        conv = self.conv[0]
        return conv.dilation == (1, 1) and isinstance(conv.padding, tuple) and conv.padding_mode == "zeros"

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """conv(x) + bias, plus z and the ReLU where they were fused."""
        conv = self.conv[0]
        x = x.to(self.weight.dtype)  # where the model asked for another one in between, as autocast does
        if z is not None:
            z = z.to(self.weight.dtype)
        if self.filters is not None:
            return winograd.frozen_conv(x, self.filters, None if self.bare else self.bias, z, relu=self.relu)
        spread = self.skipping and spreading_pays(x)
        if self.relu:
            assert isinstance(conv.padding, tuple)
            premasked = self.premasked and fits_wide(x)
            geometry = (conv.stride, conv.padding, conv.groups)
            fused: Tensor = conv_relu(x, self.weight, self.bias, z, *geometry, premasked, spread)
            return fused
        bias = None if self.bare else self.bias
        if spread:
            bare: Tensor = pointwise_conv(x, self.weight, bias, conv.stride)
            return bare
        plain: Tensor = conv._conv_forward(x, self.weight, bias)
        return plain


class FoldedBlock(nn.Module):
    """Two folded convolutions and the residual sum around them, as one operation where that is faster."""

    def __init__(self, first: FoldedConv, second: FoldedConv) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.premasked = False  # the block behind masks the gradient
        self.mask_input = False  # the layer in front leaves its mask to this block

    def forward(self, x: Tensor) -> Tensor:
        """relu(second(relu(first(x))) + x)."""
        if not fits_wide(x):
            result: Tensor = self.second(self.first(x), x)
            return result
        one, two = self.first, self.second
        fused: tuple[Tensor, Tensor] = basic_block(
            x, one.weight, one.bias, two.weight, two.bias, self.premasked, self.mask_input
        )
        return fused[0]


class FoldedNorm(nn.Module):
    """A BatchNorm that follows no convolution: x * s + t per channel."""

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm = (norm,)
        for name, value in zip(("scale", "shift"), _affine(norm), strict=True):
            self.register_buffer(name, value.clone(), persistent=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the live statistics and parameters over."""
        scale, shift = _affine(self.norm[0])
        self.scale.copy_(scale)
        self.shift.copy_(shift)

    def forward(self, x: Tensor) -> Tensor:
        """x * s + t."""
        return x * self.scale.view(-1, 1, 1) + self.shift.view(-1, 1, 1)


@torch.no_grad()
def refresh_together(parts: list[FoldedConv], compiler: Compiler = as_it_is) -> None:
    """Fold the live weights of all regular convolutions anew, with few kernels: `FoldedConv.refresh`, for lists."""
    norms = [norm for part in parts for norm in part.norm if norm is not None]
    if not norms:
        return
    means = [norm.running_mean for norm in norms if norm.running_mean is not None]
    variances = [norm.running_var for norm in norms if norm.running_var is not None]
    scales = torch._foreach_rsqrt(torch._foreach_add(variances, [norm.eps for norm in norms]))
    torch._foreach_mul_(scales, [norm.weight.detach() for norm in norms])
    shifts = list(torch._foreach_mul(torch._foreach_neg(means), scales))
    torch._foreach_add_(shifts, [norm.bias.detach() for norm in norms])
    place = {part: number for number, part in enumerate(parts)}
    for number, part in enumerate(parts):
        for other in part.carried:
            shifts[number] = shifts[number] + shifts[place[other]]
    torch._foreach_copy_([part.bias for part in parts], shifts)
    weights = [part.conv[0].weight.detach() for part in parts]
    compiler(_scale)([part.weight for part in parts], weights, list(scales))


def _scale(folded: list[Tensor], weights: list[Tensor], scales: list[Tensor]) -> None:
    """w * s per output channel, into `folded`; as lists, which a compiler makes one kernel of."""
    torch._foreach_copy_(folded, torch._foreach_mul(weights, [scale.view(-1, 1, 1, 1) for scale in scales]))


def _affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = torch.rsqrt(norm.running_var.float() + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach().float()
    shift = -norm.running_mean.float() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().float()


class Copied(nn.Module):
    """Any other layer: a copy in eval mode whose tensors follow the live one's."""

    def __init__(self, live: nn.Module) -> None:
        super().__init__()
        self.live = (live,)
        self.copy = copy.deepcopy(live).eval().requires_grad_(False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the live tensors."""
        theirs = dict((*self.live[0].named_parameters(), *self.live[0].named_buffers()))
        for name, mine in (*self.copy.named_parameters(), *self.copy.named_buffers()):
            mine.copy_(theirs[name])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the copy."""
        return self.copy(*args, **kwargs)
