"""FAB (Croce and Hein 2020): the smallest perturbation, by projections onto linearised decision boundaries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dale.attacks.base import Attack, Budget
from dale.attacks.hunt import Hunt
from dale.attacks.targeted import TargetMargin
from dale.batch import Batch
from dale.errors import UsageError, require
from dale.perturbations import L1, L2, Linf, PerturbationSet
from dale.random import Key
from dale.samplers import State
from dale.samplers.base import Classifier

STEPS = 100
_OVERSHOOT = 1.05  # how far a step goes beyond the linearised boundary
_BACK = 0.9  # how much of a perturbation is kept once the boundary is crossed
_BIAS = 0.1  # the largest weight of the original image in a step


def to_hyperplane(ball: PerturbationSet, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return d of smallest norm with w . (x + d) = b and x + d in [0, 1], for rows x, w (B, n) and b (B,).

    With v = +-w signed so that v . d = r = |w . x - b| is wanted, room_i the way to the box's wall on the side of v_i:

        l-infinity   d_i = sign(v_i) min(m, room_i),        l2   d_i = sign(v_i) min(m |v_i|, room_i),

    m >= 0 such that v . d = r, which sorted breakpoints give in closed form; l1: the largest |v_i| first, each as far
    as its room. Where the box does not reach the hyperplane, d is the corner nearest to it.
    """
    gap = (w * x).sum(dim=1) - b
    v = -w * torch.where(gap >= 0, 1.0, -1.0).unsqueeze(1)
    need, weight, sign = gap.abs().unsqueeze(1), v.abs(), v.sign()
    room = torch.where(v > 0, 1.0 - x, x).clamp_min(0.0) * (weight > 0)
    if isinstance(ball, L1):
        weights, order = weight.sort(dim=1, descending=True)
        gain = weights * room.gather(1, order)
        before = gain.cumsum(dim=1) - gain
        size = ((need - before) / weights.clamp_min(torch.finfo(x.dtype).tiny)).clamp_min(0.0)
        return sign * torch.minimum(torch.zeros_like(x).scatter(1, order, size), room)
    speed = weight if isinstance(ball, L2) else torch.ones_like(weight)
    tiny = torch.finfo(x.dtype).tiny
    reach = torch.where(weight > 0, room / speed.clamp_min(tiny), torch.inf)
    reach, order = reach.sort(dim=1)
    full = (weight * room).gather(1, order)
    slope = (weight * speed).gather(1, order)
    filled = full.cumsum(dim=1) - full  # by the coordinates that met their wall before this one
    moving = slope.flip(1).cumsum(dim=1).flip(1)  # of this one and all later ones
    at = filled + torch.where(reach.isinf(), torch.inf, reach * moving)
    place = (at < need).sum(dim=1, keepdim=True).clamp_max(x.shape[1] - 1)
    m = ((need - filled.gather(1, place)) / moving.gather(1, place).clamp_min(tiny)).clamp_min(0.0)
    unreachable = full.sum(dim=1, keepdim=True) < need
    return sign * torch.where(unreachable, room, torch.minimum(m * speed, room))


@dataclass(frozen=True, kw_only=True)
class FAB(Attack):
    """Targeted FAB, once for each of the `targets` classes with the largest clean logits.

    With d1, d2 the projections of the current point x' and of the image x onto the linearised boundary
    f_t + grad f_t . (z - x') = f_y + ..., and a = min(|d1| / (|d1| + |d2|), 0.1):

        x' <- clip( (1 - a) (x' + 1.05 d1) + a (x + 1.05 d2) )

    A point across the boundary but outside the ball is pulled back, x' <- x + 0.9 (x' - x), and keeps the boundary that
    was linearised where it came from; inside the ball it counts, and its example is left alone from then on. Norm balls
    only.
    """

    steps: int = STEPS
    targets: int = 9

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("targets", self.targets)):
            require(value >= 1, f"FAB: {name} must be a whole number of at least 1, got {value!r}")

    @property
    def name(self) -> str:
        """fab-t, fab50-t."""
        return "fab-t" if self.steps == STEPS else f"fab{self.steps}-t"

    def supports(self, perturbations: PerturbationSet) -> None:
        """Norm balls."""
        if not isinstance(perturbations, (Linf, L2, L1)):
            raise UsageError(
                f"fab-t searches norm balls (Linf, L2, L1), not {type(perturbations).__name__}; use 'grid'"
            )

    def rounds(self, num_classes: int) -> int:
        """One for each target."""
        return min(self.targets, num_classes - 1)

    def budget(self, num_classes: int) -> Budget:
        """The start's gradient and one for each step."""
        rounds = self.rounds(num_classes)
        return Budget(steps=self.steps, restarts=rounds, gradients=rounds * (self.steps + 1))

    def hunt(
        self,
        model: Classifier,
        batch: Batch,
        perturbations: PerturbationSet,
        number: int,
        clean_logits: Tensor,
        slack: float,
    ) -> Hunt:
        """The margin of the round's target; points outside the ball are not to be remembered."""
        loss = TargetMargin(rank=1 + number)
        return Hunt(model, batch, perturbations, loss, False, clean_logits, slack=slack, guard=True)

    def search(self, hunt: Hunt, number: int, key: Key) -> None:
        """Run one target."""
        start = hunt.zeros()
        value, gradient = hunt.value_and_gradient(start)
        state = {"delta": start, "value": value, "gradient": gradient}
        for _ in range(self.steps):
            state = self._look(hunt, self._step(hunt, state))
            hunt, state = hunt.shed(state)
            if len(hunt.batch) == 0:
                return
        hunt.settle()

    def _step(self, hunt: Hunt, state: State) -> Tensor:
        """Go towards the linearised boundary, from the current point and a little from the image."""
        ball, x = hunt.perturbations, hunt.x.flatten(1)
        assert isinstance(ball, (Linf, L2, L1))
        point, w = x + state["delta"].flatten(1), state["gradient"].flatten(1)
        b = (w * point).sum(dim=1) - state["value"]
        d1, d2 = to_hyperplane(ball, torch.cat([point, x]), torch.cat([w, w]), torch.cat([b, b])).chunk(2)
        n1, n2 = (ball.norm(d).clamp_min(1e-8).unsqueeze(1) for d in (d1, d2))
        a = (n1 / (n1 + n2)).clamp_max(_BIAS)
        point = ((1.0 - a) * (point + _OVERSHOOT * d1) + a * (x + _OVERSHOOT * d2)).clamp(0.0, 1.0)
        return (point - x).view_as(state["delta"])

    def _look(self, hunt: Hunt, delta: Tensor) -> State:
        """Evaluate the new points, and pull back those across the boundary and outside the ball.

        A point across lies nearer to the boundary (the overshoot) than the one it is pulled back to: its linearised
        boundary stays in use, carried over to that point, and one gradient is all that a step costs.
        """
        value, gradient = hunt.value_and_gradient(delta)
        beyond = self._beyond(hunt, delta).view(-1, *([1] * (delta.dim() - 1)))
        nearer = torch.where(beyond, _BACK * delta, delta)
        value = value + (gradient * (nearer - delta)).flatten(1).sum(dim=1)
        return {"delta": nearer, "value": value, "gradient": gradient}

    @staticmethod
    def _beyond(hunt: Hunt, delta: Tensor) -> Tensor:
        """Tell which of the points just evaluated lie across the boundary and outside the ball."""
        ball = hunt.perturbations
        assert isinstance(ball, (Linf, L2, L1))
        return (hunt.seen > 0) & (ball.norm(delta) > ball.epsilon)
