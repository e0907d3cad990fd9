import json
import math
import subprocess
import sys
import time

import numpy as np
import pytest
from scipy import stats

from dale.certificates import (
    betting,
    certify_accuracy,
    certify_mean,
    certify_nominal,
    clopper_pearson,
    empirical_bernstein,
    hoeffding,
)
from dale.errors import NumericsError, UsageError

BOUNDS = [hoeffding, empirical_bernstein, betting]
REPETITIONS = 2000

# name: (draw, true mean, B)
DISTRIBUTIONS = {
    "bernoulli(0.1)": (lambda rng, shape: (rng.random(shape) < 0.1).astype(float), 0.1, 1.0),
    "bernoulli(0.5)": (lambda rng, shape: (rng.random(shape) < 0.5).astype(float), 0.5, 1.0),
    "bernoulli(0.95)": (lambda rng, shape: (rng.random(shape) < 0.95).astype(float), 0.95, 1.0),
    "beta(1, 5)": (lambda rng, shape: rng.beta(1, 5, shape), 1 / 6, 1.0),
    "beta(10, 3)": (lambda rng, shape: rng.beta(10, 3, shape), 10 / 13, 1.0),
    # min(X, 2) of an exponential X of mean 0.8 has mean 0.8 (1 - exp(-2 / 0.8))
    "exponential clipped at 2": (lambda rng, shape: rng.exponential(0.8, shape), 0.8 * (1 - math.exp(-2.5)), 2.0),
}
# what nominal losses look like: most examples easy, few hard
TYPICAL = ["bernoulli(0.1)", "bernoulli(0.5)", "beta(1, 5)", "exponential clipped at 2"]


def draws(name: str, n: int, repetitions: int, seed: int = 0) -> tuple[np.ndarray, float, float]:
    draw, mean, upper = DISTRIBUTIONS[name]
    return draw(np.random.default_rng(seed), (repetitions, n)), mean, upper


def allowed_failures(alpha: float) -> int:
    """Return the 99.9% quantile of the number of failures of a bound that fails exactly with probability alpha."""
    return int(stats.binom.ppf(0.999, REPETITIONS, alpha))


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda f: f.__name__)
class TestBounds:
    @pytest.mark.parametrize("name", DISTRIBUTIONS)
    def test_coverage(self, bound, name):
        alpha = 0.1
        samples, mean, upper = draws(name, 100, REPETITIONS)
        failures = sum(bound(values, alpha, upper) < mean for values in samples)
        assert failures <= allowed_failures(alpha)

    @pytest.mark.verify
    @pytest.mark.parametrize("alpha", [0.01, 0.05, 0.25])
    @pytest.mark.parametrize("n", [30, 300])
    @pytest.mark.parametrize("name", DISTRIBUTIONS)
    def test_coverage_at_other_levels_and_sizes(self, bound, name, n, alpha):
        samples, mean, upper = draws(name, n, REPETITIONS, seed=n)
        failures = sum(bound(values, alpha, upper) < mean for values in samples)
        assert failures <= allowed_failures(alpha)

    @pytest.mark.parametrize("n", [1, 2, 10, 1000])
    @pytest.mark.parametrize("name", DISTRIBUTIONS)
    def test_between_sample_mean_and_upper_end(self, bound, name, n):
        samples, _, upper = draws(name, n, 20)
        for values in samples:
            assert np.minimum(values, upper).mean() <= bound(values, 0.05, upper) <= upper

    def test_never_below_the_sample_mean_in_the_worst_order(self, bound):
        values = np.concatenate([np.zeros(200), np.ones(50)])
        assert bound(values, 0.05, 1.0) >= 0.2

    def test_more_confidence_is_a_larger_bound_and_more_data_a_smaller_one(self, bound):
        values = np.minimum(draws("exponential clipped at 2", 4000, 1)[0][0], 2)
        by_alpha = [bound(values, alpha, 2.0) for alpha in (0.2, 0.05, 0.001)]
        assert by_alpha == sorted(by_alpha)
        assert by_alpha[0] < by_alpha[-1]
        by_n = [bound(np.tile([0.0, 0.5, 2.0], n), 0.05, 2.0) for n in (30, 300, 3000)]
        assert by_n == sorted(by_n, reverse=True)
        assert by_n[-1] == pytest.approx(2.5 / 3, abs=0.05)

    def test_the_unit_does_not_matter(self, bound):
        values = draws("beta(1, 5)", 200, 1)[0][0]
        assert bound(values * 7, 0.05, 7.0) == pytest.approx(7 * bound(values, 0.05, 1.0))

    def test_values_above_the_end_are_clipped(self, bound):
        values = draws("exponential clipped at 2", 200, 1)[0][0]
        assert values.max() > 2
        with_infinity = np.where(values > 2, math.inf, values)
        assert bound(with_infinity, 0.05, 2.0) == bound(np.minimum(values, 2.0), 0.05, 2.0)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (([], 0.05, 1.0), UsageError, "at least 1 example, got 0"),
            (([0.1, -0.2], 0.05, 1.0), UsageError, "at least 0 .* got -0.2"),
            (([0.1, math.nan], 0.05, 1.0), NumericsError, "1 of 2 losses are NaN"),
            (([0.1], 0.0, 1.0), UsageError, "alpha must be between 0 and 1"),
            (([0.1], 1.0, 1.0), UsageError, "alpha must be between 0 and 1"),
            (([0.1], 0.05, 0.0), UsageError, "finite number above 0"),
            (([0.1], 0.05, math.inf), UsageError, "finite number above 0"),
        ],
    )
    def test_bad_input(self, bound, arguments, error, message):
        with pytest.raises(error, match=message):
            bound(*arguments)


