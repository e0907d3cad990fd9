"""Fused operations are what they say, forward and backward, with masks on either side."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dale.fused import basic_block, conv_relu, pointwise_conv


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("with_z", [False, True])
def test_conv_relu(stride: int, with_z: bool) -> None:
    x, weight, bias = numbers(2, 3, 6, 6).requires_grad_(True), numbers(4, 3, 3, 3, seed=1), numbers(4, seed=2)
    plain = F.conv2d(x, weight, bias, stride, 1)
    z = numbers(*plain.shape, seed=3).requires_grad_(True) if with_z else None
    expected = (plain if z is None else plain + z).relu()
    found = conv_relu(x, weight, bias, z, (stride, stride), (1, 1), 1, False)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    inputs = [x] if z is None else [x, z]
    cotangent = numbers(*expected.shape, seed=4)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stride", [(2, 2), (3, 2), (1, 4)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pointwise_conv(stride: tuple[int, int], layout: torch.memory_format) -> None:
    x = numbers(2, 3, 7, 8).contiguous(memory_format=layout).requires_grad_(True)
    weight, bias = numbers(4, 3, 1, 1, seed=1).contiguous(memory_format=layout), numbers(4, seed=2)
    expected = F.conv2d(x, weight, bias, stride)
    found = pointwise_conv(x, weight, bias, stride)
    assert torch.equal(found, expected)
    cotangent = numbers(*expected.shape, seed=3).contiguous(memory_format=layout)
    ours, theirs = (torch.autograd.grad(output, x, cotangent)[0] for output in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert ours.stride() == x.stride()  # or the sum that follows would lose its layout
    fused = [conv_relu(x, weight, bias, None, stride, (0, 0), 1, False, spread) for spread in (True, False)]
    ours, theirs = (torch.autograd.grad(output, x, cotangent)[0] for output in fused)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("premasked", [False, True])
@pytest.mark.parametrize("mask_input", [False, True])
def test_basic_block(premasked: bool, mask_input: bool) -> None:
    source = numbers(2, 5, 6, 6).requires_grad_(True)
    weights = [numbers(5, 5, 3, 3, seed=seed) for seed in (1, 2)]
    biases = [numbers(5, seed=seed) for seed in (3, 4)]
    x = source.relu()
    h = F.conv2d(x, weights[0], biases[0], padding=1).relu()
    expected = (F.conv2d(h, weights[1], biases[1], padding=1) + x).relu()
    cotangent = numbers(*expected.shape, seed=5)
    (slope,) = torch.autograd.grad(expected, x, cotangent, retain_graph=True)
    (below,) = torch.autograd.grad(expected, source, cotangent)

    leaf = x.detach().requires_grad_(True)
    found, inner = basic_block(leaf, weights[0], biases[0], weights[1], biases[1], premasked, mask_input)
    torch.testing.assert_close((found, inner), (expected, h), rtol=0, atol=1e-12)
    given = cotangent * (expected > 0) if premasked else cotangent
    (ours,) = torch.autograd.grad(found, leaf, given)
    # with the mask of its input applied, the block hands down the gradient before the ReLU in front of it
    torch.testing.assert_close(ours, below if mask_input else slope, rtol=0, atol=1e-12)


def test_what_is_called_premasked_is_not_masked_again() -> None:
    x, weight, bias = numbers(1, 2, 4, 4).requires_grad_(True), numbers(2, 2, 3, 3, seed=1), numbers(2, seed=2)
    cotangent = numbers(1, 2, 4, 4, seed=3)
    outputs = [conv_relu(x, weight, bias, None, (1, 1), (1, 1), 1, premasked) for premasked in (True, False)]
    assert bool((outputs[0] == 0).any())
    ours, masked = (torch.autograd.grad(output, x, cotangent)[0] for output in outputs)
    linear = torch.autograd.grad(F.conv2d(x, weight, bias, padding=1), x, cotangent)[0]
    torch.testing.assert_close(ours, linear, rtol=0, atol=1e-12)
    assert not torch.equal(ours, masked)
