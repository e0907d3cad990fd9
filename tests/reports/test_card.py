"""The model card."""

from __future__ import annotations

import re
from dataclasses import replace

from dale.reports.card import model_card
from dale.reports.runs import read_run


def test_the_card_has_every_part(make_run):
    card = model_card(read_run(make_run()), "```python\nuse()\n```", ["model.onnx"])
    headings = [line for line in card.splitlines() if line.startswith("## ")]
    assert headings == [
        f"## {name}"
        for name in ("Use", "Data", "Method", "Constraint and certificate", "Evaluation", "Limits", "Repeating it")
    ]
    assert "**Constraint met, proven for the nominal loss clipped at B = 10**: nominal loss ≤ 0.1." in card
    assert "| pgd20 | 60.0% | 55.0% to 65.0% | 100 |" in card
    assert "clipped at the level" in card
    assert "**epsilon**: A larger radius fools the model less." in card
    assert "not met" not in card


def test_the_set_of_the_training_is_not_taken_for_that_of_the_evaluation(make_run):
    run = read_run(make_run())
    assert "trained and measured against one set only, the l-infinity ball of radius 0.25" in model_card(run, "")
    measured = replace(run, evaluation=run.evaluation | {"perturbations": {"type": "Linf", "epsilon": 0.01}})
    card = model_card(measured, "")
    assert "one set, the l-infinity ball of radius 0.25, and measured against another, the l-infinity ball of " in card
    assert "perturbations: l-infinity ball of radius 0.25" in card


def test_a_row_on_clean_images_was_trained_against_no_set(make_run):
    run = read_run(make_run(environment={"objective": "Objective(name='erm', sampler=None, robust_loss=None)"}))
    card = model_card(run, "")
    assert "trained convnet on digits without perturbations" in card
    assert "perturbations: none;" in card
    assert "not trained, only measured, and against one set only, the l-infinity ball of radius 0.25; it says" in card
    assert "trained and measured" not in card
    config = dict(run.config) | {"objective": {"name": "erm"}}
    bare = model_card(replace(run, config=config, evaluation={}), "")
    assert "- Robustness was neither trained nor measured.\n" in bare


def test_a_violation_is_not_hidden_by_a_proof_of_the_clipped_loss(make_run):
    card = model_card(read_run(make_run(feasible=False)), "")
    assert "**Constraint NOT met**: nominal loss ≤ 0.1. On held-out data the constraint is violated by 0.02" in card
    assert "proves the limit for the nominal loss clipped at B = 10 alone" in card
    assert "do not rely on the nominal performance" in card


def test_a_missed_constraint_is_a_limit(make_run):
    card = model_card(read_run(make_run(feasible=False, evaluation=None)), "")
    assert "The constraint is not met: do not rely" in card
    assert "Not evaluated." in card


def test_hostile_text_stays_text(make_run, hostile):
    card = model_card(read_run(make_run(**hostile("<script>|[x](y)\n# head"))), "")
    prose = re.sub(r"`[^`\n]*`", "", card)  # inside code it is shown as it is
    assert "&lt;script>" in prose
    assert "<script>" not in prose
    assert "\n# head" not in card
    assert re.search(r"(?<!\\)\]\(y\)", prose) is None
