import math

import pytest
import torch

from dale import random
from dale.batch import Batch
from dale.errors import UsageError
from dale.losses import CrossEntropy
from dale.perturbations import Linf
from dale.samplers import (
    Chain,
    Hmc,
    Langevin,
    Mala,
    acceptance_rate,
    chains,
    diagnose,
    effective_sample_size,
    split_r_hat,
)

COORDINATES = 200


def normal(num_chains: int, length: int, seed: int = 0) -> torch.Tensor:
    """Independent N(0, 1) draws (C, N, coordinates)."""
    rows = torch.arange(num_chains * length)
    return random.normal(random.key(seed), rows, (COORDINATES,)).view(num_chains, length, COORDINATES).double()


def autoregressive(phi: float, num_chains: int = 4, length: int = 1000) -> torch.Tensor:
    """x_t = phi x_{t-1} + sqrt(1 - phi^2) xi from its stationary law: a draw is worth (1 - phi) / (1 + phi) of one."""
    noise = normal(num_chains, length)
    states = [noise[:, 0]]
    for t in range(1, length):
        states.append(phi * states[-1] + math.sqrt(1 - phi**2) * noise[:, t])
    return torch.stack(states, dim=1)


def model(images: torch.Tensor) -> torch.Tensor:
    flat = images.flatten(1)
    return torch.stack([flat[:, 0], 2.0 * flat[:, 1]], dim=1)


def batch(size: int) -> Batch:
    return Batch.of(torch.full((size, 1, 1, 2), 0.5), torch.zeros(size, dtype=torch.int64))


class TestEffectiveSampleSize:
    def test_independent_draws_count_in_full(self):
        ess = effective_sample_size(normal(4, 1000))
        assert ess.shape == (COORDINATES,)
        assert 0.95 < ess.mean() / 4000 < 1.05

    @pytest.mark.parametrize("phi", [0.3, 0.7, 0.9])
    def test_autoregression(self, phi):
        ess = effective_sample_size(autoregressive(phi))
        assert ess.mean() / 4000 == pytest.approx((1 - phi) / (1 + phi), rel=0.1)

    def test_antithetic_chain_is_worth_more_than_its_draws(self):
        ess = effective_sample_size(autoregressive(-0.4))
        assert ess.mean() / 4000 == pytest.approx(1.4 / 0.6, rel=0.1)

    def test_cap(self):
        alternating = torch.tensor([1.0, -1.0]).repeat(500).view(1, -1)
        assert effective_sample_size(alternating) == pytest.approx(1000 * math.log10(1000), rel=1e-6)

    def test_chains_that_disagree_are_worth_little(self):
        apart = normal(4, 1000) + 5.0 * torch.arange(4).view(4, 1, 1)
        assert (effective_sample_size(apart) < 10).all()

    def test_does_not_see_shift_and_scale(self):
        draws = autoregressive(0.5)
        torch.testing.assert_close(effective_sample_size(3.0 - 20.0 * draws), effective_sample_size(draws))

    def test_is_the_variance_of_the_mean(self):
        """The definition: the mean of a chain varies as if it were of ESS independent draws."""
        draws = autoregressive(0.8, num_chains=40, length=500)  # 8,000 means of single chains
        apart = draws.transpose(0, 1).reshape(1, 500, -1)
        worth = draws.var() / apart.mean(dim=1).var()
        assert effective_sample_size(apart).median() == pytest.approx(float(worth), rel=0.1)


class TestSplitRHat:
    def test_by_hand(self):
        draws = torch.tensor(
            [[0.0, 2.0, 4.0, 8.0]]
        )  # halves (0, 2) and (4, 8): W = (2 + 8) / 2, variance of means 12.5
        assert split_r_hat(draws) == pytest.approx(math.sqrt((0.5 * 5 + 12.5) / 5))

    def test_mixed_chains(self):
        r_hat = split_r_hat(normal(4, 1000))
        assert ((r_hat - 1).abs() < 0.01).all()

    def test_chains_in_different_places(self):
        assert (split_r_hat(normal(4, 1000) + torch.arange(4).view(4, 1, 1)) > 1.3).all()

    def test_one_chain_that_drifts(self):
        assert (split_r_hat(normal(1, 1000) + torch.linspace(0, 4, 1000).view(1, -1, 1)) > 1.3).all()

    def test_chains_that_never_move(self):
        stuck = torch.tensor([1.0, 2.0]).view(2, 1).expand(2, 10)
        assert split_r_hat(stuck) == math.inf
        assert split_r_hat(stuck[:1]).isnan()
        assert effective_sample_size(stuck[:1]).isnan()


