"""Evaluation that one can trust: model + data + attacks -> report."""

from dale.evaluation.evaluate import evaluate, prepare_attacks
from dale.evaluation.results import Accuracy, Alarm, AttackResult, CurvePoint, Evaluation, Loss

__all__ = ["Accuracy", "Alarm", "AttackResult", "CurvePoint", "Evaluation", "Loss", "evaluate", "prepare_attacks"]
