"""Losses: values by hand, float64 references, gradients, and the ends of the number line."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dale.components import import_path
from dale.errors import UsageError
from dale.losses import (
    DLR,
    KL,
    LOG_FLOOR,
    BoostedCrossEntropy,
    Clipped,
    CrossEntropy,
    ErrorProbability,
    FunctionLoss,
    KLReverse,
    LogitPairing,
    Loss,
    Margin,
    Mart,
    WeightedSum,
    ZeroOne,
    as_loss,
)

SMOOTH = (
    CrossEntropy(),
    CrossEntropy(label_smoothing=0.2),
    KL(),
    KLReverse(),
    ErrorProbability(),
    Margin(),
    DLR(),
    LogitPairing(),
    BoostedCrossEntropy(),
    Mart(weight=5.0),
    Clipped(loss=CrossEntropy(), bound=3.0),
    WeightedSum(losses=(CrossEntropy(), KL()), weights=(1.0, 6.0)),
)
ALL = (*SMOOTH, ZeroOne())


def name(loss: Loss) -> str:
    return repr(loss)


def logits_of(probabilities: list[list[float]]) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def draw(seed: int, count: int = 6, classes: int = 5, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(count, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# p(x) = (1/2, 1/4, 1/4), p(x') = (1/4, 1/2, 1/4), y = 0; every value below is worked out with pencil and paper
CLEAN, PERTURBED, LABEL = logits_of([[0.5, 0.25, 0.25]]), logits_of([[0.25, 0.5, 0.25]]), torch.tensor([0])
LOG2 = math.log(2.0)
BY_HAND = (
    (CrossEntropy(), 2 * LOG2),
    # three quarters of -log(1/4), a quarter of the mean of 2 log 2, log 2 and 2 log 2
    (CrossEntropy(label_smoothing=0.25), 0.75 * 2 * LOG2 + 0.25 * 5 / 3 * LOG2),
    (KL(), 0.25 * LOG2),  # 1/2 log 2 - 1/4 log 2
    (KLReverse(), 0.25 * LOG2),
    (ErrorProbability(), 0.75),
    (Margin(), LOG2),
    (DLR(), 1.0),  # log 2 over log 1/2 - log 1/4
    (LogitPairing(), math.sqrt(2.0) * LOG2),
    (BoostedCrossEntropy(), 2 * LOG2 - math.log(0.5 + 1e-4)),
    (Mart(weight=5.0), 2 * LOG2 - math.log(0.5 + 1e-4) + 5 * 0.25 * LOG2 * 0.5),
    (ZeroOne(), 1.0),
    (Clipped(loss=CrossEntropy(), bound=1.0), 1.0),
    (Clipped(loss=CrossEntropy(), bound=2.0), 2 * LOG2),
    (WeightedSum(losses=(CrossEntropy(), KL()), weights=(1.0, 6.0)), 2 * LOG2 + 1.5 * LOG2),
)


@pytest.mark.parametrize(("loss", "expected"), BY_HAND, ids=[name(loss) for loss, _ in BY_HAND])
def test_values_by_hand(loss, expected):
    assert float(loss(PERTURBED, CLEAN, LABEL)) == pytest.approx(expected, rel=1e-11)
    if loss.non_negative:
        assert float(loss(PERTURBED, CLEAN, LABEL, log=True)) == pytest.approx(math.log(expected), rel=1e-12)


def test_kl_is_not_symmetric():
    first, second = logits_of([[0.9, 0.05, 0.05]]), logits_of([[0.25, 0.5, 0.25]])
    forward = 0.9 * math.log(0.9 / 0.25) + 0.05 * math.log(0.05 / 0.5) + 0.05 * math.log(0.05 / 0.25)
    backward = 0.25 * math.log(0.25 / 0.9) + 0.5 * math.log(0.5 / 0.05) + 0.25 * math.log(0.25 / 0.05)
    assert float(KL()(second, first, LABEL)) == pytest.approx(forward, rel=1e-12)
    assert float(KLReverse()(second, first, LABEL)) == pytest.approx(backward, rel=1e-12)


def reference(loss: Loss, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
    """The textbook formulas in float64, through softmax: fine for moderate logits."""
    logits, clean = logits.double(), clean.double()
    p, q = clean.softmax(dim=1), logits.softmax(dim=1)
    rows = torch.arange(len(labels))
    wrong = q.clone()
    wrong[rows, labels] = 0.0
    others = logits.clone()
    others[rows, labels] = -torch.inf
    boosted = -q[rows, labels].log() - (1.0 - wrong.amax(dim=1) + 1e-4).log()
    kl = (p * (p / q).log()).sum(dim=1)
    top = logits.sort(dim=1, descending=True).values
    margin = others.amax(dim=1) - logits[rows, labels]
    return {
        CrossEntropy: lambda: F.cross_entropy(
            logits, labels, reduction="none", label_smoothing=getattr(loss, "label_smoothing", 0.0)
        ),
        KL: lambda: kl,
        KLReverse: lambda: (q * (q / p).log()).sum(dim=1),
        ErrorProbability: lambda: 1.0 - q[rows, labels],
        Margin: lambda: margin,
        DLR: lambda: margin / (top[:, 0] - top[:, 2]),
        LogitPairing: lambda: (logits - clean).square().sum(dim=1).sqrt(),
        BoostedCrossEntropy: lambda: boosted,
        Mart: lambda: boosted + loss.weight * kl * (1.0 - p[rows, labels]),
        Clipped: lambda: reference(loss.loss, logits, clean, labels).clamp_max(loss.bound),
        WeightedSum: lambda: sum(
            w * reference(part, logits, clean, labels) for w, part in zip(loss.weights, loss.losses, strict=True)
        ),
        ZeroOne: (logits.argmax(dim=1) != labels).double,
    }[type(loss)]()


@pytest.mark.parametrize("loss", ALL, ids=name)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-6), (torch.bfloat16, 2e-6)]
)
def test_values_against_float64(loss, dtype, tolerance):
    logits, clean = draw(1, 64).to(dtype), draw(2, 64).to(dtype)  # rounded inputs; the arithmetic is at least float32
    labels = torch.arange(64) % 5
    value = loss(logits, clean, labels)
    assert value.shape == (64,)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = reference(loss, logits, clean, labels)
    torch.testing.assert_close(value.double(), expected, atol=tolerance, rtol=tolerance)
    if loss.non_negative and not isinstance(loss, ZeroOne):
        log = loss(logits, clean, labels, log=True)
        torch.testing.assert_close(log.double(), expected.log(), atol=1e-8 if dtype == torch.float64 else 2e-5, rtol=0)


@pytest.mark.parametrize("loss", SMOOTH, ids=name)
@pytest.mark.parametrize("log", [False, True], ids=["plain", "log"])
def test_gradients_flow_through_both_arguments(loss, log):
    logits, clean = draw(3, 3, 4).requires_grad_(True), draw(4, 3, 4).requires_grad_(True)
    labels = torch.tensor([0, 1, 3])
    if log and not loss.non_negative:
        with pytest.raises(UsageError, match="can be negative"):
            loss(logits, clean, labels, log=True)
        return
    if (log and isinstance(loss, (KL, KLReverse, LogitPairing, Clipped, WeightedSum))) or (
        log and getattr(loss, "label_smoothing", 0.0)
    ):
        # the default logarithm has the right gradient through a detached denominator, which finite differences of it
        # cannot see: compare with the gradient of the logarithm taken outside
        ours = torch.autograd.grad(loss(logits, clean, labels, log=True).sum(), (logits, clean), allow_unused=True)
        plain = torch.autograd.grad(loss(logits, clean, labels).log().sum(), (logits, clean), allow_unused=True)
        for one, other in zip(ours, plain, strict=True):
            assert (one is None) == (other is None) == (one is None)
            if one is not None:
                torch.testing.assert_close(one, other)
    else:
        assert torch.autograd.gradcheck(lambda a, b: loss(a, b, labels, log=log), (logits, clean))
    (through_clean,) = torch.autograd.grad(loss(logits, clean, labels).sum(), clean, allow_unused=True)
    assert (through_clean is not None and bool(through_clean.any())) == loss.needs_clean


@pytest.mark.parametrize("loss", ALL, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [0.0, 30.0, 200.0, 1e4])
def test_finite_at_the_ends(loss, dtype, size):
    """p_y rounds to 0 and to 1: values and gradients stay finite, and so do their logarithms."""
    signs = torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [-1.0, -1.0, -1.0], [1.0, 1.0, -1.0]])
    logits = (size * signs).to(dtype).requires_grad_(True)
    clean = (size * signs.flip(0)).to(dtype).requires_grad_(True)
    labels = torch.zeros(5, dtype=torch.long)
    for log in (False, True) if loss.non_negative else (False,):
        for first, second in ((logits, clean), (logits, logits)):
            value = loss(first, second, labels, log=log)
            assert bool(value.isfinite().all())
            if value.requires_grad:
                grads = torch.autograd.grad(value.sum(), (logits, clean), allow_unused=True)
                assert all(bool(g.isfinite().all()) for g in grads if g is not None)


@pytest.mark.parametrize(
    "gap", [-1e4, -200.0, -120.0, -88.0, -30.0, -15.001, -14.999, -3.0, 0.0, 5.0, 19.9, 20.1, 90.0, 1e4]
)
def test_cross_entropy_and_error_probability_with_many_digits(gap):
    """Against 50 digits: with three equal wrong logits, 1 - p_y = 3 e^gap / (1 + 3 e^gap)."""
    mpmath.mp.dps = 50
    odds = 3 * mpmath.exp(mpmath.mpf(gap))
    cross, error = mpmath.log1p(odds), odds / (1 + odds)
    logits = torch.tensor([[0.0, gap, gap, gap]], dtype=torch.float32)
    label = torch.tensor([0])
    assert float(CrossEntropy()(logits, None, label)) == pytest.approx(float(cross), rel=1e-5, abs=1e-37)
    assert float(ErrorProbability()(logits, None, label)) == pytest.approx(float(error), rel=1e-5, abs=1e-37)
    for loss, exact in ((CrossEntropy(), cross), (ErrorProbability(), error)):
        free = logits.clone().requires_grad_(True)
        log = loss(free, None, label, log=True)
        assert float(log.detach()) == pytest.approx(float(mpmath.log(exact)), rel=1e-6, abs=1e-6)
        (gradient,) = torch.autograd.grad(log.sum(), free)
        # d log l / d gap: (1 - p_y) / cross-entropy for the one, p_y for the other
        slope = error / cross if isinstance(loss, CrossEntropy) else 1 / (1 + odds)
        assert float(gradient[0, 1:].sum()) == pytest.approx(float(slope), rel=1e-4, abs=1e-37)
        assert float(gradient[0, 0]) == pytest.approx(-float(slope), rel=1e-4, abs=1e-37)


def test_the_margin_term_of_mart_where_the_rival_is_sure():
    """1 - p_rival = 1e-5 beside MART's 1e-4: in float32 a difference from one would be wrong in the third digit."""
    rest = torch.tensor(1e-5 / (1 - 1e-5)).log().item()
    logits = torch.tensor([[rest, 0.0]])
    exact = reference(BoostedCrossEntropy(), logits, logits, torch.tensor([0]))
    assert float(BoostedCrossEntropy()(logits, None, torch.tensor([0]))) == pytest.approx(float(exact), rel=1e-6)


