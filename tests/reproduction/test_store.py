"""What is published of a stored model."""

from __future__ import annotations

import pytest

from dale.attacks import parse
from dale.reproduction.recipes import paper_attack
from dale.reproduction.store import FIRST, parts_of


@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
def test_the_papers_attack_is_published_beside_ours(dataset: str) -> None:
    quick = {examples: attacks for examples, attacks in parts_of(dataset) if attacks != ("autoattack",)}
    assert set(quick) == {FIRST, None}
    for attacks in quick.values():
        assert {paper_attack(dataset, "fgsm"), paper_attack(dataset, "pgd"), "pgd20"} <= set(attacks)
        assert len(set(attacks)) == len(attacks)
        assert [parse(name).name for name in attacks] == list(attacks)


def test_autoattack_comes_last_and_on_all_images() -> None:
    assert parts_of("cifar10")[-1] == (None, ("autoattack",))
    assert parts_of("digits")[-1] == (None, ("autoattack",))  # a data set that is not the paper's
