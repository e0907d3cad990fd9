import math

import pytest
import torch

from dale.aggregators import Aggregator, CVaR, LambdaStar, MaxOf, MeanOf, Tilted
from dale.components import dump_yaml, known, load_yaml
from dale.errors import UsageError

ALL = [
    MeanOf(),
    MaxOf(),
    LambdaStar(gamma=0.2),
    LambdaStar(norm_budget=1.7),
    CVaR(beta=0.35),
    Tilted(t=3.0),
]
IDS = [repr(a) for a in ALL]


def random_losses(k: int, b: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.rand(k, b, generator=torch.Generator().manual_seed(seed)) * 3


def test_every_aggregator_of_the_package_is_in_the_contract_below():
    assert {type(a) for a in ALL} == {c for c in Aggregator.__subclasses__() if c.__module__ == "dale.aggregators"}


@pytest.mark.parametrize("aggregator", ALL, ids=IDS)
class TestContract:
    @pytest.mark.parametrize("k", [1, 2, 7, 32])
    def test_in_simplex_and_between_mean_and_max(self, aggregator, k):
        losses = random_losses(k)
        w = aggregator(losses)
        assert w.shape == losses.shape
        assert w.dtype == torch.float32
        assert (w >= 0).all()
        torch.testing.assert_close(w.sum(0), torch.ones(64))
        value = (w * losses).sum(0)
        assert (value >= losses.mean(0) - 1e-5).all()
        assert (value <= losses.amax(0) + 1e-5).all()

    def test_one_candidate_has_all_the_weight(self, aggregator):
        assert torch.equal(aggregator(random_losses(1)), torch.ones(1, 64))

    def test_a_larger_loss_never_has_less_weight(self, aggregator):
        losses = random_losses(9)
        sorted_weights = aggregator(losses).gather(0, losses.argsort(0))
        assert (sorted_weights.diff(dim=0) >= 0).all()

    def test_order_of_candidates_and_of_examples_does_not_matter(self, aggregator):
        losses = random_losses(6)
        rows, columns = torch.tensor([3, 1, 5, 0, 2, 4]), torch.arange(63, -1, -1)
        torch.testing.assert_close(aggregator(losses[rows][:, columns]), aggregator(losses)[rows][:, columns])

    def test_weights_carry_no_gradient(self, aggregator):
        losses = random_losses(5).requires_grad_()
        w = aggregator(losses)
        assert not w.requires_grad
        (w * losses).sum().backward()
        assert torch.equal(losses.grad, w)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_low_precision_losses_are_weighed_in_float32(self, aggregator, dtype):
        losses = random_losses(5).to(dtype)
        w = aggregator(losses)
        assert w.dtype == torch.float32
        assert torch.equal(w, aggregator(losses.float()))

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_broken_loss_shows_in_its_example_and_in_no_other(self, aggregator, bad):
        losses = random_losses(4, b=3)
        expected = aggregator(losses)
        losses[2, 1] = bad
        w = aggregator(losses)
        assert torch.equal(w[:, [0, 2]], expected[:, [0, 2]])
        assert w[:, 1].tolist() == [0, 0, 1, 0]
        assert not (w * losses).sum(0)[1].isfinite()

    def test_minus_infinity_counts_as_a_very_small_loss(self, aggregator):
        losses = random_losses(4, b=3)
        losses[1, 0] = -math.inf
        losses[:, 1] = -math.inf
        w = aggregator(losses)
        torch.testing.assert_close(w.sum(0), torch.ones(3))
        assert w[1, 0] == w[:, 0].min()

    @pytest.mark.parametrize("level", [0.0, 1e-30, 1e30])
    def test_equal_losses_of_any_size(self, aggregator, level):
        w = aggregator(torch.full((3, 2), level))
        torch.testing.assert_close(w.sum(0), torch.ones(2))

    def test_no_number_is_read_back_to_the_host(self, aggregator):
        # a tensor without data has no number to read: any `.item()` or branch on a value would raise
        assert aggregator(torch.empty(4, 3, device="meta")).shape == (4, 3)

    def test_empty_batch(self, aggregator):
        assert aggregator(torch.zeros(3, 0)).shape == (3, 0)

    @pytest.mark.parametrize("shape", [(3,), (0, 4), (2, 3, 4)])
    def test_wrong_shape(self, aggregator, shape):
        with pytest.raises(UsageError, match=r"shape \(K, B\)"):
            aggregator(torch.zeros(shape))

    def test_yaml_round_trip(self, aggregator):
        assert load_yaml(dump_yaml(aggregator), Aggregator) == aggregator


def test_weigh_sees_finite_losses_only():
    class Checked(Aggregator):
        def weigh(self, losses):
            assert losses.isfinite().all()
            return torch.full_like(losses, 0.5)

    losses = torch.tensor([[math.nan, 1.0, 0.0], [math.inf, 2.0, -math.inf]])
    assert Checked()(losses).tolist() == [[1, 0.5, 0.5], [0, 0.5, 0.5]]


def test_max_takes_the_first_of_equal_losses():
    losses = torch.tensor([[1.0, 2.0], [3.0, 2.0], [3.0, 2.0]])
    assert MaxOf()(losses).tolist() == [[0, 1], [1, 0], [0, 0]]


def test_cvar_by_hand():
    losses = torch.tensor([[1.0], [4.0], [2.0], [3.0]])
    # beta K = 2.5: the two worst whole, the third by half
    assert CVaR(beta=0.625)(losses).flatten().tolist() == pytest.approx([0, 0.4, 0.2, 0.4])
    assert CVaR(beta=0.5)(losses).flatten().tolist() == [0, 0.5, 0, 0.5]
    assert CVaR(beta=1)(losses).flatten().tolist() == [0.25] * 4
    assert CVaR(beta=0.25)(losses).flatten().tolist() == [0, 1, 0, 0]
    assert CVaR(beta=1e-12)(losses).flatten().tolist() == [0, 1, 0, 0]
    # 0.3 * 10 is 3.0000000000000004 in floating point: still exactly three
    assert (CVaR(beta=0.1 * 3)(torch.arange(10.0)[:, None]) > 0).sum() == 3


def test_cvar_is_the_minimum_of_rockafellar_and_uryasev():
    losses = random_losses(11).double()
    for beta in (0.07, 0.2, 0.5, 0.83):
        value = (CVaR(beta=beta)(losses) * losses).sum(0)
        # min over c of c + E[(l - c)_+] / beta is attained at one of the losses
        candidates = torch.stack([c + (losses - c).clamp_min(0).mean(0) / beta for c in losses])
        torch.testing.assert_close(value, candidates.amin(0))


def test_tilted_limits_and_value():
    losses = random_losses(6)
    assert torch.equal(Tilted(t=0)(losses), MeanOf()(losses))
    for t in (1e8, 1e39, 1e300):
        assert torch.equal(Tilted(t=t)(losses), MaxOf()(losses))
    assert torch.equal(Tilted(t=1e8)(torch.full((2, 3), 1e35)), torch.full((2, 3), 0.5))
    torch.testing.assert_close(Tilted(t=2.0)(torch.tensor([[0.0], [math.log(3) / 2]])), torch.tensor([[0.25], [0.75]]))


def test_lambda_star_by_hand():
    losses = torch.tensor([[0.0], [1.0], [2.0]])
    # K gamma = 3: w = (l - mu) / 3 with mu = 0; K gamma = 1.5: the smallest drops out, mu = 0.75
    assert LambdaStar(gamma=1.0)(losses).flatten().tolist() == pytest.approx([0, 1 / 3, 2 / 3])
    assert LambdaStar(gamma=0.5)(losses).flatten().tolist() == pytest.approx([0, 1 / 6, 5 / 6])
    assert LambdaStar(norm_budget=1)(losses).flatten().tolist() == pytest.approx([1 / 3] * 3)
    assert LambdaStar(norm_budget=3)(losses).flatten().tolist() == [0, 0, 1]
    # the weights (0, 1/3, 2/3) have norm 3 (1/9 + 4/9) = 5/3
    assert LambdaStar(norm_budget=5 / 3)(losses).flatten().tolist() == pytest.approx([0, 1 / 3, 2 / 3], abs=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (LambdaStar, "either gamma or norm_budget"),
        (lambda: LambdaStar(gamma=1.0, norm_budget=2.0), "either gamma or norm_budget"),
        (lambda: LambdaStar(gamma=0.0), "gamma must be a finite number above 0"),
        (lambda: LambdaStar(gamma=math.nan), "gamma must be a finite number above 0"),
        (lambda: LambdaStar(norm_budget=0.5), "norm_budget must be at least 1"),
        (lambda: CVaR(beta=0), r"beta must be in \(0, 1\]"),
        (lambda: CVaR(beta=1.5), r"beta must be in \(0, 1\]"),
        (lambda: Tilted(t=-1), "t must be a finite number of at least 0"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_known_by_name():
    assert set(known(Aggregator)) == {"MeanOf", "MaxOf", "LambdaStar", "CVaR", "Tilted"}
