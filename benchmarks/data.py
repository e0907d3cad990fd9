"""Data: speed, memory and start-up of CIFAR-10 batches, side by side with a per-image torch DataLoader.

    python benchmarks/data.py [DATA_DIR]

The peer does the same work one image at a time, as data loaders usually do: read the bytes, scale to [0, 1], pad by 4,
crop at a random place, mirror with probability 1/2; a torch DataLoader shuffles and collates. Rounds of both alternate,
so that whatever else the machine does meets both alike; the figure is each one's best round, as in timeit.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from dale.data import Dataset, Loader, RandomCrop, RandomFlip, Split, load_dataset
from dale.environment import environment

RESULTS = Path(__file__).parent / "results"


class PerImage(TorchDataset[tuple[Tensor, Tensor, int]]):
    """The peer: one image at a time."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor, int]:
        image = self.split.images[place].float().div(255.0)
        padded = F.pad(image, (4, 4, 4, 4))
        row, column = torch.randint(0, 9, (2,)).tolist()
        image = padded[:, row : row + 32, column : column + 32]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return image, self.split.labels[place], place


def _time(batches: Iterator[Any], count: int) -> float:
    """Seconds per batch over `count` batches, after one that warms up."""
    next(batches)
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    return (time.perf_counter() - start) / count


# Batches of one round, so that rounds last about equally long: a short one is more often undisturbed. Workers have four
# batches ready before they are asked, which would flatter a short round.
_DALE, _ALONE, _WORKERS = 100, 8, 40


def compare_speed(data: Dataset, batch_size: int = 128, rounds: int = 12) -> dict[str, Any]:
    """Batches per second of dale's loader and of the per-image DataLoader (in this process, and with two workers)."""
    loader = Loader(data.train, batch_size, seed=0, augmentation=(RandomCrop(padding=4), RandomFlip()))
    peers = {
        workers: DataLoader(PerImage(data.train), batch_size, shuffle=True, num_workers=workers, drop_last=True)
        for workers in (0, 2)
    }
    seconds: dict[str, list[float]] = {"dale": [], "peer_0_workers": [], "peer_2_workers": []}
    for number in range(rounds):
        seconds["dale"].append(_time(loader.epoch(number), _DALE))
        for workers, peer in peers.items():
            seconds[f"peer_{workers}_workers"].append(_time(iter(peer), _WORKERS if workers else _ALONE))
    best = {name: min(values) for name, values in seconds.items()}
    result: dict[str, Any] = {"batch_size": batch_size, "rounds": rounds}
    for name, values in seconds.items():
        result[f"{name}_batches_per_second"] = 1.0 / best[name]
        result[f"{name}_batches_per_second_median"] = 1.0 / statistics.median(values)
    for workers in peers:
        result[f"times_faster_than_{workers}_workers"] = best[f"peer_{workers}_workers"] / best["dale"]
    return result


_PROBE = """
import sys, time
import torch
from dale.data import Loader, RandomCrop, RandomFlip, load_dataset
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
torch.rand(8, 8) @ torch.rand(8, 8)
before, start = peak(), time.perf_counter()
data = load_dataset("cifar10", data_dir=sys.argv[1])
loader = Loader(data.train, 128, seed=0, augmentation=(RandomCrop(padding=4), RandomFlip()))
next(loader.epoch(0))
first = time.perf_counter() - start
for _ in loader.epoch(0):
    pass
size = sum(part.images.nbytes for part in (data.train, data.validation, data.certification, data.test))
print(first, peak() - before, size)
"""


def measure_start(data_dir: Path, repeats: int = 3) -> dict[str, Any]:
    """Seconds from files to the first batch, and peak memory over the interpreter with torch, in fresh processes.

    The files' pages are dropped from the system's cache first where it allows that.
    """
    runs = []
    for _ in range(repeats):
        cold = _drop_cache(data_dir)
        out = subprocess.run([sys.executable, "-c", _PROBE, str(data_dir)], capture_output=True, text=True, check=True)
        first, memory, size = (float(word) for word in out.stdout.split())
        runs.append((first, memory, size))
    return {
        "first_batch_seconds": statistics.median(run[0] for run in runs),
        "first_batch_seconds_all": [run[0] for run in runs],
        "cold_files": cold,
        "data_megabytes": runs[0][2] / 1e6,
        "peak_memory_over_data_megabytes": (max(run[1] for run in runs) - runs[0][2]) / 1e6,
    }


def _drop_cache(data_dir: Path) -> bool:
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in data_dir.glob("cifar10/**/*.bin"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def run(data_dir: Path) -> dict[str, Any]:
    """Measure everything; return one dictionary."""
    data = load_dataset("cifar10", data_dir=data_dir)
    return {
        "benchmark": "data",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "environment": environment(),
        "torch": torch.__version__,
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "speed": compare_speed(data),
        "start": measure_start(data_dir),
    }


def main() -> None:
    """Print a table and write results/data.json."""
    data_dir = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("DALE_DATA", "data"))
    results = run(data_dir)
    speed, start = results["speed"], results["start"]
    print(f"CIFAR-10, crop and flip, batches of {speed['batch_size']} ({results['machine']}, torch {results['torch']})")
    print(f"  dale                        {speed['dale_batches_per_second']:9.0f} batches/s")
    for workers in (0, 2):
        rate, times = speed[f"peer_{workers}_workers_batches_per_second"], speed[f"times_faster_than_{workers}_workers"]
        print(
            f"  DataLoader, {workers} workers       {rate:9.0f} batches/s   dale: {times:.1f} times as fast (target 20)"
        )
    print(f"  files to first batch        {start['first_batch_seconds']:9.2f} s           (target 2)")
    over = start["peak_memory_over_data_megabytes"]
    print(f"  peak memory over the data   {over:9.0f} MB          (target 300)")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "data.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
