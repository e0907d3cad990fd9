"""Samplers: lambda, the distribution of perturbations."""

from dale.samplers.base import Problem, Sampler
from dale.samplers.chain import Chain, Kernel, Langevin, State, fgsm, langevin, pgd, walk
from dale.samplers.diagnostics import (
    Diagnosis,
    acceptance_rate,
    chains,
    diagnose,
    effective_sample_size,
    split_r_hat,
)
from dale.samplers.exact import Hmc, Mala
from dale.samplers.fixed import CutoutNoise, GaussianNoise, GeneratorNoise, PatchNoise, UniformNoise
from dale.samplers.mixture import Mixture

__all__ = [
    "Chain",
    "CutoutNoise",
    "Diagnosis",
    "GaussianNoise",
    "GeneratorNoise",
    "Hmc",
    "Kernel",
    "Langevin",
    "Mala",
    "Mixture",
    "PatchNoise",
    "Problem",
    "Sampler",
    "State",
    "UniformNoise",
    "acceptance_rate",
    "chains",
    "diagnose",
    "effective_sample_size",
    "fgsm",
    "langevin",
    "pgd",
    "split_r_hat",
    "walk",
]
