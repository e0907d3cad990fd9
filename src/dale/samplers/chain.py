"""The one gradient loop: start, then `steps` times a kernel's step, then the projection.

FGSM, PGD, Langevin, MALA, HMC and APGD are kernels of this loop; norms and transformations are sets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from dale import random
from dale.components import Component
from dale.errors import require, require_choice, require_non_negative, require_positive
from dale.perturbations import PerturbationSet
from dale.random import Key
from dale.samplers.base import Problem, Sampler

State = dict[str, Tensor]
Start: TypeAlias = Literal["zero", "gaussian", "away", "uniform"]

_STREAMS = tuple(random.stream(name) for name in ("start", "init", "step"))  # as numbers: a compiler knows no hashes


@dataclass(frozen=True, kw_only=True)
class Kernel(Component, ABC):
    """One way to move a chain: `init` makes the state, `step` moves it.

    The state is a mapping of tensors with one row per example; `state["delta"]` is where the chain is. A kernel that
    returns something else than its last position says so in `result`.
    """

    @abstractmethod
    def init(self, problem: Problem, delta: Tensor, key: Key) -> State:
        """Return the state of a chain that starts at delta."""

    @abstractmethod
    def step(self, problem: Problem, state: State, number: int, key: Key) -> State:
        """Return the state after step `number`; `key` is the step's own."""

    def result(self, state: State) -> Tensor:
        """Return the perturbation that the chain stands for."""
        return state["delta"]

    def for_steps(self, steps: int) -> Kernel:
        """Return the kernel for a chain of known length (kernels with a schedule override this)."""
        del steps
        return self


def walk(kernel: Kernel, problem: Problem, state: State, steps: int, key: Key) -> Iterator[tuple[Problem, State]]:
    """The one gradient loop: yield problem and state after each step.

    A problem may shed examples that it is done with (attacks do, samplers never): what follows has fewer rows.
    """
    for number, step_key in enumerate(problem.compiler(Key.each)(key, steps)):
        state = kernel.step(problem, state, number, step_key)
        yield problem, state
        problem, state = problem.shed(state)
        if len(problem.batch) == 0:
            return


@dataclass(frozen=True, kw_only=True)
class Langevin(Kernel):
    """Projected Langevin dynamics, with PGD and FGSM as its limits.

        noise inside    delta <- P[ delta + eta * D(grad U + c * xi) ]
        noise outside   delta <- P[ delta + eta * D(grad U) + c * xi ],      c = sqrt(2 * eta * T)

    D is the set's direction of ascent (`drift="sign"`: the sign for l-infinity) or the identity (`"gradient"`); xi is
    Laplace(0, 1) (variance 2), N(0, I) or nothing. Give `noise_scale` = c or `temperature` = T, not both; neither means
    no noise. With drift gradient, Gaussian noise outside and the log of the loss as potential the chain targets
    loss^(1/T) on Delta, up to the error of its step; for sign drifts no target density is known: they are heuristics
    that work. `step_size` = eta defaults to a quarter of the set's radius.
    """

    step_size: float | None = None
    drift: Literal["sign", "gradient"] = "sign"
    noise: Literal["laplace", "gaussian", "none"] = "laplace"
    noise_scale: float | None = None
    temperature: float | None = None
    place: Literal["inside", "outside"] = "inside"

    def __post_init__(self) -> None:
        require_positive(self, step_size=self.step_size)
        require_non_negative(self, noise_scale=self.noise_scale, temperature=self.temperature)
        require_choice(self, ("sign", "gradient"), drift=self.drift)
        require_choice(self, ("laplace", "gaussian", "none"), noise=self.noise)
        require_choice(self, ("inside", "outside"), place=self.place)
        require(
            self.noise_scale is None or self.temperature is None,
            "Langevin: give noise_scale (c) or temperature (T), not both: c = sqrt(2 * step_size * T)",
        )
        require(
            self.noise != "none" or not (self.noise_scale or self.temperature),
            "Langevin: noise='none' takes no noise_scale and no temperature",
        )

    def eta(self, perturbations: PerturbationSet) -> float:
        """The step size for a set."""
        return perturbations.radius / 4.0 if self.step_size is None else self.step_size

    def scale(self, perturbations: PerturbationSet) -> float:
        """The noise scale c for a set."""
        if self.noise == "none":
            return 0.0
        if self.temperature is not None:
            return float((2.0 * self.eta(perturbations) * self.temperature) ** 0.5)
        return self.noise_scale or 0.0

    def init(self, problem: Problem, delta: Tensor, key: Key) -> State:
        """The state is the position alone."""
        return {"delta": delta}

    def step(self, problem: Problem, state: State, number: int, key: Key) -> State:
        """Take one projected Langevin step."""
        delta = state["delta"]
        _, gradient = problem.value_and_gradient(delta)
        advance = problem.compiler(Langevin.advance)
        return {"delta": advance(self, problem.perturbations, problem.x, delta, gradient, problem.index, key)}

    def advance(
        self, perturbations: PerturbationSet, x: Tensor, delta: Tensor, gradient: Tensor, index: Tensor, key: Key
    ) -> Tensor:
        """Return the next state, given the gradient: noise, direction, projection."""
        eta, scale = self.eta(perturbations), self.scale(perturbations)
        outside: Tensor | None = None
        if scale > 0.0:
            draw = random.laplace if self.noise == "laplace" else random.normal
            noise = scale * draw(key, index, delta.shape[1:]).to(delta)
            if self.place == "inside":
                gradient = gradient + noise
            else:
                outside = noise
        moved = delta + eta * (perturbations.ascent(gradient, delta, x) if self.drift == "sign" else gradient)
        return perturbations.project(moved if outside is None else moved + outside, x)


