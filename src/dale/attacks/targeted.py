"""Targeted losses: the target is the class of a given rank among the clean logits, so no labels need be carried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dale.errors import require
from dale.losses import Loss


def target_class(clean: Tensor, labels: Tensor, rank: int) -> Tensor:
    """Return the class with the `rank`-th largest clean logit among the wrong ones (1: the runner-up)."""
    true = torch.arange(clean.shape[1], device=clean.device) == labels.unsqueeze(1)
    return clean.masked_fill(true, -torch.inf).topk(rank, dim=1).indices[:, -1]


@dataclass(frozen=True, kw_only=True)
class TargetMargin(Loss):
    """f_t - f_y for the target t; above zero the prediction is wrong."""

    rank: int = 1
    needs_clean: ClassVar[bool] = True
    non_negative: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.rank >= 1, f"{type(self).__name__}: rank is at least 1, got {self.rank!r}")

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """The target's logit over the true one."""
        target = target_class(clean, labels, self.rank)
        both = logits.gather(1, torch.stack([target, labels], dim=1))
        return both[:, 0] - both[:, 1]


@dataclass(frozen=True, kw_only=True)
class TargetedDLR(TargetMargin):
    """(f_t - f_y) / (f_(1) - (f_(3) + f_(4)) / 2), the targeted difference-of-logits ratio of Croce and Hein.

    With fewer than four classes the loss is the margin: of three, f_(1) - f_(3) would make the ratio minus one whatever
    the logits are, without a gradient, where the target is the last class.
    """

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """The target's margin, indifferent to the scale of the logits."""
        margin = super().value(logits, clean, labels)
        if logits.shape[1] < 4:
            return margin
        top = logits.topk(4, dim=1).values
        return margin / (top[:, 0] - top[:, 2:].mean(dim=1) + 1e-12)
