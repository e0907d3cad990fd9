"""Evaluation adversaries: FGSM, PGD, APGD, FAB, Square, AutoAttack, random and grid search, transfer."""

from dale.attacks.base import Attack, Budget, Found, Hunt
from dale.attacks.gradient import FGSM, PGD
from dale.attacks.parse import parse

__all__ = ["FGSM", "PGD", "Attack", "Budget", "Found", "Hunt", "parse"]
