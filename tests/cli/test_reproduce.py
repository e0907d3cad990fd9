"""`dale reproduce` from the command line: what it lists, refuses and prints; and the smoke test on real data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_runs_of_a_table_are_listed(dale) -> None:
    code, out, _ = dale("reproduce", "table1", "--dataset", "mnist", "--seeds", "2", "--rows", "pgd", "--list")
    assert code == 0
    assert out.splitlines() == [f"mnist/convnet/pgd-short-seed{seed}  waiting" for seed in (0, 1)]


def test_a_table_of_nothing_says_so(dale, tmp_path) -> None:
    code, out, _ = dale("reproduce", "table6", "--model", "resnet50", "--table-only")
    assert code == 0
    assert "| rho=0.1 | not run | - | 93.8 | - | 23.9 | - | 16.7 |" in out
    assert "11 of 11 rows were not run." in out
    assert (tmp_path / "results/tables/table6-cifar10-resnet50-short.csv").is_file()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["tabel1"], "unknown table 'tabel1'; did you mean 'table1'?"),
        (["table6", "--dataset", "mnist"], "table6 of the paper is about cifar10, not mnist"),
        (["table1", "--budget", "ful"], "unknown budget 'ful'; did you mean 'full'?"),
        (["table1", "--budget", "retuned", "--dataset", "mnist"], "unknown budget for mnist 'retuned'"),
        (["table1", "--model", "resnet19"], "unknown model 'resnet19'; did you mean 'resnet18'?"),
        (["table1", "--seeds", "0"], "--seeds: expected at least 1, got 0"),
        (["table1", "--rows", "trade"], "unknown row 'trade'; did you mean 'trades'?"),
        (["table1", "--only", "mnist/convnet/pgd"], "unknown run 'mnist/convnet/pgd'; did you mean"),
        (["store"], "store needs --name NAME, and --run RUN where"),
        (["page"], "docs/results.md is generated from docs/results.md.in, which is not there"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(dale, words, line) -> None:
    code, _, err = dale("reproduce", *words)
    assert code == 2
    assert err.startswith(f"dale: error: {line}")
    assert err.count("\n") == 1


def test_a_figure_without_a_run_fails(dale) -> None:
    code, _, err = dale("reproduce", "figure2", "--table-only")
    assert code == 1
    assert "needs a result of dale rho=0.8 on cifar10" in err


def test_everything_there_is_is_shown_though_a_figure_is_missing(dale) -> None:
    code, out, err = dale("reproduce", "all", "--dataset", "mnist", "--table-only")
    assert code == 0
    assert "**Table 1, mnist" in out
    assert "**Table 4, mnist" in out
    assert err.startswith("figure1: figure1 needs a result")


@pytest.mark.verify
def test_smoke_on_real_data(tmp_path: Path, real_data: Path) -> None:
    """The command of the tests in the cloud: every row of Table 1, trained and attacked, within five minutes."""
    command = [sys.executable, "-m", "dale", "reproduce", "table1", "--dataset", "mnist", "--budget", "smoke"]
    environment = {**os.environ, "DALE_DATA": str(real_data)}

    def reproduce() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    done = reproduce()
    assert done.returncode == 0, done.stderr
    assert "not run" not in done.stdout
    results = sorted((tmp_path / "results/mnist/convnet").glob("*.json"))
    assert len(results) == 10
    for path in results:
        plain = json.loads(path.read_text())
        clean = plain["stages"][0]["accuracies"]["clean"]
        assert clean["n"] == 100
        assert plain["stages"][0]["accuracies"]["worst"]["correct"] <= clean["correct"]
    erm = json.loads((tmp_path / "results/mnist/convnet/erm-smoke-seed0.json").read_text())
    assert erm["stages"][0]["accuracies"]["clean"]["accuracy"] > 0.8
    before = [path.stat().st_mtime_ns for path in results]
    again = reproduce()
    assert "10 of 10 runs are finished already" in again.stderr
    assert [path.stat().st_mtime_ns for path in results] == before
