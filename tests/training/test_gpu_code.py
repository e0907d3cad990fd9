"""What a GPU would run, compiled for it without one: every graph of the captured step, and every kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with the GPU builds of torch")

pytestmark = [
    pytest.mark.verify,
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13.") or torch.version.cuda is not None,
        reason="hopper.py replaces internals of torch 2.13's CPU build",
    ),
]

CHAIN = {"_split", "_drawn", "each", "potential", "advance"}
STEP = {"predict", "evaluate", "_conclude", "_share", "_move"}


def compiled(*arguments: str) -> Counter[str]:
    """The number of kernels that each part was compiled to; none may fail."""
    script = Path(__file__).parents[1] / "hopper.py"
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failures"] == [], "\n".join(found["failures"])
    return Counter(found["kernels"])


def test_the_captured_step_of_a_residual_network_compiles_for_hopper() -> None:
    """With its folded replica, blocks of the first stage in one operation each, multipliers, and a start away."""
    kernels = compiled("resnet18", "dale")
    assert kernels.keys() >= CHAIN | STEP | {"_scale", "_logits", "narrow_forward", "wide_backward"}
    assert kernels.total() > 100, kernels


def test_the_captured_step_with_dropout_and_without_batchnorm_compiles_for_hopper() -> None:
    kernels = compiled("convnet", "mart")
    assert kernels.keys() >= CHAIN | STEP
    assert kernels.total() > 40, kernels


def test_the_loader_compiles_for_hopper() -> None:
    assert compiled("loader").keys() == {"_load"}


def test_the_kernels_written_by_hand_compile_for_hopper() -> None:
    """And ask for no more shared memory than there is."""
    assert compiled("programs") == {"narrow_forward": 7, "narrow_products": 7, "narrow_sum": 7, "wide_backward": 15}
