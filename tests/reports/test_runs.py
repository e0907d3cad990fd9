"""Reading run folders: found, named, and read whatever state they are in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dale.errors import UsageError
from dale.reports.runs import dig, find_runs, number, numbers, read_run, read_runs


def test_everything_in_a_folder_is_read(make_run):
    run = read_run(make_run())
    assert run.name == "first"
    assert run.config["objective"]["name"] == "dale"
    assert [record["epoch"] for record in run.metrics] == [1, 2, 3]
    assert run.summary["selected_epoch"] == 3
    assert run.evaluation["clean"]["correct"] == 97
    assert run.artefacts["gallery"]["radii"] == [0.0, 0.25, 0.5]
    assert run.notes == ()


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"is not a run folder: it has no config\.yaml"):
        read_run(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "null", '"text"', "[" * 100_000])
def test_damaged_files_are_noted_or_left_out(make_run, content):
    run = read_run(make_run(evaluation=content, summary=content, artefacts=content, environment=content))
    assert (run.evaluation, run.summary, run.artefacts) == ({}, {}, {})
    readable = content in ("[1, 2]", "null", '"text"')
    assert len(run.notes) == (0 if readable else 4)
    assert all(note.count("\n") == 0 for note in run.notes)


def test_a_run_still_training_has_no_results_yet(make_run):
    lines = json.dumps({"epoch": 1, "loss": 2.0}) + '\n{"epoch": 2, "lo'
    run = read_run(make_run(metrics=lines, summary=None, evaluation=None, artefacts=None))
    assert len(run.metrics) == 1
    assert run.summary == {}
    assert run.notes == ()


def test_runs_are_found_below_folders_and_with_those_they_were_compared_with(make_run, tmp_path):
    make_run("sweep/a")
    make_run("sweep/a/compare/trades")
    make_run("sweep/b")
    (tmp_path / "runs" / "sweep" / "a" / "checkpoints").mkdir()
    folders, lines = find_runs([tmp_path / "runs"])
    assert [str(f.relative_to(tmp_path / "runs")) for f in folders] == ["sweep/a", "sweep/a/compare/trades", "sweep/b"]
    assert lines == []
    assert find_runs([tmp_path / "runs", tmp_path / "runs/sweep/a"])[0] == folders  # each once


def test_a_run_is_found_once_however_its_folder_is_spelt(make_run, tmp_path, monkeypatch):
    folder = make_run("dale")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert find_runs(["runs/dale", folder, "runs/../runs", "link"]) == ([Path("runs/dale")], [])
    assert [run.name for run in read_runs(["runs/dale", folder])[0]] == ["dale"]


def test_what_is_no_run_is_said_and_the_rest_reported(make_run, tmp_path):
    folder = make_run()
    (tmp_path / "report.html").write_text("old")
    runs, lines = read_runs([folder, tmp_path / "report.html", tmp_path / "nowhere"])
    assert [run.name for run in runs] == ["first"]
    assert lines[0].endswith("is not a run folder, nor does it hold any")
    assert lines[1].endswith("does not exist")
    with pytest.raises(UsageError, match="does not exist"):
        read_runs([tmp_path / "nowhere"])


def test_names_tell_runs_apart(make_run):
    folders = [make_run("x/rho-1/seed-0"), make_run("x/rho-2/seed-0"), make_run("x/rho-2/seed-1")]
    assert [run.name for run in read_runs(folders)[0]] == ["rho-1/seed-0", "rho-2/seed-0", "rho-2/seed-1"]


def test_a_run_keeps_its_name_beside_those_inside_it(make_run):
    folder = make_run("main")
    make_run("main/compare/pgd")
    assert [run.name for run in read_runs([folder])[0]] == ["main", "compare/pgd"]


def test_small_readers():
    assert dig({"a": [{"b": 3}]}, "a", 0, "b") == 3
    assert dig({"a": []}, "a", 0) is None
    assert dig(None, "a") is None
    assert numbers([1, "2", None, float("inf"), True, 2.5]) == [1.0, None, None, None, None, 2.5]
    assert numbers("12") == []
    assert number(10**400) is None
