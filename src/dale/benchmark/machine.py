"""The machine: its measured matmul ceiling, its clock, its memory."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

_SIZES = {"cuda": (4096, 8192, 16384), "cpu": (1024, 2048)}  # of square matrices; the best rate counts
_ROUNDS = 3


def wait(device: torch.device) -> None:
    """Wait until the device has done all it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(function: Callable[[], object], device: torch.device, repeat: int = 1) -> float:
    """Seconds of one call, as the mean over `repeat` calls in a row; the device is idle before and after."""
    wait(device)
    started = time.perf_counter()
    for _ in range(repeat):
        function()
    wait(device)
    return (time.perf_counter() - started) / repeat


def matmul_ceiling(
    device: torch.device | str, dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] | None = None
) -> float:
    """The best measured rate of a product of square matrices, in TFLOP/s: 2 n^3 operations over the seconds it takes.

    It is what the machine's own library reaches under today's clock and load, with float32 as strict, or as TF32, as
    torch is set; no convolution runs faster. On a CPU convolutions come from another library, which may have the faster
    products: there a convolution of few pixels with many channels is tried too, and counts where it is the best.
    """
    device = torch.device(device)
    source = torch.Generator(device).manual_seed(0)  # numbers that vary: a GPU's clock falls with their entropy

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=source).to(dtype)

    best = 0.0
    for size in sizes or _SIZES.get(device.type, _SIZES["cpu"]):
        first, second = numbers(size, size), numbers(size, size)
        product = functools.partial(torch.mm, first, second, out=torch.empty_like(first))
        best = max(best, _rate(product, 2 * size**3, device))
    if device.type == "cpu":
        x, weight = numbers(32, 256, 8, 8), numbers(256, 256, 3, 3)
        x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
        convolution = functools.partial(torch.conv2d, x, weight, padding=1)
        with torch.no_grad():
            best = max(best, _rate(convolution, 2 * 9 * x.numel() * len(weight), device))
    return best


def _rate(function: Callable[[], object], operations: int, device: torch.device) -> float:
    """The best rate of several rounds, in TFLOP/s."""
    once = max(seconds_of(function, device), 1e-9)  # a warm-up as well
    repeat = max(1, min(50, int(0.05 / once)))
    return max(operations / seconds_of(function, device, repeat) / 1e12 for _ in range(_ROUNDS))


def start_memory(device: torch.device) -> None:
    """Forget earlier peaks, where the device can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> float | None:
    """Peak memory in GiB: of the device's tensors since `start_memory`; on a CPU that of the process since its start.

    None where the system does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # kilobytes, but for macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
