"""What the files say in words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dale import Linf, algorithms
from dale.reports import facts
from dale.reports.runs import read_run


@pytest.mark.parametrize(
    ("feasible", "holds", "expected"),
    [
        (True, True, "proven"),
        (True, False, "met"),
        (True, None, "met"),
        (False, True, "missed"),
        (False, False, "missed"),
        (None, None, "none"),
    ],
)
def test_verdicts(make_run, feasible, holds, expected):
    folder = make_run(feasible=feasible, rho=None if feasible is None else 0.1)
    plain = json.loads((folder / "evaluation.json").read_text())
    if holds is None:
        del plain["certificate"]
    else:
        plain["certificate"] |= {"holds": holds, "loss_holds": holds}
    (folder / "evaluation.json").write_text(json.dumps(plain))
    run = read_run(folder)
    assert facts.verdict(run) == expected
    assert ("With confidence 95%" in facts.confidence(run)) == (holds is not None)
    assert ("violated by 0.02" in facts.confidence(run)) == (expected == "missed")
    kept = "of the checkpoints within a tenth of the smallest violation the most robust was kept"
    assert (kept in facts.confidence(run)) == (expected == "missed")
    alone = "proves the limit for the nominal loss clipped at B = 10 alone: the loss itself"
    assert (alone in facts.confidence(run)) == (expected == "missed" and holds is True)


@pytest.mark.parametrize(
    ("on_loss", "on_accuracy", "expected"),
    [
        (True, None, " for the nominal loss clipped at B = 10"),
        (None, True, " for the clean accuracy"),
        (True, True, " for the nominal loss clipped at B = 10 and the clean accuracy"),
    ],
)
def test_what_is_proven_is_named(make_run, on_loss, on_accuracy, expected):
    run = read_run(make_run())
    certificate = run.evaluation["certificate"] | {"loss_holds": on_loss, "accuracy_holds": on_accuracy}
    run = replace(run, evaluation=run.evaluation | {"certificate": certificate})
    assert facts.headline(run) == "Constraint met, proven" + expected
    assert facts.headline(read_run(make_run("missed", feasible=False))) == "Constraint NOT met"


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


def test_a_row_on_clean_images_is_not_said_to_train_against_its_set(make_run):
    ball = Linf(epsilon=0.25)
    sentences, sets = [], []
    for name, row in (("erm", algorithms.erm(ball)), ("pgd", algorithms.pgd(ball)), ("older", None)):
        run = read_run(make_run(name, environment={} if row is None else {"objective": repr(row)}))
        sentences.append(facts.description(run))
        sets.append(facts.measured(run))
    assert ["against perturbations from the l-infinity ball" in s for s in sentences] == [False, True, True]
    assert "trained convnet on digits without perturbations" in sentences[0]
    assert sets == ["l-infinity ball of radius 0.25"] * 3


@pytest.mark.parametrize(
    ("text", "trained"),
    [
        ("Objective(robust_loss=KL(), robust_weight=0.05, nominal_weight=0.0)", True),
        ("Objective(robust_loss=KL(), robust_weight=0.0, nominal_weight=1.0)", False),
        (3, True),
    ],
)
def test_the_objectives_text_says_whether_it_has_a_robust_loss(make_run, text, trained):
    run = read_run(make_run(environment={"objective": text}))
    assert (facts.perturbations(run) != "none") == trained


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
    assert str(facts.Limit("loss", "group", (0.2, 0.3))) == "nominal loss of every group ≤ 0.2..0.3"
    assert str(facts.Limit("error", "class", (0.3, 0.1, 0.2))) == "clean error of every class ≤ 0.1..0.3"


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
