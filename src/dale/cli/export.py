"""`dale export`: a run's model for use elsewhere, checked against the original, with a model card."""

from __future__ import annotations

import argparse

HELP = "export a run's model as safetensors, a torch program or ONNX, with a model card"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument(
        "--format", choices=("safetensors", "torch-export", "onnx"), default="safetensors", help="format"
    )
    parser.add_argument("--out", metavar="DIR", help="the folder to write to (default: RUN/export/FORMAT)")
    parser.add_argument("--trust", action="store_true", help="honour import paths in the run's configuration")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from dale.errors import UsageError
    from dale.export import export_run
    from dale.models.stored import PREFIX, find
    from dale.training.runs import load_run

    if args.run.startswith(PREFIX):
        lies = ", ".join(path.name for path in find(args.run).weights)
        raise UsageError(f"dale export takes a run; {args.run} is stored as safetensors already: {lies}")
    done = export_run(load_run(args.run, trust=args.trust), args.format, args.out)
    print(f"{done.path} (logits agree within {done.difference:.2g})")
    print(done.card)
    return 0
