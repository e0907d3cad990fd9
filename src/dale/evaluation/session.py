"""One evaluation at work: the model to search and the model to judge, the data, and the rounds of an attack."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dale.attacks.base import Attack
from dale.batch import Batch
from dale.data import Split
from dale.evaluation.judge import Judge, matmul_precision, quiet_randomness
from dale.evaluation.resume import Progress
from dale.evaluation.team import current_team
from dale.perturbations import PerturbationSet
from dale.random import Key

Report = Callable[[Progress, int, str], None]

# A margin that counts as certain while searching, relative to the largest logit: rounding differs between batch shapes
# and between a folded network and the network itself by about 1e-5, and with TF32's ten bits by about 1e-2.
_SLACK = {"ieee": 1e-4, "tf32": 2e-2}


@dataclass
class Session:
    """What every attack, check and curve of one evaluation shares."""

    search_model: nn.Module
    judge: Judge
    split: Split
    clean_logits: Tensor
    correct: Tensor
    key: Key
    precision: str = "ieee"

    @property
    def device(self) -> torch.device:
        """Where the data is."""
        return self.split.labels.device

    @property
    def batch_size(self) -> int:
        """The size of every batch."""
        return self.judge.batch_size

    def chunk_size(self, count: int) -> int:
        """The number of examples that are searched together, of `count` that stand.

        On an accelerator the chunks of a round are of equal size: a small last one would take as many steps as a full
        one, each as long as its launches, and its odd size would be planned anew.
        """
        if self.device.type == "cpu":
            return self.batch_size
        return math.ceil(count / math.ceil(count / self.batch_size))

    def batch(self, places: Tensor) -> Batch:
        """Return the examples at the given places."""
        part = self.split.take(places)
        return Batch(part.convert(part.images), part.labels, part.index, part.groups)

    def run(
        self,
        attack: Attack,
        perturbations: PerturbationSet,
        progress: Progress,
        report: Report | None = None,
    ) -> Progress:
        """Run the rounds of an attack that are left, each over all standing examples before the next begins.

        What the search takes for fallen is confirmed by the judge before it counts; the rest stands, and is searched
        again in the next round. A team of processes shares the chunks of a round.
        """
        team = current_team()
        num_classes = self.clean_logits.shape[1]
        key = self.key.fold(attack.stream)
        while progress.round < attack.rounds(num_classes):
            places = progress.began.nonzero().squeeze(1)
            if len(places) == 0:
                break
            before = replace(progress, standing=progress.standing.clone())
            size = self.chunk_size(len(places))
            for first in range(progress.done, len(places), size):
                part = places[first : first + size]
                began = time.perf_counter()
                if team.takes(first // size):
                    self._chunk(attack, perturbations, progress, part, key)
                progress.done = first + len(part)
                progress.seconds += time.perf_counter() - began
                if report is not None and team.size == 1:
                    report(progress, len(part), attack.round_name(progress.round, num_classes))
            if team.size > 1:
                team.merge(progress, before)
                if report is not None:
                    report(progress, len(places), attack.round_name(progress.round, num_classes))
            progress.next_round()
        return progress

    def _chunk(
        self, attack: Attack, perturbations: PerturbationSet, progress: Progress, part: Tensor, key: Key
    ) -> None:
        batch, number = self.batch(part), progress.round
        with (
            matmul_precision(self.device, self.precision),
            quiet_randomness(self.device, self.judge.seed + 1 + number),
            torch.autocast(self.device.type, enabled=False),
        ):
            found = attack.run_round(
                self.search_model,
                batch,
                perturbations,
                number,
                key,
                clean_logits=self.clean_logits[part],
                slack=_SLACK[self.precision],
            )
        # without margins (the last iterate alone) every candidate goes to the judge, else those that look fallen
        claimed = ((found.margin >= 0) | (found.margin == -torch.inf)).nonzero().squeeze(1)
        fooled, outside = self.judge.fooled(
            batch.images[claimed], batch.labels[claimed], found.delta[claimed], perturbations
        )
        fallen = claimed[fooled]
        progress.standing[part[fallen]] = False
        progress.blind[part] |= found.blind
        if progress.delta is not None:
            progress.delta[part[fallen]] = found.delta[fallen].to(progress.delta)
        progress.gradients += found.gradients
        progress.queries += found.queries
        progress.outside += outside
        progress.refuted += int((found.margin[claimed] > 0).sum()) - int((fooled & (found.margin[claimed] > 0)).sum())
