"""Fixed distributions: their laws, their windows, and their support."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dale.batch import Batch
from dale.errors import UsageError
from dale.perturbations import L2, Linf
from dale.samplers import CutoutNoise, GaussianNoise, GeneratorNoise, PatchNoise, UniformNoise

BALL = Linf(epsilon=0.1)


def grey(count: int, shape: tuple[int, ...] = (1, 8, 8), level: float = 0.5) -> Batch:
    return Batch.of(torch.full((count, *shape), level), torch.zeros(count).long())


def draw(sampler, batch: Batch, key: int = 0) -> torch.Tensor:
    return sampler(nn.Identity(), batch, BALL, key=key)


def test_uniform_noise_is_the_sets_own_sample():
    delta = draw(UniformNoise(num_samples=5), grey(400))
    assert delta.shape == (5, 400, 1, 8, 8)
    assert stats.kstest((delta.double().flatten().numpy() + 0.1) / 0.2, "uniform").pvalue > 1e-3
    draws = np.corrcoef(delta.flatten(1).numpy()) - np.eye(5)
    assert np.abs(draws).max() < 4.5 / (400 * 64) ** 0.5
    l2 = UniformNoise()(nn.Identity(), grey(5), L2(epsilon=0.3), key=0)
    assert bool(L2(epsilon=0.3).contains(l2[0], grey(5).images).all())


def test_gaussian_noise_has_its_standard_deviation():
    delta = draw(GaussianNoise(std=0.05), grey(500))
    assert stats.kstest(delta.double().flatten().numpy() / 0.05, "norm").pvalue > 1e-3
    assert float(draw(GaussianNoise(std=(0.05,)), grey(2)).std()) == pytest.approx(0.05, rel=0.2)


def test_gaussian_noise_by_channel_and_by_pixel():
    by_channel = draw(GaussianNoise(std=(0.01, 0.05, 0.1)), grey(2000, (3, 2, 2)))
    np.testing.assert_allclose(by_channel.std(dim=(0, 1, 3, 4)), [0.01, 0.05, 0.1], rtol=0.05)
    one = draw(GaussianNoise(std=(0.05,)), grey(2000, (3, 2, 2)))
    np.testing.assert_allclose(one.std(dim=(0, 1, 3, 4)), [0.05] * 3, rtol=0.05)
    levels = tuple(0.01 * (1 + i) for i in range(8))
    by_pixel = draw(GaussianNoise(std=levels), grey(2000, (2, 2, 2)))
    np.testing.assert_allclose(by_pixel.std(dim=(0, 1)).flatten(), levels, rtol=0.08)
    with pytest.raises(UsageError, match=r"std has 2 values; expected 1, or one of \[3, 12\]"):
        draw(GaussianNoise(std=(0.1, 0.2)), grey(2, (3, 2, 2)))


@pytest.mark.parametrize("sampler", [GaussianNoise(std=2.0), PatchNoise(std=3.0, size=4), CutoutNoise(fill=1.0)])
def test_free_noise_is_held_to_the_box(sampler):
    x = torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    moved = x + draw(sampler, Batch.of(x, torch.zeros(50).long()))[0]
    assert float(moved.min()) >= 0.0
    assert float(moved.max()) <= 1.0
    assert sampler.free
    assert not UniformNoise().free


def test_a_patch_lies_wholly_inside_and_anywhere():
    delta = draw(PatchNoise(std=0.1, size=3), grey(3000))[0, :, 0]
    touched = delta != 0
    assert bool((touched.sum(dim=(1, 2)) == 9).all())
    first = touched.flatten(1).long().argmax(dim=1)
    places = torch.bincount(torch.div(first, 8, rounding_mode="floor") * 6 + first % 8, minlength=36)
    assert stats.chisquare(places.numpy()).pvalue > 1e-3  # 6 x 6 places, all alike; row and column independent
    assert bool((draw(PatchNoise(size=20), grey(3)) != 0).all())


def test_cutout_is_centred_anywhere_and_cut_at_the_border():
    for size in (3, 4):
        moved = 0.5 + draw(CutoutNoise(size=size, fill=0.25), grey(6400))[0, :, 0]
        hole = moved == 0.25
        assert bool(((moved == 0.5) | hole).all())
        areas = hole.sum(dim=(1, 2))
        assert int(areas.max()) == size * size
        assert int(areas.min()) == (size - size // 2) ** 2  # centred on the upper left pixel, or lower right if odd
        # a pixel is covered by as many of the 64 centres as have it in their window
        rows = torch.tensor(
            [sum(0 <= p + size // 2 - k < 8 for k in range(size)) for p in range(8)], dtype=torch.float64
        )
        expected = rows[:, None] * rows[None, :] / 64
        error = (hole.double().mean(dim=0) - expected).abs()
        assert float(error.max()) < 4.5 * 0.5 / 80


def test_a_generator_of_the_users(monkeypatch):
    module = types.ModuleType("my_generators")
    module.generator = nn.Sequential(nn.Linear(4, 64, bias=False), nn.Unflatten(1, (1, 8, 8)))
    module.factory, module.flat = nn.Linear, nn.Linear(4, 64)
    monkeypatch.setitem(sys.modules, "my_generators", module)
    with torch.no_grad():
        module.generator[0].weight.fill_(0.25)
    # the sum of four N(0, std^2) over four, in every pixel alike
    delta = draw(GeneratorNoise(generator="my_generators:generator", latent=4, std=0.1), grey(4000))[0]
    assert torch.equal(delta, delta[:, :, :1, :1].expand_as(delta))
    assert stats.kstest(delta[:, 0, 0, 0].double().numpy() / 0.05, "norm").pvalue > 1e-3
    with pytest.raises(UsageError, match="name a module instance"):
        draw(GeneratorNoise(generator="my_generators:factory", latent=4), grey(2))
    with pytest.raises(UsageError, match=r"returned shape \(2, 64\), expected \(2, 1, 8, 8\)"):
        draw(GeneratorNoise(generator="my_generators:flat", latent=4), grey(2))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: UniformNoise(num_samples=0), "at least 1"),
        (lambda: GaussianNoise(std=()), "std is empty"),
        (lambda: PatchNoise(std=-0.1), "above 0"),
        (lambda: CutoutNoise(size=0), "above 0"),
        (lambda: CutoutNoise(fill=1.5), "grey level"),
        (lambda: GeneratorNoise(generator="a:b", latent=0), "above 0"),
    ],
)
def test_bad_options(build, message):
    with pytest.raises(UsageError, match=message):
        build()
