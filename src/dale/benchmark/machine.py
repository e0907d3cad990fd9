"""The machine: its measured matmul ceiling, its clock, its memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

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
    torch is set; no convolution runs faster.
    """
    device = torch.device(device)
    best = 0.0
    for size in sizes or _SIZES.get(device.type, _SIZES["cpu"]):
        source = torch.Generator(device).manual_seed(0)  # numbers that vary: a GPU's clock falls with their entropy
        first = torch.randn(size, size, device=device, generator=source).to(dtype)
        second = torch.randn(size, size, device=device, generator=source).to(dtype)
        out = torch.empty_like(first)

        def product(first: torch.Tensor = first, second: torch.Tensor = second, out: torch.Tensor = out) -> None:
            torch.mm(first, second, out=out)

        once = max(seconds_of(product, device), 1e-9)  # a warm-up as well
        repeat = max(1, min(50, int(0.05 / once)))
        for _ in range(_ROUNDS):
            best = max(best, 2 * size**3 / seconds_of(product, device, repeat) / 1e12)
    return best


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
