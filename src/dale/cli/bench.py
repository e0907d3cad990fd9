"""`dale bench`: what a recipe costs on this machine."""

from __future__ import annotations

import argparse
import sys

from dale.cli.options import add_options, build_config

HELP = "measure a recipe: throughput, share of the machine's matmul ceiling, memory, time split"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options: those of `dale train` that make up a run, and how to measure."""
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: a GPU where there is one)")
    parser.add_argument(
        "--fast", choices=("auto", "on", "off"), default="auto", help="the fast path (on: also compile for a short run)"
    )
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--timed-steps", metavar="N", type=int, default=30, help="training steps to time")
    measuring.add_argument(
        "--synthetic", action="store_true", help="random images in the data set's shape and number: no files needed"
    )
    measuring.add_argument("--json", metavar="FILE", help="write everything that was measured here")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from dale.environment import no_denormals

    with no_denormals():  # before data and model wake torch's threads
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from dale.benchmark import bench, synthetic_dataset
    from dale.files import write_json

    config = build_config(args)
    if args.synthetic:
        data = synthetic_dataset(config.data.dataset, config.data.train_size, config.data.seed)
    else:
        data = config.data.load(args.data_dir)
    measured = bench(config, data, device=args.device, fast=args.fast, steps=args.timed_steps)
    if measured.line:
        print(measured.line, file=sys.stderr)
    print(measured)
    if args.json is not None:
        write_json(Path(args.json), measured.to_plain())
    return 0
