"""Reports: run folders -> one HTML page, figures and tables. Reads files only; torch is never imported."""

from dale.reports.figures import write_figures
from dale.reports.page import render_page, write_report
from dale.reports.runs import RunFiles, find_runs, read_run, read_runs
from dale.reports.tables import write_tables

__all__ = [
    "RunFiles",
    "find_runs",
    "read_run",
    "read_runs",
    "render_page",
    "write_figures",
    "write_report",
    "write_tables",
]
