"""The machine: what a number was measured on, without which it does not count; devices; denormal numbers; memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dale.errors import UsageError

if TYPE_CHECKING:
    import torch


def environment() -> dict[str, Any]:
    """Return hardware, versions and thread settings as plain values; names no user, host or path."""
    import numpy
    import torch

    import dale

    facts: dict[str, Any] = {
        "dale": dale.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["gpus"] = torch.cuda.device_count()
        facts["cuda"] = torch.version.cuda
    return facts


def find_device(name: str | torch.device | None = None) -> torch.device:
    """Return the device of a name (None: a GPU where there is one), or say in one line why it cannot be had."""
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        reason = str(error).splitlines()[0]
        reason = "unknown" if "device type" in reason else reason  # torch lists two dozen kinds
        raise UsageError(f"no device {str(name)!r} here ({reason}); `cpu` works everywhere, `cuda` is a GPU") from error
    return device


_BFLOAT16 = """
import torch
x = torch.randn(4, 32, 8, 8, dtype=torch.bfloat16, requires_grad=True)
torch.nn.functional.conv2d(x, torch.randn(32, 32, 3, 3, dtype=torch.bfloat16), padding=1).sum().backward()
torch.randn(64, 64, dtype=torch.bfloat16) @ torch.randn(64, 64, dtype=torch.bfloat16)
"""
# sets of instructions that the library of convolutions can be held to, from the fastest on
_INSTRUCTIONS = ("AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE")


@functools.cache
def require_bfloat16() -> None:
    """Refuse where the processor kills a process that computes in bfloat16, which one in a virtual machine may do.

    It announces instructions that it refuses to run. A process of its own finds out, and others with which of them
    left out it would live.
    """
    if not _killed(os.environ):
        return
    ways = (way for way in _INSTRUCTIONS if not _killed({**os.environ, "ONEDNN_MAX_CPU_ISA": way}))
    way = next(ways, None)
    advice = (
        "train in float32" if way is None else f"set ONEDNN_MAX_CPU_ISA={way} in the environment, or train in float32"
    )
    raise UsageError(f"this processor announces instructions for bfloat16 and refuses them; {advice}")


def _killed(variables: Mapping[str, str]) -> bool:
    done = subprocess.run([sys.executable, "-c", _BFLOAT16], capture_output=True, check=False, env=dict(variables))
    return done.returncode < 0


@contextlib.contextmanager
def no_denormals() -> Iterator[None]:
    """Round denormal numbers to zero while inside: KL training runs into them, and they slow a CPU down tenfold.

    Threads of torch's pool take over how the thread that starts them rounds, once and for all: a program that enters
    here before its first large operation gets it in all of them.
    """
    import torch

    before = sys.float_info.min / 2.0 == 0.0  # torch has no way to ask; the processor does as it is told
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


class _KeptMemory:
    """How many contexts ask for it; the C library's settings are the whole process's."""

    depth = 0


@contextlib.contextmanager
def kept_memory(device: torch.device) -> Iterator[None]:
    """On a CPU keep memory that is freed while inside, to be used again; at the end it goes back to the system.

    By its own rules the C library fetches each tensor of 32 MiB and more from the system and returns it at once. Fresh
    pages cost more than the arithmetic on them: a training step takes up to twice as long. Elsewhere than on Linux with
    glibc nothing changes.
    """
    library = _glibc() if device.type == "cpu" else None
    if library is None:
        yield
        return
    if _KeptMemory.depth == 0:
        if not library.mallopt(_MMAP_THRESHOLD, 2**30):  # as older versions answer, which take no more than this:
            library.mallopt(_MMAP_THRESHOLD, 2**25)
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    _KeptMemory.depth += 1
    try:
        yield
    finally:
        _KeptMemory.depth -= 1
        if _KeptMemory.depth == 0:  # where its own rules lead to in time
            library.mallopt(_MMAP_THRESHOLD, 2**25)
            library.mallopt(_TRIM_THRESHOLD, 2**26)
            library.malloc_trim(0)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, where it is GNU's: others take no such settings, or give them another meaning."""
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.CDLL(None)


def _cpu_name() -> str:
    if sys.platform == "linux":
        try:
            with open("/proc/cpuinfo", encoding="utf-8") as file:
                for line in file:
                    if line.startswith("model name"):
                        return line.partition(":")[2].strip()
        except OSError:
            pass
    return platform.processor() or platform.machine()