def test_losses_do_not_depend_on_a_shift_of_the_logits():
    logits, clean, labels = draw(5).float(), draw(6).float(), torch.arange(6) % 5
    for loss in ALL:
        # the distance compares logits, not predictions: there both have to move
        shifted = loss(logits + 8.0, clean + 8.0, labels)
        torch.testing.assert_close(shifted, loss(logits, clean, labels), atol=1e-5, rtol=1e-5)


def test_kl_of_equal_predictions():
    logits = draw(7).float().requires_grad_(True)
    value = KL()(logits, logits.detach(), torch.zeros(6).long())
    assert bool((value.abs() < 1e-6).all())
    log = KL()(logits, logits.detach(), torch.zeros(6).long(), log=True)
    torch.testing.assert_close(log, torch.full((6,), math.log(LOG_FLOOR)), atol=1.0, rtol=0.0)
    (gradient,) = torch.autograd.grad(log.sum(), logits)
    assert bool(gradient.isfinite().all())


def test_logit_pairing_has_a_gradient_at_zero():
    logits = draw(8).requires_grad_(True)
    (gradient,) = torch.autograd.grad(LogitPairing()(logits, logits.detach(), torch.zeros(6).long()).sum(), logits)
    assert not gradient.any()


def test_the_floor_keeps_the_direction_of_the_gradient():
    clean = draw(9)
    logits = (clean + 1e-6 * draw(10)).requires_grad_(True)  # a divergence near 1e-12
    labels = torch.zeros(6).long()
    (log,) = torch.autograd.grad(KL()(logits, clean, labels, log=True).sum(), logits)
    (plain,) = torch.autograd.grad(KL()(logits, clean, labels).sum(), logits)
    torch.testing.assert_close(log, plain / LOG_FLOOR)


