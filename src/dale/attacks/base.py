"""What an attack is: rounds of search, each on the examples that still stand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from dale.attacks.hunt import Found, Hunt
from dale.batch import Batch
from dale.components import Component
from dale.losses import Loss
from dale.modes import evaluating, frozen
from dale.perturbations import PerturbationSet
from dale.random import Key
from dale.random import key as make_key
from dale.samplers.base import Classifier


@dataclass(frozen=True)
class Budget:
    """The most that an attack spends on one example: gradient steps, restarts, gradients and forward queries."""

    steps: int
    restarts: int = 1
    gradients: int = 0
    queries: int = 0


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
            clean_logits = model(batch.images.clone()).to(batch.images.dtype)  # a model may write into its input
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
