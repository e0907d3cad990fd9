"""How many floating-point operations a step of a recipe is: counted by running it once, plainly, on two images."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dale import random
from dale.batch import Batch
from dale.objectives import Objective
from dale.training.state import TrainState
from dale.training.steps import PlainStep

_IMAGES = 2


@dataclass(frozen=True)
class Flops:
    """Operations per image of one step, convolutions and matrix products only, two for each multiply-add.

    `attack`: the clean forward where the loss compares with it, and per chain and step a forward and a backward pass
    to the input. `training`: forward and backward of clean and perturbed images. `forward`: one pass of one image.
    For ResNet-18 and DALE with k steps: 1 + 2 k forward passes for the attack and 2 * 3 for training, less the input
    gradient of the first layer.
    """

    forward: float
    attack: float
    training: float

    @property
    def total(self) -> float:
        """Attack and training."""
        return self.attack + self.training


def count_flops(
    model: nn.Module, objective: Objective, image_shape: tuple[int, ...], num_classes: int, num_groups: int = 0
) -> Flops:
    """Count a step of the plain path on a copy of the model, on the model's device."""
    model = copy.deepcopy(model)
    device = next(model.parameters()).device
    index = torch.arange(_IMAGES, device=device)
    images = random.uniform(random.key(0), index, image_shape)
    groups = torch.zeros_like(index) if num_groups else None
    batch = Batch(images, index % num_classes, index, groups)
    step = PlainStep(objective, torch.float32, device)
    state = TrainState(
        model, torch.optim.SGD(model.parameters(), lr=0.0), objective.initial_duals(num_classes, num_groups, device)
    )
    model.eval()
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(images)
    model.train()
    with FlopCounterMode(display=False) as attack:
        delta = step.perturb(model, batch, random.key(0))
    with FlopCounterMode(display=False) as training:
        step.descend(state, batch, delta, 1.0, last=True)
    return Flops(*(counter.get_total_flops() / _IMAGES for counter in (forward, attack, training)))