def test_hoeffding_and_empirical_bernstein_by_hand():
    values = np.array([0.0, 1.0] * 500)
    assert hoeffding(values, math.exp(-2), 1.0) == pytest.approx(0.5 + math.sqrt(2 / 2000))
    variance, log = 0.25 * 1000 / 999, 3.0
    expected = 0.5 + math.sqrt(2 * variance * log / 1000) + 7 * log / (3 * 999)
    assert empirical_bernstein(values, 2 * math.exp(-3), 1.0) == pytest.approx(expected)


def test_betting_by_hand():
    # one value 0: y = 1, the bet is sqrt(2 log(1/alpha) / (1/4)), held to c/m; capital 1 + c (1 - m) / m = 1/alpha
    assert betting([0.0], 0.5, 1.0) == pytest.approx(1 - 0.75 / 1.75)
    # one value B: y = 0 never gains, nothing is rejected
    assert betting([3.0], 0.5, 3.0) == 3.0


@pytest.mark.parametrize("values", [[0.6, 0.9, 0.4], [0.0, 0.1], [0.2, 0.0, 1.0, 0.7, 0.1, 0.3, 0.3, 0.0, 0.05, 0.2]])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.8])
def test_betting_against_the_definition_written_out(values, alpha):
    level = np.linspace(1e-5, 1, 100_000)
    capital, best = np.ones_like(level), np.ones_like(level)
    past: list[float] = []
    centres: list[float] = []
    for x in values:
        y = 1 - x
        # the bet on y is made from what came before it: the regularised variance of the past
        variance = (0.25 + sum((p - c) ** 2 for p, c in zip(past, centres, strict=True))) / (len(past) + 1)
        bet = math.sqrt(2 * math.log(1 / alpha) / (len(values) * variance))
        capital = capital * (1 + np.minimum(bet, 0.75 / level) * (y - level))
        best = np.maximum(best, capital)
        past.append(y)
        centres.append((0.5 + sum(past)) / (len(past) + 1))
    rejected = level[best >= 1 / alpha]
    expected = max(np.mean(values), 1 - rejected.max() if len(rejected) else 1.0)
    assert betting(values, alpha, 1.0) == pytest.approx(expected, abs=2e-5)


