"""Mixtures: each example draws from one of several samplers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dale import random
from dale.errors import require, require_positive
from dale.random import Key
from dale.samplers.base import Problem, Sampler

_PART = random.stream("part")  # as a number: a compiler knows no hashes


@dataclass(frozen=True, kw_only=True)
class Mixture(Sampler):
    """lambda = sum over m of s_m lambda_m, with shares s (equal ones unless given; they need not add up to 1).

    All samplers draw for all examples, and each example takes the draws of one of them: a mixture costs the sum of its
    parts. They have the same number of draws and support (`free`), the model is in the mixture's mode, and they climb
    one loss, each it or its logarithm as it does alone. What must withstand strong attacks and weak ones alike is
    trained on both: `Mixture(samplers=(pgd(20), fgsm(0.3)), shares=(0.7, 0.3))`.
    """

    samplers: tuple[Sampler, ...]
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.samplers) >= 2, f"Mixture: give at least two samplers, got {len(self.samplers)}")
        require(
            len(self.shares) in (0, len(self.samplers)),
            f"Mixture: give a share for each of the {len(self.samplers)} samplers, got {len(self.shares)}",
        )
        for number, share in enumerate(self.shares):
            require_positive(self, **{f"shares[{number}]": share})
        modes = [sampler.mode for sampler in self.samplers]
        require(
            {*modes} <= {"eval", self.mode}, f"Mixture: the mode is said of the mixture, {self.mode!r}, got {modes}"
        )
        free = [sampler.free for sampler in self.samplers]
        require(len(set(free)) == 1, f"Mixture: all samplers stay in the set or none does, got free={free}")
        draws = [sampler.num_draws for sampler in self.samplers]
        require(len(set(draws)) == 1, f"Mixture: the samplers draw equally often, got {draws} draws per example")

    @property
    def free(self) -> bool:
        """Whether draws may leave the set, the same for all parts."""
        return self.samplers[0].free

    @property
    def num_draws(self) -> int:
        """K, the same for all parts."""
        return self.samplers[0].num_draws

    @property
    def log(self) -> bool:
        """Whether any part climbs the logarithm of the loss."""
        return any(sampler.log for sampler in self.samplers)

    @property
    def needs_loss(self) -> bool:
        """Whether any part climbs a loss."""
        return any(sampler.needs_loss for sampler in self.samplers)

    def draw(self, problem: Problem, key: Key) -> Tensor:
        """Let every part draw, and choose for each example."""
        keys: list[Key] = problem.compiler(_parts)(key, len(self.samplers) + 1)
        drawn = []
        for sampler, part in zip(self.samplers, keys, strict=False):
            own = Problem(
                problem.model, problem.batch, problem.perturbations, problem.loss, sampler.log, problem.clean_logits
            )
            drawn.append(sampler.draw(own, part))
            problem.evaluations += own.evaluations
        chosen: Tensor = problem.compiler(Mixture._choose)(self, drawn, problem.index, keys[-1])
        return chosen

    def _choose(self, drawn: list[Tensor], index: Tensor, key: Key) -> Tensor:
        shares = self.shares or (1.0,) * len(drawn)
        place = sum(shares) * random.uniform(key, index)
        chosen = drawn[-1]
        for delta, bound in reversed(list(zip(drawn[:-1], accumulate(shares), strict=False))):
            chosen = torch.where((place < bound).view(1, -1, *[1] * (delta.dim() - 2)), delta, chosen)
        return chosen


def _parts(key: Key, count: int) -> list[Key]:
    """A key for each part; a name goes first, for the key may be that of a seed."""
    return key.fold(_PART).each(count)
