"""Optimisers and learning-rate schedules: small components, each a function of the step alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dale.components import Component
from dale.errors import require, require_non_negative, require_positive


@dataclass(frozen=True, kw_only=True)
class Optimiser(Component, ABC):
    """How weights descend. `decay_all`: weight decay also for biases and normalisation layers."""

    learning_rate: float
    weight_decay: float
    decay_all: bool = True

    def __post_init__(self) -> None:
        require_positive(self, learning_rate=self.learning_rate)
        require_non_negative(self, weight_decay=self.weight_decay)

    @abstractmethod
    def make(self, groups: list[dict[str, Any]], rate: float | Tensor) -> torch.optim.Optimizer:
        """Return torch's optimiser over parameter groups; a rate that is a tensor means: to be captured in a graph."""

    def build(self, model: nn.Module, *, captured: bool = False) -> torch.optim.Optimizer:
        """Return the optimiser of a model's parameters; `captured`: its step will run inside a captured graph."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        require(len(parameters) > 0, "the model has no parameters to train")
        rate = torch.tensor(self.learning_rate, device=parameters[0].device) if captured else self.learning_rate
        if self.decay_all:
            return self.make([{"params": parameters, "weight_decay": self.weight_decay}], rate)
        # biases and the scales and shifts of normalisation layers are the parameters with one dimension
        decayed = [p for p in parameters if p.dim() > 1]
        spared = [p for p in parameters if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": spared, "weight_decay": 0.0}]
        return self.make([group for group in groups if group["params"]], rate)


@dataclass(frozen=True, kw_only=True)
class SGD(Optimiser):
    """Stochastic gradient descent with momentum."""

    learning_rate: float = 0.1
    weight_decay: float = 5e-4
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0.0 <= self.momentum < 1.0, f"SGD: momentum lies in [0, 1), got {self.momentum!r}")
        require(not self.nesterov or self.momentum > 0.0, "SGD: nesterov needs a momentum above 0")

    def make(self, groups: list[dict[str, Any]], rate: float | Tensor) -> torch.optim.Optimizer:
        """torch.optim.SGD."""
        fused = True if isinstance(rate, Tensor) else None
        return torch.optim.SGD(groups, lr=rate, momentum=self.momentum, nesterov=self.nesterov, fused=fused)


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimiser):
    """Adam with decoupled weight decay."""

    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(all(0.0 <= b < 1.0 for b in self.betas), f"AdamW: betas lie in [0, 1), got {self.betas!r}")

    def make(self, groups: list[dict[str, Any]], rate: float | Tensor) -> torch.optim.Optimizer:
        """torch.optim.AdamW."""
        captured = isinstance(rate, Tensor)
        fused = True if captured else None
        return torch.optim.AdamW(groups, lr=rate, betas=self.betas, fused=fused, capturable=captured)


@dataclass(frozen=True, kw_only=True)
class Adadelta(Optimiser):
    """Adadelta, the paper's choice for MNIST."""

    learning_rate: float = 1.0
    weight_decay: float = 0.0
    decay: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0.0 <= self.decay < 1.0, f"Adadelta: decay lies in [0, 1), got {self.decay!r}")

    def make(self, groups: list[dict[str, Any]], rate: float | Tensor) -> torch.optim.Optimizer:
        """torch.optim.Adadelta."""
        return torch.optim.Adadelta(groups, lr=rate, rho=self.decay, capturable=isinstance(rate, Tensor))


@dataclass(frozen=True, kw_only=True)
class Schedule(Component, ABC):
    """The learning rate over a run, as a factor on the optimiser's."""

    @abstractmethod
    def factor(self, progress: float, epochs: int) -> float:
        """The factor at `progress` epochs (a fraction counts) of `epochs`."""


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The same learning rate throughout."""

    def factor(self, progress: float, epochs: int) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Piecewise(Schedule):
    """Multiplied by `drop` after each milestone, an epoch number."""

    milestones: tuple[int, ...] = (150, 175, 190)
    drop: float = 0.1

    def __post_init__(self) -> None:
        require_positive(self, drop=self.drop)
        require(
            list(self.milestones) == sorted(set(self.milestones)) and all(m > 0 for m in self.milestones),
            f"Piecewise: milestones are growing epoch numbers, got {self.milestones!r}",
        )

    def factor(self, progress: float, epochs: int) -> float:
        """drop^(milestones passed)."""
        return float(self.drop ** sum(progress >= milestone for milestone in self.milestones))


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Linear warm-up over `warmup` epochs, then a half cosine to `final` of the peak."""

    warmup: float = 0.0
    final: float = 0.0

    def __post_init__(self) -> None:
        require_non_negative(self, warmup=self.warmup)
        require(0.0 <= self.final <= 1.0, f"Cosine: final is a share in [0, 1], got {self.final!r}")

    def factor(self, progress: float, epochs: int) -> float:
        """min(1, progress / warmup), then (1 + cos) / 2."""
        # a run shorter than its warm-up spends a tenth of it warming up
        warmup = self.warmup if self.warmup < epochs else 0.1 * epochs
        if progress < warmup:
            return progress / warmup
        share = (progress - warmup) / max(epochs - warmup, 1e-12)
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))


@dataclass(frozen=True, kw_only=True)
class OneCycle(Schedule):
    """Linear rise from `start` of the peak to the peak at share `peak` of the run, then linear fall to `final`."""

    peak: float = 0.3
    start: float = 0.1
    final: float = 0.0

    def __post_init__(self) -> None:
        require(0.0 < self.peak < 1.0, f"OneCycle: peak is a share of the run in (0, 1), got {self.peak!r}")
        for name, value in (("start", self.start), ("final", self.final)):
            require(0.0 <= value <= 1.0, f"OneCycle: {name} is a share of the peak in [0, 1], got {value!r}")

    def factor(self, progress: float, epochs: int) -> float:
        """Two straight lines."""
        share = progress / epochs
        if share < self.peak:
            return self.start + (1.0 - self.start) * share / self.peak
        return self.final + (1.0 - self.final) * max(0.0, 1.0 - share) / (1.0 - self.peak)


def set_learning_rate(optimiser: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of every group; in place where it is a device tensor, as under a captured graph."""
    groups: Iterable[dict[str, Any]] = optimiser.param_groups
    for group in groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