@pytest.mark.parametrize(
    ("logits", "label", "expected"),
    [
        ([3.0, 1.0], 0, -2.0),  # two classes: the margin itself
        ([3.0, 1.0], 1, 2.0),
        ([3.0, 1.0, 0.0], 0, -2.0 / 3.0),
        ([3.0, 1.0, 0.0], 1, 2.0 / 3.0),
        ([3.0, 1.0, 0.0], 2, 1.0),
        ([3.0, 1.0, 0.0, -9.0], 1, 2.0 / 3.0),
        ([3.0, 3.0, 3.0], 1, 0.0),
    ],
)
def test_dlr_with_few_classes(logits, label, expected):
    value = DLR()(torch.tensor([logits]), None, torch.tensor([label]))
    assert float(value) == pytest.approx(expected, abs=1e-6)


def test_dlr_does_not_depend_on_the_scale():
    logits, labels = draw(11).float(), torch.arange(6) % 5
    torch.testing.assert_close(DLR()(100.0 * logits, None, labels), DLR()(logits, None, labels))


@pytest.mark.parametrize("loss", [Margin(), DLR(), BoostedCrossEntropy(), Mart()], ids=name)
def test_losses_that_can_be_negative_refuse_the_logarithm(loss):
    # the right class far ahead: the loss is below zero indeed
    sure = torch.tensor([[60.0, 0.0, 1.0]], dtype=torch.float64)
    assert float(loss(sure, sure, torch.tensor([0]))) < 0.0
    assert not loss.non_negative
    for wrapped in (loss, Clipped(loss=loss, bound=1.0), WeightedSum(losses=(KL(), loss), weights=(1.0, 1.0))):
        with pytest.raises(UsageError, match="can be negative"):
            wrapped(sure, sure, torch.tensor([0]), log=True)


