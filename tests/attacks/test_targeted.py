"""Targeted losses: the ranked target, and values worked out by hand."""

from __future__ import annotations

import pytest
import torch

from dale.attacks import TargetedDLR, TargetMargin
from dale.attacks.targeted import target_class
from dale.errors import UsageError


def test_targets_are_the_wrong_classes_by_rank() -> None:
    clean = torch.tensor([[5.0, 1.0, 3.0, 2.0], [0.0, 7.0, 8.0, 9.0]])
    labels = torch.tensor([0, 2])  # the second example's label is not its largest logit
    assert [target_class(clean, labels, rank).tolist() for rank in (1, 2, 3)] == [[2, 3], [3, 1], [1, 0]]


def test_targeted_losses_by_hand() -> None:
    clean, labels = torch.tensor([[5.0, 1.0, 3.0, 2.0]]), torch.tensor([0])
    logits = torch.tensor([[4.0, 0.0, 3.0, 1.0]])
    assert TargetMargin(rank=1)(logits, clean, labels).item() == -1.0
    assert TargetMargin(rank=3)(logits, clean, labels).item() == -4.0
    assert TargetedDLR(rank=1)(logits, clean, labels).item() == pytest.approx(-1.0 / (4.0 - 0.5))
    assert TargetedDLR(rank=1)(logits[:, :3], clean[:, :3], labels).item() == pytest.approx(-1.0 / 4.0)
    assert TargetedDLR(rank=1)(logits[:, :2], clean[:, :2], labels).item() == -4.0


def test_rank_is_checked() -> None:
    with pytest.raises(UsageError, match="rank is at least 1"):
        TargetMargin(rank=0)
