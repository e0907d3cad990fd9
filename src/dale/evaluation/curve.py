"""Accuracy against epsilon in one sweep: every radius starts where the smaller one ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dale.attacks import PGD, Attack, Budget, Hunt
from dale.attacks.gradient import finish
from dale.errors import UsageError, require
from dale.evaluation.results import Accuracy, CurvePoint
from dale.evaluation.resume import Progress
from dale.evaluation.session import Session
from dale.evaluation.team import current_team
from dale.losses import Loss
from dale.perturbations import L1, L2, Linf, PerturbationSet
from dale.random import Key

_PGD = PGD(steps=20, objective="margin")


@dataclass(frozen=True, kw_only=True)
class _Continued(Attack):
    """PGD on the margin from given starts, stretched by `stretch`; the best points become the next starts.

    The starts stay with the examples, found by their numbers. `ends` collects what this process found.
    """

    stretch: float
    numbers: Tensor = field(compare=False)
    starts: Tensor = field(compare=False)
    ends: Tensor = field(compare=False)

    @property
    def name(self) -> str:
        """Not a name that a user may give."""
        return "continued"

    @property
    def loss(self) -> Loss:
        """The margin."""
        return _PGD.loss

    def budget(self, num_classes: int) -> Budget:
        """That of the PGD."""
        return _PGD.budget(num_classes)

    def search(self, hunt: Hunt, number: int, key: Key) -> None:
        """Climb from the starts."""
        rows = torch.searchsorted(self.numbers, hunt.index)
        finish(hunt, _PGD.chain, key, start=self.stretch * self.starts[rows])
        self.ends[rows] = hunt.found.delta


def check_radii(epsilons: Sequence[float], perturbations: PerturbationSet) -> tuple[float, ...]:
    """Return the radii in order, once each; refuse what no curve can be drawn over."""
    if not isinstance(perturbations, (Linf, L2, L1)):
        raise UsageError(f"a curve over epsilon needs a norm ball (Linf, L2, L1), not {type(perturbations).__name__}")
    for epsilon in epsilons:
        require(0.0 < epsilon < float("inf"), f"epsilons are finite numbers above 0, got {epsilon!r}")
    return tuple(sorted(set(epsilons)))


def accuracy_curve(
    session: Session, perturbations: PerturbationSet, radii: Sequence[float], worst: Tensor
) -> tuple[CurvePoint, ...]:
    """Return the accuracy at every radius, in increasing order.

    At each radius the examples left standing by the smaller ones are attacked twice with PGD-20 on the margin: from
    where the smaller radius ended, stretched to the new one, and from a uniform start. The balls are nested, so who
    fell stays fallen, and who fell to the evaluation's own attacks (`worst`) has fallen at its radius and above.
    """
    assert isinstance(perturbations, (Linf, L2, L1))
    numbers = session.split.index.sort().values  # the starts below are in this order
    shape = perturbations.shape(tuple(session.split.images.shape[1:]))
    starts = torch.zeros((len(numbers), *shape), device=session.device)
    standing, before, points = session.correct.clone(), 0.0, []
    for radius in radii:
        ball = dataclasses.replace(perturbations, epsilon=radius)
        stretch = radius / before if before else 1.0
        if radius >= perturbations.epsilon:
            standing = standing & worst
        ends = torch.zeros_like(starts)
        continued = _Continued(stretch=stretch, numbers=numbers, starts=starts, ends=ends)
        for attack in (continued, _PGD):
            standing = session.run(attack, ball, Progress.fresh(standing)).standing
        starts = current_team().total(ends)  # each example was with one process, the others add zeros
        points.append(CurvePoint(radius, Accuracy(int(standing.sum()), len(standing))))
        before = radius
    return tuple(points)
