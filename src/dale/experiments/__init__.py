"""Experiments: many runs from one file, on this machine or on a cluster."""

from dale.experiments.cluster import run_on_ray, write_slurm
from dale.experiments.results import Place, as_table, claim, held, write_results
from dale.experiments.sweep import SweepRun, TrainOptions, expand, read_sweep
from dale.experiments.workers import Launch, run_local, run_once

__all__ = [
    "Launch",
    "Place",
    "SweepRun",
    "TrainOptions",
    "as_table",
    "claim",
    "expand",
    "held",
    "read_sweep",
    "run_local",
    "run_on_ray",
    "run_once",
    "write_results",
    "write_slurm",
]