@pytest.mark.parametrize("loss", [loss for loss in ALL if loss.non_negative], ids=name)
def test_losses_that_say_so_are_not_negative(loss):
    for seed in range(20):
        labels = torch.arange(6) % 5
        value = loss(draw(seed, scale=30.0), draw(seed + 100, scale=30.0), labels)
        assert bool((value >= 0.0).all())


def test_losses_that_compare_ask_for_clean_logits():
    for loss in ALL:
        if loss.needs_clean:
            with pytest.raises(UsageError, match="compares with clean predictions"):
                loss(PERTURBED, None, LABEL)
        else:
            assert torch.equal(loss(PERTURBED, None, LABEL), loss(PERTURBED, CLEAN, LABEL))


def test_clipping_stops_the_gradient_above_the_bound():
    logits = torch.tensor([[0.0, 5.0], [5.0, 0.0]], requires_grad=True)
    clipped = Clipped(loss=CrossEntropy(), bound=1.0)
    (gradient,) = torch.autograd.grad(clipped(logits, None, torch.tensor([0, 0])).sum(), logits)
    assert not gradient[0].any()
    assert bool(gradient[1].any())


def squared(logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
    return (logits - clean).square().sum(dim=1)


def mean_only(logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
    return logits.mean()


@dataclass(frozen=True, kw_only=True)
class Doubled(Loss):
    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        return 2.0 * CrossEntropy().value(logits, clean, labels)


def test_losses_of_the_users(monkeypatch):
    monkeypatch.setitem(sys.modules, "losses_of_mine", sys.modules[__name__])
    for function in (squared, mean_only):
        monkeypatch.setattr(function, "__module__", "losses_of_mine")
    loss = as_loss(squared)
    assert loss == FunctionLoss(path="losses_of_mine:squared")
    assert (loss.needs_clean, loss.non_negative) == (True, False)
    torch.testing.assert_close(loss(PERTURBED, CLEAN, LABEL), torch.tensor([2 * LOG2**2], dtype=torch.float64))
    with pytest.raises(UsageError, match="one value per example"):
        FunctionLoss(path=import_path(mean_only))(PERTURBED, CLEAN, LABEL)
    assert as_loss(Doubled) == Doubled()
    assert as_loss(KL()) == KL()
    with pytest.raises(UsageError, match="expected a loss"):
        as_loss(3)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CrossEntropy(label_smoothing=1.0), r"lies in \[0, 1\)"),
        (lambda: CrossEntropy(label_smoothing=float("nan")), r"lies in \[0, 1\)"),
        (lambda: Mart(weight=-1.0), "at least 0"),
        (lambda: Clipped(loss=KL(), bound=0.0), "above 0"),
        (lambda: WeightedSum(losses=(KL(),), weights=()), "as many weights as losses"),
        (lambda: WeightedSum(losses=(), weights=()), "as many weights as losses"),
        (lambda: WeightedSum(losses=(KL(),), weights=(-1.0,)), "at least 0"),
    ],
)
def test_bad_options(build, message):
    with pytest.raises(UsageError, match=message):
        build()