def test_betting_errs_on_the_safe_side_of_its_search():
    # n zeros: capital (1 + c (1 - m) / m)^n while every bet is at its largest; the exact root is known
    n, alpha = 3, 0.05
    root = 0.75 / (alpha ** (-1 / n) - 1 + 0.75)
    found = betting(np.zeros(n), alpha, 1.0)
    assert 1 - root <= found <= 1 - root + 1e-12


@pytest.mark.parametrize("n", [100, 300])
@pytest.mark.parametrize("name", TYPICAL)
def test_betting_is_the_tightest_on_average(name, n):
    samples, _, upper = draws(name, n, 200, seed=1)
    average = {bound: np.mean([bound(values, 0.05, upper) for values in samples]) for bound in BOUNDS}
    assert min(average, key=average.get) is betting


def test_betting_is_fast():
    values = draws("beta(1, 5)", 10_000, 1)[0][0]
    start = time.perf_counter()
    betting(values, 0.05, 1.0)
    assert time.perf_counter() - start < 1


class TestClopperPearson:
    @pytest.mark.parametrize(("k", "n"), [(0, 10), (1, 10), (7, 10), (10, 10), (873, 1000), (9999, 10_000)])
    @pytest.mark.parametrize("alpha", [0.001, 0.05, 0.3])
    def test_against_scipy(self, k, n, alpha):
        expected = stats.binomtest(k, n).proportion_ci(1 - alpha, method="exact")
        assert clopper_pearson(k, n, alpha) == pytest.approx((expected.low, expected.high), abs=1e-9)
        greater = stats.binomtest(k, n, alternative="greater").proportion_ci(1 - alpha, method="exact")
        assert clopper_pearson(k, n, alpha, side="lower") == pytest.approx((greater.low, 1), abs=1e-9)
        less = stats.binomtest(k, n, alternative="less").proportion_ci(1 - alpha, method="exact")
        assert clopper_pearson(k, n, alpha, side="upper") == pytest.approx((0, less.high), abs=1e-9)

    def test_known_values(self):
        assert clopper_pearson(0, 100, 0.05, side="upper")[1] == pytest.approx(1 - 0.05**0.01)  # the rule of three
        assert clopper_pearson(100, 100, 0.05, side="lower") == (pytest.approx(0.05**0.01), 1.0)
        assert clopper_pearson(4, 10, 0.05) == pytest.approx((0.12155, 0.73762), abs=1e-5)

    @pytest.mark.parametrize("p", [0.02, 0.5, 0.93])
    @pytest.mark.parametrize("side", ["two-sided", "lower", "upper"])
    def test_exact_coverage(self, p, side):
        # no simulation is needed: sum the probabilities of the counts whose interval misses p
        missed = 0.0
        for k in range(201):
            lower, upper = clopper_pearson(k, 200, 0.05, side=side)
            missed += 0.0 if lower <= p <= upper else float(stats.binom.pmf(k, 200, p))
        assert 0.01 < missed <= 0.05

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((1, 0, 0.05), "at least 1 trial"),
            ((5, 4, 0.05), "between 0 and trials = 4, got 5"),
            ((-1, 4, 0.05), "got -1"),
            ((1, 4, 5), "alpha must be"),
            ((1, 4, 0.05, "both"), "unknown side 'both'"),
        ],
    )
    def test_bad_input(self, arguments, message):
        with pytest.raises(UsageError, match=message):
            clopper_pearson(*arguments)


