"""FGSM and PGD: the Langevin kernel without noise, from the evaluator's side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dale.attacks.base import Attack, Budget
from dale.attacks.hunt import Hunt
from dale.errors import require, require_choice, require_positive
from dale.losses import DLR, KL, CrossEntropy, Loss, Margin
from dale.random import Key
from dale.samplers import Chain, Kernel, Langevin, walk

LossName = Literal["ce", "margin", "dlr", "kl"]
LOSSES: dict[str, Loss] = {"ce": CrossEntropy(), "margin": Margin(), "dlr": DLR(), "kl": KL()}


def finish(hunt: Hunt, chain: Chain, key: Key, *, look: bool = True, start: Tensor | None = None) -> Tensor:
    """Run a chain on a hunt from its start (or the one given) to the end, and return the kernel's last result.

    With `look` the last iterate is evaluated too, for kernels that move after their last evaluation.
    """
    kernel: Kernel = chain.kernel.for_steps(chain.steps)
    delta = chain.begin(hunt, key.fold("start")) if start is None else hunt.project(start)
    first = kernel.init(hunt, delta, key.fold("init"))
    problem, state = hunt, first
    for current, after in walk(kernel, hunt, first, chain.steps, key.fold("step")):
        assert isinstance(current, Hunt)
        problem, state = current, after
    if problem.keep_best and look:
        problem.query(state["delta"])
    problem.settle(state["delta"])
    return kernel.result(state)


@dataclass(frozen=True, kw_only=True)
class FGSM(Attack):
    """One step to the border of the set along the steepest direction of the cross-entropy at the clean image.

        delta = P[ epsilon * D(grad log CE(f(x), y)) ]

    The log leaves the direction as it is, and keeps it where the cross-entropy itself underflows.
    """

    @property
    def name(self) -> str:
        """fgsm."""
        return "fgsm"

    @property
    def loss(self) -> Loss:
        """Cross-entropy."""
        return LOSSES["ce"]

    @property
    def keeps_best(self) -> bool:
        """There is one iterate."""
        return False

    def budget(self, num_classes: int) -> Budget:
        """One gradient."""
        return Budget(steps=1, gradients=1)

    def search(self, hunt: Hunt, number: int, key: Key) -> None:
        """Take the step."""
        kernel = Langevin(step_size=hunt.perturbations.radius, noise="none")
        finish(hunt, Chain(kernel=kernel, steps=1, start="zero", climb_log=True), key)


@dataclass(frozen=True, kw_only=True)
class PGD(Attack):
    """Projected gradient ascent from uniform starts, `restarts` times on what still stands.

        delta <- P[ delta + eta * D(grad U(delta)) ],    U = log CE (the same direction as CE), log KL, margin or DLR

    An example has fallen when *any* iterate fools the model (`keep_best`, the stronger and the default); papers mean
    the last iterate, `keep_best=False` or the name ``pgd20-last``. `step_size` = eta defaults to a quarter of the
    set's radius: 2/255 for 8/255.
    """

    steps: int = 20
    restarts: int = 1
    step_size: float | None = None
    objective: LossName = "ce"
    start: Literal["zero", "uniform"] = "uniform"
    keep_best: bool = True

    def __post_init__(self) -> None:
        require_choice(self, LOSSES, objective=self.objective)
        require_choice(self, ("zero", "uniform"), start=self.start)
        require_positive(self, step_size=self.step_size)
        for name, value in (("steps", self.steps), ("restarts", self.restarts)):
            require(value >= 1, f"PGD: {name} must be a whole number of at least 1, got {value!r}")
        require(
            self.start != "zero" or (self.restarts == 1 and self.objective != "kl"),
            "PGD: a start at zero takes one restart, and no KL divergence (whose gradient is zero there)",
        )

    @property
    def name(self) -> str:
        """pgd20, pgd20@0.01-margin-zero-lastx10."""
        step = "" if self.step_size is None else f"@{self.step_size:.12g}"
        loss = "" if self.objective == "ce" else f"-{self.objective}"
        start = "-zero" if self.start == "zero" else ""
        last = "" if self.keep_best else "-last"
        return f"pgd{self.steps}{step}{loss}{start}{last}" + (f"x{self.restarts}" if self.restarts > 1 else "")

    @property
    def stream(self) -> str:
        """All variants begin at the same places, so that they can be compared."""
        return "pgd"

    @property
    def loss(self) -> Loss:
        """The loss that is climbed."""
        return LOSSES[self.objective]

    @property
    def keeps_best(self) -> bool:
        """As the option says."""
        return self.keep_best

    def budget(self, num_classes: int) -> Budget:
        """Steps times restarts; one more forward pass each where the best iterate is kept."""
        return Budget(
            steps=self.steps,
            restarts=self.restarts,
            gradients=self.steps * self.restarts,
            queries=self.restarts * int(self.keep_best),
        )

    def rounds(self, num_classes: int) -> int:
        """One for each restart."""
        return self.restarts

    @property
    def chain(self) -> Chain:
        """The sampler that one restart runs."""
        kernel = Langevin(step_size=self.step_size, noise="none")
        return Chain(kernel=kernel, steps=self.steps, start=self.start, climb_log=self.loss.non_negative)

    def search(self, hunt: Hunt, number: int, key: Key) -> None:
        """Run one restart."""
        finish(hunt, self.chain, key)
