"""`dale reproduce`: the paper's tables and figures, from training to the printed table, one command each."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dale.errors import DaleError, UsageError, unknown

if TYPE_CHECKING:
    from dale.reproduction import Spec
    from dale.reproduction.runner import Slot

HELP = "reproduce the paper's tables and figures; skips what has a result, continues what was interrupted"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "table",
        metavar="TABLE",
        help="table1, table2, table4, table5, table6, table7, figure1, figure2, all of them (all), our best models "
        "(best), one change at a time (ablation); the page of all results (page); or the weights of a run into the "
        "zoo, with the numbers of what was stored, or those that are missing of a stored model (store)",
    )
    parser.add_argument("--dataset", choices=("mnist", "cifar10"), help="one data set (default: all of the table)")
    parser.add_argument("--model", metavar="NAME", help="another model than the paper's, such as resnet50")
    parser.add_argument("--rows", metavar="ROW", nargs="+", help="only these: labels such as 'dale rho=0.8', or names")
    parser.add_argument("--seeds", metavar="N", type=int, default=1, help="seeds 0 .. N - 1")
    parser.add_argument("--budget", metavar="BUDGET", default="short", help="full (the paper's), short, or smoke")
    parser.add_argument("--results", metavar="DIR", default="results", help="where results lie, one file per run")
    parser.add_argument("--runs", metavar="DIR", default="runs/reproduce", help="where run folders lie")
    parser.add_argument("--workers", metavar="N", type=int, help="runs at a time (default: one per GPU, or per core)")
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda (default: a GPU where there is one)")
    parser.add_argument("--data-dir", metavar="DIR", help="where data files lie (default: $DALE_DATA or a user cache)")
    parser.add_argument("--paper-mode", action="store_true", help="also measure in train mode, as the paper's code did")
    parser.add_argument("--table-only", action="store_true", help="train nothing: write the table of what is on file")
    parser.add_argument("--out", metavar="FILE", default="docs/results.md", help="for page: where it goes")
    parser.add_argument("--only", metavar="RUN", help="only this run, DATASET/MODEL/NAME, in this process; no table")
    parser.add_argument("--run", metavar="RUN", help="for store: the run folder, if its weights are not stored yet")
    parser.add_argument("--name", metavar="NAME", help="for store: the model's name in the zoo")
    parser.add_argument("--zoo", metavar="DIR", default="zoo", help="for store: the zoo")
    parser.add_argument("--list", action="store_true", help="run nothing: the runs and whether each has a result")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from dale.reproduction.runner import outdated, slots_of

    _check(args)
    root = Path(args.results)
    if args.table == "page":
        from dale.reproduction.page import write_page

        print(write_page(root, Path(args.out)))
        return 0
    if args.table == "store":
        return _store(args)
    slots = slots_of(_specs(args), Path(args.runs), root)
    if args.only is not None:
        return _only(args, slots)
    for slot in outdated(slots):
        print(f"{slot.run.name}: the result on file was made by another recipe; it is kept", file=sys.stderr)
    if args.list:
        for slot in slots:
            print(f"{slot.run.name}  {'done' if slot.finished else 'begun' if slot.begun else 'waiting'}")
        return 0
    errors: dict[str, str] = {}
    if not args.table_only:
        errors = _run(args, slots)
        _time(args, root)
    _print(args, root)
    if errors:
        for name, line in errors.items():
            print(f"{name} failed: {line}", file=sys.stderr)
        raise DaleError(f"{len(errors)} of {len(slots)} runs failed; the same command tries them again")
    return 0


def _store(args: argparse.Namespace) -> int:
    """Store the weights of a run, and publish what stored weights score."""
    from dale.reproduction.store import publish

    if args.name is None:
        raise UsageError("store needs --name NAME, and --run RUN where the weights are not stored yet")
    run = None if args.run is None else Path(args.run)
    work = Path(args.runs) / "zoo"
    entry = publish(args.name, Path(args.zoo), work, run=run, device=args.device, data_dir=args.data_dir)
    print("\n".join(str(path) for path in (entry.path, *entry.weights)))
    return 0


def _check(args: argparse.Namespace) -> None:
    from dale.reproduction import BUDGETS, TABLES

    if args.table not in (*TABLES, "all", "page", "store"):
        raise unknown("table", args.table, (*TABLES, "all", "page", "store"))
    if args.budget not in BUDGETS:
        raise unknown("budget", args.budget, BUDGETS)
    for name in ("seeds", "workers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name}: expected at least 1, got {getattr(args, name)}")
    if args.model is not None:
        from dale.models import MODELS

        if args.model not in MODELS:
            raise unknown("model", args.model, MODELS)


def _parts(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(table, data set, model) of everything asked for."""
    from dale.reproduction import TABLES
    from dale.reproduction.recipes import default_model

    names = [n for n in TABLES if n not in ("best", "ablation")] if args.table == "all" else [args.table]
    found = [
        (name, dataset, args.model or default_model(dataset))
        for name in names
        for dataset in TABLES[name][0]
        if args.dataset in (None, dataset)
    ]
    if not found:
        raise UsageError(
            f"{args.table} of the paper is about {' and '.join(TABLES[args.table][0])}, not {args.dataset}"
        )
    return found


