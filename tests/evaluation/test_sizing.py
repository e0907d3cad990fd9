"""The size of batches: counted memory, powers of two, bounds."""

from __future__ import annotations

import torch
from torch import nn

from dale.evaluation.sizing import default_batch_size, fitting, memory_per_example


def test_memory_is_what_the_backward_pass_keeps() -> None:
    """A ReLU keeps its output, 100 floats; the last layer, frozen, keeps its weights alone, which are the model's."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)).requires_grad_(False)
    images = torch.rand(4, 1, 8, 8)
    assert memory_per_example(model, images) == 400.0
    deeper = nn.Sequential(model, nn.Linear(10, 50), nn.ReLU()).requires_grad_(False)
    assert memory_per_example(deeper, images) == 600.0


def test_fitting_by_hand() -> None:
    gib = 2.0**30
    assert fitting(8e6, 139 * gib) == 2048  # 2048 * 8 MB * 3 = 49 GB of 74 GB
    assert fitting(8e6, 24 * gib) == 512  # 12.3 of 12.9 GB
    assert fitting(60e6, 139 * gib) == 256
    assert fitting(1e12, 24 * gib) == 16  # never fewer
    assert fitting(1.0, 24 * gib) == 2048  # never more


def test_a_cpu_has_one_size() -> None:
    assert default_batch_size(nn.Flatten(), torch.rand(4, 1, 8, 8)) == 256
