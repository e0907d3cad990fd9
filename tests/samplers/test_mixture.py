from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from dale import random
from dale.batch import Batch
from dale.errors import UsageError
from dale.losses import KL, CrossEntropy, Margin
from dale.objectives import Objective
from dale.perturbations import Linf
from dale.samplers import CutoutNoise, GaussianNoise, Mixture, UniformNoise, fgsm, langevin, pgd
from dale.samplers.base import Problem

BALL = Linf(epsilon=0.1)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch(count: int) -> Batch:
    images = random.uniform(random.key(1), torch.arange(count), (1, 6, 6)).double()
    return Batch.of(images, torch.arange(count) % 4)


def test_each_example_has_the_draw_of_one_part_in_proportion_to_the_shares(model):
    """With their keys the parts draw what they draw in the mixture: which one an example took can be read off."""
    parts, key, count = (pgd(3), fgsm(0.1), UniformNoise()), random.key(5), 2000
    drawn = Mixture(samplers=parts, shares=(6.0, 3.0, 1.0))(model, batch(count), BALL, CrossEntropy(), key=key)[0]
    alone = [
        part(model, batch(count), BALL, CrossEntropy(), key=own)[0]
        for part, own in zip(parts, key.fold("part").each(4), strict=False)
    ]
    taken = torch.stack([(drawn == other).flatten(1).all(dim=1) for other in alone])
    assert bool((taken.sum(dim=0) == 1).all())
    shares = taken.double().mean(dim=1)
    for share, expected in zip(shares.tolist(), (0.6, 0.3, 0.1), strict=True):
        assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) / count) ** 0.5)


def test_shares_are_equal_unless_given(model):
    parts = (fgsm(0.1), UniformNoise())
    both = Mixture(samplers=parts)(model, batch(40), BALL, CrossEntropy(), key=0)
    assert torch.equal(both, Mixture(samplers=parts, shares=(3.0, 3.0))(model, batch(40), BALL, CrossEntropy(), key=0))


def test_each_part_climbs_the_loss_or_its_logarithm_as_alone(model):
    """The clean logits are computed once for all of them, and gradients are counted."""
    mixture = Mixture(samplers=(langevin(3), pgd(2)))
    assert mixture.log
    problem = Problem(model, batch(5), BALL, KL(), mixture.log)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    mixture.draw(problem, random.key(0))
    assert problem.evaluations == len(calls) == 3 + 2


def test_what_cannot_be_mixed_is_refused():
    with pytest.raises(UsageError, match="at least two samplers, got 1"):
        Mixture(samplers=(pgd(3),))
    with pytest.raises(UsageError, match="a share for each of the 2 samplers, got 1"):
        Mixture(samplers=(pgd(3), fgsm(0.1)), shares=(1.0,))
    with pytest.raises(UsageError, match=r"shares\[1\] must be a finite number above 0, got 0.0"):
        Mixture(samplers=(pgd(3), fgsm(0.1)), shares=(1.0, 0.0))
    with pytest.raises(UsageError, match=r"draw equally often, got \[1, 2\] draws"):
        Mixture(samplers=(pgd(3), UniformNoise(num_samples=2)))
    with pytest.raises(UsageError, match=r"said of the mixture, 'eval', got \['train', 'eval'\]"):
        Mixture(samplers=(replace(pgd(3), mode="train"), pgd(2)))
    assert Mixture(samplers=(replace(pgd(3), mode="train"),) * 2, mode="train").mode == "train"
    with pytest.raises(UsageError, match=r"or none does, got free=\[False, True\]"):
        Mixture(samplers=(UniformNoise(), GaussianNoise(std=0.1)))


def test_properties_are_those_of_the_parts():
    noise = Mixture(samplers=(CutoutNoise(size=2, num_samples=2), GaussianNoise(std=0.1, num_samples=2)))
    assert (noise.free, noise.needs_loss, noise.log, noise.num_draws) == (True, False, False, 2)
    with pytest.raises(UsageError, match="Margin can be negative"):
        Objective(
            perturbations=BALL,
            sampler=Mixture(samplers=(langevin(2), fgsm(0.1))),
            perturbation_loss=Margin(),
            robust_loss=CrossEntropy(),
        )