class TestCertifyMean:
    def test_says_what_it_is_about(self):
        certificate = certify_mean([0.1, 0.2, 9.0] * 100, alpha=0.05, upper=4.0)
        assert (certificate.method, certificate.n, certificate.upper) == ("betting", 300, 4.0)
        assert certificate.mean == pytest.approx(4.3 / 3)
        statement = certificate.statement()
        assert "95%" in statement
        assert "clipped at B = 4" in statement
        assert "300 held-out examples" in statement
        printed = float(statement.partition("at most ")[2].split()[0])
        assert certificate.bound <= printed < certificate.bound + 1e-4

    @pytest.mark.parametrize("bound", BOUNDS, ids=lambda f: f.__name__)
    def test_methods(self, bound):
        values = draws("beta(1, 5)", 500, 1)[0][0]
        found = certify_mean(values, alpha=0.05, upper=1.0, method=bound.__name__)
        tolerance = 0.01 if bound is betting else 1e-12  # betting sees another order
        assert found.bound == pytest.approx(bound(values, 0.05, 1.0), abs=tolerance)
        assert found == certify_mean(values, alpha=0.05, upper=1.0, method=bound.__name__)

    def test_sorted_data_is_certified_as_well_as_shuffled_data(self):
        rng = np.random.default_rng(0)
        covered, excess = 0, []
        for _ in range(300):
            values = rng.beta(1, 5, 300)
            bound = certify_mean(np.sort(values), alpha=0.1, upper=1.0).bound
            covered += bound >= 1 / 6
            excess.append(bound - betting(values, 0.1, 1.0))
        assert 300 - covered <= stats.binom.ppf(0.999, 300, 0.1)
        assert abs(np.mean(excess)) < 0.003

    def test_unknown_method(self):
        with pytest.raises(UsageError, match="did you mean 'betting'"):
            certify_mean([0.1], alpha=0.05, upper=1.0, method="beting")


