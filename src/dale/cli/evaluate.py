"""`dale evaluate`: accuracy under attack of a run, or of weights in a file."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dale.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from dale.data import Dataset
    from dale.perturbations import PerturbationSet

HELP = "evaluate a run or a model under attacks"
_LONGEST = 100


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "target", metavar="RUN|MODEL", help="a run folder, zoo:NAME, or a .safetensors file with --model"
    )
    parser.add_argument(
        "--attacks",
        metavar="NAME",
        nargs="+",
        default=["fgsm", "pgd20"],
        help="fgsm, pgd20, pgd20x10, pgd20-margin, apgd-ce, apgd-dlr, apgd-t, fab-t, square, autoattack, "
        "autoattack-fast, noise, worst-of-100, random, grid, transfer:RUN; numbers may be others",
    )
    parser.add_argument("--set", metavar="SET", help="another perturbation set: linf, l2, rotation, {type: ..., ...}")
    parser.add_argument("--epsilon", metavar="RADIUS", help="another radius, such as 0.25 or 8/255")
    parser.add_argument("--epsilons", metavar="RADIUS", nargs="+", help="also the accuracy at each of these radii")
    parser.add_argument("--examples", metavar="N", type=int, help="the first N test images (default: all)")
    parser.add_argument("--batch-size", metavar="N", type=int, help="examples per batch")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the attacks")
    parser.add_argument("--strict", action="store_true", help="strict float32 in the search too (GPU)")
    parser.add_argument("--no-checks", action="store_true", help="leave out the checks against false robustness")
    parser.add_argument("--save-examples", metavar="FILE", help="write the perturbed images (.safetensors)")
    parser.add_argument("--out", metavar="DIR|FILE", help="where evaluation.json goes (default: the run folder)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument("--model", metavar="NAME", help="for a weights file: a name or package.module:Name")
    parser.add_argument("--dataset", metavar="NAME|PATH", help="other data than the run's; needed for a weights file")
    parser.add_argument("--data-dir", metavar="DIR", help="where data files lie (default: $DALE_DATA or a user cache)")
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: a GPU where there is one)")
    parser.add_argument("--trust", action="store_true", help="honour import paths in a run's configuration")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from dale.cli.options import number
    from dale.environment import find_device
    from dale.evaluation import evaluate
    from dale.files import read_json, write_json

    args.device = str(find_device(args.device))
    model, data, perturbations, rho, folder = _load(args)
    out = Path(args.out) if args.out is not None else folder
    file = None if out is None else out if out.suffix == ".json" else out / "evaluation.json"
    before = read_json(file) if file is not None and file.is_file() else {}
    beside = _differs(before, args, data, perturbations) if args.out is None and before else ""
    if out is not None and beside:  # another question, or less of the same: it does not replace the answer on file
        file = out = out / f"evaluation-{beside}.json"
        before = {}
    curve = before.get("curve", []) if args.out is None else []  # what replaces it has its radii too
    radii = [number(text, "--epsilons") or 0.0 for text in args.epsilons or []] + [p["epsilon"] for p in curve]
    evaluation = evaluate(
        model,
        data,
        perturbations,
        args.attacks,
        batch_size=args.batch_size,
        seed=args.seed,
        examples=args.examples,
        strict=args.strict,
        device=args.device,
        progress=not args.quiet,
        out=out,
        rho=rho,
        save_examples=args.save_examples,
        checks=not args.no_checks,
        epsilons=radii or None,
        sources=_sources(args),
    )
    if file is not None and "certificate" in before:  # it is about the run, not about these attacks
        write_json(file, evaluation.to_plain() | {"certificate": before["certificate"]})
    print(evaluation)
    if file is not None:
        print(f"\nwritten to {file}" + ("; evaluation.json stays as it was" if beside else ""))
    return 0


def _differs(before: dict[str, Any], args: argparse.Namespace, data: Dataset, perturbations: PerturbationSet) -> str:
    """What this evaluation lacks of the one on file or asks otherwise, as a name; empty where it may replace it."""
    from dale.attacks import parse
    from dale.components import to_plain

    count = len(data.test) if args.examples is None else min(args.examples, len(data.test))
    attacks = [parse(name).name for name in args.attacks]
    known = [attack.get("name") for attack in before.get("attacks", [])]
    parts = [str(count)] if count < before.get("n", 0) else []
    if args.dataset is not None:
        parts.append(Path(args.dataset).stem)
    if json.loads(json.dumps(to_plain(perturbations))) != before.get("perturbations"):
        parts += [part for part in (args.set, args.epsilon) if part is not None]
    if args.seed != before.get("seed", args.seed):
        parts.append(f"seed{args.seed}")
    if args.no_checks and before.get("alarms"):
        parts.append("no-checks")
    if parts or not set(known) <= set(attacks):
        parts += attacks if set(known) != set(attacks) else []
    name = "-".join(re.sub(r"[^\w.@]+", "_", part).strip("_") for part in parts)
    if len(name) > _LONGEST:  # of a file's name
        name = f"{name[:_LONGEST]}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
    return name


def _load(args: argparse.Namespace) -> tuple[nn.Module, Dataset, PerturbationSet, float | None, Path | None]:
    """The model, its data, the set, the limit on its nominal loss, and the run's folder."""
    path = Path(args.target)
    if path.suffix == ".safetensors":
        return (*_load_file(args, path), None, None)
    from dale.data import load_dataset
    from dale.training.certification import fingerprints, require_same_splits
    from dale.training.runs import load_run
    from dale.zoo import PREFIX, find

    if args.target.startswith(PREFIX):
        if args.model is not None:
            raise UsageError("--model goes with a .safetensors file; a stored model knows what it is")
        entry = find(args.target)
        data = load_dataset(args.dataset or entry.dataset, data_dir=args.data_dir)
        model = entry.load(args.device, trust=args.trust)
        return model, data, _set(args, entry.perturbations()), entry.rho, None

    if args.model is not None:
        raise UsageError("--model goes with a .safetensors file; a run knows its model")
    if not path.exists():
        raise UsageError(f"{path}: no such run folder or .safetensors file")
    run = load_run(path, trust=args.trust, device=args.device)
    if args.dataset is None:
        data, why = run.data(args.data_dir), "to evaluate it on other data, name them with --dataset"
        require_same_splits(run.summary.get("splits", {}), fingerprints(data, ["test"]), ["test"], run.path, why)
    else:
        data = load_dataset(args.dataset, data_dir=args.data_dir)
    objective = run.objective
    return run.model, data, _set(args, objective.perturbations), objective.rho, run.path


def _load_file(args: argparse.Namespace, path: Path) -> tuple[nn.Module, Dataset, PerturbationSet]:
    from dale.data import load_dataset
    from dale.models import create_model

    if args.model is None or args.dataset is None:
        raise UsageError(f"{path.name}: weights alone need --model NAME and --dataset NAME as well")
    data = load_dataset(args.dataset, data_dir=args.data_dir)
    model = create_model(args.model, data, init=path).to(args.device)
    return model, data, _set(args, None)


def _set(args: argparse.Namespace, current: Any) -> PerturbationSet:
    """The set of the run, as changed by --set and --epsilon."""
    from dale.cli.options import _perturbations as perturbations

    if current is None and args.set is None:
        if args.epsilon is None:
            raise UsageError("there is no perturbation set to attack in: give --epsilon, or --set as well")
        args.set = "linf"
    found: PerturbationSet = perturbations(current, args)
    return found


def _sources(args: argparse.Namespace) -> dict[str, nn.Module]:
    """The models of the runs that `transfer:RUN` names."""
    from dale.training.runs import load_run

    names = [name.removeprefix("transfer:") for name in args.attacks if name.startswith("transfer:")]
    return {name: load_run(name, trust=args.trust, device=args.device).model for name in names}
