"""The model card."""

from __future__ import annotations

import re

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
