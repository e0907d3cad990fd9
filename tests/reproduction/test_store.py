"""What is published of a stored model."""

from __future__ import annotations

import pytest

from dale.attacks import parse
from dale.files import read_json, write_json
from dale.reproduction.recipes import paper_attack
from dale.reproduction.store import FIRST, Part, _add, parts_of


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


def test_a_later_part_adds_its_attacks_and_leaves_what_was_measured_with_the_first(tmp_path) -> None:
    path = tmp_path / "m.json"
    write_json(path, {"published": []})
    for clean, loss, attack, precision in ((0.9, 0.3, "fgsm", "ieee"), (0.8, 0.4, "autoattack", "tf32")):
        _add(
            path,
            {
                "n": 10,
                "clean": {"accuracy": clean},
                "attacks": [{"name": attack, "accuracy": {"accuracy": 0.5}, "seconds": 1.0}],
                "nominal_loss": {"mean": loss},
                "precision": precision,
            },
        )
    (part,) = read_json(path)["published"]
    assert {name: found["accuracy"] for name, found in part["accuracies"].items()} == {
        "clean": 0.9,
        "fgsm": 0.5,
        "autoattack": 0.5,
    }
    assert part["nominal_loss"]["mean"] == 0.3
    measured = {**part["accuracies"], "loss": part["nominal_loss"]}
    assert {name: found["on"].rpartition(", ")[2] for name, found in measured.items()} == {
        "clean": "ieee",
        "loss": "ieee",
        "fgsm": "ieee",
        "autoattack": "tf32",
    }