class TestCertifyNominal:
    rng = np.random.default_rng(5)
    losses = rng.exponential(0.3, 3000)
    errors = losses > 1.2
    groups = np.arange(3000) % 3

    def test_without_groups(self):
        found = certify_nominal(self.losses, self.errors, rho=0.35, alpha=0.05, clip=4.0)
        assert found.loss == certify_mean(self.losses, alpha=0.05, upper=4.0)
        assert found.accuracy == certify_accuracy(self.errors, alpha=0.05)
        assert (found.accuracy.k, found.accuracy.n) == (int((~self.errors).sum()), 3000)
        assert (found.accuracy.lower, found.accuracy.upper) == clopper_pearson(found.accuracy.k, 3000, 0.05)
        assert found.groups == ()
        assert (found.holds, found.loss_holds, found.accuracy_holds) == (True, True, None)
        assert "mean clipped loss <= 0.35 holds with confidence 95%" in found.statement()

    def test_a_limit_between_mean_and_bound_is_not_proven(self):
        bound = certify_mean(self.losses, alpha=0.05, upper=4.0).bound
        rho = (bound + self.losses.mean()) / 2
        found = certify_nominal(self.losses, self.errors, rho=rho, alpha=0.05, clip=4.0)
        assert found.holds is False
        assert "NOT proven" in found.statement()
        assert certify_nominal(self.losses, self.errors, rho=bound, alpha=0.05, clip=4.0).holds is True

    def test_groups_share_alpha(self):
        found = certify_nominal(self.losses, self.errors, rho=0.4, alpha=0.06, clip=4.0, groups=self.groups)
        assert [g.group for g in found.groups] == [0, 1, 2]
        for g in found.groups:
            part = self.groups == g.group
            assert g.loss == certify_mean(self.losses[part], alpha=0.02, upper=4.0)
            assert g.accuracy == certify_accuracy(self.errors[part], alpha=0.02)
        assert found.loss.alpha == 0.06
        assert found.holds is True

    def test_one_bad_group_is_named(self):
        losses = np.where(self.groups == 1, self.losses + 0.5, self.losses)
        found = certify_nominal(losses, self.errors, rho=0.6, alpha=0.05, clip=4.0, groups=self.groups)
        assert found.loss.bound < 0.6  # the whole would pass
        assert found.holds is False
        assert "group 1 (" in found.statement()
        assert "group 0 (" not in found.statement()
        relaxed = certify_nominal(losses, self.errors, rho={1: 1.0}, alpha=0.05, clip=4.0, groups=self.groups)
        assert relaxed.holds is True
        assert [g.rho for g in relaxed.groups] == [None, 1.0, None]

    def test_joint_coverage_over_groups(self):
        rng = np.random.default_rng(3)
        label, alpha, failures = np.arange(200) % 4, 0.2, 0
        for _ in range(500):
            wrong = rng.random(200) < 0.3
            values = wrong * 1.0
            found = certify_nominal(values, wrong, rho=None, alpha=alpha, clip=1.0, groups=label, method="hoeffding")
            failures += any(not g.accuracy.lower <= 0.7 <= g.accuracy.upper for g in found.groups)
        # four intervals at alpha each, not alpha / 4, would miss in half of the repetitions
        assert failures <= stats.binom.ppf(0.999, 500, alpha)

    def test_min_accuracy(self):
        accuracy = certify_accuracy(self.errors, alpha=0.05)
        arguments = {"rho": None, "alpha": 0.05, "clip": 4.0}
        met = certify_nominal(self.losses, self.errors, min_accuracy=accuracy.lower, **arguments)
        assert (met.holds, met.loss_holds, met.accuracy_holds) == (True, None, True)
        missed = certify_nominal(self.losses, self.errors, min_accuracy=1 - self.errors.mean(), **arguments)
        assert (missed.holds, missed.accuracy_holds) == (False, False)
        assert "is NOT proven" in missed.statement()
        neither = certify_nominal(self.losses, self.errors, **arguments)
        assert neither.holds is None

    def test_both_limits_must_hold(self):
        found = certify_nominal(self.losses, self.errors, rho=0.35, min_accuracy=0.999, alpha=0.05, clip=4.0)
        assert (found.loss_holds, found.accuracy_holds, found.holds) == (True, False, False)

    def test_plain_form_is_json(self):
        found = certify_nominal(self.losses, self.errors, rho=0.4, alpha=0.05, clip=4.0, groups=self.groups)
        plain = json.loads(json.dumps(found.to_plain()))
        assert plain == found.to_plain()
        assert plain["holds"] is True
        assert plain["loss"]["bound"] == found.loss.bound
        assert plain["groups"][2]["accuracy"]["lower"] == found.groups[2].accuracy.lower
        assert plain["statement"] == found.statement()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"losses": [], "errors": []}, "at least 1 example, got 0"),
            ({"errors": [0]}, "differ in length: 2 and 1"),
            ({"errors": [0, 2]}, "must be 0 .* or 1"),
            ({"groups": [0]}, "losses and groups differ in length: 2 and 1"),
            ({"groups": [0.5, 1.0]}, "whole numbers"),
            ({"groups": [0, 0], "rho": {0: 0.5, 3: 0.5}}, r"no held-out example of group \[3\]"),
            ({"rho": {0: 0.5}}, "needs the examples' groups"),
            ({"rho": 4.0}, "below clip = 4"),
            ({"rho": {0: 5.0}, "groups": [0, 0]}, "below clip = 4"),
            ({"min_accuracy": 85}, r"min_accuracy must be in \[0, 1\]"),
            ({"method": "hoefding"}, "did you mean 'hoeffding'"),
        ],
    )
    def test_bad_input(self, change, message):
        arguments = {"losses": [0.1, 0.2], "errors": [0, 1], "rho": 0.5, "alpha": 0.05, "clip": 4.0, **change}
        with pytest.raises(UsageError, match=message):
            certify_nominal(arguments.pop("losses"), arguments.pop("errors"), **arguments)


def test_accuracy_statement_rounds_outwards():
    certificate = certify_accuracy([0] * 970 + [1] * 30, alpha=0.05)
    statement = certificate.statement()
    low, high = (float(part.split("%")[0]) for part in (statement.split("between ")[1], statement.split("and ")[1]))
    assert low <= 100 * certificate.lower < low + 0.01
    assert high - 0.01 < 100 * certificate.upper <= high


def test_importing_certificates_needs_no_torch():
    check = "import sys, dale.certificates; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
