"""Processes that share one evaluation: each takes its chunks of every round, and all know the outcome.

Chunks have the same examples and the same shape whoever takes them, so that the counts are those of one process,
exactly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from dale.evaluation.resume import Progress

_COUNTS = ("gradients", "queries", "refuted", "outside")


def _alone(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Team:
    """Who we are among `size` processes, and how to add a tensor up over all of them."""

    rank: int = 0
    size: int = 1
    total: Callable[[Tensor], Tensor] = _alone

    def takes(self, chunk: int) -> bool:
        """Tell whether a chunk is ours."""
        return chunk % self.size == self.rank

    def merge(self, progress: Progress, before: Progress) -> None:
        """Bring all processes to what they found together in a round that began as `before`."""
        mine = before.standing & ~progress.standing
        fallen = self.total(mine.to(torch.int64)) > 0
        progress.standing = before.standing & ~fallen
        progress.blind = self.total(progress.blind.to(torch.int64)) > 0
        counts = torch.tensor([getattr(progress, name) - getattr(before, name) for name in _COUNTS])
        for name, count in zip(_COUNTS, self.total(counts.to(mine.device)).tolist(), strict=True):
            setattr(progress, name, getattr(before, name) + count)
        if progress.delta is not None:
            # an example falls on one process only: the others add zeros
            found = torch.where(_rows(mine, progress.delta), progress.delta, torch.zeros_like(progress.delta))
            progress.delta = torch.where(_rows(fallen, progress.delta), self.total(found), progress.delta)


def _rows(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (like.dim() - 1))


_TEAM: ContextVar[Team | None] = ContextVar("team", default=None)


def current_team() -> Team:
    """The team of evaluations at this place: one process, unless `shared_by` says otherwise."""
    return _TEAM.get() or Team()


@contextlib.contextmanager
def shared_by(team: Team) -> Iterator[None]:
    """Let a team share the evaluations inside; every process of it must run the same ones."""
    token = _TEAM.set(team)
    try:
        yield
    finally:
        _TEAM.reset(token)
