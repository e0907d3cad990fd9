"""`dale train`: train, evaluate, certify; everything ends up in the run folder."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from dale.cli.options import add_options, build_config
from dale.errors import DataError, UsageError

if TYPE_CHECKING:
    from dale.training.config import RunConfig
    from dale.training.runs import Run

HELP = "train a robust classifier under a nominal constraint; alone: DALE on embedded digits"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--out", metavar="RUN", help="the run folder to make (default: a new one under runs/)")
    parser.add_argument("--resume", metavar="RUN", help="continue an interrupted run")
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: a GPU where there is one)")
    parser.add_argument(
        "--fast", choices=("auto", "on", "off"), default="auto", help="the fast path (on: also compile for a short run)"
    )
    parser.add_argument(
        "--log", metavar="NAME", nargs="+", default=["tensorboard"], help="live views: tensorboard, wandb, mlflow"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    closing = parser.add_argument_group("closing evaluation, on the test set")
    closing.add_argument("--attacks", metavar="NAME", nargs="+", help="attacks (`dale list attacks`)")
    closing.add_argument("--examples", metavar="N", type=int, help="evaluate on the first N test images")
    closing.add_argument("--no-report", action="store_true", help="write no report.html")
    closing.add_argument("--no-evaluate", action="store_true", help="train only")
    closing.add_argument(
        "--compare", metavar="NAME", nargs="+", default=[], help="train these rows too and set them side by side"
    )
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from dale.environment import no_denormals
    from dale.training.distributed import connected

    with no_denormals(), connected(args.device):  # before data and model wake torch's threads
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    if args.resume is not None:
        config, out = _resumed(args)
    else:
        config, out = build_config(args), args.out
    check_early(args, config)
    done = [_train(args, config, out)]
    for name in args.compare:
        from dale.training.recipes import with_algorithm

        folder = done[0][0].path / "compare" / name
        done.append(_train(args, with_algorithm(config, name), str(folder)))
    from dale.cli.closing import closing_table
    from dale.training.distributed import is_main

    if not is_main():
        return 0
    print(closing_table(done))
    path = done[0][0].path
    print(f"\nRun folder: {path}")
    if not args.no_report:
        from dale.reports import read_runs, write_report

        print(f"Report: {write_report(read_runs([path])[0], path / 'report.html')}")
    return 0


def check_early(args: argparse.Namespace, config: RunConfig) -> None:
    """Refuse now what would otherwise fail after an hour of training."""
    from dale.algorithms import find_row
    from dale.data.load import locate
    from dale.evaluation import prepare_attacks
    from dale.models.factory import require_model
    from dale.training.distributed import may_restart
    from dale.training.loggers import require_loggers

    with contextlib.suppress(DataError):  # a file may be on the machines of a cluster alone
        locate(config.data.dataset)
    require_model(config.model.name)
    require_loggers(args.log, packages=False)
    perturbations = config.build_objective().perturbations
    if perturbations is not None:
        prepare_attacks(args.attacks or (), perturbations)
    for name in args.compare:
        find_row(name)
    if may_restart() and args.out is None and args.resume is None:
        raise UsageError("under torchrun --max-restarts give the run a folder with --out: a restart continues it there")
    if args.examples is not None and args.examples < 1:
        raise UsageError(f"--examples: expected at least 1, got {args.examples}")


def _resumed(args: argparse.Namespace) -> tuple[RunConfig, str]:
    from dale.training.runs import RunFolder

    config = RunFolder(args.resume).config(trust=args.trust)
    defaults = argparse.ArgumentParser()
    add_options(defaults)
    blank = vars(defaults.parse_args([]))
    ignored = [
        name for name, value in blank.items() if name not in ("trust", "data_dir") and getattr(args, name) != value
    ]
    if ignored or args.out:
        name = "--" + (ignored[0] if ignored else "out").replace("_", "-")
        raise UsageError(f"--resume continues a run as it was configured; {name} cannot be changed with it")
    return config, args.resume


def _train(args: argparse.Namespace, config: RunConfig, out: str | None) -> tuple[Run, dict[str, Any] | None]:
    """Train one row, then evaluate and certify it."""
    from pathlib import Path

    from dale.models import create_model
    from dale.training import RunFolder, fit
    from dale.training.distributed import is_main, restarted

    objective = config.build_objective()
    continued = args.resume is not None or restarted()
    resume = continued and out is not None and (Path(out) / "config.yaml").exists()
    data = config.data.load(args.data_dir, Path(out) if resume and out is not None else None)
    # a run with a checkpoint does not need the weights it once started from: their file may be gone
    started = resume and out is not None and RunFolder(out).newest is not None
    model = create_model(
        config.model.name,
        data,
        activation=config.model.activation,
        seed=config.training.seed,
        init=None if started else config.model.init,
    )
    if not args.quiet and is_main():
        print(f"{objective.name} on {data!r}", file=sys.stderr)
    run = fit(
        model,
        objective,
        data,
        out=out,
        config=config,
        device=args.device,
        resume=resume,
        progress=not args.quiet,
        fast=args.fast,
        loggers=args.log,
    )
    for line in run.summary["warnings"] if args.quiet and is_main() else ():  # otherwise said while training
        print(f"warning: {line}", file=sys.stderr)
    if args.no_evaluate or objective.perturbations is None:
        return run, None
    from dale.cli.closing import close_run

    return run, close_run(run, data, attacks=args.attacks, examples=args.examples, progress=not args.quiet)
