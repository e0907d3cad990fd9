"""The page of results: generated, and the committed one is what the committed results give."""

from __future__ import annotations

from pathlib import Path

import pytest

from dale.errors import UsageError
from dale.reproduction import Spec
from dale.reproduction.page import render, template_of, write_page

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_page_is_what_the_files_give() -> None:
    page = ROOT / "docs" / "results.md"
    assert page.read_text() == render(template_of(page).read_text(), ROOT / "results"), "run `dale reproduce page`"


def test_marks_are_replaced_by_numbers(put, tmp_path) -> None:
    for seed in (0, 1):
        put(Spec("mnist", "convnet", "pgd", seed=seed), (1000, {"clean": 0.9 + 0.02 * seed}))
    root = tmp_path / "results"
    assert render("a {{ value mnist/convnet/pgd-short clean }} b", root) == "a 91.0 ± 1.4 b"
    assert render("{{value mnist/convnet/erm-short clean}}", root) == "not run"
    assert "| pgd | 2 | 91.0 ± 1.4 | 98.1 (-7.1) |" in render("{{ table table1 mnist short }}", root)
    assert render("{{ table table1 cifar10 short }}", root).endswith("Adversarial robustness: not run.*")
    assert render("{{ figure figure1 }}", root).endswith("not run.*")
    (root / "figures").mkdir()
    (root / "figures" / "figure1.svg").touch()
    assert render("{{ figure figure1 }}", root).endswith("(../results/figures/figure1.svg)")
    assert render("{{ zoo }}", root) == "No model is stored yet."
    assert render("{{ certificates }}", root) == "No stored model is certified yet."
    assert "verdict" in render("{{ claims mnist short }}", root)
    assert render("{{ trends cifar10 short resnet18 }}", root).count("\n") == 1


def test_train_mode_has_a_table_of_its_own(put, tmp_path) -> None:
    root = tmp_path / "results"
    assert render("{{ mode mnist short }}", root) == "*mnist, short: not run.*"
    trained = {"accuracies": {"fgsm": {"accuracy": 0.96, "n": 1000}, "pgd": {"accuracy": 0.92, "n": 1000}}}
    put(Spec("mnist", "convnet", "pgd"), (1000, {"fgsm": 0.95, "pgd10@0.1-last": 0.9}), paper_mode=trained)
    put(Spec("mnist", "convnet", "erm"), (1000, {"fgsm": 0.1, "pgd10@0.1-last": 0.0}))
    lines = render("{{ mode mnist short }}", root).splitlines()
    assert lines[2:] == ["| pgd | 95.0 | 96.0 | 95.5 | 90.0 | 92.0 | 93.1 |"]
    other = {"accuracies": {"fgsm": {"accuracy": 0.98, "n": 1000}, "pgd": {"accuracy": 0.92, "n": 1000}}}
    again = Spec("mnist", "convnet", "pgd", seed=1)
    put(again, (1000, {"fgsm": 0.95, "pgd10@0.1-last": 0.9}), paper_mode=other)
    lines = render("{{ mode mnist short }}", root).splitlines()
    assert lines[2:] == ["| pgd | 95.0 ± 0.0 | 97.0 ± 1.4 | 95.5 | 90.0 ± 0.0 | 92.0 ± 0.0 | 93.1 |"]


def test_train_mode_of_another_recipe_is_marked(put, tmp_path) -> None:
    trained = {"accuracies": {"fgsm": {"accuracy": 0.96, "n": 1000}, "pgd": {"accuracy": 0.92, "n": 1000}}}
    accuracies = {"fgsm": 0.95, "pgd10@0.1-last": 0.9}
    put(Spec("mnist", "convnet", "pgd"), (1000, accuracies), paper_mode=trained, config="another")
    lines = render("{{ mode mnist short }}", tmp_path / "results").splitlines()
    assert lines[2].startswith("| pgd † | 95.0 |")
    assert lines[3:] == ["", "† All or some of its results were made by another recipe than today's."]


def test_a_mark_that_means_nothing_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="did you mean 'table'"):
        render("{{ tabel table1 }}", tmp_path)
    with pytest.raises(UsageError, match="wrong number of words"):
        render("{{ claims mnist }}", tmp_path)
    with pytest.raises(UsageError, match=r"is generated from .*page\.md\.in, which is not there"):
        write_page(tmp_path, tmp_path / "page.md")
