"""The average of the weights, and BatchNorm statistics that belong to it.

    average <- d * average + (1 - d) * weights,      d = min(decay, (1 + t) / (10 + t)) after t updates

Averaged BatchNorm buffers do not match averaged weights: at a high learning rate the average was seen to collapse to
chance while the raw weights were fine. So buffers are not averaged: before the averaged model is used its BatchNorm
statistics are estimated anew, by a few passes in train mode over what the row shows the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dale.compiling import Compiler, as_it_is
from dale.components import Component
from dale.errors import require
from dale.modes import sampling_mode


@dataclass(frozen=True, kw_only=True)
class Averaging(Component):
    """Exponential moving average of the weights with `decay` per step."""

    decay: float = 0.995

    def __post_init__(self) -> None:
        require(0.0 <= self.decay < 1.0, f"Averaging: decay lies in [0, 1), got {self.decay!r}")


class AveragedModel:
    """A copy of a model whose parameters follow the average; its buffers are those of the raw model."""

    def __init__(self, model: nn.Module, averaging: Averaging) -> None:
        self.decay = averaging.decay
        self.module = copy.deepcopy(model)
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)
        device = next(model.parameters()).device
        self.updates = torch.zeros((), dtype=torch.float64, device=device)  # there, so that a captured step can count

    @torch.no_grad()
    def update(self, model: nn.Module, compiler: Compiler = as_it_is) -> None:
        """Move the average towards the weights."""
        averages: list[Tensor] = [p for p in self.module.parameters() if p.is_floating_point()]
        weights: list[Tensor] = [p.detach() for p in model.parameters() if p.is_floating_point()]
        self.updates += 1.0
        compiler(_move)(averages, weights, compiler(_share)(self.updates, self.decay))

    @torch.no_grad()
    def copy_buffers(self, model: nn.Module) -> None:
        """Take over the raw model's buffers (statistics are then re-estimated where there is BatchNorm)."""
        for mine, theirs in zip(self.module.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)


def _share(updates: Tensor, decay: float) -> Tensor:
    """1 - d, once for all weights: apart from `_move`, where a compiler would work it out for each."""
    return (1.0 - ((1.0 + updates) / (10.0 + updates)).clamp_max(decay)).float()


def _move(averages: list[Tensor], weights: list[Tensor], share: Tensor) -> None:
    """One update, in place; as lists, which a compiler makes few kernels of."""
    steps = torch._foreach_sub(weights, averages)
    torch._foreach_mul_(steps, share)
    torch._foreach_add_(averages, steps)


def live_batchnorm(model: nn.Module) -> list[_BatchNorm]:
    """The layers whose running statistics an average of the weights would invalidate: those that training moves.

    A layer that the model keeps in eval mode while it trains (frozen, in a `train` of its own) is trained with the
    statistics it has, which stay.
    """
    with sampling_mode(model, "train"):
        return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats and m.training]


@torch.no_grad()
def reestimate_batchnorm(model: nn.Module, batches: Iterable[Callable[[nn.Module], object]]) -> None:
    """Estimate BatchNorm statistics anew: the plain average over `batches`, each a function that runs the model.

    Dropout stays off: only BatchNorm is in train mode meanwhile. The model is left in eval mode.
    """
    norms = live_batchnorm(model)
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # None: a cumulative average
        norm.train()
    try:
        for run in batches:
            run(model)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        model.eval()
