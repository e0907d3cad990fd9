"""What an attack is: rounds of search, each on the examples that still stand, and a memory of the best found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor, nn

from dale.batch import Batch
from dale.components import Component
from dale.losses import Loss, Margin
from dale.modes import evaluating, frozen
from dale.perturbations import PerturbationSet
from dale.random import Key
from dale.random import key as make_key
from dale.samplers import Problem, State
from dale.samplers.base import Classifier

# On an accelerator, looking whether examples have fallen stops the pipeline: every so many steps is often enough.
_LOOK_EVERY = 10
# Leaving examples out copies the state of the others: it is done when at least this share of the rows is in vain.
_SHED_SHARE = 0.1

_MARGIN = Margin()


@dataclass(frozen=True)
class Budget:
    """The most that an attack spends on one example: gradient steps, restarts, gradients and forward queries."""

    steps: int
    restarts: int = 1
    gradients: int = 0
    queries: int = 0


@dataclass
class Found:
    """What a search found: for each example the perturbation of largest margin, and what it cost.

    The margin is max_{k != y} f_k - f_y: above zero the prediction is wrong. `gradients` and `queries` are summed over
    the examples.
    """

    delta: Tensor
    margin: Tensor
    gradients: int = 0
    queries: int = 0

    def put(self, rows: Tensor, delta: Tensor, margin: Tensor) -> None:
        """Write what is known of some of the examples."""
        self.delta[rows], self.margin[rows] = delta, margin


@dataclass
class Hunt(Problem):
    """A problem that remembers, for each example, the perturbation with the largest margin among all it was asked for.

    So every kernel of the gradient loop becomes an attack that keeps its best iterate. Examples whose margin exceeds
    `slack` times their largest logit have fallen for certain and are left out of the steps that follow; the slack
    covers the rounding between the model that is searched and the one that is judged. With `keep_best` off nothing is
    remembered but what `settle` is told: the last iterate. `guard` is for searches that leave the set: what lies
    outside is not remembered. `seen` holds the margins of the latest evaluation.
    """

    keep_best: bool = True
    slack: float = 0.0
    guard: bool = False
    found: Found = field(init=False)
    rows: Tensor = field(init=False)
    best: Tensor = field(init=False)
    margin: Tensor = field(init=False)
    fallen: Tensor = field(init=False)
    seen: Tensor = field(init=False)
    looks: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        size, device = len(self.batch), self.x.device
        self.rows = torch.arange(size, device=device)
        self.best = self.zeros()
        self.margin = self.x.new_full((size,), -torch.inf)
        self.fallen = torch.zeros(size, dtype=torch.bool, device=device)
        self.seen = self.margin
        self.found = Found(self.best.clone(), self.margin.clone())

    def potential(self, delta: Tensor) -> Tensor:
        """U(delta) of each example; the margins at delta are remembered."""
        logits = self.model(self.perturbations.apply(self.x, delta))
        assert self.loss is not None
        if self.keep_best:
            self.note(delta.detach(), logits.detach())
        return self.loss(logits, self.clean_logits, self.batch.labels, log=self.log)

    def value(self, delta: Tensor) -> Tensor:
        """U(delta) without a gradient: one query for each example."""
        self.found.queries += len(self.batch)
        return super().value(delta)

    def value_and_gradient(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """U(delta) and its gradient: one gradient for each example."""
        self.found.gradients += len(self.batch)
        return super().value_and_gradient(delta)

    def query(self, delta: Tensor) -> Tensor:
        """Return the logits at delta, remembering the margins."""
        self.found.queries += len(self.batch)
        with torch.no_grad():
            logits = self.model(self.perturbations.apply(self.x, delta))
        self.note(delta, logits)
        return logits

    def query_rows(self, delta: Tensor, rows: Tensor) -> None:
        """Ask for some of the examples alone (places in this batch), remembering their margins."""
        self.found.queries += len(rows)
        moved, labels = delta[rows], self.batch.labels[rows]
        with torch.no_grad():
            logits = self.model(self.perturbations.apply(self.x[rows], moved))
        margin = _MARGIN(logits, None, labels).nan_to_num(nan=torch.inf)
        better = (margin > self.margin[rows]).nonzero().squeeze(1)
        if len(better) > 0:
            places, margin = rows[better], margin[better]
            self.best = self.best.index_copy(0, places, moved[better])
            self.margin = self.margin.index_copy(0, places, margin)
            fallen = margin > self.slack * logits[better].abs().amax(dim=1)
            self.fallen = self.fallen.index_copy(0, places, self.fallen[places] | fallen)

    def note(self, delta: Tensor, logits: Tensor) -> None:
        """Remember delta where its margin is the largest so far."""
        margin = _MARGIN(logits, None, self.batch.labels).nan_to_num(nan=torch.inf)
        self.seen = margin
        if self.guard:
            margin = margin.masked_fill(~self.perturbations.contains(delta, self.x), -torch.inf)
        better = margin > self.margin
        self.margin = torch.where(better, margin, self.margin)
        self.best = torch.where(better.view(-1, *([1] * (delta.dim() - 1))), delta, self.best)
        self.fallen = self.fallen | (margin > self.slack * logits.abs().amax(dim=1))

    def shed(self, state: State) -> tuple[Hunt, State]:
        """Go on without the examples that have fallen."""
        self.looks += 1
        if not self.keep_best or (self.x.device.type != "cpu" and self.looks % _LOOK_EVERY):
            return self, state
        standing = (~self.fallen).nonzero().squeeze(1)
        if len(standing) >= (1.0 - _SHED_SHARE) * len(self.batch) and len(standing) > 0:
            return self, state
        return self.take(standing), {name: value[standing] for name, value in state.items()}

    def take(self, part: Tensor) -> Hunt:
        """Return the hunt for some of the examples (places in this batch); what is found is written to the same book.

        Which of the two goes on to search is up to the caller; the other must not be asked any more.
        """
        self.settle()
        clean = None if self.clean_logits is None else self.clean_logits[part]
        rest = replace(self, batch=self.batch[part], clean_logits=clean)
        rest.rows, rest.best, rest.margin = self.rows[part], self.best[part], self.margin[part]
        rest.fallen, rest.found, rest.looks = self.fallen[part], self.found, self.looks
        return rest

    def split(self, part: Tensor) -> Hunt:
        """Return a hunt for some of the examples with a memory of its own, which `absorb` takes in."""
        clean = None if self.clean_logits is None else self.clean_logits[part]
        return replace(self, batch=self.batch[part], clean_logits=clean)

    def absorb(self, part: Tensor, other: Hunt) -> None:
        """Take in what the hunt that was split off for `part` found and spent."""
        chosen = other.margin > self.margin[part]
        better = part[chosen]
        self.best = self.best.index_copy(0, better, other.best[chosen])
        self.margin = self.margin.index_copy(0, better, other.margin[chosen])
        self.fallen = self.fallen.index_copy(0, part, self.fallen[part] | other.fallen)
        self.found.gradients += other.found.gradients
        self.found.queries += other.found.queries

    def settle(self, last: Tensor | None = None) -> None:
        """Write what was found to the book: the best, or without `keep_best` the `last` perturbation."""
        if not self.keep_best and last is not None:
            self.best = last
        self.found.put(self.rows, self.best, self.margin)


@dataclass(frozen=True, kw_only=True)
class Attack(Component, ABC):
    """An evaluation adversary: looks in a perturbation set for perturbations that fool a model.

    An attack is a number of rounds (restarts, target classes, parts of a sequence); each round searches the examples
    that the earlier ones left standing. `dale.evaluate` runs a round over all standing examples, in full batches,
    before the next begins; calling the attack does the same with one batch. An attack of your own writes `search`,
    which asks `hunt` for logits, values or gradients: everything asked is remembered, the best of it is the result.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that `dale.attacks.parse` reads back."""

    @property
    def stream(self) -> str:
        """The stream of its random numbers; attacks that share one begin at the same places."""
        return self.name

    @property
    def loss(self) -> Loss | None:
        """The loss that the search climbs, of the first round; None where it climbs none."""
        return None

    @property
    def white_box(self) -> bool:
        """Whether the attack uses the model's gradients."""
        return True

    @property
    def keeps_best(self) -> bool:
        """Whether an example counts as fallen when any iterate fooled the model, not only the last."""
        return True

    def prepared(self, perturbations: PerturbationSet, sources: Mapping[str, nn.Module] | None = None) -> Attack:
        """Return the attack as it is run on a set: standard numbers filled in, and models of `sources` found."""
        del perturbations, sources
        return self

    @abstractmethod
    def budget(self, num_classes: int) -> Budget:
        """The most that is spent on one example."""

    def rounds(self, num_classes: int) -> int:
        """The number of rounds."""
        del num_classes
        return 1

    def round_name(self, number: int, num_classes: int) -> str:
        """What a progress bar says of a round."""
        total = self.rounds(num_classes)
        return self.name if total == 1 else f"{self.name} {number + 1}/{total}"

    def supports(self, perturbations: PerturbationSet) -> None:
        """Raise a `UsageError` where the attack cannot search the set."""
        del perturbations

    def hunt(
        self,
        model: Classifier,
        batch: Batch,
        perturbations: PerturbationSet,
        number: int,
        clean_logits: Tensor,
        slack: float,
    ) -> Hunt:
        """Return the problem that a round searches."""
        del number
        loss = self.loss
        log = loss is not None and loss.non_negative
        return Hunt(model, batch, perturbations, loss, log, clean_logits, self.keeps_best, slack)

    @abstractmethod
    def search(self, hunt: Hunt, number: int, key: Key) -> None:
        """Search in round `number`; the hunt remembers what it is asked."""

    @final
    def run_round(
        self,
        model: Classifier,
        batch: Batch,
        perturbations: PerturbationSet,
        number: int,
        key: Key,
        *,
        clean_logits: Tensor,
        slack: float = 0.0,
    ) -> Found:
        """Run one round on a batch of correctly classified examples, for a model in eval mode with frozen weights."""
        hunt = self.hunt(model, batch, perturbations, number, clean_logits, slack)
        with torch.no_grad():
            self.search(hunt, number, key.fold(number))
        return hunt.found

    @final
    def __call__(self, model: nn.Module, batch: Batch, perturbations: PerturbationSet, key: Key | int) -> Tensor:
        """Return the best perturbation found for each example, (B, *shape); zero where the clean one is wrong."""
        self.supports(perturbations)
        attack, root = self.prepared(perturbations), make_key(key).fold(self.stream)
        with evaluating(model), frozen(model), torch.no_grad():
            clean_logits = model(batch.images)
            shape = perturbations.shape(tuple(batch.images.shape[1:]))
            delta = batch.images.new_zeros((len(batch), *shape))
            margin = clean_logits.new_full((len(batch),), -torch.inf)
            standing = (clean_logits.argmax(dim=1) == batch.labels).nonzero().squeeze(1)
            for number in range(attack.rounds(clean_logits.shape[1])):
                if len(standing) == 0:
                    break
                found = attack.run_round(
                    model, batch[standing], perturbations, number, root, clean_logits=clean_logits[standing]
                )
                better = standing[(found.margin > margin[standing]) | (found.margin == -torch.inf)]
                place = torch.searchsorted(standing, better)
                delta[better], margin[better] = found.delta[place], found.margin[place]
                images = perturbations.apply(batch.images[standing], delta[standing])
                standing = standing[model(images).argmax(dim=1) == batch.labels[standing]]
        return delta
