import itertools
import math

import pytest
import torch

from dale.errors import UsageError
from dale.lambda_star import gamma_for_budget, grid, mu, norm, value, weights

GAMMAS = [1e-3, 0.05, 0.3, 1.0, 20.0]


def random_losses(k: int, b: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.rand(k, b, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def bisected(losses: torch.Tensor, gamma: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve sum_k [(l_k - mu) / (K gamma)]_+ = 1 for mu by bisection: nothing shared with the code under test."""
    scale = len(losses) * gamma
    low, high = losses.amin(0) - scale, losses.amax(0)
    for _ in range(200):
        middle = (low + high) / 2
        too_low = ((losses - middle) / scale).clamp_min(0).sum(0) > 1
        low, high = torch.where(too_low, middle, low), torch.where(too_low, high, middle)
    return ((losses - low) / scale).clamp_min(0), low


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("k", [1, 2, 5, 40])
class TestClosedForm:
    def test_against_bisection_on_mu(self, k, gamma):
        losses = random_losses(k)
        expected_weights, expected_mu = bisected(losses, gamma)
        torch.testing.assert_close(weights(losses, gamma), expected_weights, atol=1e-10, rtol=0)
        torch.testing.assert_close(mu(losses, gamma), expected_mu, atol=1e-10, rtol=1e-10)

    def test_no_point_of_the_simplex_does_better(self, k, gamma):
        losses = random_losses(k)
        noise = torch.rand(2000, k, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        others = (-noise.log()) ** torch.linspace(0.2, 4, 2000).reshape(-1, 1, 1)
        others = others / others.sum(1, keepdim=True)
        # from random points, and from random points near the claimed optimum
        others = torch.cat([others, 0.99 * weights(losses[:, :1], gamma) + 0.01 * others])
        rival = (others * losses[:, :1]).sum(1) - 0.5 * k * gamma * others.square().sum(1)
        assert rival.max() <= value(losses, gamma)[0] + 1e-12

    def test_float32_agrees_with_float64(self, k, gamma):
        losses = random_losses(k).float()
        w = weights(losses, gamma)
        assert w.dtype == torch.float32
        torch.testing.assert_close(w.double(), weights(losses.double(), gamma), atol=2e-6 / gamma / k + 1e-6, rtol=0)


def test_expected_loss_falls_with_gamma_from_max_to_mean():
    losses = random_losses(16)
    values = torch.stack([(weights(losses, g) * losses).sum(0) for g in (0.0, *GAMMAS, math.inf)])
    assert (values.diff(dim=0) <= 1e-12).all()
    assert torch.equal(values[0], losses.amax(0))
    torch.testing.assert_close(values[-1], losses.mean(0))


def test_limits_of_mu_and_ties():
    losses = torch.tensor([1.0, 3.0, 3.0, 2.0])
    assert weights(losses, 0.0).tolist() == [0, 0.5, 0.5, 0]
    assert mu(losses, 0.0) == 3
    assert weights(losses, math.inf).tolist() == [0.25] * 4
    assert mu(losses, math.inf) == -math.inf


def test_a_shift_of_the_losses_moves_only_mu():
    losses = random_losses(7)
    torch.testing.assert_close(weights(losses + 1000, 0.3), weights(losses, 0.3), atol=1e-11, rtol=0)
    torch.testing.assert_close(mu(losses + 1000, 0.3), mu(losses, 0.3) + 1000)


def test_one_gamma_for_each_example():
    losses = random_losses(7, b=3)
    gammas = torch.tensor([0.01, 0.3, 5.0], dtype=torch.float64)
    apart = torch.stack([weights(losses[:, i], float(g)) for i, g in enumerate(gammas)], dim=1)
    torch.testing.assert_close(weights(losses, gammas), apart, rtol=1e-14, atol=0)


def test_gradient_of_the_regularised_maximum_is_the_weights():
    losses = random_losses(6, b=4).requires_grad_()
    for gamma in (0.05, 0.4, 3.0):
        assert torch.autograd.gradcheck(lambda x, g=gamma: value(x, g), (losses,))
        (gradient,) = torch.autograd.grad(value(losses, gamma).sum(), losses)
        assert torch.equal(gradient, weights(losses.detach(), gamma))


class TestNormBudget:
    @pytest.mark.parametrize("k", [2, 3, 8, 64])
    @pytest.mark.parametrize("fraction", [1e-4, 0.1, 0.5, 0.9, 0.999])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_budget_is_met(self, k, fraction, dtype):
        losses, budget = random_losses(k).to(dtype), 1 + fraction * (k - 1)
        gamma = gamma_for_budget(losses, budget)
        assert gamma.dtype == dtype
        tolerance = 1e-10 if dtype == torch.float64 else 1e-5
        found = norm(weights(losses.double(), gamma.double()))
        torch.testing.assert_close(found, torch.full_like(found, budget), rtol=tolerance, atol=0)

    def test_against_bisection_on_gamma(self):
        losses = random_losses(12)
        low, high = torch.tensor([[1e-6], [1e3]], dtype=torch.float64).expand(2, 50)
        for _ in range(200):
            middle = (low * high).sqrt()
            too_low = norm(weights(losses, middle)) > 3.3
            low, high = torch.where(too_low, middle, low), torch.where(too_low, high, middle)
        torch.testing.assert_close(gamma_for_budget(losses, 3.3), low, rtol=1e-9, atol=0)

    def test_ends(self):
        losses = random_losses(5)
        assert (gamma_for_budget(losses, 1.0) == math.inf).all()
        for budget in (5.0, 5.1, 1e9):
            w = weights(losses, gamma_for_budget(losses, budget))
            torch.testing.assert_close((w * losses).sum(0), losses.amax(0), rtol=1e-12, atol=0)

    def test_ties_share_equally_where_the_budget_cannot_be_met(self):
        losses = torch.tensor([[2.0, 1.0, 0.0, 4.0], [2.0, 3.0, 0.0, 4.0], [1.0, 3.0, 0.0, 4.0]])
        for budget in (1.5, 2.0, 3.0):  # 3/2 is the norm of two equal maxima, 1 of three
            w = weights(losses, gamma_for_budget(losses, budget))
            third = 1 / 3
            expected = torch.tensor([[0.5, 0, third, third], [0.5, 0.5, third, third], [0, 0.5, third, third]])
            torch.testing.assert_close(w, expected)

    def test_near_ties_at_the_norm_of_the_tie_do_not_jump_to_the_mean(self):
        # K/m is the norm of m equal maxima: with nearly equal ones rounding decides on which side of a breakpoint the
        # root is sought, where the formula divides by almost 0; the bracket is what keeps the answer right
        generator = torch.Generator().manual_seed(0)
        for gap in (1e-15, 1e-12, 1e-8, 1e-6):
            near = torch.randint(0, 3, (6, 400), generator=generator)
            losses = near + gap * torch.rand(6, 400, generator=generator, dtype=torch.float64)
            for budget in (1.2, 1.5, 2.0, 3.0, 6.0):
                w = weights(losses, gamma_for_budget(losses, budget))
                # the equal losses' norm is the most that can be had of the near ties, up to the gap
                ties = (near == near.amax(0)).sum(0)
                attainable = torch.minimum(torch.tensor(budget).double(), 6.0 / ties)
                assert (norm(w) > attainable - 1e-4).all()
                assert (norm(w) < budget + 1e-4).all()

    @pytest.mark.parametrize("budget", [1.0, 1.5, 7.0])
    @pytest.mark.parametrize("k", [1, 4])
    def test_equal_losses_are_weighed_equally_whatever_the_budget(self, k, budget):
        losses = torch.full((k, 2), 0.7)
        assert torch.equal(weights(losses, gamma_for_budget(losses, budget)), torch.full((k, 2), 1 / k))

    def test_scale_of_the_losses_does_not_matter(self):
        losses = random_losses(6)
        for scale in (1e-20, 1e20):
            w = weights(losses * scale, gamma_for_budget(losses * scale, 2.2))
            torch.testing.assert_close(w, weights(losses, gamma_for_budget(losses, 2.2)), atol=1e-9, rtol=0)

    def test_below_one_is_refused(self):
        with pytest.raises(UsageError, match="at least 1"):
            gamma_for_budget(random_losses(3), 0.9)


class TestGrid:
    def test_linear_loss_on_an_interval_by_hand(self):
        # loss = d on [0, 1], density [(d - mu) / gamma]_+: mu = 1 - sqrt(2 gamma) for gamma <= 1/2, then the expected
        # loss is 1 - sqrt(2 gamma) / 3; above, mu = 1/2 - gamma and the expected loss 1/2 + 1 / (12 gamma)
        for gamma, level, expected in ((0.02, 0.8, 1 - 0.2 / 3), (0.125, 0.5, 1 - 0.5 / 3), (2.0, -1.5, 0.5 + 1 / 24)):
            exact = grid(lambda p: p[:, 0], lower=[0], upper=[1], resolution=4000, gamma=gamma)
            assert exact.mu == pytest.approx(level, abs=1e-6)
            assert exact.expected_loss == pytest.approx(expected, abs=1e-6)
            assert float(exact.density.mean()) == pytest.approx(1)
            inside = ((exact.losses - exact.mu) / gamma).clamp_min(0)
            torch.testing.assert_close(exact.density, inside, atol=1e-9, rtol=0)

    def test_limits(self):
        arguments = {"lower": [-1.0, -2.0], "upper": [1.0, 2.0], "resolution": 30}
        worst = grid(lambda p: p.sum(1), gamma=0.0, **arguments)
        uniform = grid(lambda p: p.sum(1), gamma=math.inf, **arguments)
        assert worst.expected_loss == worst.max_loss == pytest.approx(3, abs=0.11)
        assert uniform.expected_loss == pytest.approx(uniform.mean_loss) == pytest.approx(0)
        assert uniform.norm == pytest.approx(1)

    def test_norm_budget(self):
        exact = grid(lambda p: p.square().sum(1), lower=[-1, -1], upper=[1, 1], resolution=50, norm_budget=2.5)
        assert exact.norm == pytest.approx(2.5)
        assert exact.gamma > 0

    @pytest.mark.parametrize(("shape", "area"), [("box", 4.0), ("l2", math.pi), ("l1", 2.0)])
    def test_shapes(self, shape, area):
        found = grid(lambda p: p[:, 0], lower=[2, 0], upper=[4, 1], resolution=200, gamma=1.0, shape=shape).points
        assert len(found) / 200**2 * 4 == pytest.approx(area, rel=0.02)
        torch.testing.assert_close(found.mean(0), torch.tensor([3, 0.5], dtype=torch.float64))
        assert found[:, 0].max() == pytest.approx(4, abs=0.02)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"lower": [0] * 3, "upper": [1] * 3}, "1 or 2 entries"),
            ({"lower": [1], "upper": [0]}, "below upper"),
            ({"resolution": 0}, "resolution must be at least 1"),
            ({"gamma": None}, "either gamma or norm_budget"),
            ({"gamma": -1.0}, "gamma must be at least 0"),
            ({"shape": "L2"}, "did you mean 'l2'"),
            ({"loss_fn": lambda p: p}, "must return"),
        ],
    )
    def test_bad_requests(self, change, message):
        arguments = {"loss_fn": lambda p: p[:, 0], "lower": [0], "upper": [1], "resolution": 10, "gamma": 1.0}
        with pytest.raises(UsageError, match=message):
            grid(**{**arguments, **change})


def bumps(points: torch.Tensor) -> torch.Tensor:
    """Two hills of different height on the unit disc."""
    centres = torch.tensor([[0.5, 0.3], [-0.4, -0.5]], dtype=torch.float64)
    squares = (points[:, None] - centres).square().sum(-1)
    return (torch.tensor([1.5, 1.0], dtype=torch.float64) * (-squares / 0.1).exp()).sum(1)


def test_expected_loss_converges_to_the_exact_one_as_candidates_grow_and_drifts_to_the_max_without_the_factor_k():
    gamma = 0.3
    exact = grid(bumps, lower=[-1, -1], upper=[1, 1], resolution=400, gamma=gamma, shape="l2")
    assert exact.mean_loss + 0.2 < exact.expected_loss < exact.max_loss - 0.2
    generator = torch.Generator().manual_seed(0)
    error, without = [], []
    for k in (16, 128, 1024, 8192):
        radius = torch.rand(k * 100, 1, generator=generator, dtype=torch.float64).sqrt()
        angle = torch.rand(k * 100, 1, generator=generator, dtype=torch.float64) * 2 * math.pi
        losses = bumps(radius * torch.cat([angle.cos(), angle.sin()], 1)).reshape(k, 100)
        error.append(float(((weights(losses, gamma) * losses).sum(0) - exact.expected_loss).square().mean().sqrt()))
        without.append(float((weights(losses, gamma / k) * losses).sum(0).mean()))
    # the error falls like 1 / sqrt(K): by 2.8 for each factor 8
    assert all(after < before / 2 for before, after in itertools.pairwise(error))
    assert error[-1] < 0.02
    # without the factor K the same gamma is a smaller and smaller one
    assert all(after > before for before, after in itertools.pairwise(without))
    assert without[-1] > exact.max_loss - 0.03
