"""Targeted losses: the ranked target, and values worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dale import random
from dale.attacks import AutoPGD, Hunt, TargetedDLR, TargetMargin
from dale.attacks.gradient import finish
from dale.attacks.targeted import target_class
from dale.batch import Batch
from dale.data import Split
from dale.errors import UsageError
from dale.perturbations import Linf
from dale.samplers import Chain


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
    for few, margin in ((3, -1.0), (2, -4.0)):
        assert TargetedDLR(rank=1)(logits[:, :few], clean[:, :few], labels).item() == margin


@pytest.mark.parametrize("classes", [2, 3, 4, 5])
def test_every_target_has_a_gradient(classes: int) -> None:
    logits = torch.randn(20, classes, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = logits.argmax(dim=1)
    for rank in range(1, classes):
        (gradient,) = torch.autograd.grad(TargetedDLR(rank=rank)(logits, logits.detach(), labels).sum(), logits)
        target = target_class(logits.detach(), labels, rank)
        assert bool((gradient.gather(1, target.unsqueeze(1)) > 1e-3).all())  # uphill for the target


def test_three_classes_fall_to_their_last_target_too(victim: tuple[nn.Module, Split]) -> None:
    """A network trained for more classes, cut down to three: the last of them alone is a target worth having."""
    model, split = victim
    three = nn.Sequential(model, _First(3)).eval()
    kept = (split.labels < 3).nonzero().squeeze(1)
    batch, ball = Batch.of(split.convert(split.images[kept]), split.labels[kept]), Linf(epsilon=0.25)
    with torch.no_grad():
        batch = batch[(three(batch.images).argmax(dim=1) == batch.labels).nonzero().squeeze(1)]
        clean = three(batch.images)
    hunt = Hunt(three, batch, ball, TargetedDLR(rank=2), False, clean)
    finish(hunt, Chain(kernel=AutoPGD(), steps=20, start="zero", climb_log=False), random.key(0), look=False)
    assert float((hunt.found.margin > 0).float().mean()) > 0.3


class _First(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, : self.count]


def test_rank_is_checked() -> None:
    with pytest.raises(UsageError, match="rank is at least 1"):
        TargetMargin(rank=0)
