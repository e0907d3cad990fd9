"""Search without gradients in any set: random draws, a grid over a few parameters, and transfer from another model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from dale.attacks.adaptive import APGD
from dale.attacks.base import Attack, Budget
from dale.attacks.hunt import Hunt
from dale.errors import UsageError, require
from dale.modes import evaluating, frozen
from dale.perturbations import PerturbationSet
from dale.perturbations.base import ParameterBox
from dale.random import Key

_GRID_POINTS = 1000


@dataclass(frozen=True, kw_only=True)
class RandomSearch(Attack):
    """The worst of `draws` uniform draws from the set; one draw is random noise."""

    draws: int = 1

    def __post_init__(self) -> None:
        require(self.draws >= 1, f"RandomSearch: draws must be a whole number of at least 1, got {self.draws!r}")

    @property
    def name(self) -> str:
        """noise, worst-of-100."""
        return "noise" if self.draws == 1 else f"worst-of-{self.draws}"

    @property
    def stream(self) -> str:
        """More draws begin as fewer do."""
        return "random"

    @property
    def white_box(self) -> bool:
        """Queries alone."""
        return False

    def budget(self, num_classes: int) -> Budget:
        """One query for each draw."""
        return Budget(steps=self.draws, queries=self.draws)

    def search(self, hunt: Hunt, number: int, key: Key) -> None:
        """Draw and ask."""
        for draw in range(self.draws):
            hunt.query(hunt.perturbations.sample(hunt.x, key.fold(draw), hunt.index))
            hunt, _ = hunt.shed({})
            if len(hunt.batch) == 0:
                return
        hunt.settle()


@dataclass(frozen=True, kw_only=True)
class GridSearch(Attack):
    """Every point of a grid over the parameters of a transformation set, `points` in each, the ends included.

    Not given, `points` is as many as keep the whole grid at about 1000. The grid is walked from its middle outwards.
    """

    points: int | None = None
    axes: int = field(default=1, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(self.points is None or self.points >= 2, f"GridSearch: points must be at least 2, got {self.points!r}")

    @property
    def name(self) -> str:
        """grid, grid9."""
        return "grid" if self.points is None else f"grid{self.points}"

    @property
    def white_box(self) -> bool:
        """Queries alone."""
        return False

    def supports(self, perturbations: PerturbationSet) -> None:
        """Sets of a few parameters."""
        if not isinstance(perturbations, ParameterBox):
            raise UsageError(
                f"grid searches transformations with a few parameters, not {type(perturbations).__name__}; "
                "use 'worst-of-100' or 'square'"
            )

    def prepared(self, perturbations: PerturbationSet, sources: Mapping[str, nn.Module] | None = None) -> GridSearch:
        """Choose the number of points for the set."""
        self.supports(perturbations)
        assert isinstance(perturbations, ParameterBox)
        axes = perturbations.num_parameters
        points = self.points or max(3, math.floor(_GRID_POINTS ** (1.0 / axes) + 1e-9))
        prepared = GridSearch(points=points)
        object.__setattr__(prepared, "axes", axes)  # the set's, not configuration
        return prepared

    def budget(self, num_classes: int) -> Budget:
        """One query for each point; the number of axes is known once the attack is `prepared` for a set."""
        total = _GRID_POINTS if self.points is None else self.points**self.axes
        return Budget(steps=total, queries=total)

    def search(self, hunt: Hunt, number: int, key: Key) -> None:
        """Ask for every point."""
        (axes,) = hunt.shape
        assert self.points is not None
        axis = torch.linspace(-1.0, 1.0, self.points)
        axis = axis[axis.abs().argsort(stable=True)]
        for point in torch.cartesian_prod(*[axis] * axes).view(-1, axes).to(hunt.x):
            hunt.query(point.expand(len(hunt.batch), axes))
            hunt, _ = hunt.shed({})
            if len(hunt.batch) == 0:
                return
        hunt.settle()


@dataclass(frozen=True, kw_only=True)
class Transfer(Attack):
    """Perturbations that fool another model, tried on this one.

    `source` names the other model in the `sources` given to `dale.evaluate` (on the command line: a run folder);
    `attack` is run on that model to its end, for every example: what fools the source only just, or not at all, may
    still fool this model, and what fools it by a wide margin is the likeliest to. This model is asked once a round.
    """

    source: str
    attack: Attack = APGD(objective="ce")
    model: nn.Module | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        """transfer:RUN."""
        return f"transfer:{self.source}"

    @property
    def white_box(self) -> bool:
        """This model's gradients are not used."""
        return False

    def supports(self, perturbations: PerturbationSet) -> None:
        """As the attack on the source."""
        self.attack.supports(perturbations)

    def prepared(self, perturbations: PerturbationSet, sources: Mapping[str, nn.Module] | None = None) -> Transfer:
        """Find the source model."""
        if self.source not in (sources or {}):
            raise UsageError(
                f"{self.name}: no such source model; give it as sources={{{self.source!r}: model}}, "
                "or on the command line as the path of a run"
            )
        assert sources is not None
        bound = Transfer(source=self.source, attack=self.attack.prepared(perturbations))
        object.__setattr__(bound, "model", sources[self.source])  # the one thing that is not configuration
        return bound

    def budget(self, num_classes: int) -> Budget:
        """One query of this model for each round; the gradients are the source's."""
        return Budget(steps=self.attack.budget(num_classes).steps, queries=self.rounds(num_classes))

    def rounds(self, num_classes: int) -> int:
        """Those of the attack on the source."""
        return self.attack.rounds(num_classes)

    def search(self, hunt: Hunt, number: int, key: Key) -> None:
        """Attack the source, then ask this model."""
        assert self.model is not None
        with evaluating(self.model), frozen(self.model):
            clean = self.model(hunt.x.clone()).to(hunt.x.dtype)  # a copy: a model may write into its input
            assert hunt.clean_logits is not None
            needed, given = hunt.clean_logits.shape[1], clean.shape[1]
            require(given >= needed, f"{self.name}: the source has {given} outputs, and this model {needed}")
            # no margin is wide enough to stop at: every example is searched to the end
            found = self.attack.run_round(
                self.model, hunt.batch, hunt.perturbations, number, key, clean_logits=clean, slack=torch.inf
            )
        hunt.query(found.delta)
        hunt.settle()
