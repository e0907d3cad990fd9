"""Attacks: PGD-20 and AutoAttack on the CPU, beside foolbox, the Adversarial Robustness Toolbox and pyautoattack.

    python benchmarks/attacks.py [--quick]

One robustly trained digits network at a time (the convolutional network of `dale`, and a small ResNet with BatchNorm),
the same images, steps and radius for all; the peers run as their documentation says. Rounds alternate, so that whatever
else the machine does meets all alike; the figures are each one's best and median round in CPU seconds of the process,
with one thread. Ours is the whole of `dale.evaluate`: clean accuracy, search, and every claim confirmed. The peers come
with the extra `peers`; one that is not installed is left out. `--quick` tries the script out and writes
no file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dale.batch import Batch
from dale.data import Split, load_dataset
from dale.environment import environment
from dale.evaluation import evaluate
from dale.losses import CrossEntropy
from dale.models import create_model
from dale.perturbations import Linf
from dale.samplers import pgd

RESULTS = Path(__file__).parent / "results"
EPSILON, STEP, STEPS = 0.15, 0.0375, 20
BALL = Linf(epsilon=EPSILON)


class Residual(nn.Module):
    """A residual network small enough for a benchmark: convolutions, BatchNorm, pooling."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(4))
        self.head = nn.Linear(width * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        for i in (0, 2):
            inner = self.norms[i](self.convs[i](x)).relu()
            x = (x + self.norms[i + 1](self.convs[i + 1](inner))).relu()
        return self.head(nn.functional.max_pool2d(x, 2).flatten(1))


def train(model: nn.Module, epochs: int) -> nn.Module:
    """PGD training on the digits' training split, a few epochs."""
    split = load_dataset("digits").train
    x, y = split.convert(split.images), split.labels
    torch.manual_seed(0)
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    sampler = pgd(5)
    for epoch in range(epochs):
        model.train()
        for rows in torch.randperm(len(x)).split(100):
            batch = Batch(x[rows], y[rows], rows)
            delta = sampler(model, batch, BALL, CrossEntropy(), key=epoch)[0]
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(batch.images + delta), batch.labels).backward()
            optimiser.step()
    optimiser.zero_grad()
    return model.eval()


def held_out() -> Split:
    """Every digit outside the training split."""
    data = load_dataset("digits")
    parts = (data.test, data.validation, data.certification)
    labels = torch.cat([part.labels for part in parts])
    return Split(torch.cat([p.images for p in parts]), labels, torch.arange(len(labels)), 10, scale=16.0)


def contenders(model: nn.Module, x: Tensor, y: Tensor, split: Split) -> dict[str, Callable[[], float]]:
    """PGD-20 from a random start by everybody; each returns the accuracy it leaves."""

    def accuracy(images: Tensor) -> float:
        with torch.no_grad():
            return float((model(images).argmax(1) == y).float().mean())

    def dale(name: str) -> Callable[[], float]:
        options: dict[str, Any] = {"progress": False, "checks": False, "batch_size": 256}
        return lambda: evaluate(model, split, BALL, [name], **options).worst.value

    found = {"dale pgd20": dale(f"pgd{STEPS}@{STEP}"), "dale pgd20-last": dale(f"pgd{STEPS}@{STEP}-last")}
    try:
        import foolbox

        wrapped = foolbox.PyTorchModel(model, bounds=(0, 1))
        fool = foolbox.attacks.LinfPGD(abs_stepsize=STEP, steps=STEPS)
        pairs = list(zip(x.split(256), y.split(256), strict=True))
        found["foolbox"] = lambda: accuracy(torch.cat([fool(wrapped, a, b, epsilons=EPSILON)[1] for a, b in pairs]))
    except ImportError:
        pass
    try:
        from art.attacks.evasion import ProjectedGradientDescentPyTorch
        from art.estimators.classification import PyTorchClassifier

        classifier = PyTorchClassifier(
            model, nn.CrossEntropyLoss(), tuple(x.shape[1:]), 10, clip_values=(0.0, 1.0), device_type="cpu"
        )
        art = ProjectedGradientDescentPyTorch(
            classifier, eps=EPSILON, eps_step=STEP, max_iter=STEPS, num_random_init=1, batch_size=256, verbose=False
        )
        found["ART"] = lambda: accuracy(torch.as_tensor(art.generate(x.numpy(), y.numpy())))
    except ImportError:
        pass
    return found


