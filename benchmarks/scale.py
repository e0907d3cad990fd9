"""Scale: two gloo processes against one, the cost of a checkpoint, and what a sweep adds to its runs.

    python benchmarks/scale.py [DATA_DIR] [--quick]

Overhead of the engine: the step as one process does it, against the same step by the distributed code in a group of one
process (DistributedDataParallel, the message, the agreement on signals), rounds alternating, the median of the rounds'
ratios. Two processes share the machine's cores, so their speed says what they cost together, not what a second machine
would bring. A checkpoint is timed on ResNet-18 as CIFAR-10 trains it, against an epoch extrapolated from timed steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dale
from dale import algorithms, random
from dale.data import Loader
from dale.environment import environment
from dale.training import distributed
from dale.training.averaging import AveragedModel, Averaging
from dale.training.parallel import DistributedStep, synchronised
from dale.training.runs import RunFolder
from dale.training.state import TrainState
from dale.training.steps import PlainStep

RESULTS = Path(__file__).parent / "results" / "scale.json"
BATCH = 128


class Net(nn.Module):
    """A small network without dropout, with or without BatchNorm."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((1, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=not norm)]
            layers += [nn.BatchNorm2d(after)] if norm else []
            layers += [nn.SiLU()]
        self.body = nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(1024, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def _prepare(norm: bool, place: torch.device, shared: bool) -> tuple[PlainStep, TrainState, Loader]:
    data = dale.load_dataset("digits")
    # cross-entropy: the divergence of nearly equal predictions is itself rounding, which a sign would make large
    objective = algorithms.dale(dale.Linf(epsilon=0.1), rho=0.5, loss="cross-entropy", steps=3, dual_step_size=0.05)
    torch.manual_seed(0)
    model = Net(norm)
    loader = Loader(data.train, BATCH, seed=0, rank=distributed.rank(), world_size=distributed.world_size())
    if shared:
        step: PlainStep = DistributedStep(objective, torch.float32, place, model, BATCH)
    else:
        step = PlainStep(objective, torch.float32, place)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    return step, TrainState(model, optimiser, objective.initial_duals(10)), loader


def train(norm: bool, steps: int) -> dict[str, Any]:
    """Losses of `steps` steps and the seconds of each, in this process's group."""
    with distributed.connected("cpu") as place:
        step, state, loader = _prepare(norm, place, distributed.active())
        losses, seconds = [], []
        with synchronised(state.model, norm):
            state.model.train()
            for number in range(steps):
                if number % len(loader) == 0:
                    batches = loader.epoch(number // len(loader))
                batch = next(batches)
                state.totals = {}
                began = time.perf_counter()
                step(state, batch, random.key(0).fold(number))
                distributed.agreed(0)
                seconds.append(time.perf_counter() - began)
                losses.append(float(state.totals["loss"] / state.totals["size"]))
    return {"losses": losses, "seconds": statistics.median(seconds), "first": distributed.is_main()}


def overhead(rounds: int) -> dict[str, float]:
    """The engine's share of a step: one process, with and without it."""
    with distributed.connected("cpu") as place:
        plain, shared = _prepare(False, place, False), _prepare(False, place, True)
        times: dict[str, list[float]] = {"plain": [], "shared": []}
        for number in range(rounds):
            for name, (step, state, loader) in (("plain", plain), ("shared", shared)):
                state.model.train()
                batch = next(loader.epoch(number))
                began = time.perf_counter()
                step(state, batch, random.key(0).fold(number))
                distributed.agreed(0)
                times[name].append(time.perf_counter() - began)
    ratios = [s / p for p, s in zip(times["plain"][2:], times["shared"][2:], strict=True)]
    return {
        "plain_ms": 1e3 * statistics.median(times["plain"][2:]),
        "engine_ms": 1e3 * statistics.median(times["shared"][2:]),
        "overhead": statistics.median(ratios) - 1.0,
    }


def message(rounds: int) -> dict[str, float]:
    """Seconds of the two messages of a step between two processes."""
    with distributed.connected("cpu"):
        values = [torch.zeros(()) for _ in range(5)] + [torch.zeros(10) for _ in range(4)]
        seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            distributed.total(*values)
            distributed.agreed(0)
            seconds.append(time.perf_counter() - began)
    return {"message_ms": 1e3 * statistics.median(seconds)}


def checkpoint(data_dir: str | None, steps: int) -> dict[str, Any]:
    """A checkpoint of ResNet-18 with momentum and an average, against an epoch of CIFAR-10 at these settings."""
    name = "cifar10" if data_dir is not None else None
    if name is not None:
        data = dale.load_dataset(name, data_dir=data_dir)
        images = len(data.train)
        loader = Loader(data.train, BATCH, seed=0)
        batches = loader.epoch(0)
    else:
        images = 46_000
    torch.manual_seed(0)
    model = dale.create_model("resnet18", channels=3, size=(32, 32), num_classes=10)
    objective = algorithms.dale(dale.Linf(epsilon=8 / 255), rho=0.8, steps=10)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = TrainState(model, optimiser, objective.initial_duals(10), AveragedModel(model, Averaging()))
    step = PlainStep(objective, torch.float32, torch.device("cpu"))
    seconds = []
    for number in range(steps):
        if name is not None:
            batch = next(batches)
        else:
            batch = dale.batch.Batch.of(torch.rand(BATCH, 3, 32, 32), torch.randint(10, (BATCH,)))
        began = time.perf_counter()
        step(state, batch, random.key(number))
        seconds.append(time.perf_counter() - began)
    epoch = min(seconds) * (images // BATCH)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        written = []
        for number in range(1, 6):
            state.epoch = number
            began = time.perf_counter()
            RunFolder(folder).save_checkpoint(state, 1)
            written.append(time.perf_counter() - began)
        size = sum(p.stat().st_size for p in Path(folder).rglob("*.safetensors")) // 2
    return {
        "checkpoint_seconds": statistics.median(written),
        "checkpoint_mib": size / 2**20,
        "step_seconds": min(seconds),
        "epoch_seconds": epoch,
        "share_of_an_epoch": statistics.median(written) / epoch,
        "data": name or "random images of its shape",
    }


def sweep(runs: int) -> dict[str, float]:
    """What `dale sweep` adds to its runs: its own time, and the time between runs, one at a time."""
    base = {"device": "cpu", "epochs": 1, "batch_size": 32, "steps": 1, "train_size": 64, "validation_size": 20}
    base |= {"certification_size": 20, "test_size": 20, "no_evaluate": True, "algorithm": "pgd"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sweep.yaml"
        file.write_text(json.dumps({"base": base, "grid": {"seed": list(range(runs))}}))
        words = [sys.executable, "-m", "dale", "sweep", str(file), "--out", f"{folder}/out", "--workers", "1"]
        began = time.perf_counter()
        subprocess.run(words, check=True, capture_output=True)
        total = time.perf_counter() - began
        inside = [json.loads(p.read_text())["seconds"] for p in Path(folder).glob("out/*/sweep.json")]
        began = time.perf_counter()
        subprocess.run(words, check=True, capture_output=True)  # all finished: what starting the sweep itself takes
        start = time.perf_counter() - began
    return {
        "runs": runs,
        "per_run_seconds": statistics.median(inside),
        "overhead_per_run": max(0.0, total - start - sum(inside)) / runs,
        "start_seconds": start,
    }


def _together(size: int, name: str, *arguments: Any) -> Any:
    """Run a function of this file in a group of `size` processes (0: alone) and return what the first one returned."""
    code = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import scale; "
    code += f"print('RESULT' + json.dumps(scale.{name}(*{arguments!r})))"
    port = str(20000 + os.getpid() % 20000)
    threads = "1" if size else str(os.environ.get("OMP_NUM_THREADS", "1"))
    members = []
    for rank in range(max(size, 1)):
        variables = {"OMP_NUM_THREADS": threads}
        if size:
            variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = [sys.executable, "-c", code]
        members.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | variables))
    outputs = [member.communicate()[0] for member in members]
    if any(member.returncode for member in members):
        raise SystemExit(f"{name} failed")
    return json.loads(outputs[0].rpartition("RESULT")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dir", nargs="?", default=os.environ.get("DALE_DATA"), help="where CIFAR-10 lies")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    args = parser.parse_args()
    found: dict[str, Any] = {"environment": environment(), "threads_per_process": 1}
    for norm in (False, True):
        one, two = _together(0, "train", norm, 50), _together(2, "train", norm, 50)
        # against the largest loss: the Lagrangian passes through zero
        scale = max(map(abs, one["losses"]))
        gaps = [abs(a - b) / scale for a, b in zip(one["losses"], two["losses"], strict=True)]
        found["synchronised_batchnorm" if norm else "no_batchnorm"] = {
            "steps": 50,
            "largest_relative_difference_of_losses": max(gaps),
            "one_process_ms": 1e3 * one["seconds"],
            "two_processes_ms": 1e3 * two["seconds"],
        }
    found["engine"] = _together(1, "overhead", 30 if args.quick else 120)
    found["messages"] = _together(2, "message", 200 if args.quick else 1000)
    found["checkpoint"] = checkpoint(args.data_dir, 1 if args.quick else 4)
    found["sweep"] = sweep(2 if args.quick else 5)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
