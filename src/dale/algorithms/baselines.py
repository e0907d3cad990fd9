"""The rows without a dual variable: special cases that the paper's method contains."""

from __future__ import annotations

from typing import Literal

from dale.aggregators import Aggregator, CVaR, MaxOf, Tilted
from dale.algorithms.options import one_sampler
from dale.errors import require
from dale.losses import KL, CrossEntropy, LogitPairing, Loss, Mart, WeightedSum
from dale.objectives import Objective
from dale.perturbations import PerturbationSet
from dale.samplers import Sampler, UniformNoise
from dale.samplers import fgsm as fgsm_chain
from dale.samplers import pgd as pgd_chain
from dale.samplers.chain import Start

BatchNorm = Literal["joint", "separate"]


def erm(perturbations: PerturbationSet | None = None, *, nominal_loss: Loss = CrossEntropy()) -> Objective:
    """Empirical risk minimisation: no robustness. The set, if given, is what the model is validated against."""
    return Objective(name="erm", perturbations=perturbations, nominal_loss=nominal_loss, nominal_weight=1.0)


def augment(
    perturbations: PerturbationSet, *, sampler: Sampler = UniformNoise(), robust_loss: Loss = CrossEntropy()
) -> Objective:
    """Random data augmentation: perturbations from a fixed distribution."""
    return Objective(name="augment", perturbations=perturbations, sampler=sampler, robust_loss=robust_loss)


def fgsm(perturbations: PerturbationSet, *, robust_loss: Loss = CrossEntropy()) -> Objective:
    """Adversarial training on one full step along the steepest direction."""
    require(perturbations is not None, "objective 'fgsm' has a robust loss: it needs a perturbation set")
    return Objective(
        name="fgsm",
        perturbations=perturbations,
        sampler=fgsm_chain(perturbations.radius),
        perturbation_loss=CrossEntropy(),
        robust_loss=robust_loss,
    )


@one_sampler
def pgd(
    perturbations: PerturbationSet,
    *,
    steps: int = 10,
    step_size: float | None = None,
    sampler: Sampler | None = None,
    robust_loss: Loss = CrossEntropy(),
) -> Objective:
    """Adversarial training on projected gradient ascent."""
    return Objective(
        name="pgd",
        perturbations=perturbations,
        sampler=sampler or pgd_chain(steps, step_size),
        perturbation_loss=CrossEntropy(),
        robust_loss=robust_loss,
    )


@one_sampler
def clp(
    perturbations: PerturbationSet,
    *,
    weight: float = 1.0,
    steps: int = 10,
    step_size: float | None = None,
    sampler: Sampler | None = None,
    batchnorm: BatchNorm = "joint",
) -> Objective:
    """Clean cross-entropy plus the distance between clean and adversarial logits."""
    return Objective(
        name="clp",
        perturbations=perturbations,
        sampler=sampler or pgd_chain(steps, step_size),
        perturbation_loss=CrossEntropy(),
        robust_loss=LogitPairing(),
        robust_weight=weight,
        nominal_weight=1.0,
        batchnorm=batchnorm,
    )


@one_sampler
def alp(
    perturbations: PerturbationSet,
    *,
    weight: float = 1.0,
    steps: int = 10,
    step_size: float | None = None,
    sampler: Sampler | None = None,
    batchnorm: BatchNorm = "joint",
) -> Objective:
    """Adversarial cross-entropy plus the distance between clean and adversarial logits."""
    paired = WeightedSum(losses=(CrossEntropy(), LogitPairing()), weights=(1.0, weight))
    return Objective(
        name="alp",
        perturbations=perturbations,
        sampler=sampler or pgd_chain(steps, step_size),
        perturbation_loss=CrossEntropy(),
        robust_loss=paired if weight > 0.0 else CrossEntropy(),
        batchnorm=batchnorm,
    )


@one_sampler
def trades(
    perturbations: PerturbationSet,
    *,
    beta: float = 6.0,
    steps: int = 10,
    step_size: float | None = None,
    start: Start = "gaussian",
    sampler: Sampler | None = None,
    batchnorm: BatchNorm = "joint",
) -> Objective:
    """Clean cross-entropy plus beta times the KL divergence from clean to adversarial predictions."""
    return Objective(
        name="trades",
        perturbations=perturbations,
        sampler=sampler or pgd_chain(steps, step_size, start=start),
        perturbation_loss=KL(),
        robust_loss=KL(),
        robust_weight=beta,
        nominal_weight=1.0,
        batchnorm=batchnorm,
    )


@one_sampler
def mart(
    perturbations: PerturbationSet,
    *,
    weight: float = 5.0,
    steps: int = 10,
    step_size: float | None = None,
    sampler: Sampler | None = None,
    batchnorm: BatchNorm = "joint",
) -> Objective:
    """Misclassification-aware adversarial training."""
    return Objective(
        name="mart",
        perturbations=perturbations,
        sampler=sampler or pgd_chain(steps, step_size, start="gaussian"),
        perturbation_loss=CrossEntropy(),
        robust_loss=Mart(weight=weight),
        batchnorm=batchnorm,
    )


def _of_k(
    name: str, perturbations: PerturbationSet, num_samples: int, sampler: Sampler | None, aggregator: Aggregator
) -> Objective:
    return Objective(
        name=name,
        perturbations=perturbations,
        sampler=sampler or UniformNoise(num_samples=num_samples),
        perturbation_loss=CrossEntropy(),
        robust_loss=CrossEntropy(),
        aggregator=aggregator,
    )


@one_sampler
def worst_of_k(perturbations: PerturbationSet, *, num_samples: int = 10, sampler: Sampler | None = None) -> Objective:
    """The largest of K losses."""
    return _of_k("worst-of-k", perturbations, num_samples, sampler, MaxOf())


@one_sampler
def cvar(
    perturbations: PerturbationSet, *, beta: float = 0.2, num_samples: int = 10, sampler: Sampler | None = None
) -> Objective:
    """The mean of the worst share beta of K losses: probabilistic robustness."""
    return _of_k("cvar", perturbations, num_samples, sampler, CVaR(beta=beta))


@one_sampler
def term(
    perturbations: PerturbationSet, *, t: float = 2.0, num_samples: int = 10, sampler: Sampler | None = None
) -> Objective:
    """K losses weighted by softmax(t * loss): tilted empirical risk."""
    return _of_k("term", perturbations, num_samples, sampler, Tilted(t=t))
