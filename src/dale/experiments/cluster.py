"""Sweeps on clusters: tasks on Ray, which schedules, retries and knows the resources; a job array for Slurm."""

from __future__ import annotations

import importlib
import logging
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dale.errors import DaleError, UsageError
from dale.experiments.results import Place
from dale.experiments.workers import Launch, Report, run_once
from dale.files import write_text

RETRIES = 3  # of a task whose machine or worker died; a run that fails by itself is not repeated


def run_on_ray(
    launch: Launch, places: Sequence[Place], address: str, report: Report, *, cpus: float = 1.0, gpus: float = 0.0
) -> dict[str, str]:
    """Bring runs to their end as tasks of a Ray cluster; returns the last error of each that failed, by name.

    The folder of the sweep must be seen by every machine under the same path.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise UsageError("--ray needs Ray: pip install 'dale[ray]'") from error
    waiting = [place for place in places if not place.finished]
    errors: dict[str, str] = {}
    _reach(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises many kinds
        raise DaleError(f"cannot reach a Ray cluster at {address!r}: {_line(error)}") from error
    try:
        task = ray.remote(_task).options(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES, retry_exceptions=False)
        pending: dict[Any, Place] = {task.remote(launch, _absolute(place)): place for place in waiting}
        for place in waiting:
            report("started", place, "continued" if place.begun else "")
        while pending:
            done, _ = ray.wait(list(pending), timeout=0.5)
            for place in pending.values():
                report("running", place, "")
            for reference in done:
                place = pending.pop(reference)
                try:
                    failed = ray.get(reference)
                except Exception as error:
                    failed = f"Ray gave up on it: {_line(error)}"
                if failed is None:
                    report("finished", place, "")
                else:
                    errors[place.run.name] = failed
                    report("failed", place, failed)
    finally:
        ray.shutdown()
    return errors


def _reach(address: str) -> None:
    """Knock at the cluster's door first: Ray ends the whole process where nobody answers."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        return  # `auto` and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DaleError(f"cannot reach a Ray cluster at {address!r}: {reason}") from error


def _task(launch: Launch, place: Place) -> str | None:
    try:
        return run_once(launch, place)
    except DaleError as error:
        return str(error)


def _absolute(place: Place) -> Place:
    return Place(place.out.resolve(), place.run)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def write_slurm(
    path: Path | str, places: Sequence[Place], sweep: Path | str, *, cpus: float, gpus: float, trust: bool
) -> Path:
    """Write a job array for Slurm: one task per run, each `dale sweep --only N`, which skips and continues as ever."""
    out = places[0].out.resolve()
    command = [sys.executable, "-m", "dale", "sweep", str(Path(sweep).resolve()), "--out", str(out), "--workers", "1"]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={Path(sweep).stem}",
        f"#SBATCH --array=0-{len(places) - 1}",
        f"#SBATCH --cpus-per-task={max(1, round(cpus))}",
        *([f"#SBATCH --gpus-per-task={round(gpus)}"] if gpus else []),
        f'#SBATCH --output="{out}/logs/slurm-%A-%a.log"',  # sbatch splits at spaces outside of quotes
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@60",  # to the shell of the script, which becomes the process
        "# a task that is preempted is queued again and continues its run; `sbatch` this file again for what failed",
        f'exec {shlex.join(command)}{" --trust" if trust else ""} --only "$SLURM_ARRAY_TASK_ID"',
    ]
    path = Path(path)
    write_text(path, "\n".join(lines) + "\n")
    return path