def test_too_few_states_are_refused():
    for function in (split_r_hat, effective_sample_size):
        with pytest.raises(UsageError, match=r"at least 4 states a chain, got \(2, 3\)"):
            function(torch.zeros(2, 3))


def test_an_odd_last_state_is_left_out():
    draws = normal(2, 101)
    assert torch.equal(split_r_hat(draws), split_r_hat(draws[:, :100]))


def test_chains_takes_the_draws_of_each_chain_apart():
    chain = Chain(kernel=Mala(step_size=0.05), steps=9, burn_in=3, keep="all", num_chains=3, start="uniform")
    draws = chain(model, batch(5), Linf(epsilon=0.3), CrossEntropy(), key=2)
    apart = chains(draws, 3)
    assert apart.shape == (3, 6, 5, 1, 1, 2)
    first = Chain(kernel=Mala(step_size=0.05), steps=9, burn_in=3, keep="all", start="uniform")
    torch.testing.assert_close(apart[0], first(model, batch(5), Linf(epsilon=0.3), CrossEntropy(), key=2))
    with pytest.raises(UsageError, match="18 draws per example do not divide into num_chains=4"):
        chains(draws, 4)


class TestDiagnose:
    def run(self, kernel=None, **options):
        kernel = Hmc(step_size=0.1) if kernel is None else kernel
        chain = Chain(kernel=kernel, steps=220, burn_in=20, keep="all", num_chains=4, start="uniform", **options)
        return chain, diagnose(chain, model, batch(3), Linf(epsilon=0.4), CrossEntropy(), key=7)

    def test_a_good_chain(self):
        chain, found = self.run()
        assert found.draws.shape == (4, 200, 3, 1, 1, 2)
        sampled = chain(model, batch(3), Linf(epsilon=0.4), CrossEntropy(), key=7)
        assert torch.equal(chains(sampled, 4), found.draws)
        assert found.acceptance_rate.shape == (4, 3)
        assert found.r_hat.shape == found.effective_sample_size.shape == (3, 1, 1, 2)
        assert (found.acceptance_rate > 0.9).all()
        assert (found.r_hat < 1.05).all()
        assert (found.effective_sample_size > 200).all()
        assert "4 chains of 200 states: acceptance 0.9" in str(found) or "acceptance 1.00" in str(found)

    def test_a_bad_one(self):
        """Steps far too small: everything is accepted and nothing is learnt."""
        _, found = self.run(Mala(step_size=1e-7))
        assert (found.acceptance_rate > 0.99).all()
        assert (found.r_hat > 1.5).all()
        assert (found.effective_sample_size < 20).all()

    def test_a_step_far_too_large(self):
        _, found = self.run(Mala(step_size=50.0))
        assert (found.acceptance_rate < 0.05).all()

    def test_acceptance_counts_moves(self):
        """A continuous proposal that is accepted moves the chain, and one that is rejected does not."""
        chain = Chain(kernel=Mala(step_size=0.1), steps=60, num_chains=2, start="uniform")
        found = diagnose(chain, model, batch(3), Linf(epsilon=0.4), CrossEntropy(), key=7)
        moved = (found.draws.diff(dim=1).flatten(3) != 0).any(dim=3).sum(dim=1)
        assert ((found.acceptance_rate * 60 - moved).abs() <= 1).all()  # the first move is not among the differences
        assert 0 < moved.sum() < moved.numel() * 59

    def test_a_module_keeps_its_mode(self):
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(2, 2))
        net[2].eval()
        chain = Chain(kernel=Hmc(step_size=0.1), steps=6)
        diagnose(chain, net, batch(2), Linf(epsilon=0.4), CrossEntropy(), key=1)
        assert [module.training for module in net] == [True, True, False]

    def test_kernels_without_acceptance_and_train_mode_are_refused(self):
        with pytest.raises(UsageError, match="expected a chain with the kernel Mala or Hmc"):
            self.run(Langevin())
        with pytest.raises(UsageError, match="expected mode='eval'"):
            self.run(mode="train")


def test_acceptance_rate_is_per_chain_and_example():
    state = {"accepted": torch.tensor([0, 1, 2, 3, 4, 5])}
    assert acceptance_rate(state, 10, num_chains=2).tolist() == [[0.0, 0.1, 0.2], [0.3, 0.4, 0.5]]
