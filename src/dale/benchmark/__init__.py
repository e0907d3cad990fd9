"""Measuring: what a recipe costs on the machine at hand, and how far that is from what the machine could do."""

from dale.benchmark.bench import Bench, bench
from dale.benchmark.machine import matmul_ceiling
from dale.benchmark.synthetic import synthetic_dataset

__all__ = ["Bench", "bench", "matmul_ceiling", "synthetic_dataset"]
