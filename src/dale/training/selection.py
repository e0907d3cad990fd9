"""Model selection is P-CON itself, on held-out data.

Among the checkpoints that meet every limit within its standard error, the one with the highest robust accuracy. If
none is feasible: the most robust among those within a tenth of the smallest violation, and the report says that the
constraint is not met. Rows without a constraint: the highest robust accuracy, or for a row without a robust term the
highest clean accuracy. Ties go to the smaller violation, then to the later one. The test set selects nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Candidate:
    """One validated checkpoint: its score (robust or clean accuracy) and by how much it breaks the constraints.

    `violation` is the largest excess of a measure over its limit plus its standard error; zero or less is feasible.
    """

    epoch: int
    score: float
    violation: float

    @property
    def feasible(self) -> bool:
        """Whether every limit is met within its standard error."""
        return self.violation <= 0.0


@dataclass
class Selection:
    """The candidates that may still be chosen, by epoch."""

    candidates: dict[int, Candidate] = field(default_factory=dict)

    @property
    def best(self) -> Candidate | None:
        """The chosen one of all seen so far."""
        pool = list(self.candidates.values())
        feasible = [c for c in pool if c.feasible]
        if not feasible and pool:
            smallest = min(c.violation for c in pool)
            feasible = [c for c in pool if c.violation <= 1.1 * smallest]
        # the order of pruning too: a tie must not depend on who has been let go of already
        return max(feasible, key=lambda c: (c.score, -max(0.0, c.violation), c.epoch), default=None)

    def add(self, candidate: Candidate) -> set[int]:
        """Take a new candidate in and return the epochs of those that can never be chosen any more.

        One is out for good when another is no worse in both respects; all feasible ones count alike in the first.
        """
        self.candidates[candidate.epoch] = candidate
        gone = {
            mine.epoch
            for mine in self.candidates.values()
            if any(_beats(other, mine) for other in self.candidates.values() if other is not mine)
        }
        for epoch in gone:
            del self.candidates[epoch]
        return gone

    def to_plain(self) -> list[dict[str, Any]]:
        """The candidates as plain values."""
        return [asdict(candidate) for candidate in self.candidates.values()]

    @staticmethod
    def from_plain(plain: list[dict[str, Any]]) -> Selection:
        """Read what `to_plain` wrote."""
        return Selection({int(c["epoch"]): Candidate(**c) for c in plain})


def _beats(other: Candidate, mine: Candidate) -> bool:
    theirs, ours = max(0.0, other.violation), max(0.0, mine.violation)
    if theirs == ours and other.score == mine.score:
        return other.epoch > mine.epoch
    return theirs <= ours and other.score >= mine.score
