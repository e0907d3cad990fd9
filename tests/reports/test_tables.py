"""Tables as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

from dale.reports.runs import read_run
from dale.reports.tables import comma_separated, latex, markdown, write_tables


def test_the_numbers_are_in_each(make_run, tmp_path):
    runs = [read_run(make_run("a")), read_run(make_run("b", rho=None, feasible=None))]
    paths = write_tables(runs, tmp_path / "tables")
    assert [path.name for path in paths] == ["results.md", "results.tex", "results.csv"]
    assert "| a | dale | nominal loss ≤ 0.1 | proven | 97.0 ± 4.0 | 70.0 ± 5.0 | 60.0 ± 5.0 |" in paths[0].read_text()
    assert r"97.0 $\pm$ 4.0 & 70.0 $\pm$ 5.0" in paths[1].read_text()
    rows = list(csv.DictReader(io.StringIO(paths[2].read_text())))
    assert [float(row["clean"]) for row in rows] == [0.97, 0.97]
    assert float(rows[0]["pgd20 lower"]) == runs[0].evaluation["worst"]["lower"]
    assert rows[0]["certified loss"] == "0.095"
    assert rows[1]["multiplier"] == ""


def test_the_set_is_named_where_accuracies_are_about_several(make_run):
    runs = [read_run(make_run("a")), read_run(make_run("b"))]
    assert "attacked in" not in markdown(runs)
    other = runs[1].evaluation | {"perturbations": {"type": "Linf", "epsilon": 0.01}}
    table = markdown([runs[0], replace(runs[1], evaluation=other)])
    assert [line.split(" | ")[4] for line in table.splitlines() if line.startswith(("| run", "| a", "| b"))] == [
        "attacked in",
        "l-infinity ball of radius 0.25",
        "l-infinity ball of radius 0.01",
    ]


def test_a_row_on_clean_images_adds_no_set(make_run):
    erm = read_run(make_run("a", environment={"objective": "Objective(name='erm', sampler=None)"}))
    assert "attacked in" not in markdown([erm, read_run(make_run("b"))])


def test_a_clipped_loss_that_is_proven_does_not_make_a_missed_limit_met(make_run):
    run = read_run(make_run(feasible=False))
    assert run.evaluation["certificate"]["holds"] is True
    assert "| nominal loss ≤ 0.1 | not met |" in markdown([run])
    assert ",not met," in comma_separated([run])
    assert "bounds the nominal loss clipped at B" in markdown([run])


def test_data_and_number_of_images_are_named_where_they_differ(make_run):
    runs = [read_run(make_run("a")), read_run(make_run("b"))]
    assert "Accuracies in percent on 100 test images, " in markdown(runs)
    assert not {"data", "test images"} & set(markdown(runs).splitlines()[0].split(" | "))
    config = dict(runs[1].config) | {"data": {"dataset": "mnist"}}
    other = replace(runs[1], evaluation=runs[1].evaluation | {"n": 2000}, config=config)
    table = markdown([runs[0], other])
    assert [line.split(" | ")[4:6] for line in table.splitlines() if line.startswith(("| run", "| a", "| b"))] == [
        ["data", "test images"],
        ["digits", "100"],
        ["mnist", "2,000"],
    ]
    assert "Accuracies in percent on test images, " in table
    assert "& digits & 100 &" in latex([runs[0], other])


def test_a_bound_is_rounded_to_the_side_on_which_it_stays_true(make_run):
    for name, bound, shown in (("a", 0.0951, "0.096"), ("b", 0.095, "0.095"), ("c", 1e30, f"{1e30:.3f}")):
        run = read_run(make_run(name))
        certificate = run.evaluation["certificate"] | {"loss": {"bound": bound}}
        table = markdown([replace(run, evaluation=run.evaluation | {"certificate": certificate})])
        assert table.splitlines()[2].split(" | ")[-2] == shown


def test_columns_are_the_attacks_of_all_runs(make_run):
    runs = [read_run(make_run("a")), read_run(make_run("b", evaluation=None))]
    lines = markdown(runs).splitlines()
    assert lines[0].count("|") == lines[2].count("|") == lines[3].count("|")
    assert lines[3].count(" - ") == 4  # clean, two attacks, and no certificate


def test_names_stay_text(make_run):
    run = read_run(make_run(), name=r"50%_of|<b>$x^2$ & \input{x} *[a](b)*")
    row = markdown([run]).splitlines()[2]
    assert row.count(" | ") == markdown([run]).splitlines()[0].count(" | ")
    assert "<b>" not in row
    assert r"\*\[a\](b)\*" in row
    tex = latex([run])
    assert r"50\%\_of|$<$b$>$\$x\textasciicircum{}2\$ \& \textbackslash{}input\{x\}" in tex


def test_a_spreadsheet_finds_no_formula(make_run):
    run = read_run(make_run(), name="=1+1")
    assert comma_separated([run]).splitlines()[1].startswith("'=1+1,")
