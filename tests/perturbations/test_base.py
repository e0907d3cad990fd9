"""A set of one's own in ten lines, and boxes of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from dale import random
from dale.batch import Batch
from dale.errors import UsageError
from dale.losses import CrossEntropy
from dale.perturbations import ParameterBox
from dale.perturbations.base import fold_into
from dale.samplers import Chain, GaussianNoise, Langevin, UniformNoise, fgsm, langevin, pgd


@dataclass(frozen=True, kw_only=True)
class Brightness(ParameterBox):
    """x' = x + limit * delta, one number for the whole image, held to [0, 1]."""

    limit: float = 0.3
    num_parameters: ClassVar[int] = 1

    def apply(self, x: Tensor, delta: Tensor) -> Tensor:
        return (x + self.limit * delta.view(-1, 1, 1, 1)).clamp(0.0, 1.0)


SAMPLERS = (
    fgsm(1.0),
    pgd(5),
    langevin(5),
    Chain(kernel=Langevin(drift="gradient", noise="gaussian", temperature=0.1, place="outside"), keep="all"),
    UniformNoise(num_samples=3),
)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=range(len(SAMPLERS)))
def test_a_set_in_ten_lines_works_through_every_sampler(sampler):
    brightness = Brightness()
    x = 0.4 + 0.2 * random.uniform(random.key(0), torch.arange(6), (1, 4, 4))
    # the brighter the image, the more of class 1: the worst change is known, darker for 1 and brighter for 0
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.stack([-torch.ones(16), torch.ones(16)]) / 16)
        model[1].bias.copy_(torch.tensor([0.5, -0.5]))
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    delta = sampler(model, Batch.of(x, labels), brightness, CrossEntropy(), key=1)
    assert delta.shape == (sampler.num_draws, 6, 1)
    assert bool((delta.abs() <= 1.0).all())
    if isinstance(sampler, Chain) and sampler.kernel.drift == "sign":
        worst = torch.where(labels == 0, 1.0, -1.0)
        steps = 1 if sampler.steps == 1 else 5 * 0.25
        assert bool(((delta[0, :, 0] * worst) >= min(steps, 1.0) - 1.0 - 1e-6).all())
        if (sampler.steps > 1 and sampler.start == "gaussian") or sampler.steps == 1:
            assert torch.equal(delta[0, :, 0], worst)


def test_free_noise_refuses_a_set_that_is_not_added_to_the_image():
    x = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(UsageError, match="added to the image"):
        GaussianNoise()(nn.Identity(), Batch.of(x, torch.zeros(2).long()), Brightness(), key=0)


def test_a_box_of_parameters():
    box, x = Brightness(), torch.zeros(20_000, 1, 2, 2)
    delta = box.sample(x, random.key(1), torch.arange(20_000))
    assert box.shape((3, 9, 9)) == (1,)
    assert box.radius == 1.0
    assert stats.kstest((delta[:, 0].double().numpy() + 1) / 2, "uniform").pvalue > 1e-3
    assert box.project(torch.tensor([[2.0], [-0.5]]), x).tolist() == [[1.0], [-0.5]]
    assert box.contains(torch.tensor([[1.1], [-0.5]]), x).tolist() == [False, True]
    assert box.steepest(torch.tensor([[-3.0], [0.0]])).tolist() == [[-1.0], [0.0]]
    there, turned = box.reflect(torch.tensor([[1.25], [-4.5]]), torch.ones(2, 1), x)
    assert there.tolist() == [[0.75], [-0.5]]
    assert turned.tolist() == [[-1.0], [1.0]]


def test_folding_is_a_billiard():
    """Small straight steps with a bounce at every wall end where folding the whole way ends."""
    low, high = torch.tensor([-0.3, 0.1]), torch.tensor([0.2, 0.9])
    position, speed = torch.tensor([0.0, 0.5]).double(), torch.tensor([1.63, -2.91]).double()
    walked, momentum = position.clone(), speed.clone()
    for _ in range(4000):
        walked = walked + momentum / 4000
        momentum = torch.where((walked < low) | (walked > high), -momentum, momentum)
        walked = torch.where(walked < low, 2 * low - walked, torch.where(walked > high, 2 * high - walked, walked))
    folded, turned = fold_into(low.double(), high.double(), position + speed, speed)
    torch.testing.assert_close(folded, walked, atol=1e-5, rtol=0.0)
    assert torch.equal(turned, momentum)
