"""A recipe at work without a run folder: the steps of `dale train`, data and all, to be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from dale import random
from dale.batch import Batch
from dale.benchmark.machine import seconds_of, wait
from dale.data import Dataset, Loader
from dale.models import create_model
from dale.objectives import Objective
from dale.random import Key
from dale.training import RunConfig, TrainState
from dale.training.averaging import AveragedModel
from dale.training.fast import CapturedStep, Fast, make_step
from dale.training.loop import CHECK_EVERY
from dale.training.optimisers import set_learning_rate
from dale.training.steps import PlainStep

MakeStep = Callable[[nn.Module, Objective, torch.dtype, torch.device], PlainStep]


class Workload:
    """Model, data, objective, optimiser and step of a configuration, ready to advance as the training loop does.

    `fast` as in `dale.fit`; `make` makes the step instead, for comparisons. `line` says which path it is, as at the
    start of a run.
    """

    def __init__(
        self, config: RunConfig, data: Dataset, device: torch.device, fast: Fast = "auto", make: MakeStep | None = None
    ) -> None:
        training = config.training
        self.training, self.device = training, device
        self.model = create_model(
            config.model.name, data, activation=config.model.activation, seed=training.seed, init=config.model.init
        ).to(device)
        self.loader = Loader(
            data.train, training.batch_size, seed=training.seed, augmentation=training.augmentation, device=device
        )
        batches = len(self.loader)
        self.objective = config.build_objective().for_run(
            training.epochs * batches, training.epochs, data.num_classes, data.num_groups
        )
        self.line = ""
        if make is not None:
            self.step = make(self.model, self.objective, training.dtype, device)
        else:
            chosen: Fast = "off" if fast == "auto" and device.type == "cpu" else fast  # as in `dale.fit`
            self.step, self.line = make_step(
                self.model,
                tuple(data.train.images.shape[1:]),
                self.objective,
                training.dtype,
                device,
                chosen,
                training.epochs * batches,
            )
        self.step.accumulate = training.accumulate
        self.step.weight_perturbation = training.weight_perturbation
        self.state = TrainState(
            self.model,
            training.optimiser.build(self.model, captured=isinstance(self.step, CapturedStep)),
            self.objective.initial_duals(data.num_classes, data.num_groups, device),
            None if training.averaging is None else AveragedModel(self.model, training.averaging),
        )
        self.model.train()
        self.key = random.key(training.seed).fold("step")
        self.done = 0
        self._stream = self._batches()

    @property
    def path(self) -> str:
        """The path that the steps take: plain, folded, captured, or compiled and captured."""
        if isinstance(self.step, CapturedStep):
            return "compiled and captured" if self.step.compiled else "captured"
        return "plain" if type(self.step) is PlainStep else "folded"

    def _batches(self) -> Iterator[Batch]:
        epoch = 0
        while True:
            yield from self.loader.epoch(epoch)
            epoch += 1

    def advance(self, count: int = 1) -> None:
        """Do `count` steps, each with its batch, learning rate, key and the loop's own check of the loss."""
        batches = len(self.loader)
        for _ in range(count):
            batch = next(self._stream)
            factor = self.training.schedule.factor(self.done / batches, self.training.epochs)
            set_learning_rate(self.state.optimiser, self.training.optimiser.learning_rate * factor)
            key = self.key.fold(self.done)
            torch.manual_seed(int(key.fold("dropout").word) & 0x7FFFFFFFFFFFFFFF)
            self.step(self.state, batch, key)
            self.loader.compiler = self.step.compiler
            self.done += 1
            if self.device.type == "cpu" or self.done % CHECK_EVERY == 0:
                self.check_finite()

    def check_finite(self) -> bool:
        """The loop's look at the loss: it waits for the device."""
        return bool(torch.isfinite(self.state.totals["loss"]))

    def read_totals(self) -> dict[str, float | list[float]]:
        """The read of an epoch's averages."""
        return {name: value.double().cpu().tolist() for name, value in self.state.totals.items()}

    def data_seconds(self, count: int) -> tuple[float, float]:
        """Seconds of a batch of data and augmentation alone, and of the start of an epoch before its first batch."""
        start = seconds_of(lambda: next(self.loader.epoch(1)), self.device)
        count = min(count, len(self.loader) - 1)
        if count < 1:
            return start, 0.0
        stream = self.loader.epoch(2)
        next(stream)
        return seconds_of(lambda: next(stream), self.device, count), start

    def attack_seconds(self, count: int) -> float | None:
        """Seconds of the perturbations of a batch alone; None for a row without. Where steps are captured, so is it."""
        batch, key = self.static_batch()

        def perturb() -> Tensor | None:
            with self.step.precision():
                return self.step.perturb(self.model, batch, key)

        if perturb() is None:
            return None
        if not isinstance(self.step, CapturedStep):
            return seconds_of(perturb, self.device, count)
        return seconds_of(capture(perturb, self.device).replay, self.device, count)

    def static_batch(self) -> tuple[Batch, Key]:
        """A batch and a key in the layout that the step's own graph reads: nothing is compiled again for them."""
        batch = next(self.loader.epoch(0))
        if not isinstance(self.step, CapturedStep):
            return batch, self.key
        images = batch.images.clone(memory_format=torch.channels_last)
        word = torch.zeros((), dtype=torch.int64, device=self.device)
        return Batch(images, batch.labels, batch.index, batch.groups), Key(word)


def capture(function: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """Return the function's work as a CUDA graph, captured after a few runs of it."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    wait(device)
    return graph
