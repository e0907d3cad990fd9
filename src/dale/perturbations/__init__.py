"""Perturbation sets: Delta and G."""

from dale.perturbations.balls import L1, L2, Linf
from dale.perturbations.base import ParameterBox, PerturbationSet
from dale.perturbations.transforms import Composition, Rotation, Scaling, Translation

__all__ = ["L1", "L2", "Composition", "Linf", "ParameterBox", "PerturbationSet", "Rotation", "Scaling", "Translation"]
