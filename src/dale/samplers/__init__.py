"""Samplers: lambda, the distribution of perturbations."""

from dale.samplers.base import Problem, Sampler
from dale.samplers.chain import Chain, Kernel, Langevin, fgsm, langevin, pgd
from dale.samplers.fixed import CutoutNoise, GaussianNoise, GeneratorNoise, PatchNoise, UniformNoise

__all__ = [
    "Chain",
    "CutoutNoise",
    "GaussianNoise",
    "GeneratorNoise",
    "Kernel",
    "Langevin",
    "PatchNoise",
    "Problem",
    "Sampler",
    "UniformNoise",
    "fgsm",
    "langevin",
    "pgd",
]