def autoattacks(model: nn.Module, x: Tensor, y: Tensor, split: Split) -> dict[str, Callable[[], float]]:
    """The standard AutoAttack by everybody."""
    options: dict[str, Any] = {"progress": False, "checks": False, "batch_size": 256}
    found = {"dale": lambda: evaluate(model, split, BALL, ["autoattack"], **options).worst.value}
    try:
        from pyautoattack import AutoAttack

        def reference() -> float:
            images, _ = AutoAttack(model, eps=EPSILON, seed=0).run_standard_evaluation(x, y, batch_size=256)
            with torch.no_grad():
                return float((model(images).argmax(1) == y).float().mean())

        found["pyautoattack"] = reference
    except ImportError:
        pass
    return found


def race(runners: dict[str, Callable[[], float]], rounds: int, warm_up: bool) -> dict[str, dict[str, Any]]:
    """CPU seconds of alternating rounds, best and median, and the accuracy left; a round before them warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    accuracies: dict[str, float] = {}
    for number in range(rounds + warm_up):
        for name, run in runners.items():
            began = time.process_time()
            accuracies[name] = run()
            if number >= warm_up:
                seconds[name].append(time.process_time() - began)
    return {
        name: {
            "seconds": min(values),
            "median_seconds": statistics.median(values),
            "all_seconds": values,
            "accuracy": accuracies[name],
        }
        for name, values in seconds.items()
    }


def times_faster(results: dict[str, dict[str, Any]], ours: str) -> float | None:
    """How many times as fast as the fastest peer, by best rounds; None where no peer is installed."""
    peers = [result["seconds"] for name, result in results.items() if not name.startswith("dale")]
    return min(peers) / results[ours]["seconds"] if peers else None


def peak_memory(steps: int) -> float:
    """MiB that a process holds at most which runs PGD of so many steps."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import attacks; attacks.hold({steps})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(answer.stdout)


def hold(steps: int) -> None:
    """Run a long PGD and print the process's peak memory."""
    torch.set_num_threads(1)
    model = create_model("convnet", load_dataset("digits")).eval()
    evaluate(model, held_out(), BALL, [f"pgd{steps}-last"], progress=False, checks=False)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def versions() -> dict[str, str]:
    """Of the peers that are installed."""
    found = {}
    for name in ("pyautoattack", "foolbox", "adversarial-robustness-toolbox"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def section(
    title: str, images: int, runners: dict[str, Callable[[], float]], ours: str, target: float, rounds: int
) -> dict[str, Any]:
    """Race, print a table, and return what goes into the file."""
    results = race(runners, rounds, warm_up=rounds > 2)
    times = times_faster(results, ours)
    print(f"{title}, {images} images, best of {rounds} (CPU seconds, one thread)")
    for name, result in results.items():
        best, middle = result["seconds"], result["median_seconds"]
        print(f"  {name:<18}{best:>8.2f} s  median {middle:>8.2f} s{100 * result['accuracy']:>9.2f}% left")
    if times is not None:
        print(f"  {ours}: {times:.2f} times as fast as the fastest peer (target {target})", flush=True)
    return {"images": images, "rounds": rounds, "target": target, "times_as_fast": times, "results": results}


def main() -> None:
    """Print tables and write results/attacks.json."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description="Attacks, side by side with other libraries.")
    parser.add_argument("--quick", action="store_true", help="a short look; writes nothing")
    quick = parser.parse_args().quick
    report: dict[str, Any] = {
        "benchmark": "attacks",
        "environment": environment() | {"threads": 1, "load_average": os.getloadavg()},
        "peers": versions(),
        "epsilon": EPSILON,
        "steps": STEPS,
        "step_size": STEP,
    }
    for title, fresh in (("convnet", create_model("convnet", load_dataset("digits"))), ("residual", Residual())):
        model, split = train(fresh, 3 if quick else 10), held_out()
        part = split.first(60 if quick else 500)
        steps = contenders(model, split.convert(split.images), split.labels, split)
        whole = autoattacks(model, part.convert(part.images), part.labels, part)
        report[title] = {
            "pgd20": section(f"{title}, pgd20", len(split), steps, "dale pgd20", 1.3, 3 if quick else 7),
            "autoattack": section(f"{title}, autoattack", len(part), whole, "dale", 2.0, 1 if quick else 2),
        }
        write(report, quick)
    report["peak_mib"] = {str(steps): peak_memory(steps) for steps in (20, 400)}
    print(f"peak memory: {report['peak_mib']['20']:.0f} MiB with 20 steps, {report['peak_mib']['400']:.0f} with 400")
    write(report, quick)


def write(report: dict[str, Any], quick: bool) -> None:
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "attacks.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
