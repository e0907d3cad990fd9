"""The programs that `kernels.py` launches, in Triton: each works on one tile, and names sizes by capital letters.

H, W: height and width of an image; M: pixels of all images; C, O: channels in and out; P: pixels of a tile; K: taps of
a window times channels, rounded up to a power of two; R: rows of an image in a tile.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton import cdiv
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["TensorDescriptor", "cdiv", "narrow_forward", "narrow_products", "narrow_sum", "wide_backward"]


@triton.jit
def narrow_forward(x, w, b, y, H, W, M, C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, P: tl.constexpr):
    """P pixels by O channels: gather the windows of the pixels, (P, K >= 9C), multiply by the weights, (K, O)."""
    pixel = tl.program_id(0) * P + tl.arange(0, P)
    row, column = (pixel // W) % H, pixel % W
    k, o = tl.arange(0, K), tl.arange(0, O)
    r, s, c = k // (3 * C) - 1, (k // C) % 3 - 1, k % C
    there_row, there_column = row[:, None] + r[None, :], column[:, None] + s[None, :]
    inside = (pixel < M)[:, None] & (k < 9 * C)[None, :]
    inside = inside & (there_row >= 0) & (there_row < H) & (there_column >= 0) & (there_column < W)
    offset = (pixel[:, None] + (r * W + s)[None, :]) * C + c[None, :]
    windows = tl.load(x + offset, mask=inside, other=0.0)
    weights = tl.load(w + o[None, :] * (9 * C) + k[:, None], mask=(k < 9 * C)[:, None], other=0.0)
    total = tl.dot(windows, weights) + tl.load(b + o).to(tl.float32)[None, :]
    result = tl.maximum(total, 0.0).to(y.dtype.element_ty)
    tl.store(y + pixel[:, None] * O + o[None, :], result, mask=(pixel < M)[:, None])


@triton.jit
def narrow_products(g, w, t, M, C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, P: tl.constexpr):
    """t[p, (tap, c)] = sum_o g[p, o] w[o, (tap, c)]."""
    pixel = tl.program_id(0) * P + tl.arange(0, P)
    k, o = tl.arange(0, K), tl.arange(0, O)
    here = (pixel < M)[:, None]
    gradient = tl.load(g + pixel[:, None] * O + o[None, :], mask=here, other=0.0)
    weights = tl.load(w + o[:, None] * (9 * C) + k[None, :], mask=(k < 9 * C)[None, :], other=0.0)
    products = tl.dot(gradient, weights).to(t.dtype.element_ty)
    tl.store(t + pixel[:, None] * K + k[None, :], products, mask=here)


@triton.jit
def narrow_sum(t, dx, H, W, N, C: tl.constexpr, K: tl.constexpr, P: tl.constexpr):
    """dx[p, c] = sum over taps of t[p - shift, (tap, c)], for P elements of dx."""
    element = tl.program_id(0) * P + tl.arange(0, P)
    pixel, c = element // C, element % C
    row, column = (pixel // W) % H, pixel % W
    total = tl.zeros((P,), dtype=tl.float32)
    for tap in tl.static_range(9):
        r, s = tap // 3 - 1, tap % 3 - 1
        inside = (element < N) & (row - r >= 0) & (row - r < H) & (column - s >= 0) & (column - s < W)
        offset = (pixel - (r * W + s)) * K + tap * C + c
        total += tl.load(t + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + element, total.to(dx.dtype.element_ty), mask=element < N)


@triton.jit
def wide_backward(
    g, w, z, m, dx, H, C: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ADD: tl.constexpr, MASK: tl.constexpr
):
    """R whole rows of an image, (R * W, C): nine products of shifted boxes, zero outside the image, and weights."""
    program = tl.program_id(0)
    image, top = program // (H // R), (program % (H // R)) * R
    total = tl.zeros((R * W, C), dtype=tl.float32)
    for tap in range(9):
        r, s = tap // 3 - 1, tap % 3 - 1
        weights = w.load([0, tap, 0]).reshape(C, C)  # (outputs, inputs)
        box = g.load([image, top - r, -s, 0]).reshape(R * W, C)
        total = tl.dot(box, weights, total)
    offset = (program * (R * W) + tl.arange(0, R * W))[:, None] * C + tl.arange(0, C)[None, :]
    if ADD:
        total += tl.load(z + offset).to(tl.float32)
    if MASK:
        total = tl.where(tl.load(m + offset).to(tl.float32) > 0.0, total, 0.0)
    tl.store(dx + offset, total.to(dx.dtype.element_ty))
