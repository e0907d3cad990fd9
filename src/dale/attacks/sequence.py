"""Attacks one after another on what still stands, and AutoAttack, which is such a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from dale.attacks.adaptive import APGD
from dale.attacks.base import Attack, Budget
from dale.attacks.fab import FAB
from dale.attacks.hunt import Hunt
from dale.attacks.square import Square
from dale.batch import Batch
from dale.errors import UsageError, require
from dale.perturbations import PerturbationSet
from dale.random import Key
from dale.samplers.base import Classifier


@dataclass(frozen=True, kw_only=True)
class Sequence(Attack):
    """The parts in order, each on the examples that the earlier ones left standing."""

    parts: tuple[Attack, ...]
    title: str

    def __post_init__(self) -> None:
        require(len(self.parts) > 0, "Sequence: parts is empty; give at least one attack")

    @property
    def name(self) -> str:
        """The title."""
        return self.title

    @property
    def white_box(self) -> bool:
        """Whether any part uses gradients."""
        return any(part.white_box for part in self.parts)

    def prepared(self, perturbations: PerturbationSet, sources: Mapping[str, nn.Module] | None = None) -> Sequence:
        """Prepare every part."""
        return replace(self, parts=tuple(part.prepared(perturbations, sources) for part in self.parts))

    def supports(self, perturbations: PerturbationSet) -> None:
        """Only what every part supports."""
        for part in self.parts:
            try:
                part.supports(perturbations)
            except UsageError as error:
                raise UsageError(f"{self.title} includes {part.name}, and {error}") from None

    def rounds(self, num_classes: int) -> int:
        """Those of all parts."""
        return sum(part.rounds(num_classes) for part in self.parts)

    def part_of(self, number: int, num_classes: int) -> tuple[Attack, int]:
        """Return the part that a round belongs to, and the round's number in it."""
        for part in self.parts:
            if number < part.rounds(num_classes):
                return part, number
            number -= part.rounds(num_classes)
        raise IndexError(number)

    def round_name(self, number: int, num_classes: int) -> str:
        """The sequence's and the part's name."""
        part, inner = self.part_of(number, num_classes)
        return f"{self.title}: {part.round_name(inner, num_classes)}"

    def budget(self, num_classes: int) -> Budget:
        """The sum over the parts; steps and restarts are the largest."""
        budgets = [part.budget(num_classes) for part in self.parts]
        return Budget(
            steps=max(b.steps for b in budgets),
            restarts=max(b.restarts for b in budgets),
            gradients=sum(b.gradients for b in budgets),
            queries=sum(b.queries for b in budgets),
        )

    def hunt(
        self,
        model: Classifier,
        batch: Batch,
        perturbations: PerturbationSet,
        number: int,
        clean_logits: Tensor,
        slack: float,
    ) -> Hunt:
        """The part's."""
        part, inner = self.part_of(number, clean_logits.shape[1])
        return part.hunt(model, batch, perturbations, inner, clean_logits, slack)

    def search(self, hunt: Hunt, number: int, key: Key) -> None:
        """The part's."""
        assert hunt.clean_logits is not None
        part, inner = self.part_of(number, hunt.clean_logits.shape[1])
        part.search(hunt, inner, key)


def autoattack(*, fast: bool = False) -> Sequence:
    """AutoAttack's standard sequence and budgets: APGD-CE, APGD-T, FAB-T, Square; `fast` is the first two."""
    first: tuple[Attack, ...] = (APGD(objective="ce"), APGD(objective="t"))
    if fast:
        return Sequence(parts=first, title="autoattack-fast")
    return Sequence(parts=(*first, FAB(), Square()), title="autoattack")
