"""The machine: what a number was measured on, without which it does not count; devices; denormal numbers."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
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
        raise UsageError(f"no device {str(name)!r} here ({reason}); `cpu` works everywhere") from error
    return device


_BFLOAT16 = """
import torch
x = torch.randn(4, 32, 8, 8, dtype=torch.bfloat16, requires_grad=True)
torch.nn.functional.conv2d(x, torch.randn(32, 32, 3, 3, dtype=torch.bfloat16), padding=1).sum().backward()
torch.randn(64, 64, dtype=torch.bfloat16) @ torch.randn(64, 64, dtype=torch.bfloat16)
"""


@functools.cache
def require_bfloat16() -> None:
    """Refuse where the processor kills a process that computes in bfloat16, which one in a virtual machine may do.

    It announces instructions that it refuses to run. A process of its own finds out.
    """
    done = subprocess.run([sys.executable, "-c", _BFLOAT16], capture_output=True, check=False)
    if done.returncode < 0:
        raise UsageError(
            "this processor announces instructions for bfloat16 and refuses them; set ONEDNN_MAX_CPU_ISA=AVX512_CORE "
            "in the environment, or train in float32"
        )


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
