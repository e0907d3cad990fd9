"""The state of a sweep is read from its run folders, whatever lies in them."""

from __future__ import annotations

import csv
import json

import pytest

from dale.cli.sweep import train_options
from dale.errors import DaleError, UsageError
from dale.experiments import as_table, claim, expand, held, write_results

KINDS = train_options()


@pytest.fixture
def places(tmp_path):
    return claim(tmp_path, expand({"grid": {"rho": [0.1, 0.5], "seed": [0, 1]}}, KINDS))


def finish(place, **summary):
    place.folder.mkdir(exist_ok=True)
    (place.folder / "config.yaml").write_text("format: 1\n")
    (place.folder / "summary.json").write_text(json.dumps({"seconds": 1.5, "feasible": True, **summary}))
    place.mark_finished(2.0)


def test_rows_of_runs_in_every_state(places):
    finish(places[0], validation={"clean_accuracy": 0.9, "nominal_loss": 0.05})
    evaluation = {"clean": {"accuracy": 0.8}, "worst": {"accuracy": 0.4}}
    evaluation["attacks"] = [{"name": "fgsm", "accuracy": {"accuracy": 0.5}}]
    (places[0].folder / "evaluation.json").write_text(json.dumps(evaluation))
    finish(places[1])
    (places[1].folder / "summary.json").write_text("{damaged")
    places[2].folder.mkdir()
    (places[2].folder / "config.yaml").write_text("format: 1\n")
    rows = write_results(places, {places[3].run.name: "dale: error: no disk"})
    assert [row["state"] for row in rows] == ["finished", "unreadable", "interrupted", "failed"]
    assert (rows[0]["clean"], rows[0]["fgsm"], rows[0]["worst"], rows[0]["held_out_loss"]) == (0.8, 0.5, 0.4, 0.05)
    with (places[0].out / "results.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [row["rho"] for row in read] == ["0.1", "0.1", "0.5", "0.5"]
    assert read[3]["error"] == "dale: error: no disk"
    table = as_table(rows)
    assert "rho=0.5,seed=1: dale: error: no disk" in table
    assert "not valid JSON" in table
    assert write_results(places, {}, {places[2].run.name})[2]["state"] == "running"


def test_a_summary_of_strange_types_is_unreadable_and_no_crash(places):
    finish(places[0])
    for text in ("[]", "3", '{"validation": 3}', '{"validation": {}}'):
        (places[0].folder / "summary.json").write_text(text)
        assert write_results(places, {})[0]["state"] in ("finished", "unreadable")
    (places[0].folder / "evaluation.json").write_text('{"attacks": [{"name": "x"}]}')
    assert write_results(places, {})[0]["state"] == "unreadable"


def test_texts_that_a_table_program_would_run_are_quoted(tmp_path):
    places = claim(tmp_path, expand({"grid": {"dataset": ["=cmd()", "@x"]}}, KINDS))
    write_results(places, {})
    text = (tmp_path / "results.csv").read_text()
    assert "'=cmd()" in text
    assert "'@x" in text


def test_another_sweep_in_the_same_folder_is_refused(places):
    other = expand({"base": {"epochs": 7}, "grid": {"rho": [0.1], "seed": [0]}}, KINDS)
    with pytest.raises(UsageError, match="is a run of other options; choose another --out"):
        claim(places[0].out, other)
    more = expand({"grid": {"rho": [0.1, 0.9], "seed": [0]}}, KINDS)
    assert [place.run.name for place in claim(places[0].out, more)] == ["rho=0.1,seed=0", "rho=0.9,seed=0"]


def test_one_sweep_at_a_time_but_for_tasks_of_one_run_each(places):
    out = places[0].out
    taken = pytest.raises(DaleError, match="is in use: another `dale sweep` is at work in it")
    with held(out, alone=False), held(out, alone=False), taken, held(out, alone=True):
        pass
    with held(out, alone=True), taken, held(out, alone=False):
        pass


def test_progress_and_the_last_error_of_a_log(places):
    place = places[0]
    assert place.progress() == "starting"
    assert place.last_error() == "no output"
    place.folder.mkdir()
    (place.folder / "metrics.jsonl").write_text('{"epoch": 1, "epochs": 4}\n{"epoch": 2, "epochs": 4}\n{"epo')
    assert place.progress() == "epoch 2/4"
    place.log.parent.mkdir()
    place.log.write_bytes(b"\xff\xfe\ndale: error: the disk is full\n[rank0]: bye\n")
    assert place.last_error() == "dale: error: the disk is full"
