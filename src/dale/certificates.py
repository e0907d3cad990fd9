"""Certificates: what held-out data nobody touched proves about the nominal loss and the accuracy.

Upper confidence bounds for the mean of values in [0, B] from n independent draws, each with P(mean > bound) <= alpha,
whatever the distribution: Hoeffding, empirical Bernstein (Maurer and Pontil 2009) and betting (Waudby-Smith and Ramdas
2023); exact intervals for accuracies (Clopper and Pearson). A loss is not bounded: the statement is about
min(loss, B), and says so. Which bound is used must be fixed before looking at the data; the default is betting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import special

from dale.errors import NumericsError, UsageError, require, unknown

Array = npt.NDArray[np.float64]
Method = Literal["betting", "empirical_bernstein", "hoeffding"]
Side = Literal["two-sided", "lower", "upper"]

# A bet never risks more than this share of the capital on one example.
_LARGEST_SHARE = 0.75


def hoeffding(values: npt.ArrayLike, alpha: float, upper: float) -> float:
    """Bound the mean of values in [0, B], B = `upper`: mean + B sqrt( log(1/alpha) / (2 n) )."""
    x = _unit(values, alpha, upper)
    return min(upper, upper * float(x.mean() + math.sqrt(math.log(1 / alpha) / (2 * len(x)))))


def empirical_bernstein(values: npt.ArrayLike, alpha: float, upper: float) -> float:
    """Bound the mean of values in [0, B]: mean + sqrt( 2 V log(2/alpha) / n ) + 7 B log(2/alpha) / (3 (n - 1)).

    V is the sample variance with n - 1 in the denominator (Maurer and Pontil 2009, theorem 4).
    """
    x = _unit(values, alpha, upper)
    if len(x) == 1:
        return upper
    log = math.log(2 / alpha)
    width = math.sqrt(2 * float(x.var(ddof=1)) * log / len(x)) + 7 * log / (3 * (len(x) - 1))
    return min(upper, upper * (float(x.mean()) + width))


def betting(values: npt.ArrayLike, alpha: float, upper: float) -> float:
    """Bound the mean of values in [0, B] by betting against every mean m that is too large.

    With y_i = 1 - x_i / B, whose mean is to be bounded from below, the capital of a gambler who bets on "the mean of y
    is above m" is

        C_t(m) = prod_{i<=t} ( 1 + lambda_i(m) (y_i - m) ),    lambda_i(m) = min( lambda_i, c / m ),
        lambda_i = sqrt( 2 log(1/alpha) / (n s_{i-1}^2) ),     c = 3/4,

    where s_{i-1}^2 is the (regularised) variance of the values before i: the bets are predictable, so at the true mean
    C_t is a non-negative martingale, and by Ville's inequality max_t C_t >= 1/alpha has probability at most alpha
    (Waudby-Smith and Ramdas 2023, section 4). Every factor falls in m, hence the rejected m are an interval
    [0, m0], found by bisection; the end of the bracket that *is* rejected is used, so the search errs on the safe side.
    The result depends on the order of the values, which must not depend on the values (see `certify_mean`).
    """
    x = _unit(values, alpha, upper)
    n, y = len(x), 1 - x
    seen = np.arange(1, n + 1)
    centre = (0.5 + np.cumsum(y)) / (seen + 1)
    variance = (0.25 + np.cumsum((y - centre) ** 2)) / (seen + 1)
    before = np.concatenate([[0.25], variance[:-1]])
    goal = math.log(1 / alpha)
    bets = np.sqrt(2 * goal / (n * before))

    def rejected(m: float) -> bool:
        log_capital = np.cumsum(np.log1p(np.minimum(bets, _LARGEST_SHARE / m) * (y - m)))
        return float(log_capital.max()) >= goal

    low, high = 0.0, 1.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if rejected(middle) else (low, middle)
    # a bound below the sample mean would be valid but absurd; raising it to the mean keeps it valid
    return min(upper, upper * max(1 - low, float(x.mean())))


_BOUNDS = {"betting": betting, "empirical_bernstein": empirical_bernstein, "hoeffding": hoeffding}


def clopper_pearson(successes: int, trials: int, alpha: float, side: Side = "two-sided") -> tuple[float, float]:
    """Return the exact interval for a probability, from `successes` of `trials`, with coverage at least 1 - alpha.

    lower: the p at which k or more successes have probability alpha; upper: the p at which k or fewer have. A two-sided
    interval spends alpha / 2 on each side; a one-sided one all of alpha, its other end being 0 or 1.
    """
    _check_alpha(alpha)
    require(trials >= 1, f"an interval for a probability needs at least 1 trial, got {trials}")
    require(0 <= successes <= trials, f"successes must be between 0 and trials = {trials}, got {successes}")
    if side not in ("two-sided", "lower", "upper"):
        raise unknown("side", side, ("two-sided", "lower", "upper"))
    tail = alpha / 2 if side == "two-sided" else alpha
    lower, upper = 0.0, 1.0
    if side != "upper" and successes > 0:
        lower = float(special.betaincinv(successes, trials - successes + 1, tail))
    if side != "lower" and successes < trials:
        upper = 1 - float(special.betaincinv(trials - successes, successes + 1, tail))
    return lower, upper


@dataclass(frozen=True)
class MeanCertificate:
    """With confidence 1 - alpha the mean of min(loss, upper) is at most `bound`."""

    bound: float
    method: str
    alpha: float
    upper: float
    n: int
    mean: float

    def statement(self) -> str:
        """Say it in one sentence."""
        return (
            f"With confidence {_percent(self.alpha)} the mean nominal loss clipped at B = {self.upper:g}, "
            f"E[min(loss, B)], is at most {_up(self.bound)} ({self.method.replace('_', ' ')} bound; "
            f"sample mean {self.mean:.4f} over {self.n:,} held-out examples)."
        )


@dataclass(frozen=True)
class AccuracyCertificate:
    """With confidence 1 - alpha the accuracy lies in [lower, upper]; k of n examples were right."""

    k: int
    n: int
    lower: float
    upper: float
    alpha: float

    def statement(self) -> str:
        """Say it in one sentence."""
        return (
            f"With confidence {_percent(self.alpha)} the accuracy is between {_down(100 * self.lower, 2)}% and "
            f"{_up(100 * self.upper, 2)}% (Clopper-Pearson; {self.k:,} of {self.n:,} held-out examples right)."
        )


@dataclass(frozen=True)
class GroupCertificate:
    """The two certificates of one group and the limit its loss is held to (None: no limit)."""

    group: int
    rho: float | None
    loss: MeanCertificate
    accuracy: AccuracyCertificate


@dataclass(frozen=True)
class NominalCertificate:
    """What held-out data says about the nominal constraints, on the whole and by group.

    `loss` and `accuracy` are about all examples, each at level alpha on its own; `groups` at alpha / g each, so that
    the g loss bounds hold jointly with confidence 1 - alpha, and so do the g accuracy intervals. Where there are
    groups the limits are each group's; else they are of the whole. `holds` claims every limit at once with confidence
    1 - alpha: the claim is wrong only if some limit is violated and its own bound, of level alpha or less, missed it.
    """

    rho: float | None
    min_accuracy: float | None
    alpha: float
    clip: float
    method: str
    loss: MeanCertificate
    accuracy: AccuracyCertificate
    groups: tuple[GroupCertificate, ...] = ()

    @property
    def loss_holds(self) -> bool | None:
        """Whether every limit on the clipped loss is proven; None where there is no limit."""
        pairs = [(g.rho, g.loss) for g in self.groups] or [(self.rho, self.loss)]
        proven = [loss.bound <= rho for rho, loss in pairs if rho is not None]
        return all(proven) if proven else None

    @property
    def accuracy_holds(self) -> bool | None:
        """Whether `min_accuracy` is proven (for every group where there are groups); None where there is none."""
        if self.min_accuracy is None:
            return None
        return all(a.lower >= self.min_accuracy for a in [g.accuracy for g in self.groups] or [self.accuracy])

    @property
    def holds(self) -> bool | None:
        """Whether all limits given are proven at confidence 1 - alpha; None where there are none."""
        answers = [answer for answer in (self.loss_holds, self.accuracy_holds) if answer is not None]
        return all(answers) if answers else None

    def to_plain(self) -> dict[str, Any]:
        """Return plain mappings and numbers for a JSON file, with the answers and the statement."""
        answers = {"holds": self.holds, "loss_holds": self.loss_holds, "accuracy_holds": self.accuracy_holds}
        return {**asdict(self), "groups": [asdict(g) for g in self.groups], **answers, "statement": self.statement()}

    def statement(self) -> str:
        """Say it in plain sentences: the bounds, then for each kind of limit whether it is proven."""
        where = f" in each of {len(self.groups)} groups jointly" if self.groups else ""
        confidence = _percent(self.alpha)
        parts = [self.loss.statement(), self.accuracy.statement()]
        if self.loss_holds is not None:
            over = [g for g in self.groups if g.rho is not None and g.loss.bound > g.rho]
            unmet = [f"group {g.group} ({_up(g.loss.bound)})" for g in over]
            limit = f"mean clipped loss <= {self.rho:g}" if self.rho is not None else "mean clipped loss <= rho"
            parts.append(_verdict(limit + where, self.loss_holds, confidence, unmet))
        if self.accuracy_holds is not None and self.min_accuracy is not None:
            under = [g for g in self.groups if g.accuracy.lower < self.min_accuracy]
            unmet = [f"group {g.group} ({_down(100 * g.accuracy.lower, 2)}%)" for g in under]
            limit = f"accuracy >= {100 * self.min_accuracy:g}%{where}"
            parts.append(_verdict(limit, self.accuracy_holds, confidence, unmet))
        return " ".join(parts)


def certify_mean(values: npt.ArrayLike, *, alpha: float, upper: float, method: Method = "betting") -> MeanCertificate:
    """Bound the mean of min(value, upper) from above, with confidence 1 - alpha, from n independent examples.

    The values are put in a fixed pseudo-random order first: data sets come sorted by class, which a bound that reads
    them one after the other must not see.
    """
    if method not in _BOUNDS:
        raise unknown("method", method, _BOUNDS)
    x = _checked(values, alpha, upper)
    return MeanCertificate(
        bound=_BOUNDS[method](x[_shuffle(len(x))], alpha, upper),
        method=method,
        alpha=alpha,
        upper=upper,
        n=len(x),
        mean=float(x.mean()),
    )


def certify_accuracy(errors: npt.ArrayLike, *, alpha: float) -> AccuracyCertificate:
    """Return the exact two-sided interval for the accuracy, from one 0 (right) or 1 (wrong) for each example."""
    wrong = np.asarray(errors).reshape(-1)
    require(len(wrong) > 0, "a certificate needs at least 1 example, got 0")
    require(bool(np.isin(wrong, (0, 1)).all()), "errors must be 0 (right) or 1 (wrong) for each example")
    n, k = len(wrong), int((wrong == 0).sum())
    lower, upper = clopper_pearson(k, n, alpha)
    return AccuracyCertificate(k=k, n=n, lower=lower, upper=upper, alpha=alpha)


def certify_nominal(
    losses: npt.ArrayLike,
    errors: npt.ArrayLike,
    *,
    rho: float | Mapping[int, float] | None,
    alpha: float,
    clip: float,
    groups: npt.ArrayLike | None = None,
    min_accuracy: float | None = None,
    method: Method = "betting",
) -> NominalCertificate:
    """Certify the nominal loss (clipped at `clip`) and the accuracy, and say whether the limits are proven.

    `rho` is one limit, or with `groups` (a whole number for each example) one for each group by its number.
    Statements over g groups use alpha / g each (Bonferroni), so that they hold jointly.
    """
    x, wrong = _checked(losses, alpha, clip), np.asarray(errors).reshape(-1)
    require(len(x) == len(wrong), f"losses and errors differ in length: {len(x)} and {len(wrong)}")
    require(min_accuracy is None or 0 <= min_accuracy <= 1, f"min_accuracy must be in [0, 1], got {min_accuracy!r}")
    label = np.zeros(0) if groups is None else np.asarray(groups).reshape(-1)
    names = [int(g) for g in np.unique(label)]
    limits = dict(rho) if isinstance(rho, Mapping) else dict.fromkeys(names, rho)
    if groups is not None:
        require(len(label) == len(x), f"losses and groups differ in length: {len(x)} and {len(label)}")
        require(np.issubdtype(label.dtype, np.integer), f"groups must be whole numbers, got {label.dtype}")
        missing = sorted(set(limits) - set(names))
        require(not missing, f"no held-out example of group {missing}: nothing can be said of it")
    require(groups is not None or not isinstance(rho, Mapping), "rho by group needs the examples' groups")
    for limit in (*limits.values(), None if isinstance(rho, Mapping) else rho):
        require(limit is None or 0 <= limit < clip, f"rho must be at least 0 and below clip = {clip:g}, got {limit!r}")
    return NominalCertificate(
        rho=None if isinstance(rho, Mapping) else rho,
        min_accuracy=min_accuracy,
        alpha=alpha,
        clip=clip,
        method=method,
        loss=certify_mean(x, alpha=alpha, upper=clip, method=method),
        accuracy=certify_accuracy(wrong, alpha=alpha),
        groups=tuple(
            GroupCertificate(
                group=name,
                rho=limits.get(name),
                loss=certify_mean(x[label == name], alpha=alpha / len(names), upper=clip, method=method),
                accuracy=certify_accuracy(wrong[label == name], alpha=alpha / len(names)),
            )
            for name in names
        ),
    )


def _check_alpha(alpha: float) -> None:
    require(0 < alpha < 1, f"alpha must be between 0 and 1 (0.05 is 95% confidence), got {alpha!r}")


def _checked(values: npt.ArrayLike, alpha: float, upper: float) -> Array:
    """Return min(value, upper) for each value, refusing what no bound could use."""
    _check_alpha(alpha)
    require(0 < upper < math.inf, f"the upper end of the values must be a finite number above 0, got {upper!r}")
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    require(len(x) > 0, "a certificate needs at least 1 example, got 0")
    if np.isnan(x).any():
        raise NumericsError(f"{int(np.isnan(x).sum())} of {len(x)} losses are NaN: nothing can be certified")
    if (x < 0).any():
        raise UsageError(f"a certificate needs losses of at least 0 (cross_entropy, say), got {x.min():g}")
    return np.minimum(x, upper)


def _unit(values: npt.ArrayLike, alpha: float, upper: float) -> Array:
    return _checked(values, alpha, upper) / upper


def _shuffle(n: int) -> npt.NDArray[np.intp]:
    """Return a permutation that depends on n alone, and on no library's version: sort by a hash (splitmix64)."""
    z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable")


def _verdict(limit: str, holds: bool, confidence: str, unmet: list[str]) -> str:
    if holds:
        return f"The constraint {limit} holds with confidence {confidence}."
    culprits = f": {', '.join(unmet)}" if unmet else ""
    return f"The constraint {limit} is NOT proven at confidence {confidence}{culprits}."


def _percent(alpha: float) -> str:
    return f"{100 * (1 - alpha):.6g}%"


def _up(value: float, digits: int = 4) -> str:
    """Print an upper bound rounded up, so that what is printed is true too."""
    return f"{math.ceil(value * 10**digits - 1e-9) / 10**digits:.{digits}f}"


def _down(value: float, digits: int = 4) -> str:
    return f"{math.floor(value * 10**digits + 1e-9) / 10**digits:.{digits}f}"
