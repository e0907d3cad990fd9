"""The Triton kernels against the library, run by Triton's interpreter: what the GPU runs, without one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed; it comes with the GPU builds of torch")

SCRIPT = """
import torch
import torch.nn.functional as F
from torch.nn.grad import conv2d_input

from dale import kernels
from dale.folded import FoldedBlock
from dale.folding import replicate
from dale.models import create_model

kernels.INTERPRETED = True
generator = torch.Generator().manual_seed(0)


def draw(*shape, scale=1.0):
    return (scale * torch.randn(*shape, generator=generator)).half()


def close(found, expected):
    assert found.shape == expected.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    error = float((found.float() - expected).abs().max())
    assert error <= 2e-3 * float(expected.abs().max()), error


for size, inputs, outputs, height, width in [(3, 3, 64, 8, 8), (2, 1, 16, 7, 9), (2, 4, 32, 5, 6)]:
    x, w, b = draw(size, inputs, height, width), draw(outputs, inputs, 3, 3), draw(outputs)
    assert kernels.fits_narrow(x, w, (1, 1), (1, 1), 1)
    assert not kernels.fits_narrow(x, w, (2, 2), (1, 1), 1)
    close(kernels.narrow_conv_relu(x, w, b), F.conv2d(x.float(), w.float(), b.float(), padding=1).relu())
    g = draw(size, outputs, height, width)
    close(kernels.narrow_input_gradient(g, w), conv2d_input(x.shape, w.float(), g.float(), padding=1))

for height, width in [(16, 8), (8, 32)]:
    x, w = draw(2, 64, height, width), draw(64, 64, 3, 3, scale=0.1)
    add, mask = draw(2, 64, height, width), draw(2, 64, height, width)
    assert kernels.fits_wide(x)
    back = conv2d_input(x.shape, w.float(), x.float(), padding=1)
    close(kernels.wide_input_gradient(x, w), back)
    close(kernels.wide_input_gradient(x, w, mask=mask), back * (mask > 0))
    close(kernels.wide_input_gradient(x, w, add=add, mask=mask), (back + add.float()) * (mask > 0))
assert not kernels.fits_wide(draw(2, 64, 16, 7))

# a whole network: blocks of its first stage run as one operation each, and masks change hands
model = create_model("resnet18", channels=3, size=16, num_classes=10).eval()
replica = replicate(model, dtype=torch.float16, channels_last=True)
blocks = [part for part in replica.graph.modules() if isinstance(part, FoldedBlock)]
assert [(block.premasked, block.mask_input) for block in blocks] == [(True, True), (False, True)]
x = torch.rand(2, 3, 16, 16, generator=generator).requires_grad_(True)
ours = torch.autograd.grad(replica(x).square().sum(), x)[0]
kernels.INTERPRETED = False
theirs = torch.autograd.grad(replica(x).square().sum(), x)[0]
exact = torch.autograd.grad(model(x).square().sum(), x)[0]
errors = [float((slope - exact).norm() / exact.norm()) for slope in (ours, theirs)]
assert 0 < errors[0] < 1.5 * errors[1] < 0.2, errors
print("ok")
"""


def test_against_the_library() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "ok", done.stderr[-2000:]
