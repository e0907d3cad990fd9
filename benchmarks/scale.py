"""Scale: two gloo processes against one, the cost of a checkpoint, and what a sweep adds to its runs.

    python benchmarks/scale.py [DATA_DIR] [--quick]
    python benchmarks/scale.py --only checkpoint --device cuda       # on a GPU, ResNet-18 on the fast path

Overhead of the engine: two processes, one thread each, share a batch of 128. In turns both take the step on their
halves alone, with nothing exchanged, and together, with all that the engine does (DistributedDataParallel, the message
of violations and metrics, the agreement on signals). A round's time is that of the slower process; the overhead is the
median over rounds of the ratio of the two, for neighbours in time see the same machine; beside it stands that ratio of
processor time, which a busy machine disturbs less. Two processes share the machine's cores, so their speed against one
process says what they cost together, not what a second machine would bring.

Checkpoint: ResNet-18 as CIFAR-10 trains it, with momentum and an average. What counts is the time that training loses:
the training thread's own (`blocking`), and all of it (`lost`: epochs with a checkpoint against epochs without, in
turns), in which the thread that writes takes something away from the steps beside it. On a CPU an epoch is
extrapolated from steps.
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
from dale.data import Loader, Split
from dale.environment import environment, find_device, no_denormals
from dale.training import distributed
from dale.training.averaging import AveragedModel, Averaging
from dale.training.checkpoints import Snapshot, Writer
from dale.training.fast import CapturedStep, make_step
from dale.training.optimisers import SGD
from dale.training.parallel import DistributedStep, synchronised
from dale.training.runs import RunFolder
from dale.training.selection import Candidate
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


def _prepare(norm: bool, place: torch.device, shared: bool, steps: int = 3) -> tuple[PlainStep, TrainState, Loader]:
    data = dale.load_dataset("digits")
    # cross-entropy: the divergence of nearly equal predictions is itself rounding, which a sign would make large
    objective = algorithms.dale(dale.Linf(epsilon=0.1), rho=0.5, loss="cross-entropy", steps=steps, dual_step_size=0.05)
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
    with no_denormals(), distributed.connected("cpu") as place:
        step, state, loader = _prepare(norm, place, distributed.active())
        losses, seconds = [], []
        agreement = distributed.Agreement()
        with synchronised(state.model, norm):
            state.model.train()
            for number in range(steps):
                if number % len(loader) == 0:
                    batches = loader.epoch(number // len(loader))
                batch = next(batches)
                state.totals = {}
                began = time.perf_counter()
                step(state, batch, random.key(0).fold(number))
                agreement(0)
                seconds.append(time.perf_counter() - began)
                losses.append(float(state.totals["loss"] / state.totals["size"]))
        agreement.settled()
    return {"losses": losses, "seconds": statistics.median(seconds), "first": distributed.is_main()}


def overhead(rounds: int) -> dict[str, float]:
    """The engine's share of a step: two processes, on their halves of a batch, with and without it."""
    with no_denormals(), distributed.connected("cpu") as place:
        # a training step as it is by default, with ten attack steps; the equality above needs no more than three
        ways = {"halves": _prepare(False, place, False, 10), "engine": _prepare(False, place, True, 10)}
        agreement = distributed.Agreement()
        walls: dict[str, list[float]] = {name: [] for name in ways}
        works: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name in sorted(ways, reverse=bool(number % 2)):
                step, state, loader = ways[name]
                state.model.train()
                batch = next(loader.epoch(number))
                distributed.agreed(0)  # both begin at once
                began, worked = time.perf_counter(), time.process_time()
                step(state, batch, random.key(0).fold(number))
                if name == "engine":
                    agreement(0)
                walls[name].append(time.perf_counter() - began)
                works[name].append(time.process_time() - worked)
        agreement.settled()
        # of each round the slower process; of processor time, all threads of both processes
        wall = {n: distributed.reduce_(torch.tensor(s[2:]), torch.distributed.ReduceOp.MAX) for n, s in walls.items()}
        work = {n: distributed.reduce_(torch.tensor(s[2:])) for n, s in works.items()}
    ratios = (wall["engine"] / wall["halves"]).tolist()
    return {
        "rounds": len(ratios),
        "halves_ms": 1e3 * float(wall["halves"].median()),
        "engine_ms": 1e3 * float(wall["engine"].median()),
        "overhead": statistics.median(ratios) - 1.0,
        "overhead_quartiles": [q - 1.0 for q in statistics.quantiles(ratios, n=4)[::2]],
        "overhead_of_processor_time": float((work["engine"] / work["halves"]).median()) - 1.0,
    }


def message(rounds: int) -> dict[str, float]:
    """Seconds of the message of a step between two processes, beside the gradients."""
    with distributed.connected("cpu"):
        values = [torch.zeros(()) for _ in range(5)] + [torch.zeros(10) for _ in range(4)]
        seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            distributed.total(*values)
            seconds.append(time.perf_counter() - began)
    return {"message_ms": 1e3 * statistics.median(seconds)}


