"""Attacks by name: read, written back, and the nearest one for a misspelt name."""

from __future__ import annotations

import pytest

from dale.attacks import NAMES, Attack, parse
from dale.components import dump_yaml, load_yaml
from dale.errors import UsageError


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in NAMES if not name.startswith(("transfer", "autoattack"))),
        *(
            "pgd3-marginx2",
            "pgd5-last",
            "apgd8-t",
            "fab4-t",
            "square40",
            "grid",
            "grid7",
            "apgd-cex5",
            "pgd20@0.01-zero",
        ),
    ],
)
def test_names_and_configuration_round_trip(name: str) -> None:
    attack = parse(name)
    assert parse(attack.name) == attack
    assert load_yaml(dump_yaml(attack), Attack) == attack  # type: ignore[type-abstract]


@pytest.mark.parametrize(
    ("name", "close"), [("pdg20", "pgd20"), ("autoatack", "autoattack"), ("apgd-cd", "apgd-ce"), ("sqare", "square")]
)
def test_unknown_names_get_the_nearest(name: str, close: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {close!r}"):
        parse(name)


@pytest.mark.parametrize(
    "name", ["pgd0", "pgd20x0", "apgd0-ce", "fab0-t", "square0", "worst-of-0", "grid1", "pgd5-kl-zero"]
)
def test_numbers_that_make_no_sense_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"at least|start at zero"):
        parse(name)
