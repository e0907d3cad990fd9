"""APGD as an attack: its names, standard numbers, restarts and the three radii of the l1 ball."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dale import random
from dale.attacks import APGD, PGD, Hunt
from dale.attacks.adaptive import border
from dale.batch import Batch
from dale.errors import UsageError
from dale.perturbations import L1, L2, Linf, PerturbationSet, Rotation

BALLS: dict[str, PerturbationSet] = {"linf": Linf(epsilon=0.15), "l2": L2(epsilon=0.8), "l1": L1(epsilon=2.0)}
Victim = tuple[nn.Module, object]


@pytest.mark.parametrize("name", BALLS)
@pytest.mark.parametrize("objective", ["ce", "dlr", "t"])
@pytest.mark.parametrize("steps", [1, 2, 10])
def test_spends_its_budget_and_no_more(name: str, objective: str, steps: int, victim: Victim, batch: Batch) -> None:
    """On a tiny ball nothing falls: one gradient for the start and one for each step (three starts in the l1 ball)."""
    model = victim[0]
    clean = model(batch.images).detach()
    right = batch[(clean.argmax(1) == batch.labels).nonzero().squeeze(1)]
    ball = type(BALLS[name])(epsilon=1e-6)  # type: ignore[call-arg]
    attack = APGD(objective=objective, steps=steps)  # type: ignore[arg-type]
    found = attack.run_round(model, right, ball, 0, random.key(0), clean_logits=model(right.images).detach())
    spent = max(steps, 3) + 3 if name == "l1" else steps + 1
    assert found.gradients == spent * len(right)
    assert attack.prepared(ball).budget(10).gradients == spent * attack.prepared(ball).rounds(10)
    assert (found.margin < 0).all()


def test_adaptive_steps_beat_fixed_ones(victim: Victim, batch: Batch) -> None:
    model, ball = victim[0], L2(epsilon=0.8)
    clean = model(batch.images).detach()
    margins = [
        attack.run_round(model, batch, ball, 0, random.key(0), clean_logits=clean, slack=torch.inf).margin
        for attack in (PGD(steps=40, objective="dlr"), APGD(steps=40, objective="dlr"))
    ]
    assert margins[1].mean() > margins[0].mean()


def test_restarts_begin_elsewhere(victim: Victim, batch: Batch) -> None:
    model, ball = victim[0], Linf(epsilon=0.05)
    clean = model(batch.images).detach()
    attack = APGD(steps=1, restarts=2)
    one, two = (
        attack.run_round(model, batch, ball, n, random.key(0), clean_logits=clean, slack=torch.inf).delta
        for n in (0, 1)
    )
    assert not torch.equal(one, two)


@pytest.mark.parametrize("name", ["linf", "l2"])
def test_starts_lie_on_the_border(name: str, victim: Victim, batch: Batch) -> None:
    hunt = Hunt(victim[0], batch, BALLS[name], None)
    start = border(hunt, random.key(0))
    assert start is not None
    assert torch.allclose(BALLS[name].norm(start), torch.full((len(batch),), BALLS[name].radius))  # type: ignore[attr-defined]
    assert border(Hunt(victim[0], batch, Rotation(degrees=5.0), None), random.key(0)) is None


@pytest.mark.parametrize("options", [{"steps": 0}, {"restarts": 0}, {"objective": "t", "targets": 0}, {"targets": 3}])
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="APGD"):
        APGD(**options)  # type: ignore[arg-type]
