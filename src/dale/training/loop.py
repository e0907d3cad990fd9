"""The training loop: epochs of steps, validation, tightening, selection, checkpoints; resumable at any moment.

Everything random is a function of (seed, epoch, step, example), and everything else is in the state: so a run that was
killed and resumed ends with the same bits as one that was not.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dale import random
from dale.data import Dataset, Loader
from dale.errors import DaleError, NumericsError
from dale.files import finite
from dale.objectives import Objective
from dale.training import distributed
from dale.training.averaging import live_batchnorm, reestimate_batchnorm
from dale.training.checkpoints import Snapshot, Writer
from dale.training.config import RunConfig
from dale.training.diagnosis import stuck
from dale.training.loggers import Logger
from dale.training.optimisers import set_learning_rate
from dale.training.parallel import share_buffers
from dale.training.progress import Progress
from dale.training.runs import RunFolder, model_metadata
from dale.training.state import TrainState
from dale.training.steps import PlainStep
from dale.training.validation import Validated, tighten, validate

REESTIMATE = 2048  # images that the statistics of an averaged model are estimated on
CHECK_EVERY = 50  # steps between two looks at whether the loss is finite, where looking costs a synchronisation


class InterruptedTrainingError(DaleError):
    """Training was asked to stop; its state is saved."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


