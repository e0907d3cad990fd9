"""AutoAttack is a sequence: its parts, their standard budgets, and where a round belongs."""

from __future__ import annotations

import pytest

from dale.attacks import APGD, FAB, Attack, Sequence, autoattack, parse
from dale.components import dump_yaml, load_yaml
from dale.errors import UsageError
from dale.perturbations import L1, L2, Linf

BALLS = {"linf": Linf(epsilon=0.15), "l2": L2(epsilon=0.8), "l1": L1(epsilon=2.0)}


def test_sequence_round_trip() -> None:
    for name in ("autoattack", "autoattack-fast"):
        attack = parse(name)
        assert isinstance(attack, Sequence)
        assert attack.name == name
        assert load_yaml(dump_yaml(attack), Attack) == attack  # type: ignore[type-abstract]
    assert [part.name for part in autoattack().parts] == ["apgd-ce", "apgd-t", "fab-t", "square"]


def test_standard_numbers() -> None:
    assert APGD(objective="t").prepared(BALLS["linf"]).rounds(10) == 9
    assert APGD(objective="t").prepared(BALLS["l1"]).rounds(10) == 5
    assert APGD(objective="ce").prepared(BALLS["l1"]).rounds(10) == 5
    assert APGD(objective="t").prepared(BALLS["linf"]).rounds(3) == 2
    assert FAB().rounds(2) == 1
    assert autoattack().prepared(BALLS["linf"]).rounds(10) == 1 + 9 + 9 + 1
    budget = autoattack().prepared(BALLS["linf"]).budget(10)
    assert (budget.gradients, budget.queries) == (101 + 909 + 909, 5001)


def test_rounds_belong_to_their_parts() -> None:
    attack = autoattack().prepared(BALLS["linf"])
    places = [attack.part_of(number, 10) for number in (0, 1, 9, 10, 18, 19)]
    assert [(part.name, inner) for part, inner in places] == [
        *(("apgd-ce", 0), ("apgd-t", 0), ("apgd-t", 8)),
        *(("fab-t", 0), ("fab-t", 8), ("square", 0)),
    ]
    assert attack.round_name(3, 10) == "autoattack: apgd-t 3/9"
    with pytest.raises(IndexError):
        attack.part_of(20, 10)


def test_two_classes_leave_one_target() -> None:
    assert autoattack().prepared(BALLS["l2"]).rounds(2) == 4


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one attack"):
        Sequence(parts=(), title="nothing")
