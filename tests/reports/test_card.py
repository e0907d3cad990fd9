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
    assert "**Constraint met, proven**: nominal loss ≤ 0.1." in card
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