def _split(key: Key) -> list[Key]:
    """The keys of the start, of the kernel's first state, and of the steps."""
    return [key.fold(number) for number in _STREAMS]


@dataclass(frozen=True, kw_only=True)
class Chain(Sampler):
    """Run a kernel for `steps` steps from a start, in `num_chains` independent chains per example.

    `start`: zero; `gaussian`, start_scale * N(0, I), the default wherever the potential is a KL divergence, whose
    gradient vanishes at zero; `away`, the same plus start_scale along the steepest ascent of the label's cross-entropy,
    for one gradient more (where the noise still leads back it is turned round); or `uniform` on Delta. A divergence
    from the clean prediction grows to both sides of the image, and a random start leads half of the chains to the side
    where the label gets likelier; `away` leads them to the other. `climb_log`: the potential is the log of the loss.
    `keep`: the `last` state of each chain, or every state after `burn_in` steps (`all`), K = num_chains * (steps -
    burn_in) perturbations per example, chain after chain.
    """

    kernel: Kernel = Langevin()
    steps: int = 10
    start: Start = "gaussian"
    start_scale: float = 1e-3
    climb_log: bool = True
    num_chains: int = 1
    keep: Literal["last", "all"] = "last"
    burn_in: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self, get_args(Start), start=self.start)
        require_choice(self, ("last", "all"), keep=self.keep)
        require_non_negative(self, start_scale=self.start_scale)
        for name, value in (("steps", self.steps), ("num_chains", self.num_chains)):
            require(value >= 1, f"Chain: {name} must be a whole number of at least 1, got {value!r}")
        require(
            0 <= self.burn_in < self.steps and (self.burn_in == 0 or self.keep == "all"),
            f"Chain: burn_in goes with keep='all' and is less than steps={self.steps}, got {self.burn_in!r}",
        )

    @property
    def log(self) -> bool:
        """Whether the potential is the logarithm of the loss."""
        return self.climb_log

    @property
    def needs_loss(self) -> bool:
        """A chain climbs a loss."""
        return True

    @property
    def num_draws(self) -> int:
        """The number of perturbations per example."""
        return self.num_chains * (self.steps - self.burn_in if self.keep == "all" else 1)

    def begin(self, problem: Problem, key: Key) -> Tensor:
        """Return where the chains start, in the set."""
        delta: Tensor = problem.compiler(Chain._drawn)(self, problem, key)
        if self.start != "away":
            return delta
        gradient = problem.away_from_label()
        step = self.start_scale * problem.perturbations.ascent(gradient, problem.zeros(), problem.x)
        # in l1 and l2 the step is no longer than the noise: where that leads back, the noise is turned round, and where
        # that leads back too, cut off by the image box, it is left out
        start = problem.project(step)
        for candidate in (problem.project(step - delta), problem.project(step + delta)):
            along = (candidate * gradient).flatten(1).sum(dim=1) >= 0.0
            start = torch.where(along.view(-1, *[1] * (delta.dim() - 1)), candidate, start)
        return start

    def _drawn(self, problem: Problem, key: Key) -> Tensor:
        if self.start == "zero":
            return problem.project(problem.zeros())
        if self.start == "uniform":
            return problem.perturbations.sample(problem.x, key, problem.index)
        noise = random.normal(key, problem.index, problem.shape).to(problem.x)
        return problem.project(self.start_scale * noise)

    def draw(self, problem: Problem, key: Key) -> Tensor:
        """Run the chains."""
        return self.run(problem, key)[0]

    def run(self, problem: Problem, key: Key, start: Tensor | None = None) -> tuple[Tensor, State]:
        """Return (perturbations, last state); `start`, (num_chains * B, ...), says where to begin instead."""
        size = len(problem.batch)
        problem = problem.repeat(self.num_chains)
        kernel = self.kernel.for_steps(self.steps)
        keys: list[Key] = problem.compiler(_split)(key)
        delta = self.begin(problem, keys[0]) if start is None else problem.project(start)
        state = first = kernel.init(problem, delta, keys[1])
        kept: list[Tensor] = []
        for number, (_, state) in enumerate(walk(kernel, problem, first, self.steps, keys[2])):
            if self.keep == "all" and number >= self.burn_in:
                kept.append(state["delta"])
        if self.keep == "last":
            kept = [kernel.result(state)]
        stacked = torch.stack(kept)  # (kept, num_chains * B, ...)
        shape = stacked.shape[2:]
        return stacked.view(len(kept), self.num_chains, size, *shape).transpose(0, 1).reshape(-1, size, *shape), state

    def with_steps(self, steps: int) -> Chain:
        """Return the same chain with another number of steps."""
        return replace(self, steps=steps)


def fgsm(epsilon: float) -> Chain:
    """One step of size epsilon from zero along the steepest direction: FGSM."""
    return Chain(kernel=Langevin(step_size=epsilon, noise="none"), steps=1, start="zero", climb_log=False)


def pgd(steps: int = 10, step_size: float | None = None, start: Start = "uniform") -> Chain:
    """Projected gradient ascent: Langevin without noise, from a uniform start."""
    return Chain(kernel=Langevin(step_size=step_size, noise="none"), steps=steps, start=start, climb_log=False)


def langevin(
    steps: int = 10,
    step_size: float | None = None,
    noise_scale: float | None = None,
    temperature: float | None = None,
    start: Start = "gaussian",
) -> Chain:
    """The paper's sampler: sign drift with Laplace noise inside, climbing the log of the loss from a small start.

    The noise is the paper's, of scale 1e-4, unless its scale or its temperature is given.
    """
    if noise_scale is None and temperature is None:
        noise_scale = 1e-4
    kernel = Langevin(step_size=step_size, noise_scale=noise_scale, temperature=temperature)
    return Chain(kernel=kernel, steps=steps, start=start)