def _specs(args: argparse.Namespace) -> list[Spec]:
    from dale.reproduction import specs_of

    return [
        spec
        for table, dataset, model in _parts(args)
        for spec in specs_of(table, dataset, model, args.budget, args.seeds, args.rows)
    ]


def _only(args: argparse.Namespace, slots: list[Slot]) -> int:
    """Bring one run to its end here."""
    from dale.reproduction.work import work

    found = next((slot for slot in slots if slot.run.name == args.only), None)
    if found is None:
        raise unknown("run", args.only, [slot.run.name for slot in slots])
    if not found.finished:
        work(
            found.spec,
            found.folder,
            found.result,
            device=args.device,
            data_dir=args.data_dir,
            paper_mode=args.paper_mode,
            shared_by=args.workers or 1,
        )
    return 0


def _run(args: argparse.Namespace, slots: list[Slot]) -> dict[str, str]:
    """Bring the runs to their end, in processes of their own."""
    from dale.cli.sweep import View
    from dale.experiments import run_local
    from dale.experiments.workers import gpu_names
    from dale.reproduction.runner import WorkerLaunch

    if not slots:
        return {}
    cores, gpus = os.cpu_count() or 1, [] if args.device == "cpu" else gpu_names()
    waiting = sum(not slot.finished for slot in slots)
    workers = max(1, min(args.workers or len(gpus) or cores, waiting))
    cache = Path(args.runs) / "compiled"
    launch = WorkerLaunch(
        threads=max(1, cores // workers), common=[*_common(args), f"--workers={workers}"], cache=cache
    )
    view = View(list(slots), list(slots))
    try:
        return run_local(launch, slots, workers, view, gpus)
    finally:
        view.close()


def _common(args: argparse.Namespace) -> list[str]:
    """The words that every worker is started with."""
    words = [args.table, f"--seeds={args.seeds}", f"--budget={args.budget}"]
    for name in ("dataset", "model", "results", "runs", "device", "data_dir"):
        if getattr(args, name) is not None:
            words.append(f"--{name.replace('_', '-')}={getattr(args, name)}")
    if args.paper_mode:
        words.append("--paper-mode")
    return words


def _time(args: argparse.Namespace, root: Path) -> None:
    """Time the rows of tables 4 and 5, one after the other in this process: they must have the device alone."""
    from dale.reproduction.catalogue import TIMED, chosen, rows_of

    for table, dataset, model in _parts(args):
        if table in TIMED:
            from dale.reproduction.timing import time_rows

            rows = chosen(rows_of(table, dataset, model), args.rows)
            time_rows(
                {row.label: row.spec(dataset, model, "full", 0) for row in rows},
                root,
                budget=args.budget,
                device=args.device,
                data_dir=args.data_dir,
            )


def _print(args: argparse.Namespace, root: Path) -> None:
    """Write and print what was asked for."""
    from dale.reproduction import make_table

    for table, dataset, model in _parts(args):
        if table.startswith("figure"):
            _draw(args, table, dataset, model, root)
            continue
        made = make_table(table, dataset, model, args.budget, root, args.rows)
        print(made.markdown())
        whole = make_table(table, dataset, model, args.budget, root)  # the files have all rows, asked for or not
        print("\n".join(f"{path}" for path in whole.write(root / "tables")) + "\n")


def _draw(args: argparse.Namespace, figure: str, dataset: str, model: str, root: Path) -> None:
    """Draw a figure; among everything else, one that cannot be drawn is only said to be so."""
    from dale.reproduction.figures import draw

    try:
        print("\n".join(str(path) for path in draw(figure, dataset, model, args.budget, root)))
    except DaleError as error:
        if args.table != "all":
            raise
        print(f"{figure}: {error}", file=sys.stderr)
