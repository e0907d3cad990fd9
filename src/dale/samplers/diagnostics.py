"""What a chain is worth: acceptance rates, split R-hat and effective sample size.

Draws are (C, N, ...): C chains of N states each of any number of coordinates (`chains` brings a sampler's output into
this form). All numbers are per coordinate, that is per example and element of delta, and computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dale.batch import Batch
from dale.errors import require
from dale.losses import Loss
from dale.modes import sampling_mode
from dale.perturbations import PerturbationSet
from dale.random import Key
from dale.random import key as make_key
from dale.samplers.base import Classifier, Problem
from dale.samplers.chain import Chain, State


def chains(draws: Tensor, num_chains: int) -> Tensor:
    """Turn (C * N, B, ...), the draws of a `Chain` with keep="all", chain after chain, into (C, N, B, ...)."""
    require(
        num_chains >= 1 and len(draws) % num_chains == 0,
        f"chains: {len(draws)} draws per example do not divide into num_chains={num_chains!r}",
    )
    return draws.reshape(num_chains, -1, *draws.shape[1:])


def acceptance_rate(state: State, steps: int, num_chains: int = 1) -> Tensor:
    """The share of proposals that each chain accepted, (C, B), from the last state of a run of `steps` steps."""
    require(
        "accepted" in state,
        "acceptance_rate: the kernel does not accept or reject; expected a chain with the kernel Mala or Hmc",
    )
    return (state["accepted"].double() / steps).view(num_chains, -1)


def split_r_hat(draws: Tensor) -> Tensor:
    """Return split R-hat of draws (C, N, ...), one per coordinate: near 1 when the chains agree, else above.

    Every chain is cut into halves, so that a drift within one chain counts as disagreement between two. With the mean
    W of the halves' variances and the variance B / n of their means (n = N / 2 states each)

        R = sqrt( ((n - 1) / n * W + B / n) / W ).

    Infinite where chains never move and disagree, NaN where all are one constant.
    """
    halves = _halves(draws)
    within, pooled = _variances(halves)
    return (pooled / within).sqrt()


def effective_sample_size(draws: Tensor) -> Tensor:
    """Return how many independent draws the draws (C, N, ...) are worth for a mean, one number per coordinate.

        ESS = C N / (1 + 2 sum_t rho_t),    rho_t = 1 - (W - mean over chains of autocovariance_t) / V

    with the split chains, W and V (the pooled variance) of `split_r_hat`, so that chains which disagree count as
    correlated. The sum ends by Geyer's initial monotone sequence: pairs rho_2t + rho_2t+1 are summed while positive
    and made non-increasing. An antithetic chain may exceed C N; as is usual, C N log10(C N) is the cap. NaN where all
    draws are one constant.
    """
    halves = _halves(draws)
    count, length = halves.shape[:2]
    total = count * length
    within, pooled = _variances(halves)
    covariance = _autocovariance(halves).mean(dim=0)  # (n, ...)
    # the autocovariances divide by n, W by n - 1: at lag 0 rho would otherwise not be one
    rho = 1.0 - (within - covariance * length / (length - 1)) / pooled
    even = length - length % 2
    pairs = rho[0:even:2] + rho[1:even:2]
    positive = (pairs > 0).to(pairs.dtype).cumprod(dim=0)
    monotone = pairs.cummin(dim=0).values * positive
    time = (2.0 * monotone.sum(dim=0) - 1.0).clamp_min(1.0 / torch.tensor(float(total)).log10().item())
    return torch.where(pooled > 0, total / time, torch.nan)


def _halves(draws: Tensor) -> Tensor:
    """Cut every chain into its first and second half, (2 C, N // 2, ...), in float64; an odd last draw is left out."""
    require(
        draws.dim() >= 2 and draws.shape[1] >= 4,
        f"diagnostics need draws (chains, states, ...) with at least 4 states a chain, got {tuple(draws.shape)}",
    )
    length = draws.shape[1] // 2
    return torch.cat([draws[:, :length], draws[:, length : 2 * length]]).double()


def _variances(halves: Tensor) -> tuple[Tensor, Tensor]:
    """W, the mean variance within a chain, and V = (n - 1) / n W + variance of the chains' means."""
    length = halves.shape[1]
    within = halves.var(dim=1).mean(dim=0)
    return within, (length - 1) / length * within + halves.mean(dim=1).var(dim=0)


def _autocovariance(halves: Tensor) -> Tensor:
    """The autocovariance of each chain at the lags 0 .. n - 1, (C, n, ...), over n, by a padded Fourier transform."""
    length = halves.shape[1]
    centred = halves - halves.mean(dim=1, keepdim=True)
    spectrum = torch.fft.rfft(centred, n=2 * length, dim=1)
    covariance: Tensor = torch.fft.irfft(spectrum.abs().square(), n=2 * length, dim=1)[:, :length] / length
    return covariance


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Draws (C, N, B, ...) with their acceptance rates (C, B), and R-hat and effective sample size (B, ...)."""

    draws: Tensor
    acceptance_rate: Tensor
    r_hat: Tensor
    effective_sample_size: Tensor

    def __str__(self) -> str:
        low, high = float(self.acceptance_rate.min()), float(self.acceptance_rate.max())
        return (
            f"{self.draws.shape[0]} chains of {self.draws.shape[1]} states: "
            f"acceptance {float(self.acceptance_rate.mean()):.2f} ({low:.2f} to {high:.2f}), "
            f"R-hat at most {float(self.r_hat.max()):.3f}, "
            f"effective sample size at least {float(self.effective_sample_size.min()):.0f}"
        )


def diagnose(
    chain: Chain, model: Classifier, batch: Batch, perturbations: PerturbationSet, loss: Loss, *, key: Key | int
) -> Diagnosis:
    """Run a chain with the kernel `Mala` or `Hmc`, keeping every state after its burn-in, and say what it is worth.

    The draws are those of the sampler itself for the same key. The model is in eval mode, and put back afterwards.
    """
    require(chain.mode == "eval", "diagnose: in train mode the density changes at every call; expected mode='eval'")
    chain = replace(chain, keep="all")
    module = model if isinstance(model, nn.Module) else nn.Module()
    with sampling_mode(module, "eval"), torch.no_grad():
        draws, state = chain.run(Problem(model, batch, perturbations, loss, chain.log), make_key(key))
    draws = chains(draws, chain.num_chains)
    rate = acceptance_rate(state, chain.steps, chain.num_chains)
    return Diagnosis(draws, rate, split_r_hat(draws), effective_sample_size(draws))
