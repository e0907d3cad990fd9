"""`dale list`: what there is to choose from."""

from __future__ import annotations

import argparse

from dale.errors import unknown

HELP = "list algorithms, datasets, models, sets, samplers, losses, attacks"
KINDS = ("algorithms", "datasets", "models", "sets", "samplers", "losses", "attacks", "augmentations", "aggregators")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("kind", nargs="?", metavar="KIND", help=f"one of: {', '.join(KINDS)} (default: all)")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.kind is not None and args.kind not in KINDS:
        raise unknown("kind", args.kind, KINDS)
    for kind in KINDS if args.kind is None else (args.kind,):
        print(f"{kind}:")
        for name, text in _entries(kind).items():
            print(f"  {name:<22} {text}")
    return 0


def _entries(kind: str) -> dict[str, str]:
    from dale.components import Component, known

    if kind == "algorithms":
        from dale.algorithms import ROWS

        return {name: _first_line(row) for name, row in ROWS.items()}
    if kind == "datasets":
        from dale.data import DATASETS

        return dict.fromkeys(DATASETS, "") | {"PATH.npz": "arrays images, labels", "FOLDER": "one folder per class"}
    if kind == "models":
        from dale.models import MODELS

        return dict.fromkeys(MODELS, "") | {"package.module:Name": "an nn.Module of yours"}
    if kind == "attacks":
        from dale.attacks import NAMES

        return dict(NAMES)
    from dale.aggregators import Aggregator
    from dale.data import Augmentation
    from dale.losses import Loss
    from dale.perturbations import PerturbationSet
    from dale.samplers import Sampler

    bases: dict[str, type[Component]] = {
        "sets": PerturbationSet,
        "samplers": Sampler,
        "losses": Loss,
        "augmentations": Augmentation,
        "aggregators": Aggregator,
    }
    return {name: _first_line(cls) for name, cls in sorted(known(bases[kind]).items())}


def _first_line(thing: object) -> str:
    return (thing.__doc__ or "").strip().partition("\n")[0]
