"""Tables 4 and 5: seconds per batch and per epoch of every row, each alone on the device, steps of training only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dale.errors import CheckpointError
from dale.files import read_json, write_json

if TYPE_CHECKING:
    import torch

    from dale.reproduction.recipes import Spec

FORMAT = 1
STEPS = 40  # timed, after as many as compiling and capturing need
WARMUP = 5


def timing_path(root: Path, dataset: str, model: str, budget: str = "full") -> Path:
    """Where the timing of a data set and a model lies; that of a smoke test has a file of its own."""
    return root / dataset / model / ("timing-smoke.json" if budget == "smoke" else "timing.json")


def find_timing(root: Path, dataset: str, model: str, budget: str = "full") -> Mapping[str, Any]:
    """The timing on file; nothing where there is none."""
    path = timing_path(root, dataset, model, budget)
    if not path.is_file():
        return {}
    plain = read_json(path)
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a timing of `dale reproduce`, format {FORMAT}")
    return plain


def time_rows(
    specs: Mapping[str, Spec],
    root: Path,
    *,
    budget: str = "full",
    device: str | None = None,
    data_dir: str | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Time rows, by label, and add them to the file; what is in it already is not timed again, here or elsewhere.

    Two ways: float32 as the paper trained, step by step; and bfloat16 on the fast path where there is a GPU.
    """
    from dale.environment import environment, find_device

    place = find_device(device)
    variants = {"float32": ("float32", "off")}
    if place.type == "cuda":
        variants["fast path, bfloat16"] = ("bfloat16", "auto")
    data, steps = None, 3 if budget == "smoke" else STEPS
    for variant, (precision, fast) in variants.items():
        for label, spec in specs.items():
            path = timing_path(root, spec.dataset, spec.model, budget)
            plain: dict[str, Any] = dict(find_timing(root, spec.dataset, spec.model, budget)) or {"format": FORMAT}
            done = plain.setdefault("variants", {}).setdefault(variant, {})
            if label in done:
                continue
            if (before := machine(plain.get("environment", environment()))) != machine(environment()):
                say(f"{path} was timed on {before}: remove it to time the rows on this machine")
                return
            if data is None:
                data = spec.config().data.load(data_dir)
            batch, seconds, batches = _time(spec, data, place, precision, fast, steps)
            say(f"{label}, {variant}: {seconds:.4f} s per batch of {batch}")
            done[label] = {"batch": round(seconds, 6), "epoch": round(seconds * batches, 4)}
            plain |= {"batch_size": batch, "batches": batches, "steps": steps, "environment": environment()}
            write_json(path, plain)


def machine(facts: Mapping[str, Any]) -> str:
    """The part of an environment that seconds depend on."""
    return f"{facts.get('gpu', facts.get('cpu', 'unknown'))}, torch {facts.get('torch', 'unknown')}"


def _time(spec: Spec, data: Any, place: torch.device, precision: Any, fast: Any, steps: int) -> tuple[int, float, int]:
    """Batch size, seconds of a step, and batches of an epoch over all training images of the data set."""
    from dale.benchmark.machine import seconds_of
    from dale.benchmark.workload import Workload

    config = spec.config()
    settings = replace(config.training, precision=precision)
    work = Workload(replace(config, training=settings), data, place, fast)
    work.advance(WARMUP)
    seconds = median(seconds_of(work.advance, place) for _ in range(steps))
    total = len(data.train) + len(data.validation) + len(data.certification)
    return settings.batch_size, seconds, -(-total // settings.batch_size)
