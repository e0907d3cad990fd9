"""What the files say in words."""

from __future__ import annotations

import json

import pytest

from dale.reports import facts
from dale.reports.runs import read_run


@pytest.mark.parametrize(
    ("feasible", "holds", "expected"),
    [(True, True, "proven"), (True, False, "met"), (True, None, "met"), (False, False, "missed"), (None, None, "none")],
)
def test_verdicts(make_run, feasible, holds, expected):
    folder = make_run(feasible=feasible, rho=None if feasible is None else 0.1)
    plain = json.loads((folder / "evaluation.json").read_text())
    if holds is None:
        del plain["certificate"]
    else:
        plain["certificate"]["holds"] = holds
    (folder / "evaluation.json").write_text(json.dumps(plain))
    run = read_run(folder)
    assert facts.verdict(run) == expected
    assert ("With confidence 95%" in facts.confidence(run)) == (holds is not None)
    assert ("violated by 0.02" in facts.confidence(run)) == (expected == "missed")
    kept = "of the checkpoints within a tenth of the smallest violation the most robust was kept"
    assert (kept in facts.confidence(run)) == (expected == "missed")


def test_an_unfinished_run_claims_nothing(make_run):
    run = read_run(make_run(summary=None, evaluation=None))
    assert facts.verdict(run) == "unknown"
    assert "not finished" in facts.confidence(run)
    assert facts.scores(run) == []
    assert facts.robust(run) is None


def test_the_description_names_all_that_matters(make_run):
    text = facts.description(read_run(make_run()))
    for part in ("dale", "convnet", "digits", "l-infinity ball of radius 0.25", "nominal loss ≤ 0.1", "3 epochs"):
        assert part in text
    assert "epoch 3 were selected" in text


def test_the_robust_accuracy_quoted_is_the_lowest(make_run):
    folder = make_run()
    assert facts.robust(read_run(folder)).name == "pgd20"
    assert [score.name for score in facts.scores(read_run(folder))] == ["clean", "fgsm", "pgd20"]
    plain = json.loads((folder / "evaluation.json").read_text())
    plain["worst"] = plain["worst"] | {"accuracy": 0.31, "correct": 31}
    (folder / "evaluation.json").write_text(json.dumps(plain))
    assert facts.robust(read_run(folder)).name == "worst"  # different attacks fool it on different examples


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ({"type": "Linf", "epsilon": 8 / 255}, "l-infinity ball of radius 8/255"),
        ({"type": "L2", "epsilon": 0.5}, "l2 ball of radius 0.5"),
        ({"type": "Rotation", "degrees": 30.0}, "Rotation(degrees=30.0)"),
        (None, "none"),
    ],
)
def test_sets_in_words(plain, expected):
    assert facts.describe_set(plain) == expected


def test_limits_on_accuracy_and_by_class():
    assert str(facts.Limit("error", "all", (0.15,))) == "clean accuracy ≥ 0.85"
    assert str(facts.Limit("loss", "class", (0.2, 0.2))) == "nominal loss of every class ≤ 0.2"
    assert str(facts.Limit("loss", "group", (0.2, 0.3))) == "nominal loss of every group ≤ limits of its own"


def test_alarms_come_with_training_warnings_and_unreadable_files(make_run):
    run = read_run(make_run(summary={"feasible": True, "warnings": ["rho is out of reach"]}, artefacts="{"))
    failed = [alarm.message for alarm in facts.alarms(run) if not alarm.passed]
    assert failed[:2] == ["A larger radius fools the model less.", "rho is out of reach"]
    assert "artefacts.json" in failed[2]
    assert [alarm.name for alarm in facts.alarms(run) if alarm.passed] == ["gradients"]


def test_the_command_repeats_the_run(make_run):
    run = read_run(make_run("a b"))
    assert facts.command(run).startswith("dale train --config '")
    assert facts.command(run).endswith("config.yaml'")
    plain = dict(run.config) | {"model": {"name": "my_pkg:Net"}}
    other = read_run(make_run("c", config=plain))
    assert facts.command(other).endswith("config.yaml --trust")
