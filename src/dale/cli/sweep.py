"""`dale sweep`: many trainings from one file, on this machine, on Ray or as a Slurm job array."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dale.errors import DaleError, UsageError

if TYPE_CHECKING:
    from dale.experiments import Launch, Place, SweepRun, TrainOptions

HELP = "train every combination of options in a file; skips what is finished, continues what was interrupted"

_EVERY = 30.0  # seconds between two progress lines in a pipe


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("sweep", metavar="SWEEP.yaml", help="base: options of `dale train`; grid: lists of values")
    parser.add_argument("--out", metavar="DIR", help="where the runs go (default: sweeps/NAME)")
    parser.add_argument("--workers", metavar="N", type=int, help="runs at a time (default: one per GPU, or per core)")
    parser.add_argument("--ray", metavar="ADDRESS", help="run on this Ray cluster (auto, HOST:PORT, ray://HOST:PORT)")
    parser.add_argument("--slurm", metavar="FILE", help="write a Slurm job array instead of running anything")
    parser.add_argument("--cpus", metavar="N", type=float, default=1.0, help="cores of a run, for Ray and Slurm")
    parser.add_argument("--gpus", metavar="N", type=float, default=0.0, help="GPUs of a run, for Ray and Slurm")
    parser.add_argument("--only", metavar="NUMBER", type=int, help="only this run of the file, counted from 0")
    parser.add_argument("--trust", action="store_true", help="honour import paths in the file")


def train_options() -> TrainOptions:
    """The options of `dale train`, as its own parser has them."""
    from dale.cli import train
    from dale.experiments import TrainOptions

    parser = argparse.ArgumentParser()
    train.configure(parser)
    actions = [action for action in parser._actions if action.option_strings]
    return TrainOptions(
        known=frozenset(action.dest for action in actions) - {"help"},
        flags=frozenset(action.dest for action in actions if action.nargs == 0),
        lists=frozenset(action.dest for action in actions if action.nargs == "+"),
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from dale.experiments import claim, held, read_sweep, write_slurm

    _check_resources(args)
    kinds = train_options()
    runs = read_sweep(args.sweep, kinds, trust=args.trust)
    _check(runs, kinds, args.trust)
    if args.workers is not None and args.workers < 1:
        raise UsageError(f"--workers: expected at least 1, got {args.workers}")
    if args.only is not None and not 0 <= args.only < len(runs):
        raise UsageError(f"--only: the sweep has runs 0 .. {len(runs) - 1}, got {args.only}")
    places = claim(Path(args.out or Path("sweeps") / Path(args.sweep).stem), runs)
    if args.slurm is not None:
        (places[0].out / "logs").mkdir(parents=True, exist_ok=True)
        path = write_slurm(args.slurm, places, args.sweep, cpus=args.cpus, gpus=args.gpus, trust=args.trust)
        print(f"{len(places)} runs; submit them with: sbatch {path}")
        return 0
    chosen = places if args.only is None else [places[args.only]]
    with held(places[0].out, alone=args.only is None):
        return _run(args, kinds, places, chosen)


def _run(args: argparse.Namespace, kinds: TrainOptions, places: list[Place], chosen: list[Place]) -> int:
    from dale.experiments import Launch, as_table, run_on_ray, write_results

    view = View(places, chosen)
    try:
        if args.ray is not None:
            launch = Launch(kinds, args.trust, max(1, round(args.cpus)))
            errors = run_on_ray(launch, chosen, args.ray, view, cpus=args.cpus, gpus=args.gpus)
        else:
            errors = _local(args, kinds, chosen, view)
    finally:
        view.close()
    rows = write_results(places, errors)
    print(as_table(rows))
    print(f"\nResults: {places[0].out / 'results.csv'}")
    if errors:
        raise DaleError(f"{len(errors)} of {len(chosen)} runs failed; the same command tries them again")
    return 0


def _check_resources(args: argparse.Namespace) -> None:
    if args.ray is not None and args.slurm is not None:
        raise UsageError("--ray runs the sweep, --slurm writes a file for it: give one of them")
    for name, least in (("cpus", 1.0 if args.slurm is not None else 0.0), ("gpus", 0.0)):
        value = getattr(args, name)
        if not least <= value < float("inf") or (args.slurm is not None and value != int(value)):
            whole = "a whole number" if args.slurm is not None else "a number"
            raise UsageError(f"--{name}: expected {whole} of at least {least:g}, got {value:g}")


def _local(args: argparse.Namespace, kinds: TrainOptions, chosen: list[Place], view: View) -> dict[str, str]:
    from dale.experiments import Launch, run_local
    from dale.experiments.workers import gpu_names

    cores = os.cpu_count() or 1
    gpus = gpu_names()
    workers = min(args.workers or len(gpus) or cores, len(chosen))
    launch: Launch = Launch(kinds, args.trust, max(1, cores // workers))
    return run_local(launch, chosen, workers, view, gpus)


def _check(runs: list[SweepRun], kinds: TrainOptions, trust: bool) -> None:
    """Refuse now what a run would refuse after the others had trained for hours: options that do not go together."""
    from dale.cli.options import build_config
    from dale.cli.train import check_early
    from dale.cli.train import configure as configure_train

    parser = _Quiet(prog="dale train", allow_abbrev=False)
    configure_train(parser)
    for run in runs:
        try:
            parsed = parser.parse_args([*run.arguments(kinds), *(["--trust"] if trust else [])])
            check_early(parsed, build_config(parsed))
        except DaleError as error:
            raise UsageError(f"run {run.name}: {error}") from error


class _Quiet(argparse.ArgumentParser):
    """argparse that raises."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


class View:
    """What a person sees meanwhile: a bar on a terminal, lines in a pipe; and the table of results as it grows."""

    def __init__(self, places: list[Place], chosen: list[Place]) -> None:
        from tqdm import tqdm

        self.places, self.errors, self.shown = places, {}, time.monotonic()  # type: ignore[var-annotated]
        self.running: dict[str, Place] = {}
        done = sum(place.finished for place in chosen)
        self.done, self.total = done, len(chosen)
        if done:
            print(f"{done} of {len(chosen)} runs are finished already", file=sys.stderr)
        self.bar = (
            tqdm(total=len(chosen), initial=done, unit="run", dynamic_ncols=True) if sys.stderr.isatty() else None
        )

    def __call__(self, event: str, place: Place, text: str) -> None:
        """Show what happened to a run."""
        from dale.experiments import write_results

        if event == "running":
            self.running[place.run.name] = place
            if time.monotonic() - self.shown > (0.5 if self.bar is not None else _EVERY):
                self._show()
            return
        if event == "started":
            self.running[place.run.name] = place
        else:
            self.running.pop(place.run.name, None)
            self.done += event == "finished"
            if event == "failed":
                self.errors[place.run.name] = text
            write_results(self.places, self.errors, self.running)
        if self.bar is not None:
            self.bar.n = self.done
            if event == "failed":
                self.bar.write(f"{place.run.name} failed: {text}", file=sys.stderr)
            self._show()
        else:
            detail = f": {text}" if event == "failed" else f" ({text})" if text else ""
            print(f"{place.run.name} {event}{detail}", file=sys.stderr, flush=True)

    def _show(self) -> None:
        self.shown = time.monotonic()
        states = [f"{name}: {place.progress()}" for name, place in self.running.items()]
        if self.bar is not None:
            self.bar.set_postfix_str("; ".join(states)[:150], refresh=False)
            self.bar.refresh()
        else:
            print(f"{self.done}/{self.total} finished; {'; '.join(states)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal in order."""
        if self.bar is not None:
            self.bar.close()
