"""Evaluation adversaries: FGSM, PGD, APGD, FAB, Square, AutoAttack, random and grid search, transfer."""

from dale.attacks.adaptive import APGD
from dale.attacks.apgd import AutoPGD, SparseAutoPGD
from dale.attacks.base import Attack, Budget
from dale.attacks.fab import FAB
from dale.attacks.gradient import FGSM, PGD
from dale.attacks.hunt import Found, Hunt
from dale.attacks.parse import NAMES, parse
from dale.attacks.search import GridSearch, RandomSearch, Transfer
from dale.attacks.sequence import Sequence, autoattack
from dale.attacks.square import Square
from dale.attacks.targeted import TargetedDLR, TargetMargin

__all__ = [
    "APGD",
    "FAB",
    "FGSM",
    "NAMES",
    "PGD",
    "Attack",
    "AutoPGD",
    "Budget",
    "Found",
    "GridSearch",
    "Hunt",
    "RandomSearch",
    "Sequence",
    "SparseAutoPGD",
    "Square",
    "TargetMargin",
    "TargetedDLR",
    "Transfer",
    "autoattack",
    "parse",
]
