"""FGSM and PGD: steps worked out by hand, the best iterate, and saturated models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dale.attacks import PGD, parse
from dale.attacks.gradient import LOSSES
from dale.batch import Batch
from dale.perturbations import L1, L2, Linf


def test_fgsm_and_pgd_by_hand(batch: Batch) -> None:
    """On a linear model the gradient is known: FGSM is the clipped sign, and PGD ends at the same corner."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2, bias=False)).eval()
    right = Batch.of(batch.images, model(batch.images).argmax(1))
    weight = model[1].weight.detach()
    for row, (label, x) in enumerate(zip(right.labels, right.images, strict=True)):
        away = (weight[1 - label] - weight[label]).sign().view(1, 8, 8)
        expected = (x + 0.1 * away).clamp(0, 1) - x
        for name in ("fgsm", "pgd10-last"):
            delta = parse(name)(model, right, Linf(epsilon=0.1), 0)
            assert torch.allclose(delta[row], expected, atol=1e-7)
        if row == 2:
            break


def test_best_iterate_is_never_weaker_than_the_last(victim: tuple[nn.Module, object], batch: Batch) -> None:
    model, ball = victim[0], Linf(epsilon=0.2)
    fooled = [
        model(batch.images + parse(name)(model, batch, ball, 0)).argmax(1) != batch.labels
        for name in ("pgd10-last", "pgd10")
    ]
    assert (fooled[1] | ~fooled[0]).all()


def test_saturated_models_keep_their_gradient() -> None:
    """Where the cross-entropy underflows in float32 the attack climbs its logarithm and gets through."""
    weight = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)).eval()
    model[1].weight.data = 500.0 * weight
    x = torch.full((1, 1, 1, 2), 0.3)
    centred = nn.Sequential(_Shift(-0.2), model)
    batch = Batch.of(x, torch.tensor([0]))
    delta = parse("pgd10-zero")(centred, batch, Linf(epsilon=0.15), 0)
    assert centred(x + delta).argmax(1).item() == 1


class _Shift(nn.Module):
    def __init__(self, by: float | torch.Tensor) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


def test_losses_by_hand() -> None:
    """Logits (4, 0, 3, 1): the margin is -1 for class 0 and +1 for class 2; the ratio divides by 4 - 1."""
    logits = torch.tensor([[4.0, 0.0, 3.0, 1.0]]).expand(2, 4)
    labels = torch.tensor([0, 2])
    assert LOSSES["margin"](logits, None, labels).tolist() == [-1.0, 1.0]
    assert LOSSES["dlr"](logits, None, labels).tolist() == pytest.approx([-1.0 / 3.0, 1.0 / 3.0])
    two = logits[:, :2]
    assert LOSSES["dlr"](two, None, torch.tensor([0, 1])).tolist() == [-4.0, 4.0]
    three = logits[:, :3]
    assert LOSSES["dlr"](three, None, torch.tensor([0, 2])).tolist() == pytest.approx([-1.0 / 4.0, 1.0 / 4.0])


def test_pgd_for_l2_by_hand() -> None:
    """Weights (3, 4) against zero: the direction is (0.6, 0.8), and three steps of 0.05 go 0.15 along it."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)).eval()
    model[1].weight.data = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    batch = Batch.of(torch.tensor([[[[0.3, 0.4]]]]), torch.tensor([1]))
    attack = PGD(steps=3, step_size=0.05, start="zero", keep_best=False)
    delta = attack(model, batch, L2(epsilon=1.0), 0).flatten()
    assert delta.tolist() == pytest.approx([-0.09, -0.12], abs=1e-6)
    # the ball stops it at 0.1, and the box where a pixel reaches zero
    assert attack(model, batch, L2(epsilon=0.1), 0).flatten().tolist() == pytest.approx([-0.06, -0.08], abs=1e-6)
    long = PGD(steps=40, step_size=0.05, start="zero", keep_best=False)
    assert long(model, batch, L2(epsilon=1.0), 0).flatten().tolist() == pytest.approx([-0.3, -0.4], abs=1e-6)


def test_l1_goes_on_where_pixels_stand_at_a_wall() -> None:
    """One pixel a step, the steepest first: once it is white the next one's turn comes, till all of them are."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False), _Shift(torch.tensor([10.0, 0.0]))).eval()
    model[1].weight.data = torch.tensor([[0.0, 0.0, 0.0, 0.0], [4.0, 3.0, 2.0, 1.0]])
    batch = Batch.of(torch.full((1, 1, 2, 2), 0.6), torch.tensor([0]))
    attack, ball = PGD(steps=4, start="zero", objective="margin", keep_best=False), L1(epsilon=2.0, active=0.25)
    assert torch.allclose(attack(model, batch, ball, 0), torch.full((1, 1, 2, 2), 0.4))
    white = Batch.of(torch.tensor([1.0, 0.6, 0.6, 0.6]).view(1, 1, 2, 2), torch.tensor([0]))
    step = parse("fgsm")(model, white, L1(epsilon=0.2, active=0.25), 0)
    assert step.flatten().tolist() == pytest.approx([0.0, 0.2, 0.0, 0.0])


def test_restarts_search_only_what_stands() -> None:
    """On a linear model the first restart ends at the worst corner: a second finds nothing, and asks for less."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False)).eval()
    model[1].weight.data = torch.tensor([[1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, -1.0]])
    images = torch.tensor([0.1, 0.6]).view(2, 1, 1, 1).expand(2, 1, 2, 2)
    batch, ball = Batch.of(images - 0.0, torch.tensor([0, 0])), Linf(epsilon=0.2)
    centred = nn.Sequential(_Shift(-0.05), model)
    delta = PGD(steps=10, restarts=3)(centred, batch, ball, 0)
    fooled = centred(batch.images + delta).argmax(1) != batch.labels
    assert fooled.tolist() == [True, False]
    assert torch.allclose(delta[1], torch.full((1, 2, 2), -0.2))
