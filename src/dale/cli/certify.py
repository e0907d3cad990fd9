"""`dale certify`: at which level the nominal constraint holds, with which confidence, on data nobody touched."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dale.errors import UsageError

if TYPE_CHECKING:
    from dale.certificates import NominalCertificate

HELP = "certify a run's nominal performance on held-out data never used before"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", metavar="RUN", help="a run folder, or zoo:NAME, which is certified on the test images")
    parser.add_argument("--alpha", type=float, default=0.05, help="the statement fails with at most this probability")
    parser.add_argument(
        "--clip",
        type=float,
        help="B: the statement is about min(loss, B) (default: 4, or twice the limit where that is more)",
    )
    parser.add_argument(
        "--method",
        choices=("betting", "empirical_bernstein", "hoeffding"),
        default="betting",
        help="the bound; choose before you look",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="where data files lie (default: $DALE_DATA or a user cache)")
    parser.add_argument("--device", metavar="DEVICE", default="cpu", help="cpu or cuda")
    parser.add_argument("--trust", action="store_true", help="honour import paths in the configuration")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from dale.files import read_json, write_json
    from dale.models.stored import PREFIX, find
    from dale.training.certification import certify_run, certify_stored
    from dale.training.runs import load_run

    options = {"alpha": args.alpha, "clip": args.clip, "method": args.method}
    if args.run.startswith(PREFIX):
        of_stored = certify_stored(
            find(args.run), data_dir=args.data_dir, device=args.device, trust=args.trust, **options
        )
        print(_promised(of_stored, args.run).statement())
        return 0
    loaded = load_run(args.run, trust=args.trust, device=args.device)
    data = loaded.data(args.data_dir)
    certificate = _promised(certify_run(loaded, data, **options), f"{args.run} ({loaded.objective.name})")
    print(certificate.statement())
    path = loaded.path / "evaluation.json"
    plain = read_json(path) if path.exists() else {}
    write_json(path, plain | {"certificate": certificate.to_plain()})
    return 0


def _promised(certificate: NominalCertificate | None, name: str) -> NominalCertificate:
    if certificate is None:
        raise UsageError(f"{name} was trained without a constraint: nothing was promised")
    return certificate