@contextlib.contextmanager
def _listening() -> Iterator[Callable[[], int]]:
    """Catch Ctrl-C and SIGTERM while inside; the function yielded tells which one came, or 0."""
    received = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if received and not distributed.launched():  # a second Ctrl-C does not wait; torchrun always sends two
            raise KeyboardInterrupt
        received = number

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Trainer:
    """One run in progress."""

    config: RunConfig
    objective: Objective
    data: Dataset
    state: TrainState
    folder: RunFolder
    loader: Loader
    step: PlainStep
    device: torch.device
    progress: Progress
    board: Logger

    def __post_init__(self) -> None:
        self.training = self.config.training
        self.key = random.key(self.training.seed)
        self.warned = False
        metadata = model_metadata(self.config, self.data)
        self.writer = Writer(lambda snapshot: self.folder.write_checkpoint(snapshot, metadata))

    def run(self) -> None:
        """Train to the end; when this returns or raises, all checkpoints are on disk."""
        with contextlib.closing(self.writer), _listening() as received:
            if self.state.epoch == 0 and self.state.batch == 0:
                # a run that ends before its first epoch does goes on from these weights; on disk before anything else,
                # for while a step is captured no other thread may use the device
                self._save()
                distributed.first(self.writer.wait)
            while self.state.epoch < self.training.epochs:
                started = time.perf_counter() - self.state.seconds
                self._epoch(received, started)
                trained, self.state.seconds = time.perf_counter() - started, 0.0
                record = self._end_epoch()
                record["seconds"] = {"train": trained, "total": time.perf_counter() - started}
                self._log(record)
                self._save()
                if number := distributed.agreed(received()):
                    self._stop(number)
            distributed.first(self.writer.wait)

    def _save(self) -> None:
        """Take a checkpoint, which is written while training goes on; raises what went wrong with the one before."""
        state, batches = self.state, len(self.loader)
        distributed.first(lambda: self.writer.put(Snapshot.of(state, batches, candidate=state.batch == 0)))

    def _epoch(self, received: Callable[[], int], started: float) -> None:
        state, batches = self.state, len(self.loader)
        state.model.train()
        agreement = distributed.Agreement()
        for batch in self.loader.epoch(state.epoch, start=state.batch):
            done = state.epoch * batches + state.batch
            factor = self.training.schedule.factor(done / batches, self.training.epochs)
            set_learning_rate(state.optimiser, self.training.optimiser.learning_rate * factor)
            key = self.key.fold("step").fold(done)
            dropout = key.fold("dropout")
            if rank := distributed.rank():  # masks of the same shape on all processes must differ
                dropout = dropout.fold(rank)
            torch.manual_seed(int(dropout.word) & 0x7FFFFFFFFFFFFFFF)
            self.step(state, batch, key)
            self.loader.compiler = self.step.compiler  # which the first step decides on
            state.batch += 1
            self.progress.step()
            if self.device.type == "cpu" or state.batch % CHECK_EVERY == 0:
                self._check_finite()
            number = agreement(received())
            if number and state.batch < batches:
                agreement.settled()
                self._check_finite(weights=True)
                state.seconds = time.perf_counter() - started
                self._save()
                self._stop(number)
        agreement.settled()
        self._check_finite(weights=True)

    def _stop(self, number: int) -> None:
        distributed.first(self.writer.wait)
        raise InterruptedTrainingError(f"stopped; nothing is lost. Continue with: {self.folder.resume_command}", number)

    def _check_finite(self, *, weights: bool = False) -> None:
        """Stop where the loss is not finite, and with `weights`, before a checkpoint, where they are not."""
        if not bool(torch.isfinite(self.state.totals["loss"])):
            self._fail("the loss is")
        if weights and not bool(torch.stack([p.isfinite().all() for p in self.state.model.parameters()]).all()):
            self._fail("the weights are")

    def _fail(self, what: str) -> NoReturn:
        self.writer.close()
        newest = self.folder.newest
        kept = "there is no checkpoint yet"  # but for that of the start
        if newest is not None and newest != self.folder.checkpoint(0):
            kept = f"the last good checkpoint, {newest.name}, is kept"
        kept = distributed.told(kept)  # the first process knows; all of them fail, for all see the same numbers
        epoch = self.state.epoch + (self.state.batch > 0)
        raise NumericsError(
            f"{what} not finite any more in epoch {epoch}; {kept}. A lower learning rate (--lr) usually helps"
        )

    def _end_epoch(self) -> dict[str, Any]:
        """Finish an epoch: dual ascent per epoch, validation, tightening, selection; returns the log record."""
        state, training = self.state, self.training
        state.duals = self.objective.ascend_epoch(state.duals)
        record = self._record()
        state.epoch, state.batch, state.totals = state.epoch + 1, 0, {}
        if state.epoch % training.validation.every == 0 or state.epoch == training.epochs:
            self._prepare_shipped()
            seen = self._validate()
            if not math.isfinite(seen.nominal):
                self._fail("the held-out loss is")
            record["validation"] = seen.to_plain()
            if state.epoch < training.epochs:
                state.duals = tighten(self.objective, state.duals, seen)
            state.selection.add(seen.candidate(state.epoch, self.objective))
        return record

    def _prepare_shipped(self) -> None:
        """Give the averaged model BatchNorm statistics of its own, estimated on what the row shows the model."""
        state = self.state
        if state.average is None:
            return
        state.average.copy_buffers(state.model)
        if not live_batchnorm(state.model):
            return
        # an eighth of the epoch at most: perturbing these images costs as much as training on them
        count = min(max(1, len(self.loader) // 8), math.ceil(REESTIMATE / self.loader.batch_size))
        key = self.key.fold("statistics").fold(state.epoch)
        runs = []
        for number, batch in enumerate(self.loader.epoch(state.epoch - 1, start=len(self.loader) - count)):
            with self.step.precision():
                delta = self.objective.perturb(state.average.module, batch, key.fold(number))

            def forward(model: nn.Module, batch: Any = batch, delta: Tensor | None = delta) -> None:
                with self.step.precision():
                    self.objective.lagrangian(model, batch, delta, state.duals)

            runs.append(forward)
        reestimate_batchnorm(state.average.module, runs)
        share_buffers(state.average.module)

    def _validate(self) -> Validated:
        return validate(
            self.state.shipped,
            self.objective,
            self.state.duals,
            self.data.train,
            self.data.validation,
            self.training.validation,
            key=self.key.fold("validation"),
            batch_size=max(128, self.training.batch_size),
            precision=self.step.precision,
        )

    def _record(self) -> dict[str, Any]:
        """The epoch's averages as plain numbers: one read of the device."""
        totals = {name: value.double().cpu() for name, value in self.state.totals.items()}
        size = totals["size"]

        def mean(name: str) -> float:
            return float(totals[name] / size)

        record: dict[str, Any] = {
            "epoch": self.state.epoch + 1,
            "epochs": self.training.epochs,
            "step": (self.state.epoch + 1) * len(self.loader),
            "learning_rate": float(self.state.optimiser.param_groups[0]["lr"]),
            "loss": mean("loss"),
            "robust_loss": mean("robust_loss"),
            "nominal_loss": mean("nominal_loss"),
            "clean_accuracy": mean("clean_correct"),
            "robust_accuracy": mean("robust_correct"),
            "constraints": [self._constraint_record(number, totals) for number in range(len(self.state.duals))],
        }
        return finite(record)  # type: ignore[no-any-return]  # what a row does not compute is null

    def _constraint_record(self, number: int, totals: dict[str, Tensor]) -> dict[str, Any]:
        constraint, dual = self.objective.constraints[number], self.state.duals[number]
        limits = constraint.limits(len(dual.multiplier)).double()
        measures = totals[f"measure.{number}"] / totals[f"members.{number}"]
        return {
            "name": "error" if constraint.on_accuracy else "loss",
            "by": constraint.by,
            "limit": limits.tolist(),
            "margin": dual.margin.tolist(),
            "measure": measures.tolist(),
            "violation": (measures - limits).tolist(),
            "multiplier": dual.multiplier.tolist(),
            "upper": constraint.upper,
        }

    def _log(self, record: dict[str, Any]) -> None:
        self.state.history.append(record)
        distributed.first(lambda: self.folder.append_metrics(record))
        self.board.epoch(record)
        self.progress.epoch(record)
        lines = stuck(self.state.history, self.training.epochs)
        if lines and not self.warned:
            self.warned = True
            for line in lines:
                self.progress.say(f"warning: {line}")
