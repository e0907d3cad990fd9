"""The attacks that run APGD: on cross-entropy or DLR with restarts, and targeted, one class after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor, nn

from dale import random
from dale.attacks.apgd import AutoPGD, SparseAutoPGD
from dale.attacks.base import Attack, Budget
from dale.attacks.gradient import LOSSES, finish
from dale.attacks.hunt import Hunt
from dale.attacks.targeted import TargetedDLR
from dale.batch import Batch
from dale.errors import require, require_choice
from dale.losses import Loss
from dale.perturbations import L1, L2, Linf, PerturbationSet
from dale.random import Key
from dale.samplers import Chain, Kernel
from dale.samplers.base import Classifier

STEPS = 100
# For the l1 ball three radii, from large to right: a sparse point found in a larger ball is a good start in the ball.
_L1_RADII = ((3.0, 0.3), (2.0, 0.3), (1.0, 0.4))


def border(hunt: Hunt, key: Key) -> Tensor | None:
    """Noise stretched to the border of a ball, uniform for l-infinity and Gaussian for l2; None for other sets.

    Clipped to the box, as a hunt does, it leaves black and white pixels as they are in half of the cases: a start
    nearer to the image than a uniform one, from which APGD was seen to get further.
    """
    ball = hunt.perturbations
    if isinstance(ball, Linf):
        noise = random.uniform(key, hunt.index, hunt.shape, low=-1.0, high=1.0).to(hunt.x)
    elif isinstance(ball, L2):
        noise = random.normal(key, hunt.index, hunt.shape).to(hunt.x)
    else:
        return None
    return noise * (ball.epsilon / ball.norm(noise)).view(-1, *([1] * (noise.dim() - 1)))


@dataclass(frozen=True, kw_only=True)
class APGD(Attack):
    """APGD on the cross-entropy ("ce"), the difference-of-logits ratio ("dlr") or the targeted one ("t").

    "t" runs once for each of the `targets` classes with the largest clean logits. `restarts` and `targets` not given
    are the standard ones: 1 and 9, for the l1 ball 5 (1 for "t") and 5. The kernel is `AutoPGD`, for the l1 ball
    `SparseAutoPGD` over three radii.
    """

    objective: Literal["ce", "dlr", "t"] = "ce"
    steps: int = STEPS
    restarts: int | None = None
    targets: int | None = None
    searches: int = field(default=1, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_choice(self, ("ce", "dlr", "t"), objective=self.objective)
        for name, value in (("steps", self.steps), ("restarts", self.restarts), ("targets", self.targets)):
            require(value is None or value >= 1, f"APGD: {name} must be a whole number of at least 1, got {value!r}")
        require(
            self.targets is None or self.objective == "t", f"APGD: targets go with objective 't', not {self.objective}"
        )

    @property
    def name(self) -> str:
        """apgd-ce, apgd50-tx2."""
        steps = "" if self.steps == STEPS else str(self.steps)
        restarts = f"x{self.restarts}" if self.restarts is not None else ""
        return f"apgd{steps}-{self.objective}{restarts}"

    @property
    def stream(self) -> str:
        """All variants begin at the same places."""
        return "apgd"

    def prepared(self, perturbations: PerturbationSet, sources: Mapping[str, nn.Module] | None = None) -> APGD:
        """Fill in the standard numbers for the set."""
        sparse = isinstance(perturbations, L1)
        restarts, targets = self.restarts, self.targets
        if restarts is None:
            restarts = 5 if sparse and self.objective != "t" else 1
        if targets is None and self.objective == "t":
            targets = 5 if sparse else 9
        # a restarts that stays 1 keeps the name short
        prepared = replace(self, restarts=None if restarts == 1 else restarts, targets=targets)
        object.__setattr__(prepared, "searches", len(_L1_RADII) if sparse else 1)  # the set's, not configuration
        return prepared

    def _targets(self, num_classes: int) -> int:
        return min(self.targets or 9, num_classes - 1) if self.objective == "t" else 1

    def rounds(self, num_classes: int) -> int:
        """One for each restart and target."""
        return (self.restarts or 1) * self._targets(num_classes)

    def budget(self, num_classes: int) -> Budget:
        """One gradient for each step and one for each start, in every round."""
        rounds, steps = self.rounds(num_classes), max(self.steps, self.searches)  # each search makes a step at least
        return Budget(steps=self.steps, restarts=rounds, gradients=rounds * (steps + self.searches))

    def hunt(
        self,
        model: Classifier,
        batch: Batch,
        perturbations: PerturbationSet,
        number: int,
        clean_logits: Tensor,
        slack: float,
    ) -> Hunt:
        """Climb the round's loss."""
        loss: Loss
        if self.objective == "t":
            loss = TargetedDLR(rank=1 + number % self._targets(clean_logits.shape[1]))
        else:
            loss = LOSSES[self.objective]
        return Hunt(model, batch, perturbations, loss, loss.non_negative, clean_logits, slack=slack)

    def search(self, hunt: Hunt, number: int, key: Key) -> None:
        """Run one round."""
        if not isinstance(hunt.perturbations, L1):
            chain = Chain(kernel=AutoPGD(), steps=self.steps, start="uniform")
            finish(hunt, chain, key, look=False, start=border(hunt, key.fold("start")))
            return
        ball = hunt.perturbations
        # noise far outside the ball, projected: a start in few coordinates, where the solutions are too
        start = random.normal(key.fold("start"), hunt.index, hunt.shape).to(hunt.x)
        left = self.steps
        for factor, share in _L1_RADII:
            last = factor == 1.0
            steps = left if last else max(1, min(left - 1, round(share * self.steps)))
            left -= steps
            kernel: Kernel = SparseAutoPGD()
            chain = Chain(kernel=kernel, steps=max(1, steps), start="uniform")
            # a larger ball's points may not count: that hunt keeps no book of them
            larger = replace(ball, epsilon=factor * ball.epsilon)
            part = hunt if last else replace(hunt, perturbations=larger, keep_best=False)
            found = finish(part, chain, key.fold(f"{factor}"), look=False, start=start)
            if not last:
                hunt.charge(part)
            start = found
