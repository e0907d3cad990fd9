"""Random search, the grid, and transfer from another model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dale import random
from dale.attacks import PGD, GridSearch, RandomSearch, Transfer
from dale.batch import Batch
from dale.errors import UsageError
from dale.perturbations import Composition, Linf, Rotation, Translation

TURN = Composition(parts=(Rotation(degrees=25.0), Translation(fraction=0.1)))
Victim = tuple[nn.Module, object]


def fooled(model: nn.Module, batch: Batch, delta: torch.Tensor, perturbations: object) -> torch.Tensor:
    return model(perturbations.apply(batch.images, delta)).argmax(1) != batch.labels  # type: ignore[attr-defined]


def test_more_draws_begin_as_fewer(victim: Victim, batch: Batch) -> None:
    model, ball = victim[0], Linf(epsilon=0.3)
    few, many = (fooled(model, batch, RandomSearch(draws=n)(model, batch, ball, 0), ball) for n in (2, 12))
    assert (many | ~few).all()
    assert many.sum() > few.sum()


def test_the_grid_finds_what_lies_on_it(victim: Victim, batch: Batch) -> None:
    """A grid of nine over one angle is the worst of those nine angles."""
    model, turn = victim[0], Rotation(degrees=40.0)
    attack = GridSearch(points=9)
    delta = attack(model, batch, turn, 0)
    right = model(batch.images).argmax(1) == batch.labels
    by_hand = torch.zeros(len(batch), dtype=torch.bool)
    for angle in torch.linspace(-1.0, 1.0, 9):
        by_hand |= fooled(model, batch, angle.expand(len(batch), 1), turn)
    assert torch.equal(fooled(model, batch, delta, turn) & right, by_hand & right)
    assert by_hand[right].any()


def test_the_grid_counts_all_its_axes() -> None:
    assert GridSearch(points=5).prepared(TURN).budget(10).queries == 125
    chosen = GridSearch().prepared(TURN)
    assert chosen.budget(10).queries == 1000 == math.prod([chosen.points or 0] * 3)
    assert GridSearch().prepared(Rotation(degrees=5.0)).budget(10).queries == 1000


def test_transfer_to_itself_is_the_attack(victim: Victim, batch: Batch) -> None:
    model, ball = victim[0], Linf(epsilon=0.2)
    attack = Transfer(source="self", attack=PGD(steps=5)).prepared(ball, {"self": model})
    found = attack.run_round(model, batch, ball, 0, random.key(0), clean_logits=model(batch.images))
    direct = PGD(steps=5)(model, batch, ball, 0)
    assert (found.margin > 0).sum() >= 0.8 * fooled(model, batch, direct, ball).sum() > 0
    assert found.gradients == 0  # of this model
    assert found.queries == len(batch)


def test_transfer_goes_on_where_the_source_has_fallen(victim: Victim, batch: Batch) -> None:
    """A source that fails everywhere would be left at once by an attack on itself; the transfer climbs to the end."""
    model, ball = victim[0], Linf(epsilon=0.2)
    attack = Transfer(source="other", attack=PGD(steps=10)).prepared(ball, {"other": _Shifted(model)})
    found = attack.run_round(model, batch, ball, 0, random.key(0), clean_logits=model(batch.images))
    assert (found.margin > 0).float().mean() > 0.3


class _Shifted(nn.Module):
    """The same gradients, but every prediction wrong: the true class is never ahead."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.model(x)
        return torch.cat([logits, logits.amax(dim=1, keepdim=True).detach() + 0.5], dim=1)


def test_a_source_is_needed(victim: Victim, batch: Batch) -> None:
    with pytest.raises(UsageError, match="no such source model"):
        Transfer(source="nowhere").prepared(TURN)
    small = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval()
    attack = Transfer(source="small", attack=PGD(steps=1)).prepared(Linf(epsilon=0.1), {"small": small})
    with pytest.raises(UsageError, match="3 outputs"):
        attack.run_round(victim[0], batch, Linf(epsilon=0.1), 0, random.key(0), clean_logits=victim[0](batch.images))
