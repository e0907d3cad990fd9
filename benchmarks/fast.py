"""The fast path against the plain one: step time, throughput, share of the matmul ceiling, memory.

    python benchmarks/fast.py [--device cuda] [--model resnet18] [--batch-size 512] [--steps 60]

On CIFAR-10 shapes with random images: DALE with KL, ten steps of the attack, data, augmentation and averaging
included. Writes benchmarks/results/fast-DEVICE.json. Every variant is off / on against the one before it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dale import algorithms, random
from dale.data import Loader, RandomCrop, RandomFlip, Split
from dale.environment import environment
from dale.folding import Replica, replicate
from dale.models import create_model
from dale.objectives import Objective
from dale.perturbations import Linf
from dale.training import SGD, Averaging, TrainState
from dale.training.averaging import AveragedModel
from dale.training.fast import CapturedStep, FastStep
from dale.training.optimisers import set_learning_rate
from dale.training.steps import PlainStep

Make = Callable[[torch.nn.Module, Objective, torch.device], PlainStep]
RESULTS = Path(__file__).resolve().parent / "results"


def fast(dtype: torch.dtype, *, fuse: bool = True, compiled: bool = True, captured: bool = True) -> Make:
    def make(model: torch.nn.Module, objective: Objective, device: torch.device) -> PlainStep:
        replica = replicate(model, dtype=dtype, channels_last=True, fuse=fuse)
        assert isinstance(replica, Replica)
        model.to(memory_format=torch.channels_last)
        if captured:
            return CapturedStep(objective, dtype, device, replica, compiled=compiled)
        return FastStep(objective, dtype, device, replica)

    return make


def plain(dtype: torch.dtype) -> Make:
    return lambda model, objective, device: PlainStep(objective, dtype, device)


VARIANTS: dict[str, dict[str, Make]] = {
    "cpu": {
        "plain float32": plain(torch.float32),
        "folded replica, channels-last": fast(torch.float32, captured=False),
    },
    "cuda": {
        "plain float32": plain(torch.float32),
        "plain bfloat16": plain(torch.bfloat16),
        "captured, not compiled": fast(torch.bfloat16, compiled=False),
        "captured, compiled": fast(torch.bfloat16, fuse=False),
        "captured, compiled, fused convolutions": fast(torch.bfloat16),
    },
}


def ceiling(device: torch.device) -> float:
    """Measured matmul rate in TFLOP/s: bfloat16 on a GPU, float32 on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    first, second = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        first @ second
    _wait(device)
    started = time.perf_counter()
    for _ in range(10):
        first @ second
    _wait(device)
    return 2 * size**3 * 10 / (time.perf_counter() - started) / 1e12


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(make: Make, args: argparse.Namespace, split: Split, device: torch.device) -> dict[str, Any]:
    """Time one variant, everything included."""
    loader = Loader(split, args.batch_size, seed=0, augmentation=(RandomCrop(padding=4), RandomFlip()), device=device)
    objective = algorithms.dale(Linf(epsilon=8 / 255), rho=0.8, steps=args.attack_steps, step_size=2 / 255)
    objective = objective.for_run(1000, 10)
    model = create_model(args.model, channels=3, size=32, num_classes=10).to(device)
    started = time.perf_counter()
    step = make(model, objective, device)
    optimiser = SGD(learning_rate=0.1, nesterov=True).build(model, captured=isinstance(step, CapturedStep))
    state = TrainState(model, optimiser, objective.initial_duals(10, 0, device), AveragedModel(model, Averaging()))
    model.train()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    warm = 0.0
    for number, batch in enumerate(loader.epoch(0)):
        if number == args.warmup:
            _wait(device)
            warm = time.perf_counter() - started
            times = [time.perf_counter()]
        if number == args.warmup + args.steps:
            break
        set_learning_rate(optimiser, 0.05)
        step(state, batch, random.key(0).fold(number))
    _wait(device)
    seconds = (time.perf_counter() - times[0]) / args.steps
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return {
        "milliseconds_per_step": 1e3 * seconds,
        "seconds_per_50000": 50_000 / args.batch_size * seconds,
        "warm_up_seconds": warm,
        "peak_memory_gib": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--attack-steps", type=int, default=10)
    parser.add_argument("--steps", type=int, default=None, help="steps to time")
    parser.add_argument("--warmup", type=int, default=None)
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    args.batch_size = args.batch_size or (512 if on_gpu else 32)
    args.steps = args.steps or (60 if on_gpu else 2)
    args.warmup = args.warmup or (6 if on_gpu else 1)
    torch.set_flush_denormal(True)
    count = args.batch_size * (args.steps + args.warmup + 1)
    images = random.uniform(random.key(0), torch.arange(count), (3, 32, 32)).mul(255).to(torch.uint8)
    split = Split.of(images, torch.arange(count) % 10, 10).to(device)
    found: dict[str, Any] = {"environment": environment(), "model": args.model, "batch_size": args.batch_size}
    found |= {"attack_steps": args.attack_steps, "steps_timed": args.steps, "matmul_tflops": ceiling(device)}
    found["variants"] = {}
    for name, make in VARIANTS[device.type].items():
        result = measure(make, args, split, device)
        found["variants"][name] = result
        print(f"{name:42s} {result['milliseconds_per_step']:9.1f} ms/step  {result['seconds_per_50000']:8.2f} s/50k")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"fast-{device.type}.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