def _resnet(device: torch.device, data_dir: str | None) -> tuple[PlainStep, TrainState, Loader, str]:
    """ResNet-18 under DALE as CIFAR-10 trains it, on the fast path where there is a GPU."""
    on_gpu = device.type == "cuda"
    if data_dir:
        data = dale.load_dataset("cifar10", data_dir=data_dir)
        train, name = data.train, "cifar10"
    else:
        images = torch.randint(256, (46_000, 3, 32, 32), dtype=torch.uint8)
        train, name = Split.of(images, torch.arange(46_000) % 10), "random images of its shape"
    loader = Loader(train, 512 if on_gpu else 16, seed=0, device=device)
    torch.manual_seed(0)
    model = dale.create_model("resnet18", channels=3, size=(32, 32), num_classes=10).to(device)
    objective = algorithms.dale(dale.Linf(epsilon=8 / 255), rho=0.8, steps=10)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    step, _ = make_step(model, (3, 32, 32), objective, dtype, device, "auto" if on_gpu else "off")
    optimiser = SGD(learning_rate=0.01).build(model, captured=isinstance(step, CapturedStep))
    state = TrainState(model, optimiser, objective.initial_duals(10, device=device), AveragedModel(model, Averaging()))
    return step, state, loader, name


def checkpoint(data_dir: str | None, device: str, steps: int, rounds: int) -> dict[str, Any]:
    """What a checkpoint every epoch costs: `rounds` epochs of `steps` steps with one, as many without, in turns."""
    place = find_device(device)
    step, state, loader, name = _resnet(place, data_dir)

    def train(folder: RunFolder | None, writer: Writer) -> tuple[float, float]:
        """An epoch that begins with a checkpoint, or does not: its seconds, and those of handing it over."""
        began = time.perf_counter()
        blocking = 0.0
        if folder is not None:
            state.epoch += 1
            state.selection.add(Candidate(state.epoch, float(state.epoch), -1.0))
            writer.put(Snapshot.of(state, len(loader), candidate=True))
            blocking = time.perf_counter() - began
        for number, batch in zip(range(steps), loader.epoch(0), strict=False):
            step(state, batch, random.key(number))
        if place.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began, blocking

    with tempfile.TemporaryDirectory(dir=".") as place_on_disk:
        folder = RunFolder(place_on_disk)
        written: list[float] = []

        def write(snapshot: Snapshot) -> None:
            began = time.perf_counter()
            folder.write_checkpoint(snapshot)
            written.append(time.perf_counter() - began)

        writer = Writer(write)
        train(None, writer)  # compiles, captures, allocates
        found = []
        for _ in range(rounds):
            without, (with_one, blocking) = train(None, writer)[0], train(folder, writer)
            writer.wait()
            found.append((without, with_one, blocking))
        size = max(p.stat().st_size for p in Path(place_on_disk).rglob("step-*"))
    without, _, blocking = (statistics.median(column) for column in zip(*found, strict=True))
    epoch = without * len(loader) / steps
    lost = statistics.median(w - o for o, w, _ in found)
    return {
        "device": torch.cuda.get_device_name() if place.type == "cuda" else "cpu",
        "path": type(step).__name__,
        "data": name,
        "rounds": rounds,
        "steps_per_round": steps,
        "batch_size": loader.batch_size,
        "checkpoint_mib": size / 2**20,
        "epoch_seconds": epoch,
        "writing_seconds_in_the_background": statistics.median(written),
        "blocking_seconds": blocking,
        "blocking_seconds_each": [round(b, 4) for _, _, b in found],
        "lost_seconds": lost,
        "blocking_share_of_an_epoch": blocking / epoch,
        "lost_share_of_an_epoch": lost / epoch,
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
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=best, help="where checkpoints are measured")
    parser.add_argument("--only", choices=("processes", "engine", "checkpoint", "sweep"), help="one section alone")
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if args.only is None:  # what was measured on another machine stays
        found = {name: value for name, value in found.items() if name.startswith("checkpoint_")}
    parts = {
        "processes": processes,
        "engine": lambda quick: {
            "engine": _together(2, "overhead", 30 if quick else 300),
            "messages": _together(2, "message", 200 if quick else 1000),
        },
        "checkpoint": lambda quick: {
            f"checkpoint_{args.device}": checkpoint(args.data_dir, args.device, *_extent(args.device, quick))
        },
        "sweep": lambda quick: {"sweep": sweep(2 if quick else 5)},
    }
    for name, part in parts.items():
        if args.only in (None, name):
            found |= {key: value | {"environment": environment()} for key, value in part(args.quick).items()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


def _extent(device: str, quick: bool) -> tuple[int, int]:
    """Steps in a round and rounds: whole epochs on a GPU, a step or two on a CPU."""
    if device == "cpu":
        return (1, 1) if quick else (2, 2)
    return (90, 3 if quick else 10)


def processes(quick: bool) -> dict[str, Any]:
    """Fifty steps by one process and by two: the same losses."""
    found = {}
    for norm in (False, True):
        one, two = _together(0, "train", norm, 50), _together(2, "train", norm, 50)
        # against the largest loss: the Lagrangian passes through zero
        scale = max(map(abs, one["losses"]))
        gaps = [abs(a - b) / scale for a, b in zip(one["losses"], two["losses"], strict=True)]
        found["synchronised_batchnorm" if norm else "no_batchnorm"] = {
            "steps": 50,
            "threads_per_process": 1,
            "largest_relative_difference_of_losses": max(gaps),
            "one_process_ms": 1e3 * one["seconds"],
            "two_processes_ms": 1e3 * two["seconds"],
        }
    return found


if __name__ == "__main__":
    main()
