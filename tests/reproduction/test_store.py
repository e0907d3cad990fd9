"""What is published of a stored model."""

from __future__ import annotations

import pytest

from dale.attacks import parse
from dale.reproduction.recipes import paper_attack
from dale.reproduction.store import FIRST, Part, parts_of


@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
def test_the_papers_attack_is_published_beside_ours(dataset: str) -> None:
    quick = {part.examples: part.attacks for part in parts_of(dataset) if part.attacks != ("autoattack",)}
    assert set(quick) == {FIRST, None}
    for attacks in quick.values():
        assert {paper_attack(dataset, "fgsm"), paper_attack(dataset, "pgd"), "pgd20"} <= set(attacks)
        assert len(set(attacks)) == len(attacks)
        assert [parse(name).name for name in attacks] == list(attacks)


def test_autoattack_comes_last_and_on_all_images() -> None:
    assert parts_of("cifar10")[-1] == Part(None, ("autoattack",))
    assert parts_of("digits")[-1] == Part(None, ("autoattack",))  # a data set that is not the paper's


def test_what_a_cpu_can_repeat_is_searched_as_a_cpu_does() -> None:
    strict = {(part.examples, part.attacks == ("autoattack",)): part.strict for part in parts_of("cifar10")}
    assert strict == {(FIRST, False): True, (None, False): False, (FIRST, True): False, (None, True): False}
