"""DALE: the rows whose nominal performance is a constraint (and the one that fixes the multiplier instead)."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from dale.aggregators import LambdaStar
from dale.algorithms.baselines import BatchNorm
from dale.algorithms.options import one_sampler
from dale.constraints import Constraint, accuracy_limit, loss_limit
from dale.errors import require, unknown
from dale.losses import KL, CrossEntropy, Loss
from dale.objectives import Objective
from dale.perturbations import PerturbationSet
from dale.samplers import Chain, Langevin, Sampler, UniformNoise, langevin
from dale.samplers.chain import Start

DaleLoss: TypeAlias = Literal["kl", "cross-entropy"] | Loss


def _limits(
    rho: float | tuple[float, ...] | None,
    min_accuracy: float | tuple[float, ...] | None,
    **options: Any,
) -> tuple[Constraint, ...]:
    require(
        rho is not None or min_accuracy is not None,
        "dale promises a nominal performance: give rho (a limit on the nominal loss) or min_accuracy",
    )
    constraints = []
    if rho is not None:
        constraints.append(loss_limit(rho, **options))
    if min_accuracy is not None:
        constraints.append(accuracy_limit(min_accuracy, **options))
    return tuple(constraints)


def _dale_loss(loss: DaleLoss) -> Loss:
    if isinstance(loss, Loss):
        return loss
    choices: dict[str, Loss] = {"kl": KL(), "cross-entropy": CrossEntropy()}
    if loss not in choices:
        raise unknown("loss", loss, choices)
    return choices[loss]


@one_sampler
def dale(
    perturbations: PerturbationSet,
    *,
    rho: float | tuple[float, ...] | None = None,
    min_accuracy: float | tuple[float, ...] | None = None,
    by: Literal["all", "class", "group"] = "all",
    loss: DaleLoss = "kl",
    steps: int = 10,
    step_size: float | None = None,
    noise_scale: float | None = None,
    temperature: float | None = None,
    start: Start = "gaussian",
    sampler: Sampler | None = None,
    dual_step_size: float | None = None,
    dual_initial: float = 0.5,
    dual_frequency: Literal["step", "epoch"] = "step",
    dual_upper: float | None = None,
    tighten: bool = True,
    batchnorm: BatchNorm = "joint",
) -> Objective:
    """The most robust model among those whose nominal loss is at most rho (or accuracy at least min_accuracy).

    With KL as loss and `start="away"` the sampler's chains leave the image on the side where the label gets less likely
    (`dale.samplers.Chain`).
    """
    return Objective(
        name="dale",
        perturbations=perturbations,
        sampler=sampler or langevin(steps, step_size, noise_scale, temperature, start),
        perturbation_loss=_dale_loss(loss),
        robust_loss=_dale_loss(loss),
        constraints=_limits(
            rho,
            min_accuracy,
            by=by,
            step_size=dual_step_size,
            initial=dual_initial,
            frequency=dual_frequency,
            upper=dual_upper,
            tighten=tighten,
        ),
        batchnorm=batchnorm,
    )


@one_sampler
def dale_fixed(
    perturbations: PerturbationSet,
    *,
    nu: float = 0.3,
    loss: DaleLoss = "kl",
    steps: int = 10,
    step_size: float | None = None,
    noise_scale: float | None = None,
    temperature: float | None = None,
    start: Start = "gaussian",
    sampler: Sampler | None = None,
    batchnorm: BatchNorm = "joint",
) -> Objective:
    """DALE without the dual update: the multiplier stays at nu (the paper's Table 2)."""
    return Objective(
        name="dale-fixed",
        perturbations=perturbations,
        sampler=sampler or langevin(steps, step_size, noise_scale, temperature, start),
        perturbation_loss=_dale_loss(loss),
        robust_loss=_dale_loss(loss),
        nominal_weight=nu,
        batchnorm=batchnorm,
    )


@one_sampler
def dale_optimal(
    perturbations: PerturbationSet,
    *,
    rho: float | tuple[float, ...] | None = None,
    min_accuracy: float | tuple[float, ...] | None = None,
    by: Literal["all", "class", "group"] = "all",
    gamma: float | None = None,
    norm_budget: float | None = None,
    num_samples: int = 4,
    candidates: Literal["chain", "uniform"] = "chain",
    loss: DaleLoss = "kl",
    steps: int = 10,
    step_size: float | None = None,
    noise_scale: float = 1e-4,
    start: Start = "gaussian",
    sampler: Sampler | None = None,
    dual_step_size: float | None = None,
    dual_initial: float = 0.5,
    dual_frequency: Literal["step", "epoch"] = "step",
    dual_upper: float | None = None,
    tighten: bool = True,
    batchnorm: BatchNorm = "joint",
) -> Objective:
    """DALE with K perturbations per example weighted by the closed form of lambda* (Proposition 3.2).

    The candidates are the last K states of dale's chain, on which the weights are a heuristic, or K uniform draws (as
    uniform as the set's own), for which they are exact in the limit: on images, where no uniform draw comes near the
    worst case, that is augmentation by noise and withstands no attack. Give gamma (smoothness) or norm_budget
    (E_uniform[lambda^2], between 1 and K; default K / 2).
    """
    if candidates not in ("chain", "uniform"):
        raise unknown("candidates", candidates, ("chain", "uniform"))
    if sampler is None and candidates == "uniform":
        sampler = UniformNoise(num_samples=num_samples)
    if sampler is None:
        require(1 <= num_samples <= steps, f"num_samples, states of one chain, lies between 1 and steps={steps}")
        kernel = Langevin(step_size=step_size, noise_scale=noise_scale)
        sampler = Chain(kernel=kernel, steps=steps, start=start, keep="all", burn_in=steps - num_samples)
    if gamma is None and norm_budget is None:
        norm_budget = max(1.0, sampler.num_draws / 2)
    return Objective(
        name="dale-optimal",
        perturbations=perturbations,
        sampler=sampler,
        perturbation_loss=_dale_loss(loss),
        robust_loss=_dale_loss(loss),
        aggregator=LambdaStar(gamma=gamma, norm_budget=norm_budget),
        constraints=_limits(
            rho,
            min_accuracy,
            by=by,
            step_size=dual_step_size,
            initial=dual_initial,
            frequency=dual_frequency,
            upper=dual_upper,
            tighten=tighten,
        ),
        batchnorm=batchnorm,
    )
