"""Where numbers were made: hardware and versions."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch


def describe(device: torch.device) -> dict[str, Any]:
    """Return hardware and versions, for a result that others shall repeat."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("dale", "numpy"):
        versions[package] = metadata.version(package)
    hardware: dict[str, Any] = {
        "device": str(device),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name(device)
        versions["cuda"] = str(torch.version.cuda)
    return {"hardware": hardware, "versions": versions}
