"""`bench`: throughput, share of the matmul ceiling, memory and time split of a recipe on the machine at hand."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from dale.benchmark.flops import Flops, count_flops
from dale.benchmark.machine import matmul_ceiling, peak_memory, seconds_of, start_memory
from dale.benchmark.workload import MakeStep, Workload
from dale.components import to_plain
from dale.data import Dataset
from dale.environment import environment, find_device, kept_memory
from dale.errors import UsageError, require
from dale.files import finite
from dale.training import RunConfig
from dale.training.fast import Fast
from dale.training.loop import CHECK_EVERY

FORMAT = 1


@dataclass(frozen=True)
class Split:
    """Seconds of a step by what they are spent on; they add up to the step.

    `attack`, `data` and `logging` are timed alone, each by itself; `training` is what is left: forward, backward,
    optimiser, dual ascent and average. `logging` is the loop's look at the loss and the read of the epoch's averages,
    shared out over the steps.
    """

    attack: float
    training: float
    data: float
    logging: float


@dataclass(frozen=True)
class Bench:
    """What was measured; times are in seconds, rates in TFLOP/s, memory in GiB.

    `seconds_per_epoch` is `epoch_images` images at the rate of the timed steps, and the start of the epoch. `share` is
    the share of the matmul ceiling that the whole step reaches: (operations counted) / (seconds * ceiling).
    """

    name: str
    path: str
    line: str
    device: str
    precision: str
    batch_size: int
    steps: int
    seed: int
    step_seconds: float
    images_per_second: float
    epoch_images: int
    seconds_per_epoch: float
    warm_up_seconds: float
    peak_memory: float | None
    flops: Flops
    ceiling: float
    share: float
    split: Split
    config: dict[str, Any]
    environment: dict[str, Any]

    def to_plain(self) -> dict[str, Any]:
        """As plain values for JSON."""
        plain: dict[str, Any] = finite({"format": FORMAT, **dataclasses.asdict(self)})
        return plain

    def __str__(self) -> str:
        """A table."""
        memory = "unknown" if self.peak_memory is None else f"{self.peak_memory:.2f} GiB"
        if self.device.startswith("cpu"):
            memory += " (the whole process)"
        rows = [
            ("throughput", f"{self.images_per_second:,.0f} images/s"),
            ("a step", f"{1e3 * self.step_seconds:.2f} ms (mean of {self.steps})"),
            (f"an epoch of {self.epoch_images:,}", f"{self.seconds_per_epoch:.2f} s"),
            ("operations", f"{self.flops.total / 1e9:.3g} GFLOP an image, {self._share_of_attack():.0%} of it attack"),
            ("matmul ceiling", f"{self.ceiling:.4g} TFLOP/s in {self.precision}, measured"),
            ("share of the ceiling", f"{self.share:.1%}"),
            ("peak memory", memory),
            ("warm-up", f"{self.warm_up_seconds:.1f} s to the end of the first step"),
        ]
        whole = max(self.step_seconds, 1e-12)
        for name, value in dataclasses.asdict(self.split).items():
            rows.append((f"  {name}", f"{1e3 * value:.2f} ms, {value / whole:.0%}"))
        head = f"{self.name}, batch {self.batch_size}, {self.precision}, {self.path} path, {self._machine()}"
        lines = [head, "", *(f"{name:<24}{value}" for name, value in rows)]
        if self.split.training == 0.0:
            lines.append("The parts, timed alone, took longer than the whole step: the split says nothing here.")
        return "\n".join(lines)

    def _share_of_attack(self) -> float:
        return self.flops.attack / max(self.flops.total, 1.0)

    def _machine(self) -> str:
        facts = self.environment
        if self.device.startswith("cuda"):
            return str(facts.get("gpu", self.device))
        return f"{facts['cpu']}, {facts['threads']} threads"


def bench(
    config: RunConfig,
    data: Dataset,
    *,
    device: torch.device | str | None = None,
    fast: Fast = "auto",
    steps: int = 30,
    make: MakeStep | None = None,
    ceiling: float | None = None,
) -> Bench:
    """Measure `steps` steps of a recipe, everything included, after as many as it takes to be warm.

    The ceiling is measured where none is given. `make` makes the step in place of `dale.fit`'s choice.
    """
    require(steps >= 1, f"steps to time must be at least 1, got {steps!r}")
    if config.training.deterministic:
        raise UsageError("a benchmark chooses kernels by their speed; leave --deterministic out")
    place = find_device(device)
    training = config.training
    with torch.random.fork_rng([place] if place.type == "cuda" else []), kept_memory(place):
        found: list[Workload] = []
        start_memory(place)
        # from building the step to the end of the first: tracing, compiling, capturing
        warm_up = seconds_of(lambda: _first_step(found, config, data, place, fast, make), place)
        work = found[0]
        work.advance(min(3, max(1, steps // 4)))
        seconds = seconds_of(lambda: work.advance(steps), place) / steps
        memory = peak_memory(place)
        batches = len(work.loader)
        looks = 1.0 if place.type == "cpu" else 1.0 / CHECK_EVERY
        logging = looks * seconds_of(work.check_finite, place, 5) + seconds_of(work.read_totals, place, 3) / batches
        loading, start = work.data_seconds(steps)
        attack = work.attack_seconds(max(1, steps // 3)) or 0.0
        flops = count_flops(work.model, work.objective, data.image_shape, data.num_classes, data.num_groups)
    ceiling = matmul_ceiling(place, training.dtype) if ceiling is None else ceiling
    size = work.loader.batch_size
    images = len(data.train)
    return Bench(
        name=f"{work.objective.name}, {config.model.name}, {data.name}",
        path=work.path,
        line=work.line,
        device=str(place),
        precision=training.precision,
        batch_size=size,
        steps=steps,
        seed=training.seed,
        step_seconds=seconds,
        images_per_second=size / seconds,
        epoch_images=images,
        seconds_per_epoch=images / size * seconds + start,
        warm_up_seconds=warm_up,
        peak_memory=memory,
        flops=flops,
        ceiling=ceiling,
        share=flops.total * size / seconds / (ceiling * 1e12),
        split=Split(attack, max(0.0, seconds - attack - loading - logging), loading, logging),
        config=to_plain(config),
        environment=environment(),
    )


def _first_step(
    found: list[Workload],
    config: RunConfig,
    data: Dataset,
    place: torch.device,
    fast: Fast,
    make: MakeStep | None,
) -> None:
    found.append(Workload(config, data, place, fast, make))
    found[0].advance()
