"""`dale report`: one HTML page, figures and tables from run folders; no torch, no network."""

from __future__ import annotations

import argparse
import sys

HELP = "write a report of runs: one HTML page, and figures and tables for a paper"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders, or folders that hold some")
    parser.add_argument("--out", metavar="FILE", default="report.html", help="the page to write")
    parser.add_argument("--title", metavar="TEXT", help="the page's heading (default: the run's name)")
    parser.add_argument("--figures", metavar="DIR", help="also write the charts as PDF, SVG and PNG")
    parser.add_argument("--tables", metavar="DIR", help="also write the results as Markdown, LaTeX and CSV")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from dale.reports import read_runs, write_figures, write_report, write_tables

    runs, lines = read_runs(args.runs)
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)
    written = [write_report(runs, args.out, args.title)]
    if args.tables is not None:
        written += write_tables(runs, args.tables)
    if args.figures is not None:
        written += write_figures(runs, args.figures)
    for path in written:
        print(path)
    return 0
